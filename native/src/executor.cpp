// One step: the op loop and the ops.
#include "executor.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace hotset {

namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

// Fewer units than this per thread and attention is cut finer, by spans.
constexpr int64_t kUnitsPerThread = 4;
// Bytes of the next matrix that a thread asks for before it waits.
constexpr int64_t kNextMatrixBytes = 4096;
// Query rows worth gathering before keys are read.
constexpr int32_t kRowsPerUnit = 24;

}  // namespace

const uint8_t* Executor::tile(const Weight& w, int64_t index) const {
  int thread = 0;
  while (share(w.num_tiles, thread).second <= index) ++thread;
  return w.base[thread] + (index - share(w.num_tiles, thread).first) * w.tile_stride;
}

float* Executor::row(int buffer, int64_t t, int thread) const {
  const BufferSpec& b = spec_.buffers[buffer];
  uint8_t* base = step_.few && b.is_private ? scratch_[thread].data() + private_offset_[b.slot]
                                            : workspace_.data() + slot_offset_[b.slot];
  return reinterpret_cast<float*>(base) + t * lds_[buffer];
}

Act Executor::packed(int buffer, int thread, int64_t k) const {
  const BufferSpec& b = spec_.buffers[buffer];
  const bool own = step_.few && b.is_private;
  uint8_t* base = own ? scratch_[thread].data() + private_offset_[b.slot] : workspace_.data() + slot_offset_[b.slot];
  const int64_t rows = own ? spec_.few_tokens : b.is_outputs ? spec_.max_outputs : spec_.max_tokens;
  Act act{};
  switch (static_cast<ActKind>(b.act)) {
    case ActKind::kF32: act.f32 = reinterpret_cast<float*>(base); break;
    case ActKind::kBF16: act.bf16 = reinterpret_cast<uint16_t*>(base); break;
    default:
      act.q = reinterpret_cast<int8_t*>(base);
      act.d = reinterpret_cast<float*>(base + rows * k);
      act.terms = reinterpret_cast<int32_t*>(base + rows * k + rows * (k / 32) * 4);
  }
  return act;
}

void Executor::step(const int32_t* tokens, int64_t num_tokens, const std::vector<Segment>& segments,
                    const int32_t* outputs, int64_t num_outputs) {
  step_ = {tokens, num_tokens, num_outputs, outputs, segments.data(), static_cast<int64_t>(segments.size()),
           num_tokens <= spec_.few_tokens, false};
  for (size_t s = 0; s < segments.size(); ++s) {
    for (int64_t i = 0; i < segments[s].count; ++i) {
      positions_[segments[s].first + i] = segments[s].position + i;
      segment_of_[segments[s].first + i] = static_cast<int32_t>(s);
    }
  }
  plan_attention();
  if (!step_.few) {
    for (std::atomic<int64_t>& claimed : claimed_) claimed.store(0, std::memory_order_relaxed);
  }
  team_.run([this](int thread) { run_ops(thread); });
}

const float* Executor::logits() const { return row(spec_.logits, 0, 0); }
int64_t Executor::logits_stride() const { return lds_[spec_.logits]; }

// Cuts the step's attention into units of (tokens, heads of one kv head, spans) and deals contiguous runs of about
// equal cost to the threads. The cut never changes a bit: a row's partials are formed per block and merged in order
// wherever they were computed.
void Executor::plan_attention() {
  units_.clear();
  unit_cost_.clear();
  partial_tokens_.clear();
  partial_base_.clear();
  const auto attend = std::find_if(spec_.ops.begin(), spec_.ops.end(), [](const OpSpec& o) { return o.kind == kOpAttend; });
  if (attend == spec_.ops.end()) return;
  const int32_t group = attend->num_heads / attend->num_kv_heads;
  const int32_t tile = std::max(1, kRowsPerUnit / group);
  int64_t coarse = 0;
  for (int64_t s = 0; s < step_.num_segments; ++s) {
    coarse += (step_.segments[s].count + tile - 1) / tile * attend->num_kv_heads;
  }
  const bool fine = coarse < kUnitsPerThread * team_.size();
  int64_t floats = 0;
  const int64_t row_floats = attend->head_dim + 2;
  for (int64_t s = 0; s < step_.num_segments; ++s) {
    const Segment& seg = step_.segments[s];
    const int64_t spans = (seg.position + seg.count + kSpanTokens - 1) / kSpanTokens;
    const int64_t need = seg.count * attend->num_heads * spans * row_floats;
    const bool split = fine && spans > 1 && floats + need <= spec_.partial_floats;
    int64_t base = floats;
    if (split) {
      step_.has_partials = true;
      for (int64_t i = 0; i < seg.count; ++i) {
        partial_tokens_.push_back(static_cast<int32_t>(seg.first + i));
        partial_base_.push_back(base + i * attend->num_heads * spans * row_floats);
      }
      floats += need;
    }
    const int32_t heads = std::min<int32_t>(group, kMaxAttendRows);
    for (int32_t t = 0; t < seg.count; t += tile) {
      const int32_t count = std::min<int32_t>(tile, seg.count - t);
      for (int32_t kv = 0; kv < attend->num_kv_heads; ++kv) {
        for (int32_t h = 0; h < group; h += heads) {
          for (int32_t sp = 0; sp < (split ? spans : 1); ++sp) {
            AttendUnit u{static_cast<int32_t>(s), t, count, kv, kv * group + h, std::min(heads, group - h), sp,
                         static_cast<int32_t>(split ? 1 : spans), split ? base : -1};
            int64_t last = seg.position + t + count, begin = static_cast<int64_t>(sp) * kSpanTokens;
            int64_t keys = std::max<int64_t>(0, split ? std::min<int64_t>(last - begin, kSpanTokens) : last);
            units_.push_back(u);
            unit_cost_.push_back(64.0 + static_cast<double>(keys) * (2 + count * u.num_heads));
          }
        }
      }
    }
  }
  double total = 0, seen = 0;
  for (double c : unit_cost_) total += c;
  int thread = 0;
  unit_start_[0] = 0;
  for (size_t i = 0; i < units_.size(); ++i) {
    while (thread + 1 < team_.size() && seen + unit_cost_[i] / 2 >= total * (thread + 1) / team_.size()) {
      unit_start_[++thread] = static_cast<int64_t>(i);
    }
    seen += unit_cost_[i];
  }
  while (thread < team_.size()) unit_start_[++thread] = static_cast<int64_t>(units_.size());
}

// Calls work(owner, begin, end) on pieces of the threads' shares, range(owner), of an op that costs the same wherever it
// runs: a thread takes its own share first and then from those that are behind, so a thread that the system stopped
// does not hold up the step with all of its share. In a step of few tokens every thread keeps to its share: taking
// turns would cost more than it saves.
template <class Range, class Work> void Executor::claim(const OpSpec& op, int thread, Range range, Work work) {
  if (step_.few) {
    const auto [begin, end] = range(thread);
    if (begin < end) work(thread, begin, end);
    return;
  }
  std::atomic<int64_t>* claimed = &claimed_[(&op - spec_.ops.data()) * team_.size()];
  for (int i = 0; i < team_.size(); ++i) {
    const int owner = (thread + i) % team_.size();
    const auto [begin, end] = range(owner);
    int64_t at = claimed[owner].load(std::memory_order_relaxed);
    while (begin + at < end) {
      const int64_t next = at + (end - begin - at + 2) / 3;
      if (!claimed[owner].compare_exchange_weak(at, next, std::memory_order_relaxed)) continue;
      work(owner, begin + at, begin + next);
      at = claimed[owner].load(std::memory_order_relaxed);
    }
  }
}

void Executor::run_ops(int thread) {
  const bool timed = profile_ && thread == 0;
  for (size_t i = 0; i < spec_.ops.size(); ++i) {
    const OpSpec& op = spec_.ops[i];
    if (op.kind == kOpAttendMerge && !step_.has_partials) continue;
    int64_t t0 = timed ? now_ns() : 0;
    if (step_.few ? op.barrier_few : op.barrier_many) team_.barrier();
    int64_t t1 = timed ? now_ns() : 0;
    if (op.kind == kOpRmsNorm && i + 1 < spec_.ops.size() && can_fuse(op, spec_.ops[i + 1])) {
      run_norm_pack(op, spec_.ops[i + 1], thread);
      ++i;
    } else {
      run_op(op, thread);
    }
    if (timed) wait_ns_[i] += t1 - t0, op_ns_[i] += now_ns() - t1;
  }
}

// A norm whose row the next op packs: done row by row, so that the row is packed while it is in the first cache.
bool Executor::can_fuse(const OpSpec& norm, const OpSpec& next) const {
  return next.kind == kOpPack && next.x == norm.out && !(step_.few ? next.barrier_few : next.barrier_many);
}

void Executor::run_norm_pack(const OpSpec& norm, const OpSpec& pack, int thread) {
  const int64_t n = rows_of(norm.x), k = spec_.buffers[norm.x].width;
  auto [begin, end] = step_.few ? std::pair<int64_t, int64_t>(0, n) : share(n, thread);
  const Act act = packed(pack.out, thread, k);
  auto pack_row = kernels_->pack_act[spec_.buffers[pack.out].act];
  for (int64_t t = begin; t < end; ++t) {
    float* y = row(norm.out, t, thread);
    kernels_->rms_norm(row(norm.x, t, thread), weights_[norm.weight].vector, norm.value, k, y);
    pack_row(y, k, n, t, act);
  }
}

void Executor::run_op(const OpSpec& op, int thread) {
  switch (op.kind) {
    case kOpEmbed: {
      const WeightSpec& w = spec_.weights[op.weight];
      auto [begin, end] = share(step_.n, thread);
      for (int64_t t = begin; t < end; ++t) {
        int32_t token = step_.tokens[t];
        kernels_->unpack_row(w.format, tile(weights_[op.weight], token / kTileRows), token % kTileRows, w.in_width,
                             row(op.out, t, thread));
      }
      break;
    }
    case kOpAngles: run_angles(op, thread); break;
    case kOpRmsNorm: {
      auto [begin, end] = step_.few ? std::pair<int64_t, int64_t>(0, rows_of(op.x)) : share(rows_of(op.x), thread);
      for (int64_t t = begin; t < end; ++t) {
        kernels_->rms_norm(row(op.x, t, thread), weights_[op.weight].vector, op.value, spec_.buffers[op.x].width,
                           row(op.out, t, thread));
      }
      break;
    }
    case kOpSiluMul: {
      auto [begin, end] = step_.few ? std::pair<int64_t, int64_t>(0, rows_of(op.out)) : share(rows_of(op.out), thread);
      for (int64_t t = begin; t < end; ++t) {
        kernels_->silu_mul(row(op.x, t, thread), row(op.y, t, thread), lds_[op.out], row(op.out, t, thread));
      }
      break;
    }
    case kOpPack: run_pack(op, thread); break;
    case kOpLinear:
    case kOpGated: run_linear(op, thread); break;
    case kOpRope: run_rope(op, thread); break;
    case kOpStoreKV: run_store(op, thread); break;
    case kOpAttend: run_attend(op, thread); break;
    case kOpAttendMerge: run_attend_merge(op, thread); break;
    case kOpSelect: {
      auto [begin, end] = share(step_.m, thread);
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(row(op.out, i, thread), row(op.x, step_.outputs[i], thread), lds_[op.x] * sizeof(float));
      }
      break;
    }
    default: break;
  }
}

void Executor::run_angles(const OpSpec& op, int thread) {
  auto [begin, end] = step_.few ? std::pair<int64_t, int64_t>(0, step_.n) : share(step_.n, thread);
  const int64_t half = static_cast<int64_t>(spec_.frequencies.size());
  for (int64_t t = begin; t < end; ++t) {
    float* out = row(op.out, t, thread);
    for (int64_t i = 0; i < half; ++i) {
      // The references round position times frequency to float before taking the cosine.
      double angle = static_cast<float>(positions_[t]) * spec_.frequencies[i];
      out[i] = static_cast<float>(std::cos(angle));
      out[half + i] = static_cast<float>(std::sin(angle));
    }
  }
}

void Executor::run_pack(const OpSpec& op, int thread) {
  const int64_t n = rows_of(op.x), k = spec_.buffers[op.x].width;
  auto [begin, end] = step_.few ? std::pair<int64_t, int64_t>(0, n) : share(n, thread);
  const Act act = packed(op.out, thread, k);
  auto pack = kernels_->pack_act[spec_.buffers[op.out].act];
  for (int64_t t = begin; t < end; ++t) pack(row(op.x, t, thread), k, n, t, act);
}

void Executor::run_linear(const OpSpec& op, int thread) {
  const WeightSpec& spec = spec_.weights[op.weight];
  const Weight& w = weights_[op.weight];
  const Act act = packed(op.x, thread, spec.in_width);
  const int64_t n = rows_of(op.out);
  if (n == 0) return;
  claim(op, thread, [&](int owner) { return share(w.num_tiles, owner); }, [&](int owner, int64_t begin, int64_t end) {
    const uint8_t* tiles = w.base[owner] + (begin - share(w.num_tiles, owner).first) * w.tile_stride;
    LinearArgs args{tiles, w.tile_bytes, w.tile_stride, end - begin, spec.in_width, n, &act,
                    row(op.out, 0, thread) + begin * kTileRows, lds_[op.out], op.add != 0};
    (op.kind == kOpGated ? kernels_->gated : kernels_->linear)[spec.format](args);
    if (step_.few) {
      // What follows in the arena is the next matrix of the program: its first lines arrive while the team gathers.
      const uint8_t* next = args.tiles + args.num_tiles * args.tile_stride;
      for (int64_t i = 0; i < kNextMatrixBytes; i += 64) __builtin_prefetch(next + i, 0, 3);
    }
  });
}

void Executor::run_rope(const OpSpec& op, int thread) {
  auto [begin, end] = share(step_.n * op.num_heads, thread);
  for (int64_t i = begin; i < end; ++i) {
    int64_t t = i / op.num_heads, h = i % op.num_heads;
    kernels_->rope_head(row(op.x, t, thread) + h * op.head_dim, row(op.y, t, thread), op.rotary_dim, op.adjacent != 0);
  }
}

void Executor::run_store(const OpSpec& op, int thread) {
  auto [begin, end] = share(step_.n * op.num_kv_heads, thread);
  const int64_t head_bytes = static_cast<int64_t>(kBlockTokens) * op.head_dim * 2;
  for (int64_t i = begin; i < end; ++i) {
    int64_t t = i / op.num_kv_heads, h = i % op.num_kv_heads, position = positions_[t];
    int32_t block = step_.segments[segment_of_[t]].blocks[position / kBlockTokens];
    uint8_t* keys = cache_.data() + block * spec_.block_bytes + op.cache_offset + h * 2 * head_bytes;
    kernels_->store_kv[op.cache_kind](row(op.x, t, thread) + h * op.head_dim, row(op.y, t, thread) + h * op.head_dim, op.head_dim,
                       position % kBlockTokens, keys, keys + head_bytes);
  }
}

void Executor::run_attend(const OpSpec& op, int thread) {
  const int64_t rows_max = spec_.attend_rows, max_dim = spec_.attend_head_dim;
  float* base = reinterpret_cast<float*>(scratch_[thread].data() + (private_bytes_ + 63) / 64 * 64);
  AttendScratch scratch{base, base + rows_max * max_dim, nullptr, nullptr, nullptr};
  scratch.values = scratch.scores + rows_max * kBlockTokens;
  scratch.span = scratch.values + rows_max * max_dim;
  scratch.total = scratch.span + rows_max * (max_dim + 2);
  const auto range = [&](int owner) { return std::pair<int64_t, int64_t>(unit_start_[owner], unit_start_[owner + 1]); };
  claim(op, thread, range, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) attend_unit(op, units_[i], scratch, thread);
  });
}

void Executor::attend_unit(const OpSpec& op, const AttendUnit& u, const AttendScratch& scratch, int thread) {
  const int32_t dim = op.head_dim;
  const int64_t head_bytes = static_cast<int64_t>(kBlockTokens) * dim * 2;
  const float* q[kMaxAttendRows];
  int64_t visible[kMaxAttendRows];
  const Segment& seg = step_.segments[u.segment];
  int32_t rows = 0;
  for (int32_t t = 0; t < u.num_tokens; ++t) {
    for (int32_t h = 0; h < u.num_heads; ++h, ++rows) {
      q[rows] = row(op.x, seg.first + u.token + t, thread) + (u.head + h) * dim;
      visible[rows] = seg.position + u.token + t + 1;
    }
  }
  int64_t key_offset = op.cache_offset + u.kv_head * 2 * head_bytes;  // a head's keys, then its values
  AttendArgs args{q, visible, rows, dim, op.value, u.span, u.num_spans, cache_.data(), seg.blocks, spec_.block_bytes,
                  key_offset, key_offset + head_bytes, &scratch};
  kernels_->attend_rows[op.cache_kind](args);
  const int64_t spans = (seg.position + seg.count + kSpanTokens - 1) / kSpanTokens;
  rows = 0;
  for (int32_t t = 0; t < u.num_tokens; ++t) {
    for (int32_t h = 0; h < u.num_heads; ++h, ++rows) {
      const float* total = scratch.total + rows * (dim + 2);
      if (u.partial < 0) {
        kernels_->attend_finish(total, dim, row(op.out, seg.first + u.token + t, thread) + (u.head + h) * dim);
      } else {
        int64_t at = ((static_cast<int64_t>(u.token) + t) * op.num_heads + u.head + h) * spans + u.span;
        std::memcpy(reinterpret_cast<float*>(partials_.data()) + u.partial + at * (dim + 2), total, sizeof(float) * (dim + 2));
      }
    }
  }
}

void Executor::run_attend_merge(const OpSpec& op, int thread) {
  const int32_t dim = op.head_dim;
  auto [begin, end] = share(static_cast<int64_t>(partial_tokens_.size()) * op.num_heads, thread);
  alignas(64) float acc[kMaxHeadDim + 2];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t index = i / op.num_heads, h = i % op.num_heads, t = partial_tokens_[index];
    const Segment& seg = step_.segments[segment_of_[t]];
    const int64_t spans = (seg.position + seg.count + kSpanTokens - 1) / kSpanTokens;
    const float* part = reinterpret_cast<const float*>(partials_.data()) + partial_base_[index] + h * spans * (dim + 2);
    acc[1] = 0.0f;
    for (int64_t s = 0; s < spans; ++s) kernels_->attend_merge(acc, part + s * (dim + 2), dim);
    kernels_->attend_finish(acc, dim, row(op.out, t, thread) + h * dim);
  }
}

}  // namespace hotset
