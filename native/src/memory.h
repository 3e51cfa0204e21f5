// Anonymous memory with huge pages when the system offers them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hotset {

constexpr size_t kHugePage = size_t{2} << 20;

// Zero-filled and untouched: the thread that first writes a page places it.
class Region {
 public:
  Region() = default;
  Region(std::string name, size_t bytes);  // throws std::bad_alloc
  ~Region();
  Region(Region&& other) noexcept { *this = static_cast<Region&&>(other); }
  Region& operator=(Region&& other) noexcept;

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

}  // namespace hotset
