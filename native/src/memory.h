// Anonymous memory: on a NUMA node that was planned, with huge pages when the system offers them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace hotset {

constexpr int kAnyNode = -1;

enum class NumaPolicy {
  kTouch,   // the thread that first writes a page places it
  kBind,    // on the node or not at all: the kernel kills who asks for more than the node has
  kPrefer,  // on the node while it has room
};

size_t page_bytes();
// 2 MiB on kernels of 4 KiB pages, 512 MiB on those of 64 KiB.
size_t huge_page_bytes();

// Zero-filled, untouched, whole pages with a gap of address space behind them: neighbours never share an entry of
// /proc/self/smaps, which tells the huge pages of each.
class Region {
 public:
  Region() = default;
  Region(std::string name, size_t bytes);  // throws std::bad_alloc
  ~Region();
  Region(Region&& other) noexcept { *this = static_cast<Region&&>(other); }
  Region& operator=(Region&& other) noexcept;

  // Binds the pages that hold bytes [begin, end), none of them touched yet. Throws std::runtime_error.
  void bind(size_t begin, size_t end, int node, NumaPolicy policy);
  // No huge page will hold bytes on both sides of `at`, the end of a page: threads of two nodes write them, and by first
  // touch all of it would lie with one of them.
  void split(size_t at);

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  void* map_ = nullptr;
  size_t map_bytes_ = 0;
};

// Pages by node of the memory from `address` on, as the kernel finds them. A negative key is an errno: -ENOENT for
// pages that are not in memory. Throws std::runtime_error when the kernel does not answer.
std::map<int, int64_t> pages_by_node(const uint8_t* address, size_t bytes);

}  // namespace hotset
