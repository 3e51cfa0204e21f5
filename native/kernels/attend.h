// Attention over cache blocks. Keys of one kv head lie as [256/16][head_dim][16] halves (lane = key), values as
// [256][head_dim] halves (lane = channel), so neither product needs a sum over lanes.
//
// For every query row the 256 keys of a block give one partial (m, l, o); partials merge in block order inside
// a span, spans merge in order. Which rows share a call never changes a row's arithmetic.

// scores[r][key] for key tiles [0, tiles) of R packed query rows.
template <int R, int kTiles>
inline void score_tiles(const float* q, const uint16_t* k, int32_t dim, float* scores) {
  f32x16 acc[kTiles][R];
  for (int i = 0; i < kTiles; ++i)
    for (int r = 0; r < R; ++r) acc[i][r] = f32_zero();
  for (int32_t j = 0; j < dim; ++j) {
#pragma GCC unroll 4
    for (int i = 0; i < kTiles; ++i) {
      // Few rows: keys come from memory. Two steps of j share a cache line.
      if (R <= 6 && (j & 1) == 0) __builtin_prefetch(k + (static_cast<int64_t>(i + kTiles) * dim + j) * 16, 0, 3);
      f32x16 key = f32_from_f16(k + (static_cast<int64_t>(i) * dim + j) * 16);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[i][r] = f32_fma(key, f32_splat(q[j * R + r]), acc[i][r]);
    }
  }
  for (int i = 0; i < kTiles; ++i)
    for (int r = 0; r < R; ++r) f32_store(scores + r * kBlockTokens + i * 16, acc[i][r]);
}

template <int R> void score_rows(const float* q, const uint16_t* k, int32_t dim, int tiles, float* scores) {
  constexpr int kTiles = 2 * R <= kAttendRows ? (4 * R <= kAttendRows ? 4 : 2) : 1;
  int i = 0;
  for (; i + kTiles <= tiles; i += kTiles) score_tiles<R, kTiles>(q, k + static_cast<int64_t>(i) * dim * 16, dim, scores + i * 16);
  for (; i < tiles; ++i) score_tiles<R, 1>(q, k + static_cast<int64_t>(i) * dim * 16, dim, scores + i * 16);
}

// Turns scores into weights exp(s - m) for the first `visible` keys and zero for the rest; returns m and l.
inline void softmax_row(float* s, int visible, int tiles, float* m_out, float* l_out) {
  f32x16 low = f32_splat(-INFINITY), top = low;
  for (int i = 0; i < tiles; ++i) top = f32_max(top, f32_first(visible - 16 * i, f32_load(s + 16 * i), low));
  float m = f32_max_lanes(top);
  f32x16 shift = f32_splat(m), sum = f32_zero();
  for (int i = 0; i < tiles; ++i) {
    f32x16 e = f32_first(visible - 16 * i, exp16(f32_sub(f32_load(s + 16 * i), shift)), f32_zero());
    f32_store(s + 16 * i, e);
    sum = f32_add(sum, e);
  }
  *m_out = m;
  *l_out = f32_sum_lanes(sum);
}

// o[r][c..c+16V) = sum over keys of p[r][key] v[key][c..].
template <int R, int V>
inline void value_tile(const float* p, const uint16_t* v, int32_t dim, int keys, float* o, int64_t ld) {
  f32x16 acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < V; ++i) acc[r][i] = f32_zero();
  for (int key = 0; key < keys; ++key) {
    f32x16 row[V];
    if (R <= 3) {
      __builtin_prefetch(v + static_cast<int64_t>(key + 16) * dim, 0, 3);
      if (V > 2) __builtin_prefetch(v + static_cast<int64_t>(key + 16) * dim + 32, 0, 3);
    }
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) row[i] = f32_from_f16(v + static_cast<int64_t>(key) * dim + 16 * i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      f32x16 w = f32_splat(p[r * kBlockTokens + key]);
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) acc[r][i] = f32_fma(w, row[i], acc[r][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < V; ++i) f32_store(o + r * ld + 16 * i, acc[r][i]);
}

template <int R> void value_rows(const float* p, const uint16_t* v, int32_t dim, int keys, float* o, int64_t ld) {
  int32_t c = 0;
  for (; c + 64 <= dim; c += 64) value_tile<R, 4>(p, v + c, dim, keys, o + c, ld);
  for (; c < dim; c += 16) value_tile<R, 1>(p, v + c, dim, keys, o + c, ld);
}

// acc = merge(acc, part), both (m, l, o[dim]); a part without visible keys (l == 0) leaves acc as it is.
void attend_merge(float* acc, const float* part, int32_t dim) {
  if (part[1] == 0.0f) return;
  if (acc[1] == 0.0f) {
    std::memcpy(acc, part, sizeof(float) * (dim + 2));
    return;
  }
  float m = acc[0] > part[0] ? acc[0] : part[0];
  alignas(64) float e[16] = {acc[0] - m, part[0] - m};
  f32_store(e, exp16(f32_load(e)));
  f32x16 ea = f32_splat(e[0]), eb = f32_splat(e[1]);
  acc[0] = m;
  acc[1] = acc[1] * e[0] + part[1] * e[1];
  for (int32_t i = 0; i < dim; i += 16) {
    f32x16 b = f32_mul(f32_load(part + 2 + i), eb);
    f32_store(acc + 2 + i, f32_fma(f32_load(acc + 2 + i), ea, b));
  }
}

void attend_finish(const float* acc, int32_t dim, float* out) {
  f32x16 inverse = f32_splat(1.0f / acc[1]);
  for (int32_t i = 0; i < dim; i += 16) f32_store(out + i, f32_mul(f32_load(acc + 2 + i), inverse));
}

// Pack `rows` scaled queries in groups of kAttendRows and one last smaller group.
inline void pack_queries(const float* const* q, int rows, int32_t dim, float scale, float* out) {
  for (int r0 = 0; r0 < rows; r0 += kAttendRows) {
    int size = rows - r0 < kAttendRows ? rows - r0 : kAttendRows;
    for (int r = 0; r < size; ++r)
      for (int32_t j = 0; j < dim; ++j) out[r0 * dim + j * size + r] = q[r0 + r][j] * scale;
  }
}

template <int R> inline void score_exact(int size, const float* q, const uint16_t* k, int32_t dim, int tiles, float* s) {
  if constexpr (R == 0) return;
  else if (size == R) score_rows<R>(q, k, dim, tiles, s);
  else score_exact<R - 1>(size, q, k, dim, tiles, s);
}
template <int R> inline void value_exact(int size, const float* p, const uint16_t* v, int32_t dim, int keys, float* o, int64_t ld) {
  if constexpr (R == 0) return;
  else if (size == R) value_rows<R>(p, v, dim, keys, o, ld);
  else value_exact<R - 1>(size, p, v, dim, keys, o, ld);
}

// Attention of `rows` queries over spans [span_first, span_first + num_spans) of one sequence.
// visible[r] = keys that row r may see, counted from position 0. Leaves (m, l, o) per row in scratch.total.
void attend_rows(const AttendArgs& a) {
  const AttendScratch& s = *a.scratch;
  const int32_t dim = a.head_dim;
  const int64_t ld = dim + 2;
  pack_queries(a.q, a.rows, dim, a.scale, s.q);
  for (int r = 0; r < a.rows; ++r) s.total[r * ld + 1] = 0.0f;
  float part[2 + kMaxHeadDim];
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
      for (int r0 = 0; r0 < a.rows; r0 += kAttendRows) {
        int size = a.rows - r0 < kAttendRows ? a.rows - r0 : kAttendRows;
        score_exact<kAttendRows>(size, s.q + r0 * dim, k, dim, tiles, s.scores + r0 * kBlockTokens);
      }
      for (int r0 = 0; r0 < a.rows; r0 += kAttendValueRows) {
        int size = a.rows - r0 < kAttendValueRows ? a.rows - r0 : kAttendValueRows;
        float ml[kAttendValueRows][2];
        for (int r = 0; r < size; ++r) {
          int64_t seen = a.visible[r0 + r] - start;
          ml[r][1] = 0.0f;
          float* row = s.scores + (r0 + r) * kBlockTokens;
          if (seen > 0) softmax_row(row, seen < kBlockTokens ? static_cast<int>(seen) : kBlockTokens, tiles, &ml[r][0], &ml[r][1]);
          else std::memset(row, 0, sizeof(float) * tiles * 16);
        }
        value_exact<kAttendValueRows>(size, s.scores + r0 * kBlockTokens, v, dim, keys, s.values, dim);
        for (int r = 0; r < size; ++r) {
          part[0] = ml[r][0], part[1] = ml[r][1];
          std::memcpy(part + 2, s.values + r * dim, sizeof(float) * dim);
          attend_merge(s.span + (r0 + r) * ld, part, dim);
        }
      }
    }
    for (int r = 0; r < a.rows; ++r) attend_merge(s.total + r * ld, s.span + r * ld, dim);
  }
}

// Write one token's key and value rows of one kv head into its block; r = position % 256.
void store_kv(const float* k, const float* v, int32_t dim, int64_t r, uint8_t* keys, uint8_t* values) {
  alignas(64) uint16_t half[16];
  uint16_t* key = reinterpret_cast<uint16_t*>(keys) + (r / 16) * dim * 16 + r % 16;
  uint16_t* value = reinterpret_cast<uint16_t*>(values) + r * dim;
  for (int32_t j = 0; j < dim; j += 16) {
    f16_store(half, f32_load(k + j));
    for (int i = 0; i < 16; ++i) key[(j + i) * 16] = half[i];
    f16_store(value + j, f32_load(v + j));
  }
}
