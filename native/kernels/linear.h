// Products with packed weights. A tile holds sixteen output rows; a row is always reduced in the same order,
// whether one token or a thousand are in the step, so the number of tokens never changes a bit of the result.
//
// Integer formats: exact int32 dot products over 32 (or 16) inputs, scaled and added to one float per row with
// fused multiply-adds in block order. Weights are kept unsigned in the tile; the offset leaves through the
// start value of the int32 sum. Float formats: two float sums per row (even and odd input steps), added at
// the end.

// ---- integer formats -------------------------------------------------------------------------------------

// A block function multiplies one tile block with NT tokens. The activation pointers stand at the block.
// NT tokens of a group of S.
template <int NT, int S> struct ActQ8 {
  const int8_t* q;      // [blocks][S][32]
  const float* d;       // [blocks][S]
  const int32_t* terms; // [blocks][S]
  void advance() { q += 32 * S, d += S, terms += S; }
};

// Eight vectors of four inputs each times NT tokens, scale dw per row. The int32 sum starts at the offset's term.
template <int kMaxWeight, bool kHasTerm, int NT, int S>
HOTSET_INLINE void block32(const u8x64 (&w)[8], f32x16 dw, const ActQ8<NT, S>& a, f32x16 (&acc)[NT]) {
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) {
    i32x16 s = i32_splat(kHasTerm ? a.terms[t] : 0);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) s = i32_dot<kMaxWeight>(s, w[g], a.q + t * 32 + 4 * g);
    acc[t] = f32_fma(f32_mul(f32_from_i32(s), dw), f32_splat(a.d[t]), acc[t]);
  }
}

// Adds m * (d * sum of q): the constant term of formats with a minimum.
template <int NT, int S> HOTSET_INLINE void block_min(f32x16 m, const ActQ8<NT, S>& a, f32x16 (&acc)[NT]) {
  const float* sums = reinterpret_cast<const float*>(a.terms);
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) acc[t] = f32_fma(m, f32_splat(sums[t]), acc[t]);
}

// Eight vectors from four of packed nibbles: low nibbles are the first four, high the last four.
HOTSET_INLINE void load_nibbles(const uint8_t* p, u8x64 (&w)[8]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    u8x64 v = u8_load(p + 64 * i);
    w[i] = u8_and(v, 15);
    w[4 + i] = u8_and(u8_shr<4>(v), 15);
  }
}

struct FormatQ4_0 {  // tile block: half d[16]; nibbles [4][16][4]
  static constexpr int kWeights = 32, kBytes = 18 * kTileRows, kTermInputs = 32;
  template <int NT, int S> static HOTSET_INLINE void block(const uint8_t* p, ActQ8<NT, S>& a, f32x16 (&acc)[NT]) {
    u8x64 w[8];
    load_nibbles(p + 32, w);
    block32<15, true>(w, f32_from_f16(reinterpret_cast<const uint16_t*>(p)), a, acc);
    a.advance();
  }
};

struct FormatQ4_1 {  // half d[16], half m[16]; nibbles [4][16][4]
  static constexpr int kWeights = 32, kBytes = 20 * kTileRows, kTermInputs = 32;
  template <int NT, int S> static HOTSET_INLINE void block(const uint8_t* p, ActQ8<NT, S>& a, f32x16 (&acc)[NT]) {
    u8x64 w[8];
    load_nibbles(p + 64, w);
    const uint16_t* h = reinterpret_cast<const uint16_t*>(p);
    block32<15, false>(w, f32_from_f16(h), a, acc);
    block_min(f32_from_f16(h + 16), a, acc);
    a.advance();
  }
};

struct FormatQ8_0 {  // half d[16]; bytes q + 128 [8][16][4]
  static constexpr int kWeights = 32, kBytes = 34 * kTileRows, kTermInputs = 32;
  template <int NT, int S> static HOTSET_INLINE void block(const uint8_t* p, ActQ8<NT, S>& a, f32x16 (&acc)[NT]) {
    u8x64 w[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) w[i] = u8_load(p + 32 + 64 * i);
    block32<255, true>(w, f32_from_f16(reinterpret_cast<const uint16_t*>(p)), a, acc);
    a.advance();
  }
};

// Scales [8][16] and minima [8][16] of a Q4_K tile block from its planes [12][16], four planes at a time.
inline void q4k_scales(const uint8_t* planes, uint8_t* scales, uint8_t* mins) {
  const u8x64 first = u8_load(planes), second = u8_load(planes + 64), third = u8_load(planes + 128);
  u8_store(scales, u8_and(first, 63));
  u8_store(mins, u8_and(second, 63));
  u8_store(scales + 64, u8_or(u8_and(third, 15), u8_shl<4>(u8_and(u8_shr<6>(first), 3))));
  u8_store(mins + 64, u8_or(u8_and(u8_shr<4>(third), 15), u8_shl<4>(u8_and(u8_shr<6>(second), 3))));
}

struct FormatQ4_K {  // half d[16], half dmin[16]; planes [12][16]; 4 chunks of nibbles [8][16][4]
  static constexpr int kWeights = 256, kBytes = 144 * kTileRows, kTermInputs = 32;
  template <int NT, int S> static HOTSET_INLINE void block(const uint8_t* p, ActQ8<NT, S>& a, f32x16 (&acc)[NT]) {
    const uint16_t* h = reinterpret_cast<const uint16_t*>(p);
    const f32x16 d = f32_from_f16(h), dmin = f32_sub(f32_zero(), f32_from_f16(h + 16));
    alignas(64) uint8_t scales[128], mins[128];
    q4k_scales(p + 64, scales, mins);
#pragma GCC unroll 4
    for (int chunk = 0; chunk < 4; ++chunk) {
      const uint8_t* q = p + 64 + 192 + 512 * chunk;
      half<false>(q, 32 * chunk, d, dmin, scales, mins, a, acc);
      half<true>(q, 32 * chunk + 16, d, dmin, scales, mins, a, acc);
    }
  }
  template <bool kHigh, int NT, int S>
  static HOTSET_INLINE void half(const uint8_t* q, int at, f32x16 d, f32x16 dmin, const uint8_t* scales, const uint8_t* mins,
                          ActQ8<NT, S>& a, f32x16 (&acc)[NT]) {
    u8x64 w[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) w[i] = u8_and(kHigh ? u8_shr<4>(u8_load(q + 64 * i)) : u8_load(q + 64 * i), 15);
    block32<15, false>(w, f32_mul(d, f32_from_i32(i32_from_u8(scales + at))), a, acc);
    block_min(f32_mul(dmin, f32_from_i32(i32_from_u8(mins + at))), a, acc);
    a.advance();
  }
};

struct FormatQ6_K {  // half d[16]; int8 scales [16][16]; per half: low nibbles [2][8][16][4], top bits [8][16][4]
  static constexpr int kWeights = 256, kBytes = 210 * kTileRows, kTermInputs = 16;
  template <int NT, int S> static HOTSET_INLINE void block(const uint8_t* p, ActQ8<NT, S>& a, f32x16 (&acc)[NT]) {
    f32x16 d = f32_from_f16(reinterpret_cast<const uint16_t*>(p));
    const int8_t* scales = reinterpret_cast<const int8_t*>(p + 32);
    for (int n = 0; n < 2; ++n) {
      const uint8_t* low = p + 32 + 256 + n * (1024 + 512);
      const uint8_t* top = low + 1024;
      quarter<0>(low, top, scales + 16 * (8 * n + 0), d, a, acc);
      quarter<1>(low + 512, top, scales + 16 * (8 * n + 2), d, a, acc);
      quarter<2>(low, top, scales + 16 * (8 * n + 4), d, a, acc);
      quarter<3>(low + 512, top, scales + 16 * (8 * n + 6), d, a, acc);
    }
  }
  template <int kQuarter, int NT, int S>
  static HOTSET_INLINE void quarter(const uint8_t* low, const uint8_t* top, const int8_t* scales, f32x16 d, ActQ8<NT, S>& a,
                             f32x16 (&acc)[NT]) {
    if (NT <= 2) {
      // One token: this format is read twice, in an order that hardware prefetch loses. Each quarter asks for a quarter
      // of the half block that comes four further on.
      const uint8_t* ahead = (kQuarter & 1 ? low - 512 : low) + 384 * kQuarter + 4 * 1536;
#pragma GCC unroll 6
      for (int i = 0; i < 384; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    }
    u8x64 w[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      u8x64 l = u8_load(low + 64 * i), h = u8_load(top + 64 * i);
      u8x64 bits = kQuarter == 0 ? u8_and(u8_shl<4>(h), 48)
                   : kQuarter == 1 ? u8_and(u8_shl<2>(h), 48)
                   : kQuarter == 2 ? u8_and(h, 48) : u8_and(u8_shr<2>(h), 48);
      w[i] = u8_or(u8_and(kQuarter < 2 ? l : u8_shr<4>(l), 15), bits);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      f32x16 dw = f32_mul(d, f32_from_i32(i32_from_i8(scales + 16 * half)));
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) {
        i32x16 s = i32_splat(a.terms[half * S + t]);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) s = i32_dot<63>(s, w[4 * half + g], a.q + t * 32 + 16 * half + 4 * g);
        acc[t] = f32_fma(f32_mul(f32_from_i32(s), dw), f32_splat(a.d[t]), acc[t]);
      }
    }
    a.advance();
    a.terms += S;  // this kind has two terms per 32 inputs
  }
};

// Tokens [first + slice, first + slice + NT) of the group of S tokens that starts at `first`.
template <class F, int NT, int S>
HOTSET_INLINE void tile_q8(const uint8_t* w, int64_t k, const Act& act, int64_t first, int slice, f32x16 (&acc)[NT]) {
  ActQ8<NT, S> a{act.q + first * k + slice * 32, act.d + first * (k / 32) + slice, act.terms + first * (k / F::kTermInputs) + slice};
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) acc[t] = f32_zero();
  for (int64_t b = 0; b < k / F::kWeights; ++b, w += F::kBytes) {
    F::block(w, a, acc);
  }
}

// ---- float formats ---------------------------------------------------------------------------------------

struct FormatF32 {  // floats [k][16]
  static inline f32x16 load(const uint8_t* w, int64_t i) { return f32_load(reinterpret_cast<const float*>(w) + 16 * i); }
};
struct FormatF16 {  // halves [k][16]
  static inline f32x16 load(const uint8_t* w, int64_t i) {
    return f32_from_f16(reinterpret_cast<const uint16_t*>(w) + 16 * i);
  }
};

template <class F, int NT, int S>
HOTSET_INLINE void tile_f32(const uint8_t* w, int64_t k, const Act& act, int64_t first, int slice, f32x16 (&acc)[NT]) {
  const float* a = act.f32 + first * k + slice;
  f32x16 odd[NT];
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) acc[t] = odd[t] = f32_zero();
  for (int64_t i = 0; i < k; i += 2, a += 2 * S) {
    f32x16 w0 = F::load(w, i), w1 = F::load(w, i + 1);
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      acc[t] = f32_fma(w0, f32_splat(a[t]), acc[t]);
      odd[t] = f32_fma(w1, f32_splat(a[S + t]), odd[t]);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) acc[t] = f32_add(acc[t], odd[t]);
}

// BF16 weights as pairs [k/2][16][2], BF16 activations; k is a multiple of 4.
template <int NT, int S>
HOTSET_INLINE void tile_bf16(const uint8_t* w, int64_t k, const Act& act, int64_t first, int slice, f32x16 (&acc)[NT]) {
  const uint16_t* a = act.bf16 + first * k + 2 * slice;
  const uint16_t* p = reinterpret_cast<const uint16_t*>(w);
  f32x16 odd[NT];
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) acc[t] = odd[t] = f32_zero();
  for (int64_t i = 0; i < k / 2; i += 2, a += 4 * S, p += 64) {
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      acc[t] = bf16_dot(acc[t], p, a + 2 * t);
      odd[t] = bf16_dot(odd[t], p + 32, a + 2 * S + 2 * t);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) acc[t] = f32_add(acc[t], odd[t]);
}

#include "mx.h"

// ---- dispatch over formats and group sizes -----------------------------------------------------------------

template <int32_t kFormat, int NT, int S>
HOTSET_INLINE void tile_product(const uint8_t* w, int64_t k, const Act& act, int64_t first, int slice, f32x16 (&acc)[NT]) {
  if constexpr (kFormat == kF32) tile_f32<FormatF32, NT, S>(w, k, act, first, slice, acc);
  if constexpr (kFormat == kF16) tile_f32<FormatF16, NT, S>(w, k, act, first, slice, acc);
  if constexpr (kFormat == kBF16) tile_bf16<NT, S>(w, k, act, first, slice, acc);
  if constexpr (kFormat == kQ8_0) tile_q8<FormatQ8_0, NT, S>(w, k, act, first, slice, acc);
  if constexpr (kFormat == kQ4_0) tile_q8<FormatQ4_0, NT, S>(w, k, act, first, slice, acc);
  if constexpr (kFormat == kQ4_1) tile_q8<FormatQ4_1, NT, S>(w, k, act, first, slice, acc);
  if constexpr (kFormat == kQ4_K) tile_q8<FormatQ4_K, NT, S>(w, k, act, first, slice, acc);
  if constexpr (kFormat == kQ6_K) tile_q8<FormatQ6_K, NT, S>(w, k, act, first, slice, acc);
  if constexpr (kFormat == kFP8) tile_fp8<NT, S>(w, k, act, first, slice, acc);
  if constexpr (kFormat == kMXFP4) tile_q8<FormatMXFP4, NT, S>(w, k, act, first, slice, acc);
}

template <int32_t kFormat> constexpr bool is_float_format = kFormat == kF32 || kFormat == kF16 || kFormat == kBF16 || kFormat == kFP8;
template <int32_t kFormat, int S>
constexpr int slice_tokens = S < (is_float_format<kFormat> ? kMaxTokensFloat : kMaxTokens)
                                 ? S
                                 : (is_float_format<kFormat> ? kMaxTokensFloat : kMaxTokens);

// Token t's row of y.
HOTSET_INLINE float* output_row(const LinearArgs& a, int64_t t, float* y) {
  return y + (a.rows != nullptr ? a.rows[t] : t) * a.ld;
}

// One weight tile and the group of S tokens at `first`, into rows of y.
template <int32_t kFormat, int S>
void group_linear(const LinearArgs& a, const uint8_t* w, int64_t first, float* y) {
  constexpr int NT = slice_tokens<kFormat, S>;
  for (int slice = 0; slice < S; slice += NT) {
    f32x16 acc[NT];
    tile_product<kFormat, NT, S>(w, a.k, *a.act, first, slice, acc);
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      float* row = output_row(a, first + slice + t, y);
      f32_store(row, a.add ? f32_add(f32_load(row), acc[t]) : acc[t]);
    }
  }
}

template <int32_t kFormat, int S>
void group_gated(const LinearArgs& a, const uint8_t* gate, int64_t first, float* y) {
  constexpr int NT = slice_tokens<kFormat, S>;
  for (int slice = 0; slice < S; slice += NT) {
    f32x16 acc[NT];
    alignas(64) float g[NT][16];
    tile_product<kFormat, NT, S>(gate, a.k, *a.act, first, slice, acc);
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) f32_store(g[t], silu16(a.limit > 0 ? f32_min(acc[t], f32_splat(a.limit)) : acc[t]));
    tile_product<kFormat, NT, S>(gate + a.tile_bytes, a.k, *a.act, first, slice, acc);
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      if (a.limit > 0) acc[t] = f32_min(f32_max(acc[t], f32_splat(-a.limit)), f32_splat(a.limit));
      f32_store(output_row(a, first + slice + t, y), f32_mul(f32_load(g[t]), acc[t]));
    }
  }
}

// Bytes of packed weights that stay in the second cache while all tokens pass by.
constexpr int64_t kResidentBytes = 512 << 10;

// Tiles [begin, end) times the group of S tokens at `first`. A gated product has its gate and up tiles in turn: gate 0,
// up 0, gate 1, ...
template <int32_t kFormat, bool kGated, int S>
HOTSET_INLINE void tiles_group(const LinearArgs& a, int64_t begin, int64_t end, int64_t first) {
  for (int64_t tile = begin; tile < end; ++tile) {
    const uint8_t* w = a.tiles + tile * a.tile_stride;
    float* y = a.y + tile * kTileRows;
    if constexpr (kGated) group_gated<kFormat, S>(a, w, first, y); else group_linear<kFormat, S>(a, w, first, y);
  }
}

// All tiles times all tokens. Many tokens' rows are larger than the tiles of a matrix and their results lie far apart,
// so the tokens of one group stay in the first cache and the tiles come by from the second, not the other way round.
template <int32_t kFormat, bool kGated> void linear(const LinearArgs& a) {
  const int64_t resident = a.tile_stride < kResidentBytes ? kResidentBytes / a.tile_stride : 1;
  for (int64_t begin = 0; begin < a.num_tiles; begin += resident) {
    const int64_t end = begin + resident < a.num_tiles ? begin + resident : a.num_tiles;
    for (int64_t t = 0; t < a.n;) {
      const int size = group_size(a.n - t);
      switch (size) {
        case 16: tiles_group<kFormat, kGated, 16>(a, begin, end, t); break;
        case 8: tiles_group<kFormat, kGated, 8>(a, begin, end, t); break;
        case 4: tiles_group<kFormat, kGated, 4>(a, begin, end, t); break;
        case 2: tiles_group<kFormat, kGated, 2>(a, begin, end, t); break;
        default: tiles_group<kFormat, kGated, 1>(a, begin, end, t);
      }
      t += size;
    }
  }
}
