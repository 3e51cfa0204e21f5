// Attention of many query rows over a tile of 64 rows that are key and value in one: BF16 products, as over a BF16
// cache. A query's partial result (m, l, o) of one tile is merged into its accumulator.
//
// kQueryRows queries and kQueryTiles vectors of keys (or channels) are in registers at a time. Which queries share a
// call, and what lies outside the rows that a query sees, never changes its arithmetic.

// Scaled queries as BF16 pairs: groups of kQueryRows rows and one last smaller group, each [dim/2][size][2].
void pack_tile_queries(const float* const* q, int32_t num_rows, int32_t dim, float scale, uint16_t* out) {
  alignas(64) uint16_t rounded[16];
  for (int32_t r = 0; r < num_rows; ++r) {
    const int32_t first = r / kQueryRows * kQueryRows;
    const int32_t size = num_rows - first < kQueryRows ? num_rows - first : kQueryRows;
    uint16_t* pairs = out + first * dim + 2 * (r - first);
    for (int32_t j = 0; j < dim; j += 16, pairs += 16 * size) {
      bf16_store(rounded, f32_mul(f32_load(q[r] + j), f32_splat(scale)));
      for (int i = 0; i < 8; ++i) std::memcpy(pairs + 2 * i * size, rounded + 2 * i, 4);
    }
  }
}

// sums[r][i] = sum over `steps` of pairs a[step * R + r] times row[step][i]: R query rows, V vectors.
// `row_stride`: numbers from one step's vectors to the next; `a_row`, `a_step`: numbers between rows and steps of a.
template <int R, int V>
HOTSET_INLINE void pair_products(const uint16_t* a, int64_t a_row, int64_t a_step, const uint16_t* row,
                                 int64_t row_stride, int steps, f32x16 (&sums)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) sums[r][i] = f32_zero();
  for (int s = 0; s < steps; ++s, a += a_step, row += row_stride) {
    bf16x32 v[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) v[i] = bf16_load(row + 32 * i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) sums[r][i] = bf16_dot(sums[r][i], v[i], a + r * a_row);
  }
}

// out[r][16 i ..] for all sums.
template <int R, int V> HOTSET_INLINE void store_sums(const f32x16 (&sums)[R][V], float* out, int64_t ld) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) f32_store(out + r * ld + 16 * i, sums[r][i]);
}

// scores[r][64] of R packed queries.
template <int R> void tile_scores(const uint16_t* q, const uint16_t* keys, int32_t dim, float* scores) {
  for (int key = 0; key < kTileKeys; key += 16 * kQueryTiles) {
    f32x16 sums[R][kQueryTiles];
    pair_products<R, kQueryTiles>(q, 2, 2 * R, keys + 2 * key, 2 * kTileKeys, dim / 2, sums);
    store_sums(sums, scores + key, kTileKeys);
  }
}

// o[r][dim] = sum over keys of the weights p[r][64] times values.
template <int R> void tile_values(const uint16_t* p, const uint16_t* values, int32_t dim, float* o, int64_t ld) {
  constexpr int kPairs = kTileKeys / 2, kRow = 2 * kTileKeys;  // weights lie over the floats they come from
  int32_t c = 0;
  for (; c + 16 * kQueryTiles <= dim; c += 16 * kQueryTiles) {
    f32x16 sums[R][kQueryTiles];
    pair_products<R, kQueryTiles>(p, kRow, 2, values + 2 * c, 2 * dim, kPairs, sums);
    store_sums(sums, o + c, ld);
  }
  for (; c < dim; c += 16) {
    f32x16 sums[R][1];
    pair_products<R, 1>(p, kRow, 2, values + 2 * c, 2 * dim, kPairs, sums);
    store_sums(sums, o + c, ld);
  }
}

// Scores to BF16 weights exp(s - m), over the scores, for rows [first, last) and zero for the others; m and l to `ml`.
inline void tile_softmax(float* s, int first, int last, float* ml) {
  constexpr int kVectors = kTileKeys / 16;
  const f32x16 low = f32_splat(-INFINITY);
  f32x16 seen[kVectors], top = low, sum = f32_zero();
  for (int i = 0; i < kVectors; ++i) {
    seen[i] = f32_first(first - 16 * i, low, f32_first(last - 16 * i, f32_load(s + 16 * i), low));
    top = f32_max(top, seen[i]);
  }
  uint16_t* weights = reinterpret_cast<uint16_t*>(s);
  ml[0] = f32_max_lanes(top), ml[1] = 0.0f;
  if (first >= last) {
    std::memset(weights, 0, 2 * kTileKeys);
    return;
  }
  const f32x16 shift = f32_splat(ml[0]);
  for (int i = 0; i < kVectors; ++i) {
    const f32x16 weight = exp16(f32_sub(seen[i], shift));  // exactly 0 where nothing is seen
    bf16_store(weights + 16 * i, weight);
    sum = f32_add(sum, weight);
  }
  ml[1] = f32_sum_lanes(sum);
}

template <int R> void attend_tile_group(const TileAttendArgs& a, int32_t row) {
  const int64_t ld = a.dim + 2;
  float *scores = a.scratch, *parts = a.scratch + R * kTileKeys;
  tile_scores<R>(a.q + row * a.dim, a.keys, a.dim, scores);
  for (int r = 0; r < R; ++r) tile_softmax(scores + r * kTileKeys, a.first[row + r], a.last[row + r], parts + r * ld);
  tile_values<R>(reinterpret_cast<const uint16_t*>(scores), a.values, a.dim, parts + 2, ld);
  for (int r = 0; r < R; ++r) attend_merge(a.acc + (row + r) * ld, parts + r * ld, a.dim);
}

// The group of exactly `size` rows.
template <int R> inline void attend_tile_exact(const TileAttendArgs& a, int32_t row, int size) {
  if constexpr (R == 0) return;
  else if (size == R) attend_tile_group<R>(a, row);
  else attend_tile_exact<R - 1>(a, row, size);
}

void attend_tile(const TileAttendArgs& a) {
  for (int32_t row = 0; row < a.num_rows; row += kQueryRows) {
    attend_tile_exact<kQueryRows>(a, row, a.num_rows - row < kQueryRows ? a.num_rows - row : kQueryRows);
  }
}

// out = o / (l + exp(sink - m)); zeros when nothing was seen. Both terms are taken relative to the larger exponent, so
// that a sink far above all scores does not overflow.
void attend_finish_sink(const float* acc, int32_t dim, float sink, float* out) {
  if (acc[1] == 0.0f) {
    std::memset(out, 0, sizeof(float) * dim);
    return;
  }
  const float m = acc[0] > sink ? acc[0] : sink;
  alignas(64) float e[16] = {acc[0] - m, sink - m};
  f32_store(e, exp16(f32_load(e)));
  const f32x16 factor = f32_splat(e[0] / (acc[1] * e[0] + e[1]));
  for (int32_t i = 0; i < dim; i += 16) f32_store(out + i, f32_mul(f32_load(acc + 2 + i), factor));
}
