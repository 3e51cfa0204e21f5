#include "memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

namespace hotset {

namespace {

// libnuma would be one more library to install, and it says that binding works where a container forbids it.
#if defined(__x86_64__)
constexpr long kMbind = 237, kMovePages = 279;
#elif defined(__aarch64__)
constexpr long kMbind = 235, kMovePages = 239;
#else
#error "the numbers of mbind and move_pages are not known for this processor"
#endif
constexpr int kPolicyPreferred = 1, kPolicyBind = 2;
// As many nodes as any kernel is built for.
constexpr int kMaskBits = 1024;
constexpr size_t kPagesPerCall = 16384;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::runtime_error failed(const std::string& what) { return std::runtime_error(what + ": " + std::strerror(errno)); }

}  // namespace

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t huge_page_bytes() {
  static const size_t bytes = [] {
    // One page of 8-byte entries maps a huge page, where the kernel does not say.
    size_t found = page_bytes() * page_bytes() / 8;
    if (FILE* file = std::fopen("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "re")) {
      size_t told = 0;
      if (std::fscanf(file, "%zu", &told) == 1 && told >= page_bytes()) found = told;
      std::fclose(file);
    }
    return found;
  }();
  return bytes;
}

Region::Region(std::string name, size_t bytes) : name_(std::move(name)), bytes_(bytes) {
  if (bytes == 0) return;
  // Large regions begin on a huge page.
  const size_t used = round_up(bytes, page_bytes());
  const size_t align = bytes >= huge_page_bytes() ? huge_page_bytes() : page_bytes();
  map_bytes_ = used + align;
  map_ = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map_ == MAP_FAILED) {
    map_ = nullptr;
    throw std::bad_alloc();
  }
  data_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(map_), align));
  if (mprotect(data_, used, PROT_READ | PROT_WRITE) != 0) {
    munmap(map_, map_bytes_);
    throw std::bad_alloc();
  }
  // A refusal (huge pages compiled out or set to never) is not an error: probe and plan say what is in force. Small
  // regions must not take a whole huge page where the system gives one to everybody.
  madvise(data_, used, bytes >= huge_page_bytes() ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
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

void Region::bind(size_t begin, size_t end, int node, NumaPolicy policy) {
  if (policy == NumaPolicy::kTouch || begin >= end) return;
  if (node < 0 || node >= kMaskBits) throw std::runtime_error(name_ + ": no node " + std::to_string(node));
  constexpr int kWidth = 8 * sizeof(unsigned long);
  unsigned long mask[kMaskBits / kWidth] = {};
  mask[node / kWidth] = 1ul << node % kWidth;
  const size_t first = begin / page_bytes() * page_bytes(), last = round_up(end, page_bytes());
  const int mode = policy == NumaPolicy::kBind ? kPolicyBind : kPolicyPreferred;
  if (syscall(kMbind, data_ + first, last - first, mode, mask, static_cast<unsigned long>(kMaskBits), 0u) != 0) {
    throw failed("mbind of " + name_ + " to node " + std::to_string(node));
  }
}

void Region::split(size_t at) {
  const size_t first = at / huge_page_bytes() * huge_page_bytes();
  // A huge page lies in one mapping, and other advice makes another mapping of the bytes before.
  if (bytes_ >= huge_page_bytes() && first < at) madvise(data_ + first, at - first, MADV_NOHUGEPAGE);
}

std::map<int, int64_t> pages_by_node(const uint8_t* address, size_t bytes) {
  std::map<int, int64_t> found;
  std::vector<void*> pages;
  std::vector<int> nodes;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address) / page_bytes() * page_bytes();
  const uintptr_t end = reinterpret_cast<uintptr_t>(address) + bytes;
  for (uintptr_t at = begin; at < end;) {
    pages.clear();
    for (; at < end && pages.size() < kPagesPerCall; at += page_bytes()) pages.push_back(reinterpret_cast<void*>(at));
    nodes.assign(pages.size(), 0);
    // Without target nodes the call moves nothing and reports.
    if (syscall(kMovePages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0) throw failed("move_pages");
    for (const int node : nodes) ++found[node];
  }
  return found;
}

}  // namespace hotset
