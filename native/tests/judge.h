// The judge of products: checkpoint rows of every format, what each of their weights is (read one by one from
// the layouts of the GGUF specification, in double precision), and what an activation is after its rounding.
#pragma once

#include "support.h"

namespace hotset {

struct WeightValue {
  double scaled, offset;  // the weight is scaled + offset; the two are rounded apart in a kernel
};

inline uint16_t u16_at(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

inline WeightValue q4k_weight(const uint8_t* block, int i) {
  const uint8_t* s = block + 4;
  const int j = i / 32;
  const int scale = j < 4 ? s[j] % 64 : s[j + 4] % 16 + s[j - 4] / 64 * 16;
  const int low = j < 4 ? s[j + 4] % 64 : s[j + 4] / 16 + s[j] / 64 * 16;
  const uint8_t pair = block[16 + i / 64 * 32 + i % 32];
  const int code = i % 64 < 32 ? pair % 16 : pair / 16;
  return {half_value(u16_at(block)) * scale * code, -half_value(u16_at(block + 2)) * low};
}

inline double q6k_weight(const uint8_t* block, int i) {
  const int half = i / 128, quarter = i % 128 / 32, l = i % 32;
  const uint8_t low = block[64 * half + 32 * (quarter % 2) + l];
  const uint8_t top = block[128 + 32 * half + l];
  const int code = (quarter < 2 ? low % 16 : low / 16) + 16 * (top >> 2 * quarter & 3) - 32;
  const int scale = static_cast<int8_t>(block[192 + i / 16]);
  return half_value(u16_at(block + 208)) * scale * code;
}

inline double e4m3_value(uint8_t code) {
  const int e = code >> 3 & 15, m = code & 7;
  const double x = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
  return code & 0x80 ? -x : x;
}
inline double e2m1_value(int code) {
  constexpr double kMagnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kMagnitude[code & 7] : kMagnitude[code & 7];
}
inline double e8m0_value(uint8_t b) { return std::ldexp(1.0, b - 127); }

// Codes of numbers in e4m3 or e2m1 and the exponent of their scale, the smallest power of two with which all of them
// fit: the nearest of all codes, ties to the even one.
struct JudgedCodes {
  std::vector<uint8_t> codes;
  int exponent = -127;
  bool is_e4m3;
  JudgedCodes(bool is_e4m3, const std::vector<double>& x) : is_e4m3(is_e4m3) {
    double top = is_e4m3 ? 1e-4f : 6 * 0x1p-126;
    for (double v : x) top = std::fmax(top, std::fabs(v));
    while (std::ldexp(is_e4m3 ? 448.0 : 6.0, exponent) < top) ++exponent;
    for (double v : x) {
      const int sign = !std::signbit(v) ? 0 : is_e4m3 ? 0x80 : 8;
      codes.push_back(static_cast<uint8_t>(nearest(std::ldexp(std::fabs(v), -exponent)) | sign));
    }
  }
  double magnitude(int code) const { return is_e4m3 ? e4m3_value(static_cast<uint8_t>(code)) : e2m1_value(code); }
  double value(size_t i) const { return std::ldexp(magnitude(codes[i]), exponent); }

 private:
  int nearest(double v) const {
    const int last = is_e4m3 ? 0x7e : 7;
    int low = 0;  // the largest code that is not above v
    for (int step = 64; step > 0; step /= 2)
      if (low + step <= last && magnitude(low + step) <= v) low += step;
    if (low == last) return low;
    const double below = v - magnitude(low), above = magnitude(low + 1) - v;
    return below < above || (below == above && low % 2 == 0) ? low : low + 1;
  }
};

// Weight i of a checkpoint row. The scales of FP8, and of MXFP4 outside GGUF, are not in it.
inline WeightValue weight_at(int32_t format, const uint8_t* row, int64_t i) {
  const FormatInfo& info = format_info(format);
  const uint8_t* block = row + i / info.block_weights * info.block_bytes;
  const int at = static_cast<int>(i % info.block_weights);
  switch (format) {
    case kF32: {
      float x;
      std::memcpy(&x, block, 4);
      return {x, 0};
    }
    case kF16:
      return {half_value(u16_at(block)), 0};
    case kBF16:
      return {bf16_value(u16_at(block)), 0};
    case kQ8_0:
      return {half_value(u16_at(block)) * static_cast<int8_t>(block[2 + at]), 0};
    case kQ4_0: {
      const uint8_t pair = block[2 + at % 16];
      return {half_value(u16_at(block)) * ((at < 16 ? pair % 16 : pair / 16) - 8), 0};
    }
    case kQ4_1: {
      const uint8_t pair = block[4 + at % 16];
      return {half_value(u16_at(block)) * (at < 16 ? pair % 16 : pair / 16), half_value(u16_at(block + 2))};
    }
    case kQ4_K:
      return q4k_weight(block, at);
    case kFP8:
      return {e4m3_value(*block), 0};
    case kMXFP4: {
      const uint8_t pair = block[1 + at % 16];
      return {e2m1_value(at < 16 ? pair % 16 : pair / 16) * e8m0_value(block[0]), 0};
    }
    default:
      return {q6k_weight(block, at), 0};
  }
}

inline void put_half(uint8_t* out, float x) {
  const uint16_t h = half_of(x);
  std::memcpy(out, &h, 2);
}

// A random row. Row 0 has only the largest codes and row 1 only the smallest: sums of products that overflow
// 16 bits must show up somewhere.
inline std::vector<uint8_t> random_row(int32_t format, int64_t k, int64_t row, Random& random) {
  const FormatInfo& info = format_info(format);
  std::vector<uint8_t> out(k / info.block_weights * info.block_bytes);
  for (int64_t b = 0; b < k / info.block_weights; ++b) {
    uint8_t* block = out.data() + b * info.block_bytes;
    for (int i = 0; i < info.block_bytes; ++i)
      block[i] = static_cast<uint8_t>(row == 0 ? 0xff : row == 1 ? 0 : random.bits());
    const float x = 0.02f * random.normal(), size = 0.5f + static_cast<float>(random.uniform());
    const float sign = random.below(2) == 0 ? -1.0f : 1.0f;
    switch (format) {
      case kF32:
        std::memcpy(block, &x, 4);
        break;
      case kF16:
        put_half(block, random.below(50) == 0 ? x * 0x1p-13f : x);
        break;  // some are subnormal
      case kBF16: {
        const uint16_t h = bf16_of(x);
        std::memcpy(block, &h, 2);
        break;
      }
      case kQ8_0:
        put_half(block, size * 3e-4f);
        if (row < 2) std::memset(block + 2, row == 0 ? 0x7f : 0x80, 32);
        break;
      case kQ4_0:
        put_half(block, sign * size * 4e-3f);
        break;
      case kQ4_1:
        put_half(block, size * 4e-3f);
        put_half(block + 2, size * -3e-2f);
        break;
      case kQ4_K:
        put_half(block, size * 2e-4f);
        put_half(block + 2, size * 1e-3f);
        break;
      case kFP8:  // neither NaN; row 0 the largest, row 1 the most negative, and enough subnormals
        if (row < 2) *block = row == 0 ? 0x7e : 0xfe;
        else if (random.below(4) == 0) *block &= 0x87;
        if ((*block & 0x7f) == 0x7f) *block ^= 1;
        break;
      case kMXFP4:
        block[0] = static_cast<uint8_t>(118 + random.below(6));
        if (row < 2) std::memset(block + 1, row == 0 ? 0x77 : 0xff, 16);
        break;
      default:
        put_half(block + 208, sign * size * 2e-5f);
    }
  }
  return out;
}

// Whether rows of this kind are packed as int8, and how many inputs share a term.
inline bool is_q8(ActKind kind) { return kind != ActKind::kF32 && kind != ActKind::kBF16; }
inline int64_t term_inputs(ActKind kind) { return kind == ActKind::kQ8Offset32 ? 16 : 32; }

// What the products make of an input row. Below 1e-30 a block counts as zeros.
inline std::vector<double> rounded_input(ActKind kind, const float* x, int64_t k) {
  std::vector<double> out(x, x + k);
  if (kind == ActKind::kBF16) {
    for (int64_t i = 0; i < k; ++i) out[i] = bf16_value(bf16_of(x[i]));
  } else if (is_q8(kind)) {
    for (int64_t b = 0; b < k; b += 32) {
      float top = 0;
      for (int i = 0; i < 32; ++i) top = std::fmax(top, std::fabs(x[b + i]));
      const float inverse = top > 1e-30f ? 127.0f / top : 0.0f, d = top / 127.0f;
      for (int i = 0; i < 32; ++i) out[b + i] = static_cast<double>(d) * std::nearbyint(x[b + i] * inverse);
    }
  }
  return out;
}

// Roundings that one output may go through, in units of 2^-24 of the sum of magnitudes.
inline double num_roundings(int32_t format, int64_t k) {
  switch (format_info(format).act) {
    case ActKind::kF32:
      return static_cast<double>(k) / 2 + 2;
    case ActKind::kBF16:
      return static_cast<double>(k) + 2;
    default:
      return 3.0 * static_cast<double>(k) / (format == kQ6_K ? 16 : 32) + 3;
  }
}

struct Judgement {
  double value, bound;  // the exact result; the largest error that float arithmetic explains
  double exact;         // the result without rounding of the activations
  double size;          // the sum of the magnitudes of the terms
};

// GGUF blocks of MXFP4 as other checkpoints have them: two neighbours in a byte, and the scales apart.
inline void split_mxfp4(const std::vector<uint8_t>& blocks, std::vector<uint8_t>* nibbles,
                        std::vector<uint8_t>* scales) {
  for (size_t b = 0; b < blocks.size(); b += 17) {
    scales->push_back(blocks[b]);
    const auto code = [&](int i) { return i < 16 ? blocks[b + 1 + i] % 16 : blocks[b + 1 + i - 16] / 16; };
    for (int i = 0; i < 32; i += 2) nibbles->push_back(static_cast<uint8_t>(code(i) + 16 * code(i + 1)));
  }
}

// All rows of a weight, for judging many tokens. Of MXFP4 weights, those with an even seed have their scales apart.
class JudgedWeight {
 public:
  JudgedWeight(int32_t format, int64_t num_rows, int64_t k, uint64_t seed) : format_(format), k_(k) {
    Random random(seed);
    for (int64_t tile = 0; tile < num_tiles_of(num_rows) && format == kFP8; ++tile) {
      scales_.emplace_back();
      for (int64_t i = 0; i < k; i += kScaleInputs)
        scales_[tile].push_back(static_cast<uint8_t>(random.below(2) == 0 ? 117 : 115 + random.below(5)));
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      rows_.push_back(random_row(format, k, r, random));
      for (int64_t i = 0; i < k; ++i) {
        weights_.push_back(weight_at(format, rows_[r].data(), i));
        if (format == kFP8) weights_.back().scaled *= e8m0_value(scales_[r / kTileRows][i / kScaleInputs]);
      }
      if (format != kMXFP4 || seed % 2 != 0) continue;
      std::vector<uint8_t> nibbles;
      scales_.emplace_back();
      split_mxfp4(rows_[r], &nibbles, &scales_[r]);
      rows_[r] = nibbles;
    }
  }
  int32_t format() const { return format_; }
  int64_t k() const { return k_; }
  int64_t num_rows() const { return static_cast<int64_t>(rows_.size()); }
  static int64_t num_tiles_of(int64_t num_rows) { return (num_rows + kTileRows - 1) / kTileRows; }
  int64_t num_tiles() const { return num_tiles_of(num_rows()); }
  int64_t tile_bytes() const { return hotset::tile_bytes(format_, k_); }
  const uint8_t* row(int64_t r) const { return rows_[r].data(); }
  const WeightValue& weight(int64_t r, int64_t i) const { return weights_[r * k_ + i]; }

  void pack(const KernelTable& kernels, int64_t tile, uint8_t* out) const {
    const uint8_t *rows[kTileRows], *scales[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t at = tile * kTileRows + r;
      rows[r] = at < num_rows() ? row(at) : nullptr;
      scales[r] = format_ == kMXFP4 && !scales_.empty() && at < num_rows() ? scales_[at].data() : nullptr;
    }
    if (format_ == kFP8) scales[0] = scales_[tile].data();
    kernels.pack_tile(format_, rows, scales_.empty() ? nullptr : scales, k_, out);
  }
  Judgement judge(int64_t r, const float* x, const std::vector<double>& rounded) const {
    Judgement out{0, 0, 0, 1e-30};
    for (int64_t i = 0; i < k_; ++i) {
      const WeightValue& w = weight(r, i);
      out.value += (w.scaled + w.offset) * rounded[i];
      out.exact += (w.scaled + w.offset) * x[i];
      out.size += (std::fabs(w.scaled) + std::fabs(w.offset)) * std::fabs(rounded[i]);
    }
    out.bound = num_roundings(format_, k_) * 0x1p-24 * out.size + 1e-30;
    return out;
  }

 private:
  int32_t format_;
  int64_t k_;
  std::vector<std::vector<uint8_t>> rows_, scales_;
  std::vector<WeightValue> weights_;
};

}  // namespace hotset
