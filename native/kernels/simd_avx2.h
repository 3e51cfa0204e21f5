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
constexpr int kQueryRows = 2;        // query rows per pass over a tile of rows
constexpr int kQueryTiles = 2;       // vectors of keys or channels per such pass
constexpr bool kHasBf16Dot = false;
constexpr bool kHasScaledLookup = false;  // of 64 bytes: common scales of index rows
constexpr bool kHasCodeTiles = false;     // e4m3 codes to tiles of keys and of values directly

struct f32x16 { __m256 lo, hi; };
struct i32x16 { __m256i lo, hi; };
struct u8x64 { __m256i lo, hi; };  // sixteen rows, four consecutive inputs each
struct bf16x32 { __m256i lo, hi; };  // sixteen rows, a pair each

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
// Bit i is set where lane i of a is not below the limit; a NaN is.
inline uint32_t f32_lanes_from(f32x16 a, f32x16 limit) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, limit.lo, _CMP_GE_OQ)) |
                               _mm256_movemask_ps(_mm256_cmp_ps(a.hi, limit.hi, _CMP_GE_OQ)) << 8);
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
inline i32x16 i32_max(i32x16 a, i32x16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline f32x16 f32_from_bits(i32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
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

// The unsigned e2m1 numbers (kE2m1Unsigned) of low and of high nibbles.
inline __m256i e2m1_half(__m256i index) {
  const __m256i table = _mm256_broadcastsi128_si256(load_half(kE2m1Unsigned.entries));
  return _mm256_shuffle_epi8(table, _mm256_and_si256(index, _mm256_set1_epi8(15)));
}
inline u8x64 u8_e2m1_low(u8x64 a) { return {e2m1_half(a.lo), e2m1_half(a.hi)}; }
inline u8x64 u8_e2m1_high(u8x64 a) {
  return {e2m1_half(_mm256_srli_epi16(a.lo, 4)), e2m1_half(_mm256_srli_epi16(a.hi, 4))};
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
inline bf16x32 bf16_load(const uint16_t* p) { return {load_bits(p), load_bits(p + 16)}; }
// acc[row] += w[row][0] * a[0], then w[row][1] * a[1], for pairs of BF16.
inline f32x16 bf16_dot(f32x16 acc, bf16x32 w, const uint16_t* a) {
  int32_t pair;
  std::memcpy(&pair, a, 4);
  __m256i splat = _mm256_set1_epi32(pair);
  return {bf16_dot_half(acc.lo, w.lo, splat), bf16_dot_half(acc.hi, w.hi, splat)};
}
inline f32x16 bf16_dot(f32x16 acc, const uint16_t* w, const uint16_t* a) { return bf16_dot(acc, bf16_load(w), a); }

inline __m256i lookup16(const uint8_t* table, __m256i index) {  // 0 where bit 7 of the index is set
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_half(table)), index);
}
// BF16 numbers of e4m3 bytes: of every sixteen, eight go to `first` and eight to `second`.
inline void bf16_from_e4m3(__m256i x, __m256i& first, __m256i& second) {
  const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi8(0x7f));
  const __m256i nan = _mm256_cmpeq_epi8(magnitude, _mm256_set1_epi8(0x7f));
  const __m256i subnormal = _mm256_add_epi8(magnitude, _mm256_set1_epi8(0x78));  // bit 7 is set for all others
  const __m256i top = _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15));
  __m256i low = _mm256_and_si256(_mm256_slli_epi16(x, 4), _mm256_set1_epi8(static_cast<char>(0xf0)));
  low = _mm256_or_si256(_mm256_add_epi8(low, lookup16(kE4m3Lookups.low_fix, subnormal)), nan);
  __m256i high = lookup16(kE4m3Lookups.high, top);
  high = _mm256_or_si256(_mm256_add_epi8(high, lookup16(kE4m3Lookups.high_fix, subnormal)), nan);
  first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
}
inline void bf16_from_e4m3(u8x64 x, bf16x32& first, bf16x32& second) {
  bf16_from_e4m3(x.lo, first.lo, second.lo);
  bf16_from_e4m3(x.hi, first.hi, second.hi);
}

// 64 e4m3 bytes as BF16 times 2^exponent, in their order.
inline void bf16_expand_e4m3(const uint8_t* p, int exponent, uint16_t* out) {
  const __m256i step = _mm256_set1_epi16(static_cast<int16_t>(exponent * 128)), magnitude = _mm256_set1_epi16(0x7fff);
  for (int i = 0; i < 64; i += 32) {
    __m256i half[2];
    bf16_from_e4m3(_mm256_permute4x64_epi64(load_bits(p + i), 0b11011000), half[0], half[1]);
    for (int j = 0; j < 2; ++j) {
      const __m256i is_zero = _mm256_cmpeq_epi16(_mm256_and_si256(half[j], magnitude), _mm256_setzero_si256());
      const __m256i scaled = _mm256_add_epi16(half[j], _mm256_andnot_si256(is_zero, step));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i + 16 * j), scaled);
    }
  }
}

// 32 e2m1 nibbles, the even number low, as BF16 times 2^exponent, in their order.
inline void bf16_expand_e2m1(const uint8_t* p, int exponent, uint16_t* out) {
  const __m256i step = _mm256_set1_epi16(static_cast<int16_t>(exponent * 128)), magnitude = _mm256_set1_epi16(0x7fff);
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), nibble = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(pairs, nibble), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
  const __m256i codes = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
  const __m256i order = _mm256_permute4x64_epi64(codes, 0b11011000);
  const __m256i low = lookup16(kE2m1Words.low, order), high = lookup16(kE2m1Words.high, order);
  const __m256i half[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
  for (int j = 0; j < 2; ++j) {
    const __m256i is_zero = _mm256_cmpeq_epi16(_mm256_and_si256(half[j], magnitude), _mm256_setzero_si256());
    const __m256i scaled = _mm256_add_epi16(half[j], _mm256_andnot_si256(is_zero, step));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * j), scaled);
  }
}

inline void u32_transpose8(const uint32_t* const* rows, int64_t at, uint32_t* out, int64_t ld) {
  __m256i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = load_bits(rows[i] + at);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const auto place = [&](int row) { return reinterpret_cast<__m256i*>(out + row * ld); };
    _mm256_storeu_si256(place(c), _mm256_permute2x128_si256(a[c], a[4 + c], 0x20));
    _mm256_storeu_si256(place(c + 4), _mm256_permute2x128_si256(a[c], a[4 + c], 0x31));
  }
}
// out[i][r] = rows[r][i] for sixteen rows of sixteen words; `ld` words from one row of out to the next.
inline void u32_transpose16(const uint32_t* const* rows, uint32_t* out, int64_t ld) {
  for (int r = 0; r < 16; r += 8)
    for (int i = 0; i < 16; i += 8) u32_transpose8(rows + r, i, out + i * ld + r, ld);
}

// For packing. A vector is four quarters: 16 bytes from each of four places.
inline u8x64 u8_quarters(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  return {_mm256_set_m128i(load_half(b), load_half(a)), _mm256_set_m128i(load_half(d), load_half(c))};
}
// By quarters, each at a multiple of 16: wide stores across such borders are slow.
inline void u8_store_quarters(uint8_t* p, u8x64 a) {
  store_half(p, _mm256_castsi256_si128(a.lo)), store_half(p + 16, _mm256_extracti128_si256(a.lo, 1));
  store_half(p + 32, _mm256_castsi256_si128(a.hi)), store_half(p + 48, _mm256_extracti128_si256(a.hi, 1));
}
inline void u32_transpose_quarters(__m256i& v0, __m256i& v1, __m256i& v2, __m256i& v3) {
  const __m256i a = _mm256_unpacklo_epi32(v0, v1), b = _mm256_unpackhi_epi32(v0, v1);
  const __m256i c = _mm256_unpacklo_epi32(v2, v3), d = _mm256_unpackhi_epi32(v2, v3);
  v0 = _mm256_unpacklo_epi64(a, c), v1 = _mm256_unpackhi_epi64(a, c);
  v2 = _mm256_unpacklo_epi64(b, d), v3 = _mm256_unpackhi_epi64(b, d);
}
// In every quarter, word i of v[j] and word j of v[i] change places.
inline void u32_transpose_quarters(u8x64 (&v)[4]) {
  u32_transpose_quarters(v[0].lo, v[1].lo, v[2].lo, v[3].lo);
  u32_transpose_quarters(v[0].hi, v[1].hi, v[2].hi, v[3].hi);
}
inline u8x64 u8_xor(u8x64 a, uint8_t mask) {
  const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_xor_si256(a.lo, m), _mm256_xor_si256(a.hi, m)};
}
// A byte of a, then one of b: of the first and of the second half of every quarter.
inline u8x64 u8_zip_low(u8x64 a, u8x64 b) { return {_mm256_unpacklo_epi8(a.lo, b.lo), _mm256_unpacklo_epi8(a.hi, b.hi)}; }
inline u8x64 u8_zip_high(u8x64 a, u8x64 b) { return {_mm256_unpackhi_epi8(a.lo, b.lo), _mm256_unpackhi_epi8(a.hi, b.hi)}; }
inline u8x64 shuffle_quarters(u8x64 a, __m128i order) {
  const __m256i both = _mm256_broadcastsi128_si256(order);
  return {_mm256_shuffle_epi8(a.lo, both), _mm256_shuffle_epi8(a.hi, both)};
}
// The low halves of words, then their high halves: in every quarter, and of all sixteen.
inline u8x64 u16_unzip_quarters(u8x64 a) {
  return shuffle_quarters(a, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
}
inline u8x64 u16_unzip(u8x64 a) {
  const u8x64 halves = u16_unzip_quarters(a);
  const __m256i lo = _mm256_permute4x64_epi64(halves.lo, 0b11011000), hi = _mm256_permute4x64_epi64(halves.hi, 0b11011000);
  return {_mm256_permute2x128_si256(lo, hi, 0x20), _mm256_permute2x128_si256(lo, hi, 0x31)};
}
// The first bytes of the sixteen words, then their second bytes, and so on.
inline u8x64 u8_unzip(u8x64 a) {
  const u8x64 bytes = shuffle_quarters(a, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i lo = _mm256_permutevar8x32_epi32(bytes.lo, order), hi = _mm256_permutevar8x32_epi32(bytes.hi, order);
  const __m256i even = _mm256_unpacklo_epi64(lo, hi), odd = _mm256_unpackhi_epi64(lo, hi);
  return {_mm256_permute2x128_si256(even, odd, 0x20), _mm256_permute2x128_si256(even, odd, 0x31)};
}
// To a multiple of 64, past the caches: what is there already is not read. Other threads see it after the fence.
inline void u8_stream(uint8_t* p, u8x64 a) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), a.lo), _mm256_stream_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
inline void stream_fence() { _mm_sfence(); }

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
