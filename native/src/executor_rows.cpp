// Rows that are key and value in one: how they enter the window and the cache, and attention over them.
//
// A layer sees the rows of the last `window` positions and rows that pool `ratio` tokens each. Rows of this step's
// positions lie in a step buffer, those of earlier ones in the ring of the sequence's frontier: a ring is written only
// after every thread has read it, so a step of any length may pass by. Everything is addressed by position.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "executor.h"

namespace hotset {

namespace {

// Query rows packed by one call: whole groups of every instruction set.
constexpr int64_t kPackedRows = 64;

// Finite numbers to the nearest BF16, ties to even.
void round_to_bf16(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    std::memcpy(x + i, &bits, 4);
  }
}

}  // namespace

// A thread's scratch for one unit, and which unit's queries are packed in it.
struct Executor::RowsWork {
  uint16_t* q;
  float *total, *part, *scratch;
  int64_t rows = 0;
  RowsUnit unit{};
};

// The sum over spans of a unit's rows: the first span's in its place, every other one's apart, then merged.
class Executor::SpanSum {
 public:
  SpanSum(const KernelTable* kernels, const RowsWork& work, int32_t dim) : kernels_(kernels), work_(work), dim_(dim) {}
  // Where the next span's partial results go.
  float* begin() {
    end();
    float* acc = num_spans_++ == 0 ? work_.total : work_.part;
    for (int64_t r = 0; r < work_.rows; ++r) acc[r * (dim_ + 2) + 1] = 0.0f;
    return acc;
  }
  void end() {
    if (num_spans_ < 2) return;
    for (int64_t at = 0; at < work_.rows * (dim_ + 2); at += dim_ + 2)
      kernels_->attend_merge(work_.total + at, work_.part + at, dim_);
  }

 private:
  const KernelTable* kernels_;
  const RowsWork& work_;
  int32_t dim_;
  int64_t num_spans_ = 0;
};

void Executor::run_encode_rows(const OpSpec& op, int thread) {
  auto [begin, end] = rows_share(step_.n, thread);
  const int32_t width = static_cast<int32_t>(spec_.buffers[op.x].width);
  for (int64_t t = begin; t < end; ++t) {
    uint8_t* out = reinterpret_cast<uint8_t*>(row(op.out, t, thread));
    kernels_->encode_row[op.ring_kind](row(op.x, t, thread), width, op.plain, out, out + op.ring_row_bytes);
  }
}

// Every row whose last token is in this step, dealt to the threads.
void Executor::run_compress(const OpSpec& op, int thread) {
  const auto entries = [&](const Segment& s) {
    return std::pair<int64_t, int64_t>(s.position / op.ratio, (s.position + s.count) / op.ratio);
  };
  int64_t total = 0, before = 0;
  for (int64_t s = 0; s < step_.num_segments; ++s) {
    const auto [first, last] = entries(step_.segments[s]);
    total += last - first;
  }
  const auto [begin, end] = share(total, thread);
  for (int64_t s = 0; s < step_.num_segments; ++s) {
    const auto [first, last] = entries(step_.segments[s]);
    const int64_t from = first + std::max<int64_t>(0, begin - before), to = std::min(last, first + end - before);
    for (int64_t entry = from; entry < to; ++entry) compress_entry(op, step_.segments[s], entry, thread);
    before += last - first;
  }
}

// Row `entry` of one sequence: its tokens' values pooled, normed, turned to the position of its first token, rounded.
void Executor::compress_entry(const OpSpec& op, const Segment& seg, int64_t entry, int thread) {
  const int32_t width = op.head_dim, copies = op.overlap ? 2 : 1;
  const float *k[kMaxPooled], *g[kMaxPooled], *ape[kMaxPooled];
  const int64_t start = entry * op.ratio;
  int32_t count = 0;
  for (int64_t p = op.overlap ? std::max<int64_t>(0, start - op.ratio) : start; p < start + op.ratio; ++p, ++count) {
    // An overlapping row takes the first half of the tokens before its own and the second half of its own.
    const int32_t half = op.overlap && p >= start ? width : 0;
    if (p >= seg.position) {
      k[count] = row(op.x, seg.first + p - seg.position, thread) + half;
      g[count] = row(op.y, seg.first + p - seg.position, thread) + half;
    } else {
      k[count] = reinterpret_cast<const float*>(ring(op, seg) + p % op.ring_rows * op.ring_row_bytes) + half;
      g[count] = k[count] + copies * width;
    }
    ape[count] = weights_[op.weight].vector + p % op.ratio * copies * width + half;
  }
  alignas(64) float pooled[kMaxHeadDim], angles[kMaxHeadDim];
  kernels_->compress_pool({k, g, ape, count, width, pooled});
  round_to_bf16(pooled, width);
  kernels_->rms_norm(pooled, weights_[op.weight2].vector, op.value, width, pooled);
  angles_at(op, start, op.rotary_dim / 2, angles);
  kernels_->rope_head(pooled + width - op.rotary_dim, angles, op.rotary_dim, true);
  if (op.hadamard) kernels_->hadamard(pooled, width);
  const int64_t rows = kBlockTokens / op.ratio, r = entry % rows;
  uint8_t* base = cache_.data() + seg.blocks[entry / rows] * spec_.block_bytes + op.cache_offset;
  if (op.row_kind >= kIndexRows) {
    const int32_t kind = op.row_kind - kIndexRows;
    uint8_t* tile = base + r / kTileRows * index_tile_bytes(IndexKind{kind}, width);
    kernels_->store_index_row[kind](pooled, width, tile, static_cast<int32_t>(r % kTileRows));
  } else {
    kernels_->encode_row[op.row_kind](pooled, width, op.plain, base + r * op.row_bytes,
                                      base + rows * op.row_bytes + r * op.scale_bytes);
  }
}

// The last values and scores of every segment enter its ring.
void Executor::run_store_state(const OpSpec& op, int thread) {
  const int64_t width = spec_.buffers[op.x].width;
  auto [begin, end] = share(step_.n, thread);
  for (int64_t t = begin; t < end; ++t) {
    const Segment& seg = step_.segments[segment_of_[t]];
    if (t - seg.first < seg.count - op.ring_rows) continue;
    float* out = reinterpret_cast<float*>(ring(op, seg) + positions_[t] % op.ring_rows * op.ring_row_bytes);
    std::memcpy(out, row(op.x, t, thread), width * sizeof(float));
    std::memcpy(out + width, row(op.y, t, thread), width * sizeof(float));
  }
}

void Executor::run_store_window(const OpSpec& op, int thread) {
  auto [begin, end] = share(step_.n, thread);
  for (int64_t t = begin; t < end; ++t) {
    const Segment& seg = step_.segments[segment_of_[t]];
    if (t - seg.first < seg.count - op.ring_rows) continue;
    const uint8_t* in = reinterpret_cast<const uint8_t*>(row(op.x, t, thread));
    const int64_t r = positions_[t] % op.ring_rows;
    uint8_t* scales = ring(op, seg) + int64_t{op.ring_rows} * op.ring_row_bytes;
    std::memcpy(ring(op, seg) + r * op.ring_row_bytes, in, op.ring_row_bytes);
    std::memcpy(scales + r * op.ring_scale_bytes, in + op.ring_row_bytes, op.ring_scale_bytes);
  }
}

Executor::RowPlace Executor::cached_row(const OpSpec& op, const Segment& seg, int64_t index) const {
  const int64_t rows = kBlockTokens / op.ratio, r = index % rows;
  const uint8_t* base = cache_.data() + seg.blocks[index / rows] * spec_.block_bytes + op.cache_offset;
  return {base + r * op.row_bytes, base + rows * op.row_bytes + r * op.scale_bytes};
}

Executor::RowPlace Executor::window_row(const OpSpec& op, const Segment& seg, int64_t position, int thread) const {
  if (position >= seg.position) {
    const uint8_t* data = reinterpret_cast<const uint8_t*>(row(op.z, seg.first + position - seg.position, thread));
    return {data, data + op.ring_row_bytes};
  }
  const uint8_t* base = ring(op, seg);
  const int64_t r = position % op.ring_rows;
  return {base + r * op.ring_row_bytes, base + int64_t{op.ring_rows} * op.ring_row_bytes + r * op.ring_scale_bytes};
}

// Compressed rows are summed by spans of tiles (span_of_tile), the window is the last span, and spans merge in order,
// whoever has summed which. What shares a call never changes a bit: a row's partial results are formed per tile, and
// tiles lie at fixed places (of 64 row numbers, 64 ranks of chosen rows, 64 positions).
//
// In a small step a thread takes the heads that it has normed and turned, unless they are too few: then, as with many
// tokens, items are dealt by cost.
void Executor::run_attend_rows(const OpSpec& op, int thread) {
  const CostClass& costs = costs_[cost_of_[&op - spec_.ops.data()]];
  if (step_.few && !costs.is_split) {
    const auto [begin, end] = share(step_.n * op.num_heads, thread);
    return attend_heads(op, op.num_heads, begin, end, thread);
  }
  const auto range = [&](int owner) { return std::pair<int64_t, int64_t>(costs.start[owner], costs.start[owner + 1]); };
  claim(op, thread, range, [&](int, int64_t begin, int64_t end) {
    if (costs.is_split) return attend_spans(op, costs, begin, end, thread);
    costs.parts > 1 ? attend_heads(op, costs.parts, begin, end, thread) : attend_tokens(op, begin, end, thread);
  });
}

void Executor::attend_tokens(const OpSpec& op, int64_t begin, int64_t end, int thread) {
  for (int64_t t = begin; t < end;) {
    const Segment& seg = step_.segments[segment_of_[t]];
    const int64_t count = std::min({int64_t{op.unit_tokens}, end - t, seg.first + seg.count - t});
    attend_unit(op, {&seg, t, static_cast<int32_t>(count), 0, op.num_heads}, thread);
    t += count;
  }
}

// Items are runs of a token's heads, `parts` of them.
void Executor::attend_heads(const OpSpec& op, int64_t parts, int64_t begin, int64_t end, int thread) {
  for (int64_t at = begin; at < end;) {
    const int64_t t = at / parts, stop = std::min(end, (t + 1) * parts);
    const int64_t head = op.num_heads * (at - t * parts) / parts, last = op.num_heads * (stop - t * parts) / parts;
    const Segment& seg = step_.segments[segment_of_[t]];
    attend_unit(op, {&seg, t, 1, static_cast<int32_t>(head), static_cast<int32_t>(last - head)}, thread);
    at = stop;
  }
}

void Executor::attend_unit(const OpSpec& op, const RowsUnit& unit, int thread) {
  RowsWork work;
  pack_rows(op, unit, work, thread);
  SpanSum sum(kernels_, work, op.head_dim);
  const int64_t tiles = num_row_tiles(op.ratio, op.top_k, unit.token + unit.num_tokens - 1);
  attend_compressed(op, unit, work, 0, tiles, sum, thread);
  attend_window(op, unit, work, sum.begin(), thread);
  sum.end();
  const float* sinks = weights_[op.weight].vector + unit.head;
  for (int64_t r = 0; r < work.rows; ++r) {
    const int64_t token = unit.token + r / unit.num_heads, head = r % unit.num_heads;
    kernels_->attend_finish_sink(work.total + r * (op.head_dim + 2), op.head_dim, sinks[head],
                                 row(op.out, token, thread) + (unit.head + head) * op.head_dim);
  }
}

// Items are runs of the heads of a token's span; their partial results go to the partials.
void Executor::attend_spans(const OpSpec& op, const CostClass& costs, int64_t begin, int64_t end, int thread) {
  RowsWork work;
  for (int64_t at = begin; at < end;) {
    const int64_t t = std::upper_bound(costs.first.begin(), costs.first.begin() + step_.n, at) - costs.first.begin() - 1;
    const int64_t runs = (op.num_heads + costs.run - 1) / costs.run;
    const int64_t span = (at - costs.first[t]) / runs, run = (at - costs.first[t]) % runs;
    const int64_t count = std::min(runs - run, end - at);
    const int64_t head = run * costs.run, last = std::min<int64_t>(op.num_heads, (run + count) * costs.run);
    const RowsUnit unit{&step_.segments[segment_of_[t]], t, 1, static_cast<int32_t>(head), static_cast<int32_t>(last - head)};
    pack_rows(op, unit, work, thread);
    const int64_t tiles = num_row_tiles(op.ratio, op.top_k, t), spans = num_row_spans(tiles);
    float* acc = span_partials(op, costs, t, span) + head * (op.head_dim + 2);
    for (int64_t r = 0; r < work.rows; ++r) acc[r * (op.head_dim + 2) + 1] = 0.0f;
    if (span == spans) {
      attend_window(op, unit, work, acc, thread);
    } else {
      attend_compressed(op, unit, work, first_tile_of_span(span), std::min(tiles, first_tile_of_span(span + 1)), acc, thread);
    }
    at += count;
  }
}

void Executor::run_attend_rows_merge(const OpSpec& op, int thread) {
  const CostClass& costs = costs_[cost_of_[&op - spec_.ops.data()]];
  const int64_t ld = op.head_dim + 2;
  alignas(64) float acc[kMaxHeadDim + 2];
  const auto [begin, end] = share(step_.n * op.num_heads, thread);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t t = i / op.num_heads, h = i % op.num_heads;
    const int64_t spans = num_row_spans(num_row_tiles(op.ratio, op.top_k, t)) + 1;
    acc[1] = 0.0f;
    for (int64_t s = 0; s < spans; ++s) kernels_->attend_merge(acc, span_partials(op, costs, t, s) + h * ld, op.head_dim);
    kernels_->attend_finish_sink(acc, op.head_dim, weights_[op.weight].vector[h], row(op.out, t, thread) + h * op.head_dim);
  }
}

// The packed queries of a unit, unless `work` has them.
void Executor::pack_rows(const OpSpec& op, const RowsUnit& unit, RowsWork& work, int thread) {
  const RowsUnit& had = work.unit;
  if (work.rows > 0 && had.token == unit.token && had.num_tokens == unit.num_tokens && had.head == unit.head &&
      had.num_heads == unit.num_heads)
    return;
  const int64_t dim = op.head_dim, rows = int64_t{unit.num_tokens} * unit.num_heads;
  const auto align64 = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  uint8_t* at = this->work(thread);
  const auto take = [&](int64_t bytes) { return std::exchange(at, at + align64(bytes)); };
  work.rows = rows, work.unit = unit;
  work.q = reinterpret_cast<uint16_t*>(take(rows * dim * 2));
  work.total = reinterpret_cast<float*>(take(rows * (dim + 2) * 4));
  work.part = reinterpret_cast<float*>(take(rows * (dim + 2) * 4));
  work.scratch = reinterpret_cast<float*>(at);
  for (int64_t r0 = 0; r0 < rows; r0 += kPackedRows) {
    const float* q[kPackedRows];
    const int32_t count = static_cast<int32_t>(std::min<int64_t>(kPackedRows, rows - r0));
    for (int64_t r = r0; r < r0 + count; ++r) {
      q[r - r0] = row(op.x, unit.token + r / unit.num_heads, thread) + (unit.head + r % unit.num_heads) * dim;
    }
    kernels_->pack_tile_queries(q, count, op.head_dim, op.value, work.q + r0 * dim);
  }
}

// All query rows meet tiles [first, last): fill(number, tile) names a tile's rows, see(number, begin, end) which of them
// each of the unit's tokens sees, into(number) says where their partial results go. A tile's rows are on their way
// while the one before it is met: chosen ones lie anywhere, and no hardware prefetcher would find them.
template <class Fill, class See, class Into>
void Executor::each_tile(int32_t kind, int64_t row_bytes, const OpSpec& op, const RowsUnit& unit, const RowsWork& work,
                         int64_t first, int64_t last, Fill fill, See see, Into into) const {
  AttendTile tiles[2];
  const int64_t lines = (row_bytes + 63) / 64;
  if (first < last) fill(first, tiles[first & 1]);
  for (int64_t number = first; number < last; ++number) {
    const AttendTile& tile = tiles[number & 1];
    AttendTile* next = number + 1 < last ? &tiles[(number + 1) & 1] : nullptr;
    if (next != nullptr) fill(number + 1, *next);
    for (int32_t i = tile.first; number == first && i < tile.last; ++i)
      for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(tile.data[i] + 64 * line);
    int32_t begin[kMaxUnitTokens], end[kMaxUnitTokens];
    see(number, begin, end);
    kernels_->attend_tile[kind]({&tile, next, static_cast<int32_t>(lines), work.q, static_cast<int32_t>(work.rows),
                                 op.head_dim, op.plain, unit.num_heads, begin, end, into(number), work.scratch});
  }
}

// Tiles [begin, end) of compressed rows: those of one span into a place, or those of several into their sum.
template <class Sum>
void Executor::attend_compressed(const OpSpec& op, const RowsUnit& unit, const RowsWork& work, int64_t begin,
                                 int64_t end, Sum& sum, int thread) {
  const Segment& seg = *unit.segment;
  const float* chosen = op.y < 0 ? nullptr : row(op.y, unit.token, thread);
  int64_t seen[kMaxUnitTokens], most = 0;
  for (int32_t i = 0; i < unit.num_tokens; ++i) {
    seen[i] = num_rows_seen(op.ratio, op.top_k, unit.token + i);
    most = std::max(most, seen[i]);
  }
  const auto fill = [&](int64_t number, AttendTile& tile) {
    const int64_t first = number * kTileKeys;
    tile.first = 0;
    tile.last = static_cast<int32_t>(std::min<int64_t>(kTileKeys, most - first));
    for (int32_t i = 0; i < tile.last; ++i) {
      const RowPlace place = cached_row(op, seg, chosen ? static_cast<int64_t>(chosen[first + i]) : first + i);
      tile.data[i] = place.data, tile.scales[i] = place.scales;
    }
  };
  const auto see = [&](int64_t number, int32_t* first, int32_t* last) {
    for (int32_t i = 0; i < unit.num_tokens; ++i) {
      first[i] = 0;
      last[i] = static_cast<int32_t>(std::clamp<int64_t>(seen[i] - number * kTileKeys, 0, kTileKeys));
    }
  };
  if constexpr (std::is_same_v<Sum, SpanSum>) {
    int64_t span = -1;
    float* acc = nullptr;
    each_tile(op.row_kind, op.row_bytes, op, unit, work, begin, end, fill, see, [&](int64_t number) {
      if (span_of_tile(number) != span) span = span_of_tile(number), acc = sum.begin();
      return acc;
    });
  } else {
    each_tile(op.row_kind, op.row_bytes, op, unit, work, begin, end, fill, see, [&](int64_t) { return sum; });
  }
}

void Executor::attend_window(const OpSpec& op, const RowsUnit& unit, const RowsWork& work, float* acc, int thread) {
  const Segment& seg = *unit.segment;
  const int64_t position = positions_[unit.token], last = position + unit.num_tokens - 1;
  const int64_t oldest = std::max<int64_t>(0, position - op.window + 1);
  const auto fill = [&](int64_t number, AttendTile& tile) {
    const int64_t first = number * kTileKeys;
    tile.first = static_cast<int32_t>(std::max<int64_t>(0, oldest - first));
    tile.last = static_cast<int32_t>(std::min<int64_t>(kTileKeys, last + 1 - first));
    for (int32_t i = tile.first; i < tile.last; ++i) {
      const RowPlace place = window_row(op, seg, first + i, thread);
      tile.data[i] = place.data, tile.scales[i] = place.scales;
    }
  };
  const auto see = [&](int64_t number, int32_t* begin, int32_t* end) {
    const int64_t first = number * kTileKeys;
    for (int32_t i = 0; i < unit.num_tokens; ++i) {
      begin[i] = static_cast<int32_t>(std::clamp<int64_t>(position + i - op.window + 1 - first, 0, kTileKeys));
      end[i] = static_cast<int32_t>(std::clamp<int64_t>(position + i + 1 - first, 0, kTileKeys));
    }
  };
  each_tile(op.ring_kind, op.ring_row_bytes, op, unit, work, oldest / kTileKeys, last / kTileKeys + 1, fill, see,
            [&](int64_t) { return acc; });
}

}  // namespace hotset
