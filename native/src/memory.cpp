#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace hotset {

Region::Region(std::string name, size_t bytes) : name_(std::move(name)), bytes_(bytes) {
  if (bytes == 0) return;
  // Large regions are mapped with slack, so that the used part can start on a huge page.
  const bool is_large = bytes >= kHugePage;
  map_bytes_ = bytes + (is_large ? kHugePage : 0);
  map_ = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map_ == MAP_FAILED) {
    map_ = nullptr;
    throw std::bad_alloc();
  }
  // A refusal (huge pages compiled out or set to never) is not an error: probe and plan say what is in force. Small
  // regions must not take a whole huge page where the system gives one to everybody.
  if (is_large) {
    uintptr_t start = (reinterpret_cast<uintptr_t>(map_) + kHugePage - 1) / kHugePage * kHugePage;
    data_ = reinterpret_cast<uint8_t*>(start);
    madvise(data_, bytes, MADV_HUGEPAGE);
  } else {
    data_ = static_cast<uint8_t*>(map_);
    madvise(data_, bytes, MADV_NOHUGEPAGE);
  }
}

Region::~Region() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(map_, other.map_);
  std::swap(map_bytes_, other.map_bytes_);
  return *this;
}

}  // namespace hotset
