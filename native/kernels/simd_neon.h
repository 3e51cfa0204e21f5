// Sixteen-lane vectors on NEON (with dotprod and i8mm): four registers each, lanes 4 i to 4 i + 3 in v[i].
// Same names, lane order, reduction trees and treatment of zeros and NaN as simd_avx512.h, so that both sets
// give the same bits. The one exception is bf16_dot, for which AVX-512 has an instruction with its own rounding.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

// Register blocking of this instruction set (32 registers of 4 floats).
constexpr int kMaxTokens = 4;        // tokens per pass of an integer product
constexpr int kMaxTokensFloat = 2;   // tokens per pass of a float product (two sums a token)
constexpr int kAttendRows = 2;       // query rows per pass over keys or values
constexpr int kScoreTiles = 2;       // tiles of sixteen keys per pass
constexpr int kValueTiles = 2;       // vectors of sixteen channels per pass
constexpr int kQueryRows = 2;        // query rows per pass over a tile of rows
constexpr int kQueryTiles = 2;       // vectors of keys or channels per such pass
constexpr bool kHasBf16Dot = false;
constexpr bool kHasScaledLookup = false;  // of 64 bytes: common scales of index rows
constexpr bool kHasCodeTiles = false;     // e4m3 codes to tiles of keys and of values directly

struct f32x16 { float32x4_t v[4]; };
struct i32x16 { int32x4_t v[4]; };
struct u8x64 { uint8x16_t v[4]; };  // sixteen rows, four consecutive inputs each
struct bf16x32 { uint16x8_t v[4]; };  // sixteen rows, a pair each

// `expression` of i for the four registers of a vector.
template <class V, class F> HOTSET_INLINE V each(F f) { return V{{f(0), f(1), f(2), f(3)}}; }
#define HOTSET_EACH(V, expression) \
  each<V>([&]([[maybe_unused]] int i) __attribute__((always_inline)) { return expression; })

HOTSET_INLINE f32x16 f32_splat(float x) { return HOTSET_EACH(f32x16, vdupq_n_f32(x)); }
HOTSET_INLINE f32x16 f32_zero() { return f32_splat(0.0f); }
HOTSET_INLINE f32x16 f32_load(const float* p) { return HOTSET_EACH(f32x16, vld1q_f32(p + 4 * i)); }
HOTSET_INLINE void f32_store(float* p, f32x16 a) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
HOTSET_INLINE f32x16 f32_add(f32x16 a, f32x16 b) { return HOTSET_EACH(f32x16, vaddq_f32(a.v[i], b.v[i])); }
HOTSET_INLINE f32x16 f32_sub(f32x16 a, f32x16 b) { return HOTSET_EACH(f32x16, vsubq_f32(a.v[i], b.v[i])); }
HOTSET_INLINE f32x16 f32_mul(f32x16 a, f32x16 b) { return HOTSET_EACH(f32x16, vmulq_f32(a.v[i], b.v[i])); }
HOTSET_INLINE f32x16 f32_div(f32x16 a, f32x16 b) { return HOTSET_EACH(f32x16, vdivq_f32(a.v[i], b.v[i])); }
HOTSET_INLINE f32x16 f32_fma(f32x16 a, f32x16 b, f32x16 c) {
  return HOTSET_EACH(f32x16, vfmaq_f32(c.v[i], a.v[i], b.v[i]));
}
// a where a > b, else b: what the x86 instruction does with zeros and NaN (vmaxq_f32 differs).
HOTSET_INLINE float32x4_t max_quarter(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
HOTSET_INLINE f32x16 f32_max(f32x16 a, f32x16 b) { return HOTSET_EACH(f32x16, max_quarter(a.v[i], b.v[i])); }
HOTSET_INLINE f32x16 f32_min(f32x16 a, f32x16 b) {
  return HOTSET_EACH(f32x16, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]));
}
HOTSET_INLINE f32x16 f32_abs(f32x16 a) { return HOTSET_EACH(f32x16, vabsq_f32(a.v[i])); }
HOTSET_INLINE f32x16 f32_round(f32x16 a) { return HOTSET_EACH(f32x16, vrndnq_f32(a.v[i])); }
HOTSET_INLINE float32x4_t scale2_quarter(float32x4_t a, float32x4_t n) {
  int32x4_t exponent = vshlq_n_s32(vcvtnq_s32_f32(n), 23);
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), exponent));
}
// a * 2^n for integral n in the normal range.
HOTSET_INLINE f32x16 f32_scale2(f32x16 a, f32x16 n) { return HOTSET_EACH(f32x16, scale2_quarter(a.v[i], n.v[i])); }
HOTSET_INLINE float32x4_t masked_quarter(uint32x4_t mask, float32x4_t a) {
  return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(a)));
}
// Lanes where a < limit are zeroed.
HOTSET_INLINE f32x16 f32_zero_below(f32x16 value, f32x16 a, f32x16 limit) {
  return HOTSET_EACH(f32x16, masked_quarter(vcgeq_f32(a.v[i], limit.v[i]), value.v[i]));
}
// Bit i is set where lane i of a is not below the limit; a NaN is.
HOTSET_INLINE uint32_t f32_lanes_from(f32x16 a, f32x16 limit) {
  alignas(16) static const uint32_t kBit[4] = {1, 2, 4, 8};
  uint32_t out = 0;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) out |= vaddvq_u32(vandq_u32(vcgeq_f32(a.v[i], limit.v[i]), vld1q_u32(kBit))) << 4 * i;
  return out;
}
// First n lanes of a, the others from b.
HOTSET_INLINE f32x16 f32_first(int n, f32x16 a, f32x16 b) {
  alignas(16) static const int32_t kLane[4] = {0, 1, 2, 3};
  const int32x4_t lane = vld1q_s32(kLane);
  return HOTSET_EACH(f32x16, vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n - 4 * i)), a.v[i], b.v[i]));
}
HOTSET_INLINE f32x16 f32_from_i32(i32x16 a) { return HOTSET_EACH(f32x16, vcvtq_f32_s32(a.v[i])); }
HOTSET_INLINE f32x16 f32_from_f16(const uint16_t* p) {
  const float16x8_t lo = vreinterpretq_f16_u16(vld1q_u16(p)), hi = vreinterpretq_f16_u16(vld1q_u16(p + 8));
  return {{vcvt_f32_f16(vget_low_f16(lo)), vcvt_high_f32_f16(lo),
           vcvt_f32_f16(vget_low_f16(hi)), vcvt_high_f32_f16(hi)}};
}
HOTSET_INLINE void f16_store(uint16_t* p, f32x16 a) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.v[0]), a.v[1])));
  vst1q_u16(p + 8, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.v[2]), a.v[3])));
}
// BF16 bits of four lanes: nearest even, subnormals flushed to zero and NaN made quiet, as vcvtneps2bf16 does.
HOTSET_INLINE uint16x4_t bf16_bits(float32x4_t a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a), magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t out = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t tiny = vcltq_u32(magnitude, vdupq_n_u32(0x00800000));
  const uint32x4_t nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7f800000));
  out = vbslq_u32(tiny, vandq_u32(bits, vdupq_n_u32(0x80000000)), out);
  out = vbslq_u32(nan, vorrq_u32(bits, vdupq_n_u32(0x00400000)), out);
  return vshrn_n_u32(out, 16);
}
HOTSET_INLINE void bf16_store(uint16_t* p, f32x16 a) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, bf16_bits(a.v[i]));
}

HOTSET_INLINE i32x16 i32_splat(int32_t x) { return HOTSET_EACH(i32x16, vdupq_n_s32(x)); }
HOTSET_INLINE i32x16 i32_add(i32x16 a, i32x16 b) { return HOTSET_EACH(i32x16, vaddq_s32(a.v[i], b.v[i])); }
HOTSET_INLINE i32x16 i32_from_i16(int16x8_t lo, int16x8_t hi) {
  return {{vmovl_s16(vget_low_s16(lo)), vmovl_high_s16(lo), vmovl_s16(vget_low_s16(hi)), vmovl_high_s16(hi)}};
}
HOTSET_INLINE i32x16 i32_from_u8(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  return i32_from_i16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))), vreinterpretq_s16_u16(vmovl_high_u8(bytes)));
}
HOTSET_INLINE i32x16 i32_from_i8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  return i32_from_i16(vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
}
HOTSET_INLINE i32x16 i32_max(i32x16 a, i32x16 b) { return HOTSET_EACH(i32x16, vmaxq_s32(a.v[i], b.v[i])); }
HOTSET_INLINE f32x16 f32_from_bits(i32x16 a) { return HOTSET_EACH(f32x16, vreinterpretq_f32_s32(a.v[i])); }
HOTSET_INLINE i32x16 i32_and(i32x16 a, int32_t mask) {
  return HOTSET_EACH(i32x16, vandq_s32(a.v[i], vdupq_n_s32(mask)));
}
HOTSET_INLINE i32x16 i32_or(i32x16 a, i32x16 b) { return HOTSET_EACH(i32x16, vorrq_s32(a.v[i], b.v[i])); }
template <int kBits> HOTSET_INLINE i32x16 i32_shr(i32x16 a) {
  return HOTSET_EACH(i32x16, vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), kBits)));
}
template <int kBits> HOTSET_INLINE i32x16 i32_shl(i32x16 a) {
  return HOTSET_EACH(i32x16, vshlq_n_s32(a.v[i], kBits));
}
// Nearest integers, ties to even. What int32 cannot hold becomes a number whose low byte is 0, as on x86, where
// the conversion gives 0x80000000.
HOTSET_INLINE int32x4_t rounded_quarter(float32x4_t a) {
  const int32x4_t whole = vcvtnq_s32_f32(a);
  return vbicq_s32(whole, vreinterpretq_s32_u32(vceqq_s32(whole, vdupq_n_s32(INT32_MAX))));
}
// Nearest integers as bytes.
HOTSET_INLINE void i8_store_rounded(int8_t* p, f32x16 a) {
  const i32x16 n = HOTSET_EACH(i32x16, rounded_quarter(a.v[i]));
  const int16x8_t lo = vmovn_high_s32(vmovn_s32(n.v[0]), n.v[1]), hi = vmovn_high_s32(vmovn_s32(n.v[2]), n.v[3]);
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(lo), hi));
}

HOTSET_INLINE u8x64 u8_load(const uint8_t* p) { return HOTSET_EACH(u8x64, vld1q_u8(p + 16 * i)); }
HOTSET_INLINE void u8_store(uint8_t* p, u8x64 a) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, a.v[i]);
}
HOTSET_INLINE u8x64 u8_and(u8x64 a, uint8_t mask) {
  return HOTSET_EACH(u8x64, vandq_u8(a.v[i], vdupq_n_u8(mask)));
}
HOTSET_INLINE u8x64 u8_or(u8x64 a, u8x64 b) { return HOTSET_EACH(u8x64, vorrq_u8(a.v[i], b.v[i])); }
// The caller masks, because other sets have no shift of bytes.
template <int kBits> HOTSET_INLINE u8x64 u8_shr(u8x64 a) {
  return HOTSET_EACH(u8x64, vshrq_n_u8(a.v[i], kBits));
}
template <int kBits> HOTSET_INLINE u8x64 u8_shl(u8x64 a) {
  return HOTSET_EACH(u8x64, vshlq_n_u8(a.v[i], kBits));
}

// The unsigned e2m1 numbers (kE2m1Unsigned) of low and of high nibbles.
HOTSET_INLINE uint8x16_t e2m1_quarter(uint8x16_t index) { return vqtbl1q_u8(vld1q_u8(kE2m1Unsigned.entries), index); }
HOTSET_INLINE u8x64 u8_e2m1_low(u8x64 a) { return HOTSET_EACH(u8x64, e2m1_quarter(vandq_u8(a.v[i], vdupq_n_u8(15)))); }
HOTSET_INLINE u8x64 u8_e2m1_high(u8x64 a) { return HOTSET_EACH(u8x64, e2m1_quarter(vshrq_n_u8(a.v[i], 4))); }

// acc[row] += sum of w[row][j] * a[j] for four unsigned weights and four signed activations. USDOT is exact,
// so kMaxWeight does not matter here.
template <int kMaxWeight> HOTSET_INLINE i32x16 i32_dot(i32x16 acc, u8x64 w, const int8_t* a) {
  int32_t four;
  std::memcpy(&four, a, 4);
  const int8x16_t splat = vreinterpretq_s8_s32(vdupq_n_s32(four));
  return HOTSET_EACH(i32x16, vusdotq_s32(acc.v[i], w.v[i], splat));
}

// The first and second BF16 of each pair as floats.
HOTSET_INLINE float32x4_t bf16_first(uint32x4_t pairs) { return vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)); }
HOTSET_INLINE float32x4_t bf16_second(uint32x4_t pairs) {
  return vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
}
HOTSET_INLINE float32x4_t bf16_dot_quarter(float32x4_t acc, uint16x8_t w, float32x4_t first, float32x4_t second) {
  const uint32x4_t row = vreinterpretq_u32_u16(w);
  return vfmaq_f32(vfmaq_f32(acc, bf16_first(row), first), bf16_second(row), second);
}
HOTSET_INLINE bf16x32 bf16_load(const uint16_t* p) { return HOTSET_EACH(bf16x32, vld1q_u16(p + 8 * i)); }
// acc[row] += w[row][0] * a[0], then w[row][1] * a[1], for pairs of BF16.
HOTSET_INLINE f32x16 bf16_dot(f32x16 acc, bf16x32 w, const uint16_t* a) {
  uint32_t pair;
  std::memcpy(&pair, a, 4);
  const float32x4_t first = bf16_first(vdupq_n_u32(pair)), second = bf16_second(vdupq_n_u32(pair));
  return HOTSET_EACH(f32x16, bf16_dot_quarter(acc.v[i], w.v[i], first, second));
}
HOTSET_INLINE f32x16 bf16_dot(f32x16 acc, const uint16_t* w, const uint16_t* a) {
  return bf16_dot(acc, bf16_load(w), a);
}

// BF16 numbers of sixteen e4m3 bytes: the first eight and the last eight. The corrections are for subnormals only.
HOTSET_INLINE void bf16_from_e4m3(uint8x16_t x, uint16x8_t& first, uint16x8_t& second) {
  const uint8x16_t magnitude = vandq_u8(x, vdupq_n_u8(0x7f)), nan = vceqq_u8(magnitude, vdupq_n_u8(0x7f));
  const uint8x16_t subnormal = vcltq_u8(magnitude, vdupq_n_u8(8));
  const uint8x16_t low_fix = vandq_u8(vqtbl1q_u8(vld1q_u8(kE4m3Lookups.low_fix), magnitude), subnormal);
  const uint8x16_t high_fix = vandq_u8(vqtbl1q_u8(vld1q_u8(kE4m3Lookups.high_fix), magnitude), subnormal);
  const uint8x16_t low = vorrq_u8(vaddq_u8(vshlq_n_u8(x, 4), low_fix), nan);
  const uint8x16_t high = vorrq_u8(vaddq_u8(vqtbl1q_u8(vld1q_u8(kE4m3Lookups.high), vshrq_n_u8(x, 4)), high_fix), nan);
  first = vreinterpretq_u16_u8(vzip1q_u8(low, high)), second = vreinterpretq_u16_u8(vzip2q_u8(low, high));
}
HOTSET_INLINE void bf16_from_e4m3(u8x64 x, bf16x32& first, bf16x32& second) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) bf16_from_e4m3(x.v[i], first.v[i], second.v[i]);
}

// 64 e4m3 bytes as BF16 times 2^exponent, in their order.
inline void bf16_expand_e4m3(const uint8_t* p, int exponent, uint16_t* out) {
  const uint16x8_t step = vdupq_n_u16(static_cast<uint16_t>(exponent * 128)), magnitude = vdupq_n_u16(0x7fff);
  for (int i = 0; i < 64; i += 16) {
    uint16x8_t half[2];
    bf16_from_e4m3(vld1q_u8(p + i), half[0], half[1]);
    for (int j = 0; j < 2; ++j)
      vst1q_u16(out + i + 8 * j, vaddq_u16(half[j], vandq_u16(vtstq_u16(half[j], magnitude), step)));
  }
}

// 32 e2m1 nibbles, the even number low, as BF16 times 2^exponent, in their order.
inline void bf16_expand_e2m1(const uint8_t* p, int exponent, uint16_t* out) {
  const uint16x8_t step = vdupq_n_u16(static_cast<uint16_t>(exponent * 128)), magnitude = vdupq_n_u16(0x7fff);
  const uint8x16_t pairs = vld1q_u8(p), even = vandq_u8(pairs, vdupq_n_u8(15)), odd = vshrq_n_u8(pairs, 4);
  const uint8x16_t codes[2] = {vzip1q_u8(even, odd), vzip2q_u8(even, odd)};
  for (int i = 0; i < 2; ++i) {
    const uint8x16_t low = vqtbl1q_u8(vld1q_u8(kE2m1Words.low), codes[i]);
    const uint8x16_t high = vqtbl1q_u8(vld1q_u8(kE2m1Words.high), codes[i]);
    const uint16x8_t half[2] = {vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))};
    for (int j = 0; j < 2; ++j)
      vst1q_u16(out + 16 * i + 8 * j, vaddq_u16(half[j], vandq_u16(vtstq_u16(half[j], magnitude), step)));
  }
}

HOTSET_INLINE void u32_transpose4(const uint32_t* const* rows, int64_t at, uint32_t* out, int64_t ld) {
  const uint32x4_t a = vld1q_u32(rows[0] + at), b = vld1q_u32(rows[1] + at);
  const uint32x4_t c = vld1q_u32(rows[2] + at), d = vld1q_u32(rows[3] + at);
  const uint64x2_t p = vreinterpretq_u64_u32(vtrn1q_u32(a, b)), q = vreinterpretq_u64_u32(vtrn1q_u32(c, d));
  const uint64x2_t r = vreinterpretq_u64_u32(vtrn2q_u32(a, b)), s = vreinterpretq_u64_u32(vtrn2q_u32(c, d));
  vst1q_u32(out, vreinterpretq_u32_u64(vtrn1q_u64(p, q)));
  vst1q_u32(out + ld, vreinterpretq_u32_u64(vtrn1q_u64(r, s)));
  vst1q_u32(out + 2 * ld, vreinterpretq_u32_u64(vtrn2q_u64(p, q)));
  vst1q_u32(out + 3 * ld, vreinterpretq_u32_u64(vtrn2q_u64(r, s)));
}
// out[i][r] = rows[r][i] for sixteen rows of sixteen words; `ld` words from one row of out to the next.
inline void u32_transpose16(const uint32_t* const* rows, uint32_t* out, int64_t ld) {
  for (int r = 0; r < 16; r += 4)
    for (int i = 0; i < 16; i += 4) u32_transpose4(rows + r, i, out + i * ld + r, ld);
}

// For packing. A vector is four quarters: 16 bytes from each of four places.
HOTSET_INLINE u8x64 u8_quarters(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  return {{vld1q_u8(a), vld1q_u8(b), vld1q_u8(c), vld1q_u8(d)}};
}
// By quarters, each at a multiple of 16: wide stores across such borders are slow.
HOTSET_INLINE void u8_store_quarters(uint8_t* p, u8x64 a) { u8_store(p, a); }
// In every quarter, word i of v[j] and word j of v[i] change places.
HOTSET_INLINE void u32_transpose_quarters(u8x64 (&v)[4]) {
  const auto words = [&](int i, int q) { return vreinterpretq_u32_u8(v[i].v[q]); };
  const auto wide = [](uint32x4_t a) { return vreinterpretq_u64_u32(a); };
  const auto bytes = [](uint64x2_t a) { return vreinterpretq_u8_u64(a); };
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const uint64x2_t a = wide(vzip1q_u32(words(0, q), words(1, q))), b = wide(vzip2q_u32(words(0, q), words(1, q)));
    const uint64x2_t c = wide(vzip1q_u32(words(2, q), words(3, q))), d = wide(vzip2q_u32(words(2, q), words(3, q)));
    v[0].v[q] = bytes(vzip1q_u64(a, c)), v[1].v[q] = bytes(vzip2q_u64(a, c));
    v[2].v[q] = bytes(vzip1q_u64(b, d)), v[3].v[q] = bytes(vzip2q_u64(b, d));
  }
}
HOTSET_INLINE u8x64 u8_xor(u8x64 a, uint8_t mask) { return HOTSET_EACH(u8x64, veorq_u8(a.v[i], vdupq_n_u8(mask))); }
// A byte of a, then one of b: of the first and of the second half of every quarter.
HOTSET_INLINE u8x64 u8_zip_low(u8x64 a, u8x64 b) { return HOTSET_EACH(u8x64, vzip1q_u8(a.v[i], b.v[i])); }
HOTSET_INLINE u8x64 u8_zip_high(u8x64 a, u8x64 b) { return HOTSET_EACH(u8x64, vzip2q_u8(a.v[i], b.v[i])); }
HOTSET_INLINE uint8x16_t low_halves(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u16(vuzp1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
HOTSET_INLINE uint8x16_t high_halves(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u16(vuzp2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
// The low halves of words, then their high halves: in every quarter, and of all sixteen.
HOTSET_INLINE u8x64 u16_unzip_quarters(u8x64 a) {
  const auto quarter = [](uint8x16_t x) {
    return vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(low_halves(x, x)), vreinterpretq_u64_u8(high_halves(x, x))));
  };
  return HOTSET_EACH(u8x64, quarter(a.v[i]));
}
HOTSET_INLINE u8x64 u16_unzip(u8x64 a) {
  return {{low_halves(a.v[0], a.v[1]), low_halves(a.v[2], a.v[3]), high_halves(a.v[0], a.v[1]), high_halves(a.v[2], a.v[3])}};
}
// The first bytes of the sixteen words, then their second bytes, and so on.
HOTSET_INLINE u8x64 u8_unzip(u8x64 a) {
  const uint8x16_t even[2] = {vuzp1q_u8(a.v[0], a.v[1]), vuzp1q_u8(a.v[2], a.v[3])};
  const uint8x16_t odd[2] = {vuzp2q_u8(a.v[0], a.v[1]), vuzp2q_u8(a.v[2], a.v[3])};
  return {{vuzp1q_u8(even[0], even[1]), vuzp1q_u8(odd[0], odd[1]), vuzp2q_u8(even[0], even[1]), vuzp2q_u8(odd[0], odd[1])}};
}
// Whole lines one after another: these processors do not read what is there.
HOTSET_INLINE void u8_stream(uint8_t* p, u8x64 a) { u8_store(p, a); }
inline void stream_fence() {}

// Sum and maximum of the lanes, in one fixed tree: halves, quarters, ...
HOTSET_INLINE float f32_sum_lanes(f32x16 a) {
  const float32x4_t lo = vaddq_f32(a.v[0], a.v[2]), hi = vaddq_f32(a.v[1], a.v[3]);
  const float32x4_t quarter = vaddq_f32(lo, hi);
  const float32x2_t eighth = vadd_f32(vget_low_f32(quarter), vget_high_f32(quarter));
  return vget_lane_f32(eighth, 0) + vget_lane_f32(eighth, 1);
}
HOTSET_INLINE float f32_max_lanes(f32x16 a) {
  const float32x4_t lo = max_quarter(a.v[2], a.v[0]), hi = max_quarter(a.v[3], a.v[1]);
  float q[4];
  vst1q_f32(q, max_quarter(hi, lo));
  const float even = q[0] > q[2] ? q[0] : q[2], odd = q[1] > q[3] ? q[1] : q[3];
  return even > odd ? even : odd;
}
