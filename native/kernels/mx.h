// Weights with power-of-two scales: MXFP4 (e2m1, a scale per 32 inputs) and FP8 (e4m3, a scale per 128 inputs and 128
// rows). Their layouts, their products, and the way from the checkpoint's rows and back. Included by linear.h.

// ---- MXFP4: int8 inputs, as Q4_0, but codes are looked up ------------------------------------------------

constexpr int kMxBlockBytes = 17 * kTileRows;

// e8m0 scales of sixteen rows, halved because the codes are twice the numbers: 2^(b - 128). Both the exponent's place
// and, for b of 0 and 1, the top of a subnormal number are right in the larger of two shifts.
HOTSET_INLINE f32x16 mx_scales(const uint8_t* p) {
  const i32x16 b = i32_from_u8(p);
  return f32_from_bits(i32_max(i32_shl<23>(i32_add(b, i32_splat(-1))), i32_shl<21>(i32_add(b, i32_splat(1)))));
}

struct FormatMXFP4 {  // e8m0 [16]; nibbles [4][16][4]
  static constexpr int kWeights = 32, kBytes = kMxBlockBytes, kTermInputs = 32;
  template <int NT, int S> static HOTSET_INLINE void block(const uint8_t* p, ActQ8<NT, S>& a, f32x16 (&acc)[NT]) {
    u8x64 w[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const u8x64 v = u8_load(p + 16 + 64 * i);
      w[i] = u8_e2m1_low(v);
      w[4 + i] = u8_e2m1_high(v);
    }
    block32<2 * kE2m1Offset, true>(w, mx_scales(p), a, acc);
    a.advance();
  }
};

// ---- FP8: BF16 inputs ------------------------------------------------------------------------------------
//
// Sums are kept in units of the scale of the inputs at hand. Where it changes, both sums are multiplied by a power of
// two, which is exact, so the result has the bits of a product with weights that had been scaled before. Only scales
// further apart than any checkpoint has them are summed apart: in common units sums could overflow.
constexpr int kScaleSpread = 64;

// Where the scales from `begin` on leave a common range.
inline int64_t scale_run(const uint8_t* scales, int64_t begin, int64_t end) {
  int low = scales[begin], high = low;
  for (int64_t i = begin + 1; i < end; ++i) {
    low = scales[i] < low ? scales[i] : low;
    high = scales[i] > high ? scales[i] : high;
    if (high - low > kScaleSpread) return i;
  }
  return end;
}

// Inputs [0, k) with one run of scales, packed inputs at `a`. Four inputs are 64 bytes: in every sixteen, the first two
// inputs of four rows, then the other two.
template <int NT, int S>
HOTSET_INLINE void fp8_run(const uint8_t* scales, const uint8_t* w, const uint16_t* a, int64_t k, f32x16 (&acc)[NT]) {
  f32x16 odd[NT];
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) acc[t] = odd[t] = f32_zero();
  uint8_t unit = *scales;
  for (; k > 0; k -= kScaleInputs, ++scales) {
    if (*scales != unit) {
      const f32x16 ratio = f32_splat(power_of_two(unit - *scales));
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) acc[t] = f32_mul(acc[t], ratio), odd[t] = f32_mul(odd[t], ratio);
      unit = *scales;
    }
    const int64_t count = k < kScaleInputs ? k : kScaleInputs;
    for (int64_t i = 0; i < count; i += 4, a += 4 * S, w += 64) {
      bf16x32 first, second;
      bf16_from_e4m3(u8_load(w), first, second);
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) {
        acc[t] = bf16_dot(acc[t], first, a + 2 * t);
        odd[t] = bf16_dot(odd[t], second, a + 2 * S + 2 * t);
      }
    }
  }
  const f32x16 scale = f32_splat(e8m0_value(unit));
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) acc[t] = f32_mul(f32_add(acc[t], odd[t]), scale);
}

template <int NT, int S>
HOTSET_INLINE void tile_fp8(const uint8_t* tile, int64_t k, const Act& act, int64_t first, int slice,
                            f32x16 (&acc)[NT]) {
  const uint8_t* w = tile + fp8_header_bytes(k);
  const uint16_t* a = act.bf16 + first * k + 2 * slice;
  const int64_t blocks = (k + kScaleInputs - 1) / kScaleInputs;
  alignas(64) float before[NT][16];
  for (int64_t b = 0, end; b < blocks; b = end) {
    end = scale_run(tile, b, blocks);
    const int64_t begin = b * kScaleInputs, inputs = (end < blocks ? end * kScaleInputs : k) - begin;
    fp8_run<NT, S>(tile + b, w + begin * kTileRows, a + begin * S, inputs, acc);
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      if (b > 0) acc[t] = f32_add(f32_load(before[t]), acc[t]);
      if (end < blocks) f32_store(before[t], acc[t]);
    }
  }
}

// ---- packing ---------------------------------------------------------------------------------------------

// Where weight `input` of a row lies among the weights of a tile.
inline int64_t fp8_at(int64_t row, int64_t input) {
  return input / 4 * 64 + row / 4 * 16 + input % 4 / 2 * 8 + row % 4 * 2 + input % 2;
}

inline void pack_fp8_scales(const uint8_t* const* scales, int64_t k, uint8_t* tile) {
  const int64_t num_scales = (k + kScaleInputs - 1) / kScaleInputs;
  std::memset(tile, 0, fp8_header_bytes(k));
  if (scales) std::memcpy(tile, scales[0], num_scales); else std::memset(tile, 127, num_scales);  // 127 is 1
}

inline void unpack_fp8_row(const uint8_t* tile, int row, int64_t k, float* y) {
  const uint8_t* w = tile + fp8_header_bytes(k);
  for (int64_t i = 0; i < k; ++i) y[i] = e4m3_value(w[fp8_at(row, i)]) * e8m0_value(tile[i / kScaleInputs]);
}

inline void unpack_mxfp4_row(const uint8_t* tile, int row, int64_t k, float* y) {
  for (int64_t b = 0; b < k / 32; ++b, tile += kMxBlockBytes) {
    for (int i = 0; i < 32; ++i) {
      const uint8_t pair = tile[16 + i % 16 / 4 * 64 + 4 * row + i % 4];
      const int twice = kTwiceE2m1[i < 16 ? pair & 15 : pair >> 4];
      y[32 * b + i] = static_cast<float>(twice) * power_of_two(tile[row] - 128);
    }
  }
}
