// Rows that are key and value in one: how they enter the window and the cache, and attention over them.
//
// A layer sees the rows of the last `window` positions and rows that pool `ratio` tokens each. Rows of this step's
// positions lie in a step buffer, those of earlier ones in the ring of the sequence's frontier: a ring is written only
// after every thread has read it, so a step of any length may pass by. Everything is addressed by position.
#include <algorithm>
#include <cstring>

#include "executor.h"

namespace hotset {

namespace {

// Fewer items than this per thread and heads are dealt out too, in runs of at least kLeastHeads.
constexpr int64_t kItemsPerThread = 4, kLeastHeads = 8;

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

// A thread's scratch for one unit.
struct Executor::RowsWork {
  uint16_t* q;
  float *acc, *scratch;
  int64_t rows;
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

// In a small step a thread takes the heads that it has normed and turned, with many tokens a run of tokens. Which rows
// share a call never changes a bit: a row's partial results are formed per tile, tiles lie at fixed places (of 64 row
// numbers, 64 ranks of chosen rows, 64 positions) and merge in order.
void Executor::run_attend_rows(const OpSpec& op, int thread) {
  if (step_.few) {
    const auto [begin, end] = share(step_.n * op.num_heads, thread);
    for (int64_t at = begin; at < end;) {
      const int64_t t = at / op.num_heads;
      const int32_t head = static_cast<int32_t>(at % op.num_heads);
      const int32_t count = static_cast<int32_t>(std::min<int64_t>(op.num_heads - head, end - at));
      attend_rows_unit(op, {&step_.segments[segment_of_[t]], t, 1, head, count}, thread);
      at += count;
    }
    return;
  }
  const CostClass& costs = costs_[cost_of_[&op - spec_.ops.data()]];
  const auto range = [&](int owner) { return std::pair<int64_t, int64_t>(costs.start[owner], costs.start[owner + 1]); };
  claim(op, thread, range, [&](int, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t t = at / costs.parts;
      const Segment& seg = step_.segments[segment_of_[t]];
      if (costs.parts == 1) {
        const int64_t count = std::min({int64_t{op.unit_tokens}, end - t, seg.first + seg.count - t});
        attend_rows_unit(op, {&seg, t, static_cast<int32_t>(count), 0, op.num_heads}, thread);
        at += count;
      } else {
        const int64_t stop = std::min(end, (t + 1) * costs.parts);
        const int64_t head = op.num_heads * (at - t * costs.parts) / costs.parts;
        const int64_t last = op.num_heads * (stop - t * costs.parts) / costs.parts;
        attend_rows_unit(op, {&seg, t, 1, static_cast<int32_t>(head), static_cast<int32_t>(last - head)}, thread);
        at = stop;
      }
    }
  });
}

void Executor::attend_rows_unit(const OpSpec& op, const RowsUnit& unit, int thread) {
  const int64_t dim = op.head_dim, rows = int64_t{unit.num_tokens} * unit.num_heads;
  const auto align64 = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  uint8_t* at = work(thread);
  const auto take = [&](int64_t bytes) { return std::exchange(at, at + align64(bytes)); };
  RowsWork work;
  work.rows = rows;
  work.q = reinterpret_cast<uint16_t*>(take(rows * dim * 2));
  work.acc = reinterpret_cast<float*>(take(rows * (dim + 2) * 4));
  work.scratch = reinterpret_cast<float*>(at);
  const auto head = [&](int buffer, int64_t r) {
    return row(buffer, unit.token + r / unit.num_heads, thread) + (unit.head + r % unit.num_heads) * dim;
  };
  for (int64_t r0 = 0; r0 < rows; r0 += kPackedRows) {
    const float* q[kPackedRows];
    const int32_t count = static_cast<int32_t>(std::min<int64_t>(kPackedRows, rows - r0));
    for (int32_t r = 0; r < count; ++r) q[r] = head(op.x, r0 + r);
    kernels_->pack_tile_queries(q, count, op.head_dim, op.value, work.q + r0 * dim);
  }
  for (int64_t r = 0; r < rows; ++r) work.acc[r * (dim + 2) + 1] = 0.0f;
  if (op.ratio > 0) attend_compressed(op, unit, work, thread);
  attend_window(op, unit, work, thread);
  const float* sinks = weights_[op.weight].vector + unit.head;
  for (int64_t r = 0; r < rows; ++r) {
    kernels_->attend_finish_sink(work.acc + r * (dim + 2), op.head_dim, sinks[r % unit.num_heads], head(op.out, r));
  }
}

// All query rows meet tiles [first, last): fill(number, tile) names a tile's rows, see(number, begin, end) which of them
// each of the unit's tokens sees. A tile's rows are on their way while the one before it is met: chosen ones lie
// anywhere, and no hardware prefetcher would find them.
template <class Fill, class See>
void Executor::each_tile(int32_t kind, int64_t row_bytes, const OpSpec& op, const RowsUnit& unit, const RowsWork& work,
                         int64_t first, int64_t last, Fill fill, See see) const {
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
                                 op.head_dim, op.plain, unit.num_heads, begin, end, work.acc, work.scratch});
  }
}

void Executor::attend_compressed(const OpSpec& op, const RowsUnit& unit, const RowsWork& work, int thread) {
  const Segment& seg = *unit.segment;
  const float* chosen = op.y < 0 ? nullptr : row(op.y, unit.token, thread);
  int64_t seen[kMaxUnitTokens], most = 0;
  for (int32_t i = 0; i < unit.num_tokens; ++i) {
    seen[i] = (positions_[unit.token + i] + 1) / op.ratio;
    most = std::max(most, seen[i]);
  }
  if (chosen != nullptr) {
    most = std::find_if(chosen, chosen + op.top_k, [](float index) { return index < 0.0f; }) - chosen;
    seen[0] = most;
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
  const auto see = [&](int64_t number, int32_t* begin, int32_t* end) {
    for (int32_t i = 0; i < unit.num_tokens; ++i) {
      begin[i] = 0;
      end[i] = static_cast<int32_t>(std::clamp<int64_t>(seen[i] - number * kTileKeys, 0, kTileKeys));
    }
  };
  each_tile(op.row_kind, op.row_bytes, op, unit, work, 0, (most + kTileKeys - 1) / kTileKeys, fill, see);
}

void Executor::attend_window(const OpSpec& op, const RowsUnit& unit, const RowsWork& work, int thread) {
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
  each_tile(op.ring_kind, op.ring_row_bytes, op, unit, work, oldest / kTileKeys, last / kTileKeys + 1, fill, see);
}

// Cuts the step's items into runs of about equal cost, a run per thread, for every class of ops.
void Executor::plan_costs() {
  for (CostClass& c : costs_) {
    const int64_t most_parts = std::max<int64_t>(1, c.num_heads / kLeastHeads);
    c.parts = std::clamp<int64_t>(kItemsPerThread * team_.size() / step_.n, 1, most_parts);
    const auto cost = [&](int64_t item) {
      const int64_t seen = c.ratio > 0 ? (positions_[item / c.parts] + 1) / c.ratio : 0;
      return kWindowCost + (c.top_k > 0 ? std::min(seen, c.top_k) : seen);
    };
    const int64_t count = step_.n * c.parts;
    int64_t total = 0, before = 0;
    for (int64_t i = 0; i < count; ++i) total += cost(i);
    int thread = 0;
    c.start[0] = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t middle = before + cost(i) / 2;
      while (thread + 1 < team_.size() && middle >= total * (thread + 1) / team_.size()) c.start[++thread] = i;
      before += cost(i);
    }
    while (thread < team_.size()) c.start[++thread] = count;
  }
}

}  // namespace hotset
