// What every kernel test needs: checks, checksums, deterministic numbers, software half and BF16.
#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "table.h"

namespace hotset {

// One test: the first failed check is kept as its reason. The checksum covers the result bits, and is the same
// for every instruction set where `is_portable`, and for all but AVX-512 otherwise.
class Test {
 public:
  Test(std::string name, bool is_portable) : name_(std::move(name)), is_portable_(is_portable) {}

  __attribute__((format(printf, 3, 4))) void expect(bool ok, const char* format, ...) {
    if (ok) return;
    ++num_failures_;
    if (!reason_.empty()) return;
    char text[256];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    reason_ = text;
  }
  template <class T>
  void hash(const T* values, int64_t count) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(values);
    for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(T)); ++i) {
      checksum_ = (checksum_ ^ bytes[i]) * 0x100000001b3ull;  // FNV-1a
    }
  }
  void note(const std::string& text) { note_ = text; }
  // Expects an error within `bound`, and keeps the largest as a share of `size`, the size of the terms that were added.
  bool is_near(double error, double bound, double size) {
    if (std::fabs(error) > largest_error_ * size) largest_error_ = std::fabs(error) / size;
    return std::fabs(error) <= bound;
  }

  const std::string& name() const { return name_; }
  bool is_portable() const { return is_portable_; }
  bool passed() const { return num_failures_ == 0; }
  uint64_t checksum() const { return checksum_; }
  std::string detail() const {
    if (!passed()) return reason_ + " (" + std::to_string(num_failures_) + " failed checks)";
    if (largest_error_ == 0) return note_;
    char text[64];
    std::snprintf(text, sizeof text, "largest error %.1e of the terms' sizes", largest_error_);
    return note_.empty() ? text : note_ + "; " + text;
  }

 private:
  std::string name_, reason_, note_;
  bool is_portable_;
  int64_t num_failures_ = 0;
  double largest_error_ = 0;
  uint64_t checksum_ = 0xcbf29ce484222325ull;
};

// Numbers from integer arithmetic and exact float operations only, so that every machine tests the same ones.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t bits() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // Nearly normal, variance 1: the sum of twelve uniform numbers.
  float normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return static_cast<float>(sum);
  }
  std::vector<float> normals(int64_t count, float scale = 1.0f) {
    std::vector<float> out(count);
    for (float& x : out) x = normal() * scale;
    return out;
  }

 private:
  uint64_t state_;
};

// |value| in units of its last place for `bits` of significand and the smallest exponent `low`, rounded to even.
inline double round_to(double value, int bits, int low, int* exponent) {
  int e;
  std::frexp(value, &e);
  *exponent = e - 1 > low ? e - 1 : low;
  return std::nearbyint(std::ldexp(std::fabs(value), bits - 1 - *exponent));
}
inline uint16_t half_of(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (x == 0.0f) return sign;
  if (std::fabs(x) >= 65520.0f) return sign | 0x7c00;
  int e;
  const double units = round_to(x, 11, -14, &e);
  return static_cast<uint16_t>(sign + ((e + 14) << 10) + static_cast<int>(units));
}
inline double half_value(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double x = e == 0 ? std::ldexp(m, -24) : std::ldexp(1024 + m, e - 25);
  return h & 0x8000 ? -x : x;
}
inline uint16_t bf16_of(float x) {  // subnormals become zero, as in the instruction
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::fabs(x) < 0x1p-126f) return sign;
  int e;
  const double units = round_to(x, 8, -126, &e);
  return static_cast<uint16_t>(sign + ((e + 126) << 7) + static_cast<int>(units));
}
inline double bf16_value(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline bool same_bits(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

using Tests = std::vector<Test>;

}  // namespace hotset
