// Sixteen-lane vectors on AVX2 (with FMA and F16C): two registers each, lanes 0 to 7 in `lo`, 8 to 15 in `hi`.
// Same names, lane order and reduction trees as simd_avx512.h, so that both sets give the same bits. The one
// exception is bf16_dot, for which AVX-512 has an instruction with its own rounding.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Register blocking of this instruction set (16 registers of 8 floats).
constexpr int kMaxTokens = 8;        // tokens per pass of an integer product
constexpr int kMaxTokensFloat = 4;   // tokens per pass of a float product (two sums a token)
constexpr int kAttendRows = 2;       // query rows per pass over keys or values
constexpr int kScoreTiles = 2;       // tiles of sixteen keys per pass
constexpr int kValueTiles = 2;       // vectors of sixteen channels per pass
constexpr bool kHasBf16Dot = false;

struct f32x16 { __m256 lo, hi; };
struct i32x16 { __m256i lo, hi; };
struct u8x64 { __m256i lo, hi; };  // sixteen rows, four consecutive inputs each

inline __m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store_half(void* p, __m128i a) { _mm_storeu_si128(static_cast<__m128i*>(p), a); }

inline f32x16 f32_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline f32x16 f32_splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 f32_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void f32_store(float* p, f32x16 a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
inline f32x16 f32_add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline f32x16 f32_sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline f32x16 f32_mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline f32x16 f32_div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline f32x16 f32_fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 f32_max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline f32x16 f32_min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline f32x16 f32_abs(f32x16 a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline f32x16 f32_round(f32x16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}
inline __m256 scale2_half(__m256 a, __m256 n) {
  __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
// a * 2^n for integral n in the normal range.
inline f32x16 f32_scale2(f32x16 a, f32x16 n) { return {scale2_half(a.lo, n.lo), scale2_half(a.hi, n.hi)}; }
// Lanes where a < limit are zeroed.
inline f32x16 f32_zero_below(f32x16 value, f32x16 a, f32x16 limit) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.lo, limit.lo, _CMP_GE_OQ), value.lo),
          _mm256_and_ps(_mm256_cmp_ps(a.hi, limit.hi, _CMP_GE_OQ), value.hi)};
}
// First n lanes of a, the others from b.
inline f32x16 f32_first(int n, f32x16 a, f32x16 b) {
  __m256i count = _mm256_set1_epi32(n);
  __m256i lo = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i hi = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(lo)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(hi))};
}
inline f32x16 f32_from_i32(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline f32x16 f32_from_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))};
}
inline void f16_store(uint16_t* p, f32x16 a) {
  store_half(p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  store_half(p + 8, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
// BF16 bits of each lane in the low half of its 32 bits: nearest even, subnormals flushed to zero and NaN made
// quiet, as vcvtneps2bf16 does.
inline __m256i bf16_bits(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a), magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i out = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
  out = _mm256_blendv_epi8(out, _mm256_andnot_si256(_mm256_set1_epi32(0x7fffffff), bits), tiny);
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  out = _mm256_blendv_epi8(out, _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000)), nan);
  return _mm256_srli_epi32(out, 16);
}
inline void bf16_store(uint16_t* p, f32x16 a) {
  // The pack works on 128-bit halves; the permutation puts them back in order.
  __m256i packed = _mm256_packus_epi32(bf16_bits(a.lo), bf16_bits(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0b11011000));
}

inline i32x16 i32_splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline i32x16 i32_add(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline i32x16 i32_from_u8(const uint8_t* p) {
  __m128i bytes = load_half(p);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline i32x16 i32_from_i8(const int8_t* p) {
  __m128i bytes = load_half(p);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline i32x16 i32_and(i32x16 a, int32_t mask) {
  __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
inline i32x16 i32_or(i32x16 a, i32x16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int kBits> inline i32x16 i32_shr(i32x16 a) {
  return {_mm256_srli_epi32(a.lo, kBits), _mm256_srli_epi32(a.hi, kBits)};
}
template <int kBits> inline i32x16 i32_shl(i32x16 a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
inline __m128i low_bytes(__m256i a) {  // of eight 32-bit lanes, in the low 64 bits
  const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                        -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
  __m256i bytes = _mm256_shuffle_epi8(a, pick);
  return _mm_or_si128(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
}
// Nearest integers, ties to even, as bytes.
inline void i8_store_rounded(int8_t* p, f32x16 a) {
  store_half(p, _mm_unpacklo_epi64(low_bytes(_mm256_cvtps_epi32(a.lo)), low_bytes(_mm256_cvtps_epi32(a.hi))));
}

inline u8x64 u8_load(const uint8_t* p) { return {load_bits(p), load_bits(p + 32)}; }
inline void u8_store(uint8_t* p, u8x64 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
inline u8x64 u8_and(u8x64 a, uint8_t mask) {
  __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
inline u8x64 u8_or(u8x64 a, u8x64 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
// Shifts move bits across the bytes of a 16-bit lane; the caller masks.
template <int kBits> inline u8x64 u8_shr(u8x64 a) {
  return {_mm256_srli_epi16(a.lo, kBits), _mm256_srli_epi16(a.hi, kBits)};
}
template <int kBits> inline u8x64 u8_shl(u8x64 a) {
  return {_mm256_slli_epi16(a.lo, kBits), _mm256_slli_epi16(a.hi, kBits)};
}

// vpmaddubsw adds two products of bytes and saturates at 16 bits: safe while 2 * kMaxWeight * 127 fits. Wider
// weights go through 16-bit lanes, even and odd bytes apart.
template <int kMaxWeight> inline __m256i dot_half(__m256i acc, __m256i w, __m256i a) {
  if constexpr (2 * kMaxWeight * 127 <= INT16_MAX) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)));
  } else {
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), odd = _mm256_srai_epi16(a, 8);
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd));
  }
}
// acc[row] += sum of w[row][j] * a[j] for four unsigned weights and four signed activations in [-127, 127].
// kMaxWeight bounds the weights.
template <int kMaxWeight> inline i32x16 i32_dot(i32x16 acc, u8x64 w, const int8_t* a) {
  int32_t four;
  std::memcpy(&four, a, 4);
  __m256i splat = _mm256_set1_epi32(four);
  return {dot_half<kMaxWeight>(acc.lo, w.lo, splat), dot_half<kMaxWeight>(acc.hi, w.hi, splat)};
}

// The first and second BF16 of each pair as floats.
inline __m256 bf16_first(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 bf16_second(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}
inline __m256 bf16_dot_half(__m256 acc, __m256i w, __m256i a) {
  acc = _mm256_fmadd_ps(bf16_first(w), bf16_first(a), acc);
  return _mm256_fmadd_ps(bf16_second(w), bf16_second(a), acc);
}
// acc[row] += w[row][0] * a[0], then w[row][1] * a[1], for pairs of BF16.
inline f32x16 bf16_dot(f32x16 acc, const uint16_t* w, const uint16_t* a) {
  int32_t pair;
  std::memcpy(&pair, a, 4);
  __m256i splat = _mm256_set1_epi32(pair);
  return {bf16_dot_half(acc.lo, load_bits(w), splat), bf16_dot_half(acc.hi, load_bits(w + 16), splat)};
}

// Sum and maximum of the lanes, in one fixed tree: halves, quarters, ...
inline float f32_sum_lanes(f32x16 a) {
  __m256 h = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  q = _mm_add_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
inline float f32_max_lanes(f32x16 a) {
  __m256 h = _mm256_max_ps(a.hi, a.lo);
  __m128 q = _mm_max_ps(_mm256_extractf128_ps(h, 1), _mm256_castps256_ps128(h));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  q = _mm_max_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
