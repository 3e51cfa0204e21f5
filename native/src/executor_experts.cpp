// Mixture of experts: routing, and products of (token, expert) pairs expert by expert, each expert's weights read once.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "executor.h"

namespace hotset {

namespace {

float sqrt_softplus(float x) { return std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x))); }

// The `top_k` best of s + bias in rising order, of equals the lower expert. A NaN is never better than a number.
void choose_experts(const float* s, const float* bias, int32_t num_experts, int32_t top_k, int32_t* ids) {
  bool taken[kMaxExperts] = {};
  for (int32_t i = 0; i < top_k; ++i) {
    int32_t best = -1;
    float best_value = 0.0f;
    for (int32_t e = 0; e < num_experts; ++e) {
      if (taken[e] || (best >= 0 && !(s[e] + bias[e] > best_value))) continue;
      best = e, best_value = s[e] + bias[e];
    }
    taken[best] = true;
    ids[i] = best;
  }
  std::sort(ids, ids + top_k);
}

// The pairs of a step, expert by expert and inside an expert by token.
struct PairOrder {
  int32_t* start;   // [num_experts + 1]
  int32_t* token;   // [pairs]
  float* weight;    // [pairs]
  PairOrder(uint8_t* base, int64_t header_bytes, int64_t num_pairs)
      : start(reinterpret_cast<int32_t*>(base)),
        token(reinterpret_cast<int32_t*>(base + header_bytes)),
        weight(reinterpret_cast<float*>(token + num_pairs)) {}
};

}  // namespace

// Expert ids in rising order, then their weights, as floats.
void Executor::run_route(const OpSpec& op, int thread) {
  float s[kMaxExperts];
  auto [begin, end] = rows_share(step_.n, thread);
  for (int64_t t = begin; t < end; ++t) {
    const float* scores = row(op.x, t, thread);
    int32_t ids[kMaxTopK];
    for (int32_t e = 0; e < op.num_experts; ++e) s[e] = sqrt_softplus(scores[e]);
    if (op.weight2 >= 0) {
      const int32_t* table = reinterpret_cast<const int32_t*>(weights_[op.weight2].vector);
      std::memcpy(ids, table + int64_t{step_.tokens[t]} * op.top_k, op.top_k * sizeof(int32_t));
      std::sort(ids, ids + op.top_k);
    } else {
      choose_experts(s, weights_[op.weight].vector, op.num_experts, op.top_k, ids);
    }
    float sum = 0.0f;
    for (int32_t i = 0; i < op.top_k; ++i) sum += s[ids[i]];
    float* out = row(op.out, t, thread);
    for (int32_t i = 0; i < op.top_k; ++i) {
      out[i] = static_cast<float>(ids[i]);
      out[op.top_k + i] = op.value * s[ids[i]] / sum;
    }
  }
}

// A counting sort; with many tokens one thread does it for all.
void Executor::run_pair_order(const OpSpec& op, int thread) {
  if (!step_.few && thread != 0) return;
  const int64_t top_k = op.top_k;
  const PairOrder order(place(op.out, thread), spec_.buffers[op.out].header_bytes, step_.n * top_k);
  std::fill(order.start, order.start + op.num_experts + 1, 0);
  for (int64_t t = 0; t < step_.n; ++t) {
    const float* route = row(op.x, t, thread);
    for (int64_t i = 0; i < top_k; ++i) ++order.start[static_cast<int32_t>(route[i]) + 1];
  }
  for (int32_t e = 0; e < op.num_experts; ++e) order.start[e + 1] += order.start[e];
  for (int64_t t = 0; t < step_.n; ++t) {
    const float* route = row(op.x, t, thread);
    for (int64_t i = 0; i < top_k; ++i) {
      const int32_t at = order.start[static_cast<int32_t>(route[i])]++;
      order.token[at] = static_cast<int32_t>(t);
      order.weight[at] = route[top_k + i];
    }
  }
  // Filling has moved every start to the next one's place.
  for (int32_t e = op.num_experts; e > 0; --e) order.start[e] = order.start[e - 1];
  order.start[0] = 0;
}

// The rows of a single token's experts are all the same: packed once, it serves all of them.
void Executor::run_pack_pairs(const OpSpec& op, int thread) {
  const ActKind kind = static_cast<ActKind>(spec_.buffers[op.out].act);
  const int64_t k = spec_.buffers[op.x].width, pairs = step_.n * op.top_k;
  const Act act = packed(op.out, thread, k);
  auto pack = kernels_->pack_act[spec_.buffers[op.out].act];
  if (step_.n == 1 && !op.by_pair) {
    pack(row(op.x, 0, thread), k, 1, 0, act);
    return;
  }
  const PairOrder order(place(op.y, thread), spec_.buffers[op.y].header_bytes, pairs);
  auto [begin, end] = rows_share(pairs, thread);
  int64_t e = std::upper_bound(order.start, order.start + op.num_experts + 1, begin) - order.start - 1;
  for (int64_t p = begin; p < end; ++p) {
    while (order.start[e + 1] <= p) ++e;
    const int64_t first = order.start[e], count = order.start[e + 1] - first;
    pack(row(op.x, op.by_pair ? p : order.token[p], thread), k, count, p - first, act_from(act, kind, k, first));
  }
}

// Columns of every pair's row, times the router's weight.
void Executor::run_expert_gated(const OpSpec& op, int thread) {
  const WeightSpec& spec = spec_.weights[op.weight];
  const Weight& w = weights_[op.weight];
  const int64_t k = spec.in_width, ld = lds_[op.out];
  const PairOrder order(place(op.y, thread), spec_.buffers[op.y].header_bytes, step_.n * op.top_k);
  const Act packed_pairs = packed(op.x, thread, k);
  const ActKind kind = static_cast<ActKind>(spec_.buffers[op.x].act);
  claim(op, thread, [&](int owner) { return share(w.num_tiles, owner); }, [&](int owner, int64_t begin, int64_t end) {
    for (int64_t e = 0; e < op.num_experts; ++e) {
      const int64_t first = order.start[e], count = order.start[e + 1] - first;
      if (count == 0) continue;
      const Act act = act_from(packed_pairs, kind, k, step_.n == 1 ? 0 : first);
      float* y = row(op.out, first, thread) + begin * kTileRows;
      const uint8_t* tiles = tiles_of(w, owner, begin, e);
      LinearArgs args{tiles, w.tile_bytes, w.tile_stride, end - begin, k, count, &act, y, ld, false};
      args.limit = op.limit;
      kernels_->gated[spec.format](args);
      for (int64_t p = 0; p < count; ++p) {
        const float weight = order.weight[first + p];
        for (int64_t c = 0; c < (end - begin) * kTileRows; ++c) y[p * ld + c] *= weight;
      }
    }
  });
}

// Columns of every token's sum over its experts, in rising order.
void Executor::run_expert_down(const OpSpec& op, int thread) {
  const WeightSpec& spec = spec_.weights[op.weight];
  const Weight& w = weights_[op.weight];
  const int64_t k = spec.in_width, ld = lds_[op.out];
  const PairOrder order(place(op.y, thread), spec_.buffers[op.y].header_bytes, step_.n * op.top_k);
  const Act packed_pairs = packed(op.x, thread, k);
  const ActKind kind = static_cast<ActKind>(spec_.buffers[op.x].act);
  claim(op, thread, [&](int owner) { return share(w.num_tiles, owner); }, [&](int owner, int64_t begin, int64_t end) {
    float* y = row(op.out, 0, thread) + begin * kTileRows;
    for (int64_t t = 0; t < step_.n; ++t) std::memset(y + t * ld, 0, (end - begin) * kTileRows * sizeof(float));
    for (int64_t e = 0; e < op.num_experts; ++e) {
      const int64_t first = order.start[e], count = order.start[e + 1] - first;
      if (count == 0) continue;
      const Act act = act_from(packed_pairs, kind, k, first);
      const uint8_t* tiles = tiles_of(w, owner, begin, e);
      LinearArgs args{tiles, w.tile_bytes, w.tile_stride, end - begin, k, count, &act, y, ld, true};
      args.rows = order.token + first;
      kernels_->linear[spec.format](args);
    }
  });
}

}  // namespace hotset
