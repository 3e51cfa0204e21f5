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

// sums[r][i] += sum over `steps` of pairs a[step * R + r] times row[step][i]: R query rows, V vectors.
// `row_stride`: numbers from one step's vectors to the next; `a_row`, `a_step`: numbers between rows and steps of a.
template <int R, int V>
HOTSET_INLINE void pair_products(const uint16_t* a, int64_t a_row, int64_t a_step, const uint16_t* row,
                                 int64_t row_stride, int steps, f32x16 (&sums)[R][V]) {
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

// scores[r] of keys [key, key + 16 V) and R packed queries, plus scales[key] times what `steps` pairs of channels add;
// from zero with the first ones. Scales are powers of two: the bits are those of keys that had been scaled before.
template <int R, int V>
HOTSET_INLINE void score_keys(const uint16_t* q, const uint16_t* keys, const float* scales, int key, int steps,
                              bool is_first, float* scores) {
  f32x16 sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) sums[r][i] = f32_zero();
  pair_products<R, V>(q, 2, 2 * R, keys + 2 * key, 2 * kTileKeys, steps, sums);
#pragma GCC unroll 4
  for (int i = 0; i < V; ++i) {
    const f32x16 scale = f32_load(scales + key + 16 * i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float* out = scores + r * kTileKeys + key + 16 * i;
      f32_store(out, is_first ? f32_mul(sums[r][i], scale) : f32_fma(sums[r][i], scale, f32_load(out)));
    }
  }
}

// The same for keys [first, last), rounded to sixteens outwards.
template <int R>
void score_piece(const uint16_t* q, const uint16_t* keys, const float* scales, int first, int last, int steps,
                 bool is_first, float* scores) {
  int key = first / 16 * 16;
  for (; key + 16 * (kQueryTiles - 1) < last; key += 16 * kQueryTiles)
    score_keys<R, kQueryTiles>(q, keys, scales, key, steps, is_first, scores);
  for (; key < last; key += 16) score_keys<R, 1>(q, keys, scales, key, steps, is_first, scores);
}

// acc[r][16 V] merged with the sum over `steps` pairs of keys of the weights p[r][..][2] times values[..][kRowGroup][2].
template <int R, int V>
HOTSET_INLINE void value_vectors(const uint16_t* p, const uint16_t* values, int steps, const Merge* merges, float* acc,
                                 int64_t ld) {
  f32x16 sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) sums[r][i] = f32_zero();
  // Weights lie over the floats they come from.
  pair_products<R, V>(p, 2 * kTileKeys, 2, values, 2 * kRowGroup, steps, sums);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Merge& merge = merges[r];
    if (!merge.is_seen) continue;
    const f32x16 kept = f32_splat(merge.kept), added = f32_splat(merge.added);
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
      float* o = acc + r * ld + 16 * i;
      f32_store(o, merge.is_new ? sums[r][i] : f32_fma(f32_load(o), kept, f32_mul(sums[r][i], added)));
    }
  }
}

// The same for channels [0, count) and rows [first, last): the others weigh nothing.
template <int R>
void value_piece(const uint16_t* p, const uint16_t* values, int first, int last, int32_t count, const Merge* merges,
                 float* acc, int64_t ld) {
  const int even = first / 2 * 2, steps = (last - even + 1) / 2;
  p += even, values += even * kRowGroup;
  int32_t c = 0;
  for (; c + 16 * kQueryTiles <= count; c += 16 * kQueryTiles)
    value_vectors<R, kQueryTiles>(p, values + 2 * c, steps, merges, acc + c, ld);
  for (; c < count; c += 16) value_vectors<R, 1>(p, values + 2 * c, steps, merges, acc + c, ld);
}

// The largest score of rows [first, last), minus infinity for none; the scores of others become that.
inline float tile_top(float* s, int first, int last) {
  const f32x16 low = f32_splat(-INFINITY);
  f32x16 top = low;
  for (int i = 0; i < kTileKeys; i += 16) {
    const f32x16 seen = f32_first(first - i, low, f32_first(last - i, f32_load(s + i), low));
    f32_store(s + i, seen);
    top = f32_max(top, seen);
  }
  return f32_max_lanes(top);
}

// Scores to BF16 weights exp(s - top), over the scores; returns their sum before rounding. All zero if nothing is seen.
inline float tile_weights(float* s, float top) {
  uint16_t* weights = reinterpret_cast<uint16_t*>(s);
  if (top == -INFINITY) {
    std::memset(weights, 0, 2 * kTileKeys);
    return 0.0f;
  }
  f32x16 sum = f32_zero();
  for (int i = 0; i < kTileKeys; i += 16) {
    const f32x16 weight = exp16(f32_sub(f32_load(s + i), f32_splat(top)));  // exactly 0 where nothing is seen
    bf16_store(weights + i, weight);
    sum = f32_add(sum, weight);
  }
  return f32_sum_lanes(sum);
}

// Calls work<R>(first row, R) for groups of kQueryRows rows and the smaller last one.
template <int R, class Work> inline void exact_group(int32_t row, int size, const Work& work) {
  if constexpr (R == 0) return;
  else if (size == R) work(row, std::integral_constant<int, R>());
  else exact_group<R - 1>(row, size, work);
}
template <class Work> inline void each_group(int32_t num_rows, const Work& work) {
  for (int32_t row = 0; row < num_rows; row += kQueryRows)
    exact_group<kQueryRows>(row, num_rows - row < kQueryRows ? num_rows - row : kQueryRows, work);
}

// Lines of the next tile's rows, half of them with each pass over the pieces: all at once would fill the queues of the
// core, which then waits as if it had loaded them.
inline void prefetch_piece(const AttendTile* tile, int64_t line, int pass) {
  if (tile == nullptr) return;
  for (int r = tile->first + pass; r < tile->last; r += 2) {
    __builtin_prefetch(tile->data[r] + 64 * line);
    if (line == 0) __builtin_prefetch(tile->scales[r]);
  }
}

template <RowKind kKind> void attend_tile(const TileAttendArgs& a) {
  alignas(64) uint16_t numbers[kTileKeys * kRowGroup];
  alignas(64) float scales[kTileKeys];
  const int first = a.tile->first, last = a.tile->last;
  const int64_t ld = a.dim + 2;
  float* scores = a.scratch;
  Merge* merges = reinterpret_cast<Merge*>(scores + int64_t{a.num_rows} * kTileKeys);
  const auto range = [&](int32_t row) { return row / a.rows_per_token; };
  const auto is_unseen = [&](int32_t row, int size) {
    for (int32_t r = row; r < row + size; ++r)
      if (a.first[range(r)] < a.last[range(r)]) return false;
    return true;
  };
  for (int32_t c = 0, end; c < a.dim; c = end) {
    end = piece_end(c, a.dim, a.plain);
    piece_keys(Piece<kKind>{*a.tile, c, end, a.plain}, numbers, scales);
    for (int64_t line = c * a.row_lines / a.dim; line < end * a.row_lines / a.dim; ++line) prefetch_piece(a.next, line, 0);
    each_group(a.num_rows, [&](int32_t row, auto size) {
      if (is_unseen(row, size)) return;
      score_piece<size()>(a.q + int64_t{row} * a.dim + c * size, numbers, scales, first, last, (end - c) / 2, c == 0,
                          scores + row * kTileKeys);
    });
  }
  // Step by step for sixteen rows: each is a chain of operations that wait for one another, those of other rows do not.
  for (int32_t r0 = 0; r0 < a.num_rows; r0 += 16) {
    const int32_t count = a.num_rows - r0 < 16 ? a.num_rows - r0 : 16;
    float top[16], sum[16];
    for (int32_t i = 0; i < count; ++i)
      top[i] = tile_top(scores + (r0 + i) * kTileKeys, a.first[range(r0 + i)], a.last[range(r0 + i)]);
    for (int32_t i = 0; i < count; ++i) sum[i] = tile_weights(scores + (r0 + i) * kTileKeys, top[i]);
    begin_merges(a.acc + r0 * ld, ld, count, top, sum, merges + r0);
  }
  for (int32_t c = 0, end; c < a.dim; c = end) {
    end = piece_end(c, a.dim, a.plain);
    piece_values(Piece<kKind>{*a.tile, c, end, a.plain}, numbers);
    for (int64_t line = c * a.row_lines / a.dim; line < end * a.row_lines / a.dim; ++line) prefetch_piece(a.next, line, 1);
    each_group(a.num_rows, [&](int32_t row, auto size) {
      if (is_unseen(row, size)) return;
      value_piece<size()>(reinterpret_cast<const uint16_t*>(scores + row * kTileKeys), numbers, first, last, end - c,
                          merges + row, a.acc + row * ld + 2 + c, ld);
    });
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
