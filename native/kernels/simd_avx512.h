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
constexpr int kQueryRows = 8;        // query rows per pass over a tile of rows
constexpr int kQueryTiles = 2;       // vectors of keys or channels per such pass
constexpr bool kHasBf16Dot = true;

struct f32x16 { __m512 v; };
struct i32x16 { __m512i v; };
struct u8x64 { __m512i v; };  // sixteen rows, four consecutive inputs each
struct bf16x32 { __m512i v; };  // sixteen rows, a pair each

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
// Bit i is set where lane i of a is not below the limit; a NaN is.
inline uint32_t f32_lanes_from(f32x16 a, f32x16 limit) { return _mm512_cmp_ps_mask(a.v, limit.v, _CMP_GE_OQ); }
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
inline i32x16 i32_sub(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline i32x16 i32_from_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline i32x16 i32_from_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline i32x16 i32_max(i32x16 a, i32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline f32x16 f32_from_bits(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
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

// The unsigned e2m1 numbers (kE2m1Unsigned) of low and of high nibbles. The table of 64 repeats, so that other bits of
// an index do not matter.
inline u8x64 u8_e2m1(__m512i index) {
  return {_mm512_permutexvar_epi8(index, _mm512_load_si512(kE2m1Unsigned.entries))};
}
inline u8x64 u8_e2m1_low(u8x64 a) { return u8_e2m1(a.v); }
inline u8x64 u8_e2m1_high(u8x64 a) { return u8_e2m1(_mm512_srli_epi16(a.v, 4)); }

// Scales of sixteen rows, one every `stride` bytes: the smallest of each row to `low`; false if any row's lie more than
// `most` apart, or beyond 2^-60 .. 2^60.
constexpr bool kHasScaledLookup = true;
inline bool row_scales(const uint8_t* scales, int64_t stride, int64_t count, int most, uint8_t* low) {
  __m128i least = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)), largest = least;
  for (int64_t i = 1; i < count; ++i) {
    const __m128i next = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + i * stride));
    least = _mm_min_epu8(least, next), largest = _mm_max_epu8(largest, next);
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), least);
  const __mmask16 is_far = _mm_cmpgt_epu8_mask(_mm_sub_epi8(largest, least), _mm_set1_epi8(static_cast<char>(most)));
  const __mmask16 is_small = _mm_cmplt_epu8_mask(least, _mm_set1_epi8(127 - 60));
  return (is_far | is_small | _mm_cmpgt_epu8_mask(largest, _mm_set1_epi8(static_cast<char>(127 + 60)))) == 0;
}
// Sixteen times how far the rows' scales lie above `low`, for each of their four bytes.
inline u8x64 row_shifts(const uint8_t* scales, const uint8_t* low) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
  const __m128i above = _mm_sub_epi8(all, _mm_loadu_si128(reinterpret_cast<const __m128i*>(low)));
  __m512i x = _mm512_cvtepu8_epi32(_mm_slli_epi16(above, 4));
  x = _mm512_or_si512(x, _mm512_slli_epi32(x, 8));
  return {_mm512_or_si512(x, _mm512_slli_epi32(x, 16))};
}
// Of four bytes per row: kE2m1Scaled[nibble + shift].
inline u8x64 u8_e2m1_scaled(u8x64 nibbles, u8x64 shifts) {
  const __m512i index = _mm512_or_si512(nibbles.v, shifts.v);
  return {_mm512_permutexvar_epi8(index, _mm512_load_si512(kE2m1Scaled.entries))};
}

// acc[row] += sum of w[row][j] * a[j] for four unsigned weights and four signed activations. kMaxWeight bounds
// the weights (needed where the product saturates at 16 bits).
template <int kMaxWeight> inline i32x16 i32_dot(i32x16 acc, u8x64 w, const int8_t* a) {
  int32_t four;
  std::memcpy(&four, a, 4);
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(four))};
}

// acc[row] += sum of (u[row][j] + a[j]) * (s[row][j] + b[j]) for j < 4. The first sums are unsigned bytes, the second
// signed ones.
inline i32x16 i32_dot_of_sums(i32x16 acc, u8x64 u, const int8_t* a, u8x64 s, const int8_t* b) {
  int32_t four_a, four_b;
  std::memcpy(&four_a, a, 4);
  std::memcpy(&four_b, b, 4);
  return {_mm512_dpbusd_epi32(acc.v, _mm512_add_epi8(u.v, _mm512_set1_epi32(four_a)),
                              _mm512_add_epi8(s.v, _mm512_set1_epi32(four_b)))};
}
inline u8x64 u8_sub(u8x64 a, int8_t b) { return {_mm512_sub_epi8(a.v, _mm512_set1_epi8(b))}; }

inline bf16x32 bf16_load(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
// acc[row] += w[row][0] * a[0] + w[row][1] * a[1] for pairs of BF16.
inline f32x16 bf16_dot(f32x16 acc, bf16x32 w, const uint16_t* a) {
  int32_t pair;
  std::memcpy(&pair, a, 4);
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(w.v),
                           reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)))};
}
inline f32x16 bf16_dot(f32x16 acc, const uint16_t* w, const uint16_t* a) { return bf16_dot(acc, bf16_load(w), a); }

// BF16 numbers of e4m3 bytes: of every sixteen, eight go to `first` and eight to `second`.
inline void bf16_from_e4m3(__m512i x, __m512i& first, __m512i& second) {
  const auto table = [](const uint8_t* p) { return _mm512_load_si512(p); };
  const __m512i low = _mm512_permutex2var_epi8(table(kE4m3Bytes.low), x, table(kE4m3Bytes.low + 64));
  const __m512i high = _mm512_permutex2var_epi8(table(kE4m3Bytes.high), x, table(kE4m3Bytes.high + 64));
  // high | (x & sign)
  const __m512i all = _mm512_ternarylogic_epi32(high, x, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
  first = _mm512_unpacklo_epi8(low, all), second = _mm512_unpackhi_epi8(low, all);
}
inline void bf16_from_e4m3(u8x64 x, bf16x32& first, bf16x32& second) { bf16_from_e4m3(x.v, first.v, second.v); }

// 64 e4m3 bytes as BF16 times 2^exponent, in their order.
inline void bf16_expand_e4m3(const uint8_t* p, int exponent, uint16_t* out) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), magnitude = _mm512_set1_epi16(0x7fff);
  const __m512i step = _mm512_set1_epi16(static_cast<int16_t>(exponent * 128));
  __m512i half[2];
  bf16_from_e4m3(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(p)), half[0], half[1]);
  for (int i = 0; i < 2; ++i) {
    const __mmask32 is_number = _mm512_test_epi16_mask(half[i], magnitude);
    _mm512_storeu_si512(out + 32 * i, _mm512_mask_add_epi16(half[i], is_number, half[i], step));
  }
}

// 32 e2m1 nibbles, the even number low, as BF16 times 2^exponent, in their order.
inline void bf16_expand_e2m1(const uint8_t* p, int exponent, uint16_t* out) {
  const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  // A lookup takes five bits of each half word: the low nibble and one more, then the high nibble and a zero.
  const __m512i codes = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
  const __m512i values = _mm512_permutexvar_epi16(codes, _mm512_load_si512(kE2m1Words.words));
  const __mmask32 is_number = _mm512_test_epi16_mask(values, _mm512_set1_epi16(0x7fff));
  const __m512i step = _mm512_set1_epi16(static_cast<int16_t>(exponent * 128));
  _mm512_storeu_si512(out, _mm512_mask_add_epi16(values, is_number, values, step));
}

// Calls store(i, word i of sixteen rows) for the sixteen words of each.
template <class Store> inline void u32_columns16(const __m512i* const* rows, const Store& store) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i]);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  }
  // a[4 g + c]: words c, c + 4, c + 8, c + 12 of rows 4 g to 4 g + 3, one in each 128 bits.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i p = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), q = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i r = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd), s = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    store(c, _mm512_shuffle_i32x4(p, q, 0x88));
    store(c + 4, _mm512_shuffle_i32x4(r, s, 0x88));
    store(c + 8, _mm512_shuffle_i32x4(p, q, 0xdd));
    store(c + 12, _mm512_shuffle_i32x4(r, s, 0xdd));
  }
}
// out[i][r] = rows[r][i] for sixteen rows of sixteen words; `ld` words from one row of out to the next.
inline void u32_transpose16(const uint32_t* const* rows, uint32_t* out, int64_t ld) {
  u32_columns16(reinterpret_cast<const __m512i* const*>(rows),
                [&](int i, __m512i column) { _mm512_storeu_si512(out + i * ld, column); });
}

// Pairs of neighbouring e4m3 codes of sixteen rows as BF16: out[i][2 r + j] = rows[r][2 i + j], 64 codes a row; `ld`
// numbers from one row of out to the next.
constexpr bool kHasCodeTiles = true;
inline void bf16_keys_e4m3(const uint8_t* const* rows, uint16_t* out, int64_t ld) {
  // Of four codes of each of four rows, the first two, then the others.
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  u32_columns16(reinterpret_cast<const __m512i* const*>(rows), [&](int i, __m512i column) {
    __m512i first, second;
    bf16_from_e4m3(_mm512_shuffle_epi8(column, order), first, second);
    _mm512_storeu_si512(out + 2 * i * ld, first);
    _mm512_storeu_si512(out + (2 * i + 1) * ld, second);
  });
}
// out[i] = even[i] 2^exponents[0], odd[i] 2^exponents[1] as BF16, of 64 e4m3 codes each.
inline void bf16_values_e4m3(const uint8_t* even, const uint8_t* odd, const int (&exponents)[2], uint16_t* out) {
  // Fours of codes move so that what the unpacking takes from the quarters is in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  const __m512i step = _mm512_set1_epi32((exponents[0] * 128 & 0xffff) | exponents[1] * 128 * 65536);
  const __m512i e = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(even));
  const __m512i o = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(odd));
  __m512i quarter[4];
  bf16_from_e4m3(_mm512_unpacklo_epi8(e, o), quarter[0], quarter[1]);
  bf16_from_e4m3(_mm512_unpackhi_epi8(e, o), quarter[2], quarter[3]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __mmask32 is_number = _mm512_test_epi16_mask(quarter[i], magnitude);
    _mm512_storeu_si512(out + 32 * i, _mm512_mask_add_epi16(quarter[i], is_number, quarter[i], step));
  }
}

// For packing. A vector is four quarters: 16 bytes from each of four places.
inline u8x64 u8_quarters(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  const auto load = [](const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
  const __m256i lo = _mm256_inserti128_si256(_mm256_castsi128_si256(load(a)), load(b), 1);
  const __m256i hi = _mm256_inserti128_si256(_mm256_castsi128_si256(load(c)), load(d), 1);
  return {_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1)};
}
// By quarters, each at a multiple of 16: wide stores across such borders are slow.
inline void u8_store_quarters(uint8_t* p, u8x64 a) {
  const auto store = [p](int i, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + i, x); };
  store(0, _mm512_castsi512_si128(a.v)), store(1, _mm512_extracti32x4_epi32(a.v, 1));
  store(2, _mm512_extracti32x4_epi32(a.v, 2)), store(3, _mm512_extracti32x4_epi32(a.v, 3));
}
// In every quarter, word i of v[j] and word j of v[i] change places.
inline void u32_transpose_quarters(u8x64 (&v)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(v[0].v, v[1].v), b = _mm512_unpackhi_epi32(v[0].v, v[1].v);
  const __m512i c = _mm512_unpacklo_epi32(v[2].v, v[3].v), d = _mm512_unpackhi_epi32(v[2].v, v[3].v);
  v[0].v = _mm512_unpacklo_epi64(a, c), v[1].v = _mm512_unpackhi_epi64(a, c);
  v[2].v = _mm512_unpacklo_epi64(b, d), v[3].v = _mm512_unpackhi_epi64(b, d);
}
inline u8x64 u8_xor(u8x64 a, uint8_t mask) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(static_cast<char>(mask)))}; }
// A byte of a, then one of b: of the first and of the second half of every quarter.
inline u8x64 u8_zip_low(u8x64 a, u8x64 b) { return {_mm512_unpacklo_epi8(a.v, b.v)}; }
inline u8x64 u8_zip_high(u8x64 a, u8x64 b) { return {_mm512_unpackhi_epi8(a.v, b.v)}; }
inline __m512i shuffle_quarters(__m512i a, __m128i order) {
  return _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(order));
}
// The low halves of words, then their high halves: in every quarter, and of all sixteen.
inline u8x64 u16_unzip_quarters(u8x64 a) {
  return {shuffle_quarters(a.v, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15))};
}
inline u8x64 u16_unzip(u8x64 a) {
  return {_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), u16_unzip_quarters(a).v)};
}
// The first bytes of the sixteen words, then their second bytes, and so on.
inline u8x64 u8_unzip(u8x64 a) {
  const __m512i bytes = shuffle_quarters(a.v, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return {_mm512_permutexvar_epi32(order, bytes)};
}
// To a multiple of 64, past the caches: what is there already is not read. Other threads see it after the fence.
inline void u8_stream(uint8_t* p, u8x64 a) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), a.v); }
inline void stream_fence() { _mm_sfence(); }

// Sum and maximum of the lanes, in one fixed tree: halves, quarters, ...
inline float f32_sum_lanes(f32x16 a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  q = _mm_add_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
inline float f32_max_lanes(f32x16 a) { return _mm512_reduce_max_ps(a.v); }
