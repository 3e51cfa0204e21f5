// Attention over cache blocks. Keys of one kv head lie as [256/64][head_dim][64] (lane = key), values as
// [256][head_dim] (lane = channel), so neither product needs a sum over lanes, and both are read in one contiguous
// stream. F16 rows are multiplied as floats. BF16 rows are multiplied as pairs with BF16 queries and weights, twice as
// fast where the processor has an instruction for it; pairs are of channels in keys, [256/64][head_dim/2][64][2], and of
// tokens in values, [128][head_dim][2].
//
// For every query row the 256 keys of a block give one partial (m, l, o); partials merge in block order inside
// a span, spans merge in order. Which rows share a call never changes a row's arithmetic.

// Few query rows: keys and values come from memory, and compute is too short to hide it. Lines are asked for this many
// halves ahead, into the second cache: what the first cache can have on its way at once is not enough.
constexpr int kFewRows = 3;
constexpr int kAhead = 4096;
inline void prefetch_row(const uint16_t* p) {
  __builtin_prefetch(p, 0, 2);
  __builtin_prefetch(p + 32, 0, 2);
}

// scores[r][key] for N tiles of keys, R packed query rows.
template <bool kBf16, int R, int N>
inline void score_tiles(const void* packed, const uint16_t* k, int32_t dim, float* scores) {
  f32x16 acc[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) acc[r][i] = f32_zero();
  if constexpr (kBf16) {
    const uint16_t* q = static_cast<const uint16_t*>(packed);
    for (int32_t j = 0; j < dim; j += 2, k += 2 * kKeyGroup, q += 2 * R) {
      if (R <= kFewRows) prefetch_row(k + kAhead), prefetch_row(k + kAhead + 64);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) acc[r][i] = bf16_dot(acc[r][i], k + 32 * i, q + 2 * r);
    }
  } else {
    const float* q = static_cast<const float*>(packed);
    for (int32_t j = 0; j < dim; ++j, k += kKeyGroup, q += R) {
      if (R <= kFewRows) prefetch_row(k + kAhead);
      f32x16 key[N];
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) key[i] = f32_from_f16(k + 16 * i);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const f32x16 value = f32_splat(q[r]);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) acc[r][i] = f32_fma(key[i], value, acc[r][i]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) f32_store(scores + r * kBlockTokens + i * 16, acc[r][i]);
}

// All tiles of keys that hold one of the first `keys`. Few rows read keys in the order they lie in memory; more rows
// leave out what no row sees.
template <bool kBf16, int R>
void score_rows(const void* q, const uint16_t* k, int32_t dim, int keys, float* scores) {
  constexpr int kStep = 16 * kScoreTiles;
  for (int i = 0; i < keys; i += kStep) {
    const uint16_t* group = k + static_cast<int64_t>(i / kKeyGroup * kKeyGroup) * dim;
    const int lane = i % kKeyGroup;
    if (R > kFewRows && keys - i <= kStep / 2) {
      for (int t = 0; t < keys - i; t += 16)
        score_tiles<kBf16, R, 1>(q, group + (kBf16 ? 2 : 1) * (lane + t), dim, scores + i + t);
    } else {
      score_tiles<kBf16, R, kScoreTiles>(q, group + (kBf16 ? 2 : 1) * lane, dim, scores + i);
    }
  }
}

// Sixteen weights of a row, as floats in place of the scores or as BF16 over the front of them.
template <bool kBf16> inline void store_weights(float* s, int tile, f32x16 e) {
  if (kBf16) bf16_store(reinterpret_cast<uint16_t*>(s) + 16 * tile, e);
  else f32_store(s + 16 * tile, e);
}

// Turns scores into weights exp(s - m) for the first `visible` keys and zero for the rest; returns m and l.
template <bool kBf16> inline void softmax_row(float* s, int visible, int tiles, float* m_out, float* l_out) {
  const int full = visible / 16, rest = visible % 16;
  const f32x16 low = f32_splat(-INFINITY);
  f32x16 top = rest ? f32_first(rest, f32_load(s + 16 * full), low) : low;
  for (int i = 0; i < full; ++i) top = f32_max(top, f32_load(s + 16 * i));
  const float m = f32_max_lanes(top);
  f32x16 shift = f32_splat(m), sum = f32_zero();
  int i = 0;
  for (; i < full; ++i) {
    const f32x16 e = exp16(f32_sub(f32_load(s + 16 * i), shift));
    store_weights<kBf16>(s, i, e);
    sum = f32_add(sum, e);
  }
  if (rest) {
    const f32x16 e = f32_first(rest, exp16(f32_sub(f32_load(s + 16 * i), shift)), f32_zero());
    store_weights<kBf16>(s, i++, e);
    sum = f32_add(sum, e);
  }
  for (; i < tiles; ++i) store_weights<kBf16>(s, i, f32_zero());
  *m_out = m;
  *l_out = f32_sum_lanes(sum);
}

// o[r][c..c+16V) = sum over keys of p[r][key] v[key][c..]. `next` is what will be read after this block's values.
template <bool kBf16, int R, int V>
inline void value_tile(const float* p, const uint16_t* v, int32_t dim, int keys, const uint16_t* next, float* o) {
  constexpr int kStep = kBf16 ? 2 : 1;
  f32x16 acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) acc[r][i] = f32_zero();
  const int last_ahead = kBlockTokens - kAhead / dim;  // keys from here on have their look-ahead in the next block
  for (int key = 0; key < keys; key += kStep, v += kStep * dim) {
    if (R <= kFewRows && V == kValueTiles) {
      const uint16_t* ahead = key < last_ahead ? v + kAhead : next + (key - last_ahead) * dim;
      prefetch_row(ahead);
      if (kBf16) prefetch_row(ahead + 64);
    }
    if constexpr (kBf16) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const uint16_t* w = reinterpret_cast<const uint16_t*>(p + r * kBlockTokens) + key;
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) acc[r][i] = bf16_dot(acc[r][i], v + 32 * i, w);
      }
    } else {
      f32x16 row[V];
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) row[i] = f32_from_f16(v + 16 * i);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        f32x16 w = f32_splat(p[r * kBlockTokens + key]);
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) acc[r][i] = f32_fma(w, row[i], acc[r][i]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) f32_store(o + r * dim + 16 * i, acc[r][i]);
}

template <bool kBf16, int R>
void value_rows(const float* p, const uint16_t* v, int32_t dim, int keys, const uint16_t* next, float* o) {
  constexpr int kStep = kBf16 ? 2 : 1;
  int32_t c = 0;
  for (; c + 16 * kValueTiles <= dim; c += 16 * kValueTiles)
    value_tile<kBf16, R, kValueTiles>(p, v + kStep * c, dim, keys, next + kStep * c, o + c);
  for (; c < dim; c += 16) value_tile<kBf16, R, 1>(p, v + kStep * c, dim, keys, next + kStep * c, o + c);
}

// How a part enters an accumulator (m, l, o): not at all, as it is, or o = o * kept + part * added.
struct Merge {
  float kept, added;
  int32_t is_seen, is_new;
};

// Merges m and l of up to sixteen parts into accumulators `ld` floats apart; the caller lets o follow. A part without
// visible keys (l == 0) leaves its accumulator as it is.
inline void begin_merges(float* acc, int64_t ld, int count, const float* m_part, const float* l_part, Merge* merges) {
  alignas(64) float kept[16] = {}, added[16] = {};
  for (int i = 0; i < count; ++i) {
    const float m = acc[i * ld] > m_part[i] ? acc[i * ld] : m_part[i];
    if (acc[i * ld + 1] != 0.0f && l_part[i] != 0.0f) kept[i] = acc[i * ld] - m, added[i] = m_part[i] - m;
  }
  f32_store(kept, exp16(f32_load(kept)));
  f32_store(added, exp16(f32_load(added)));
  for (int i = 0; i < count; ++i) {
    float *const m = acc + i * ld, *const l = m + 1;
    if (l_part[i] == 0.0f) {
      merges[i] = {1.0f, 0.0f, 0, 0};
    } else if (*l == 0.0f) {
      *m = m_part[i], *l = l_part[i];
      merges[i] = {0.0f, 1.0f, 1, 1};
    } else {
      *m = *m > m_part[i] ? *m : m_part[i];
      *l = *l * kept[i] + l_part[i] * added[i];
      merges[i] = {kept[i], added[i], 1, 0};
    }
  }
}

// acc = (m, l, o[dim]) merged with a part.
inline void merge_part(float* acc, float m_part, float l_part, const float* o_part, int32_t dim) {
  Merge merge;
  begin_merges(acc, 0, 1, &m_part, &l_part, &merge);
  if (!merge.is_seen) return;
  const f32x16 kept = f32_splat(merge.kept), added = f32_splat(merge.added);
  for (int32_t i = 0; i < dim; i += 16) {
    const f32x16 part = f32_load(o_part + i);
    f32_store(acc + 2 + i, merge.is_new ? part : f32_fma(f32_load(acc + 2 + i), kept, f32_mul(part, added)));
  }
}

// acc = merge(acc, part), both (m, l, o[dim]).
void attend_merge(float* acc, const float* part, int32_t dim) { merge_part(acc, part[0], part[1], part + 2, dim); }

void attend_finish(const float* acc, int32_t dim, float* out) {
  f32x16 inverse = f32_splat(1.0f / acc[1]);
  for (int32_t i = 0; i < dim; i += 16) f32_store(out + i, f32_mul(f32_load(acc + 2 + i), inverse));
}

// Pack `rows` scaled queries in groups of kAttendRows and one last smaller group: [dim][size], or BF16 pairs
// [dim/2][size][2] in the first half of the same room.
template <bool kBf16> inline void pack_queries(const float* const* q, int rows, int32_t dim, float scale, float* out) {
  alignas(64) uint16_t rounded[16];
  for (int r0 = 0; r0 < rows; r0 += kAttendRows) {
    const int size = rows - r0 < kAttendRows ? rows - r0 : kAttendRows;
    float* group = out + r0 * dim;
    for (int r = 0; r < size; ++r) {
      for (int32_t j = 0; j < dim; j += 16) {
        const f32x16 scaled = f32_mul(f32_load(q[r0 + r] + j), f32_splat(scale));
        if (kBf16) {
          bf16_store(rounded, scaled);
          uint16_t* pairs = reinterpret_cast<uint16_t*>(group) + j * size + 2 * r;
          for (int i = 0; i < 8; ++i) std::memcpy(pairs + i * 2 * size, rounded + 2 * i, 4);
        } else {
          alignas(64) float lanes[16];
          f32_store(lanes, scaled);
          for (int i = 0; i < 16; ++i) group[(j + i) * size + r] = lanes[i];
        }
      }
    }
  }
}

// The pass for exactly `size` rows.
template <bool kBf16, int R>
inline void score_exact(int size, const void* q, const uint16_t* k, int32_t dim, int keys, float* s) {
  if constexpr (R == 0) return;
  else if (size == R) score_rows<kBf16, R>(q, k, dim, keys, s);
  else score_exact<kBf16, R - 1>(size, q, k, dim, keys, s);
}
template <bool kBf16, int R>
inline void value_exact(int size, const float* p, const uint16_t* v, int32_t dim, int keys, const uint16_t* next, float* o) {
  if constexpr (R == 0) return;
  else if (size == R) value_rows<kBf16, R>(p, v, dim, keys, next, o);
  else value_exact<kBf16, R - 1>(size, p, v, dim, keys, next, o);
}

// Attention of `rows` queries over spans [span_first, span_first + num_spans) of one sequence.
// visible[r] = keys that row r may see, counted from position 0. Leaves (m, l, o) per row in scratch.total.
template <bool kBf16> void attend_rows(const AttendArgs& a) {
  const AttendScratch& s = *a.scratch;
  const int32_t dim = a.head_dim;
  const int64_t ld = dim + 2;
  pack_queries<kBf16>(a.q, a.rows, dim, a.scale, s.q);
  for (int r = 0; r < a.rows; ++r) s.total[r * ld + 1] = 0.0f;
  int64_t longest = 0;
  for (int r = 0; r < a.rows; ++r) longest = a.visible[r] > longest ? a.visible[r] : longest;
  const int32_t last_block = static_cast<int32_t>((longest + kBlockTokens - 1) / kBlockTokens);
  for (int32_t span = a.span_first; span < a.span_first + a.num_spans; ++span) {
    for (int r = 0; r < a.rows; ++r) s.span[r * ld + 1] = 0.0f;
    for (int32_t b = span * kSpanBlocks; b < (span + 1) * kSpanBlocks; ++b) {
      int64_t start = static_cast<int64_t>(b) * kBlockTokens, most = 0;
      for (int r = 0; r < a.rows; ++r) most = a.visible[r] - start > most ? a.visible[r] - start : most;
      if (most <= 0) break;
      int keys = most < kBlockTokens ? static_cast<int>(most) : kBlockTokens, tiles = (keys + 15) / 16;
      const uint8_t* base = a.cache + static_cast<int64_t>(a.blocks[b]) * a.block_stride;
      const uint16_t* k = reinterpret_cast<const uint16_t*>(base + a.key_offset);
      const uint16_t* v = reinterpret_cast<const uint16_t*>(base + a.value_offset);
      const int32_t after = a.blocks[b + 1 < last_block ? b + 1 : b];
      const uint16_t* next = reinterpret_cast<const uint16_t*>(a.cache + after * a.block_stride + a.key_offset);
      for (int r0 = 0; r0 < a.rows; r0 += kAttendRows) {
        int size = a.rows - r0 < kAttendRows ? a.rows - r0 : kAttendRows;
        score_exact<kBf16, kAttendRows>(size, s.q + r0 * dim, k, dim, keys, s.scores + r0 * kBlockTokens);
      }
      for (int r0 = 0; r0 < a.rows; r0 += kAttendRows) {
        int size = a.rows - r0 < kAttendRows ? a.rows - r0 : kAttendRows;
        float ml[kAttendRows][2];
        for (int r = 0; r < size; ++r) {
          int64_t seen = a.visible[r0 + r] - start;
          ml[r][1] = 0.0f;
          float* row = s.scores + (r0 + r) * kBlockTokens;
          const int visible = seen < kBlockTokens ? static_cast<int>(seen) : kBlockTokens;
          if (seen > 0) softmax_row<kBf16>(row, visible, tiles, &ml[r][0], &ml[r][1]);
          else std::memset(row, 0, sizeof(float) * tiles * 16);
        }
        value_exact<kBf16, kAttendRows>(size, s.scores + r0 * kBlockTokens, v, dim, keys, next, s.values);
        for (int r = 0; r < size; ++r) merge_part(s.span + (r0 + r) * ld, ml[r][0], ml[r][1], s.values + r * dim, dim);
      }
    }
    for (int r = 0; r < a.rows; ++r) attend_merge(s.total + r * ld, s.span + r * ld, dim);
  }
}

// Clamped to what the row's format can hold: an infinite row would reach earlier tokens of the same call as 0 times
// infinity.
inline f32x16 clamp_row(f32x16 x, float top) { return f32_min(f32_max(x, f32_splat(-top)), f32_splat(top)); }

// Write one token's key and value rows of one kv head into its block; r = position % 256.
template <bool kBf16>
void store_kv(const float* k, const float* v, int32_t dim, int64_t r, uint8_t* keys, uint8_t* values) {
  alignas(64) uint16_t half[2][16];
  const int64_t group = r / kKeyGroup * kKeyGroup * dim, lane = r % kKeyGroup;
  uint16_t* key = reinterpret_cast<uint16_t*>(keys) + group + (kBf16 ? 2 * lane : lane);
  uint16_t* value = reinterpret_cast<uint16_t*>(values) + (kBf16 ? r / 2 * 2 * dim + r % 2 : r * dim);
  for (int32_t j = 0; j < dim; j += 16) {
    const float* rows[2] = {k + j, v + j};
    for (int side = 0; side < 2; ++side) {
      const f32x16 x = f32_load(rows[side]);
      if (kBf16) bf16_store(half[side], clamp_row(x, 3.3895313892515355e38f));
      else f16_store(half[side], clamp_row(x, 65504.0f));
    }
    for (int i = 0; i < 16; ++i) {
      key[kBf16 ? (j + i) / 2 * 2 * kKeyGroup + i % 2 : (j + i) * kKeyGroup] = half[0][i];
      value[kBf16 ? 2 * (j + i) : j + i] = half[1][i];
    }
  }
}
