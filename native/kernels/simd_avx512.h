// Sixteen-lane vectors on AVX-512. Every instruction set offers the same names and the same lane order, so
// kernels.cpp is one source; lane i of a tile is output row i of the tile.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Register blocking of this instruction set (32 registers of 16 floats).
constexpr int kMaxTokens = 16;       // tokens per pass of an integer product
constexpr int kMaxTokensFloat = 8;   // tokens per pass of a float product (two sums a token)
constexpr int kAttendRows = 6;       // query rows per pass over keys or values
constexpr int kScoreTiles = 4;       // tiles of sixteen keys per pass
constexpr int kValueTiles = 4;       // vectors of sixteen channels per pass
constexpr bool kHasBf16Dot = true;

struct f32x16 { __m512 v; };
struct i32x16 { __m512i v; };
struct u8x64 { __m512i v; };  // sixteen rows, four consecutive inputs each

inline f32x16 f32_zero() { return {_mm512_setzero_ps()}; }
inline f32x16 f32_splat(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 f32_load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void f32_store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
inline f32x16 f32_add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 f32_sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 f32_mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 f32_div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 f32_fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 f32_max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 f32_min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 f32_abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline f32x16 f32_round(f32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n in the normal range.
inline f32x16 f32_scale2(f32x16 a, f32x16 n) {
  return {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23)))};
}
// Lanes where a < limit are zeroed.
inline f32x16 f32_zero_below(f32x16 value, f32x16 a, f32x16 limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, limit.v, _CMP_GE_OQ), value.v)};
}
// First n lanes of a, the others from b.
inline f32x16 f32_first(int n, f32x16 a, f32x16 b) {
  __mmask16 mask = n >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n < 0 ? 0 : n)) - 1);
  return {_mm512_mask_mov_ps(b.v, mask, a.v)};
}
inline f32x16 f32_from_i32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline f32x16 f32_from_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void f16_store(uint16_t* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void bf16_store(uint16_t* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
}

inline i32x16 i32_splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline i32x16 i32_add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline i32x16 i32_from_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline i32x16 i32_from_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline i32x16 i32_and(i32x16 a, int32_t mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(mask))}; }
inline i32x16 i32_or(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int kBits> inline i32x16 i32_shr(i32x16 a) { return {_mm512_srli_epi32(a.v, kBits)}; }
template <int kBits> inline i32x16 i32_shl(i32x16 a) { return {_mm512_slli_epi32(a.v, kBits)}; }
// Nearest integers, ties to even, as bytes.
inline void i8_store_rounded(int8_t* p, f32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

inline u8x64 u8_load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void u8_store(uint8_t* p, u8x64 a) { _mm512_storeu_si512(p, a.v); }
inline u8x64 u8_and(u8x64 a, uint8_t mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(mask)))}; }
inline u8x64 u8_or(u8x64 a, u8x64 b) { return {_mm512_or_si512(a.v, b.v)}; }
// Shifts move bits across the bytes of a 16-bit lane; the caller masks.
template <int kBits> inline u8x64 u8_shr(u8x64 a) { return {_mm512_srli_epi16(a.v, kBits)}; }
template <int kBits> inline u8x64 u8_shl(u8x64 a) { return {_mm512_slli_epi16(a.v, kBits)}; }

// acc[row] += sum of w[row][j] * a[j] for four unsigned weights and four signed activations. kMaxWeight bounds
// the weights (needed where the product saturates at 16 bits).
template <int kMaxWeight> inline i32x16 i32_dot(i32x16 acc, u8x64 w, const int8_t* a) {
  int32_t four;
  std::memcpy(&four, a, 4);
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(four))};
}

// acc[row] += w[row][0] * a[0] + w[row][1] * a[1] for pairs of BF16.
inline f32x16 bf16_dot(f32x16 acc, const uint16_t* w, const uint16_t* a) {
  int32_t pair;
  std::memcpy(&pair, a, 4);
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(w)),
                           reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)))};
}

// Sum and maximum of the lanes, in one fixed tree: halves, quarters, ...
inline float f32_sum_lanes(f32x16 a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  q = _mm_add_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
inline float f32_max_lanes(f32x16 a) { return _mm512_reduce_max_ps(a.v); }
