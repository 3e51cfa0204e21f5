// The indexer: of the compressed rows that a token may see, the best `top_k`, in rising order.
//
// "Best" is by score, and of equal scores the lower row. That order is strict, so the chosen set does not depend on how
// rows are dealt to threads, and a row may be dropped as soon as `top_k` better ones are known: the room for candidates
// is fixed, however long the context.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "executor.h"

namespace hotset {

namespace {

// Smaller keys are better: the score turned upside down in the high half, the row in the low half.
uint64_t key_of(float score, int32_t row) {
  score += 0.0f;  // -0 and 0 are the same score
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~bits) << 32 | static_cast<uint32_t>(row);
}

float score_of(uint64_t key) {
  uint32_t bits = ~static_cast<uint32_t>(key >> 32);
  bits = bits & 0x80000000u ? bits ^ 0x80000000u : ~bits;
  float score;
  std::memcpy(&score, &bits, 4);
  return score;
}

int32_t row_of(uint64_t key) { return static_cast<int32_t>(key & 0xffffffffu); }

// The k-th smallest, from 1, of n different keys. Keys are dealt around a pivot into `a` and `b` in turn, each of n.
uint64_t kth_smallest(const uint64_t* keys, int64_t n, int64_t k, uint64_t* a, uint64_t* b) {
  constexpr int kSamples = 16;
  uint64_t samples[kSamples];
  while (n > 4 * kSamples) {
    for (int i = 0; i < kSamples; ++i) samples[i] = keys[n * i / kSamples];
    std::sort(samples, samples + kSamples);
    // Never the largest: a key above the pivot leaves the smaller part.
    const uint64_t pivot = samples[std::min<int64_t>(kSamples - 2, k * kSamples / n)];
    int64_t low = 0, high = n;
    for (int64_t i = 0; i < n; ++i) {  // both places get the key, only one is kept: no branch to guess
      const uint64_t key = keys[i];
      a[low] = a[high - 1] = key;
      const bool is_low = key <= pivot;
      low += is_low, high -= !is_low;
    }
    keys = k <= low ? a : a + low;
    n = k <= low ? low : n - low;
    k = k <= low ? k : k - low;
    std::swap(a, b);
  }
  uint64_t rest[4 * kSamples];
  std::copy(keys, keys + n, rest);
  std::nth_element(rest, rest + k - 1, rest + n);
  return rest[k - 1];
}

// The best `top_k` of the rows offered so far, in rising order, among up to `room` of them. Rows are offered in rising
// order: a later one needs a better score than the last of the best.
class BestRows {
 public:
  BestRows(uint64_t* keys, int64_t top_k) : keys_(keys), top_k_(top_k), room_(select_room(top_k)) {}

  void add(uint64_t key) {
    if (size_ == room_) shrink();
    keys_[size_++] = key;
  }
  // Leaves the best.
  void shrink() {
    if (size_ <= top_k_) return;
    const uint64_t last = kth_smallest(keys_, size_, top_k_, keys_ + room_, keys_ + 2 * room_);
    int64_t kept = 0;
    for (int64_t i = 0; i < size_; ++i) {
      const uint64_t key = keys_[i];
      keys_[kept] = key;
      kept += key <= last;
    }
    size_ = kept;
    threshold_ = std::nextafter(score_of(last), INFINITY);
  }
  void make_room(int64_t count) {
    if (size_ + count > room_) shrink();
  }
  float threshold() const { return threshold_; }
  const uint64_t* keys() const { return keys_; }
  int64_t size() const { return size_; }

  // The rows as floats, then -1.
  void write(float* out) {
    shrink();
    for (int64_t i = 0; i < size_; ++i) out[i] = static_cast<float>(row_of(keys_[i]));
    std::fill(out + size_, out + top_k_, -1.0f);
  }

 private:
  uint64_t* keys_;  // and room for two copies behind them
  int64_t top_k_, room_, size_ = 0;
  float threshold_ = -INFINITY;
};

void write_all(int64_t count, int64_t top_k, float* out) {
  for (int64_t i = 0; i < top_k; ++i) out[i] = i < count ? static_cast<float>(i) : -1.0f;
}

// A token's packed queries and the weights of its heads, in one row of a step buffer.
struct Query {
  Act act{};
  float* weights;
  Query(float* row, const OpSpec& op) {
    const ActPart part = act_part(index_act(IndexKind{op.row_kind - kIndexRows}), op.head_dim, op.num_heads);
    uint8_t* base = reinterpret_cast<uint8_t*>(row);
    act.q = reinterpret_cast<int8_t*>(base);
    act.bf16 = reinterpret_cast<uint16_t*>(base);
    act.d = reinterpret_cast<float*>(base + part.d);
    act.terms = reinterpret_cast<int32_t*>(base + part.terms);
    weights = reinterpret_cast<float*>(base + part.bytes);
  }
};

}  // namespace

// Queries are turned, transformed where rows are, and rounded in a copy, head by head.
void Executor::run_index_pack(const OpSpec& op, int thread) {
  const int64_t dim = op.head_dim, heads = op.num_heads;
  const auto pack_query = kernels_->pack_index_query[op.row_kind - kIndexRows];
  alignas(64) float head[kMaxHeadDim];
  auto [begin, end] = rows_share(step_.n, thread);
  for (int64_t t = begin; t < end; ++t) {
    const Query query(row(op.out, t, thread), op);
    const float *q = row(op.x, t, thread), *weights = row(op.z, t, thread);
    for (int64_t h = 0; h < heads; ++h) {
      std::memcpy(head, q + h * dim, dim * sizeof(float));
      if (op.y >= 0) kernels_->rope_head(head + op.first, row(op.y, t, thread), op.rotary_dim, op.adjacent != 0);
      if (op.hadamard) kernels_->hadamard(head, op.head_dim);
      pack_query(head, dim, heads, h, query.act);
      query.weights[h] = weights[h] * op.value;
    }
  }
}

// Offers the rows of blocks [begin, end) that token t sees.
template <class Best>
void Executor::score_blocks(const OpSpec& op, int64_t t, int64_t begin, int64_t end, int thread, Best& best) const {
  const Segment& seg = step_.segments[segment_of_[t]];
  const int64_t rows = kBlockTokens / op.ratio, seen = (positions_[t] + 1) / op.ratio;
  const Query query(row(op.x, t, thread), op);
  const int32_t kind = op.row_kind - kIndexRows;
  IndexHeads heads{query.act, query.weights, op.head_dim, op.num_heads};
  kernels_->prepare_index_heads[kind](heads);
  alignas(64) float scores[kBlockTokens], kept[kBlockTokens];
  int32_t index[kBlockTokens];
  const auto tiles_of_block = [&](int64_t b) {
    return cache_.data() + seg.blocks[b] * spec_.block_bytes + op.cache_offset;
  };
  for (int64_t b = begin; b < end; ++b) {
    const int64_t count = std::min(rows, seen - b * rows);
    const uint8_t* next = b + 1 < end ? tiles_of_block(b + 1) : nullptr;
    kernels_->index_scores[kind]({&heads, tiles_of_block(b), (count + kTileRows - 1) / kTileRows, next, scores});
    best.make_room(count);
    const int32_t first = static_cast<int32_t>(b * rows);
    const int64_t found = kernels_->select_above(scores, count, best.threshold(), first, kept, index);
    for (int64_t i = 0; i < found; ++i) best.add(key_of(kept[i], index[i]));
  }
}

// With many tokens a thread chooses for its tokens; in a small step it puts forward the best of its blocks.
void Executor::run_index_select(const OpSpec& op, int thread) {
  const int64_t rows = kBlockTokens / op.ratio;
  uint64_t* keys = reinterpret_cast<uint64_t*>(work(thread));
  if (!step_.few) {
    const std::vector<int64_t>& start = costs_[cost_of_[&op - spec_.ops.data()]].start;
    const auto range = [&](int owner) { return std::pair<int64_t, int64_t>(start[owner], start[owner + 1]); };
    claim(op, thread, range, [&](int, int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t seen = (positions_[t] + 1) / op.ratio;
        if (seen <= op.top_k) {
          write_all(seen, op.top_k, row(op.out, t, thread));
          continue;
        }
        BestRows best(keys, op.top_k);
        score_blocks(op, t, 0, (seen + rows - 1) / rows, thread, best);
        best.write(row(op.out, t, thread));
      }
    });
    return;
  }
  for (int64_t t = 0; t < step_.n; ++t) {
    const int64_t seen = (positions_[t] + 1) / op.ratio;
    if (seen <= op.top_k) continue;
    const auto [begin, end] = share((seen + rows - 1) / rows, thread);
    BestRows best(keys, op.top_k);
    score_blocks(op, t, begin, end, thread, best);
    best.shrink();
    uint64_t* out = candidates(thread) + t * (op.top_k + 1);
    out[0] = static_cast<uint64_t>(best.size());
    std::memcpy(out + 1, best.keys(), best.size() * sizeof(uint64_t));
  }
}

// In a small step every thread chooses among the candidates of all, and has the chosen rows to itself.
void Executor::run_index_merge(const OpSpec& op, int thread) {
  if (!step_.few) return;
  for (int64_t t = 0; t < step_.n; ++t) {
    const int64_t seen = (positions_[t] + 1) / op.ratio;
    float* out = row(op.out, t, thread);
    if (seen <= op.top_k) {
      write_all(seen, op.top_k, out);
      continue;
    }
    BestRows best(reinterpret_cast<uint64_t*>(work(thread)), op.top_k);
    for (int other = 0; other < team_.size(); ++other) {
      const uint64_t* from = candidates(other) + t * (op.top_k + 1);
      for (uint64_t i = 1; i <= from[0]; ++i) best.add(from[i]);
    }
    best.write(out);
  }
}

}  // namespace hotset
