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
// Fewer tiles than this per thread and a product of many tokens is cut by tokens too, in runs of this many.
constexpr int64_t kTilesPerThread = 4, kTokenRun = 64;
// Query rows worth gathering before keys are read.
constexpr int32_t kRowsPerUnit = 24;

}  // namespace

const uint8_t* Executor::tile(const Weight& w, int64_t index) const {
  int thread = 0;
  while (share(w.num_tiles, thread).second <= index) ++thread;
  return w.base[thread] + (index - share(w.num_tiles, thread).first) * w.tile_stride;
}

uint8_t* Executor::place(int buffer, int thread) const {
  const BufferSpec& b = spec_.buffers[buffer];
  return step_.few && b.is_private ? scratch_[thread].data() + private_offset_[b.slot]
                                   : workspace_.data() + slot_offset_[b.slot];
}

float* Executor::row(int buffer, int64_t t, int thread) const {
  return reinterpret_cast<float*>(place(buffer, thread) + spec_.buffers[buffer].header_bytes) + t * lds_[buffer];
}

// The packed rows of a buffer, or of one of its groups of `k` columns.
Act Executor::packed(int buffer, int thread, int64_t k, int64_t group) const {
  const BufferSpec& b = spec_.buffers[buffer];
  const bool own = step_.few && b.is_private;
  const int64_t tokens = own ? spec_.few_tokens : b.is_outputs ? spec_.max_outputs : spec_.max_tokens;
  const ActKind kind = static_cast<ActKind>(b.act);
  const ActPart part = act_part(kind, k, tokens * b.rows_per_token);
  uint8_t* base = place(buffer, thread) + group * ((part.bytes + 63) / 64 * 64);
  Act act{};
  switch (kind) {
    case ActKind::kF32: act.f32 = reinterpret_cast<float*>(base); break;
    case ActKind::kBF16: act.bf16 = reinterpret_cast<uint16_t*>(base); break;
    default:
      act.q = reinterpret_cast<int8_t*>(base);
      act.d = reinterpret_cast<float*>(base + part.d);
      act.terms = reinterpret_cast<int32_t*>(base + part.terms);
  }
  return act;
}

void Executor::step(const int32_t* tokens, int64_t num_tokens, const std::vector<Segment>& segments,
                    const int32_t* outputs, int64_t num_outputs) {
  step_ = {tokens, num_tokens, num_outputs, outputs, segments.data(), static_cast<int64_t>(segments.size()),
           num_tokens <= spec_.few_tokens, false};
  if (nodes_.size() > 1) use_slots();
  for (size_t s = 0; s < segments.size(); ++s) {
    for (int64_t i = 0; i < segments[s].count; ++i) {
      positions_[segments[s].first + i] = segments[s].position + i;
      segment_of_[segments[s].first + i] = static_cast<int32_t>(s);
    }
  }
  plan_attention();
  plan_costs();
  team_.run([this](int thread) {
    // Each thread its own: one for all would fetch the lines of every core.
    for (const OpSpec& op : spec_.ops) {
      if (op.is_lent || !step_.few) claimed_of(op, thread).store(0, std::memory_order_relaxed);
    }
    team_.barrier();
    run_ops(thread);
  });
}

// Kernels find a block by its number times its size: with several nodes the numbers are those of slots.
void Executor::use_slots() {
  segments_.assign(step_.segments, step_.segments + step_.num_segments);
  slots_.clear();
  const auto num_blocks = [](const Segment& seg) { return (seg.position + seg.count + kBlockTokens - 1) / kBlockTokens; };
  for (const Segment& seg : segments_) slots_.insert(slots_.end(), seg.blocks, seg.blocks + num_blocks(seg));
  const int32_t* at = slots_.data();
  for (int32_t& block : slots_) block = static_cast<int32_t>(slot_of(block));
  for (Segment& seg : segments_) seg.blocks = at, at += num_blocks(seg);
  step_.segments = segments_.data();
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
  const auto is_attend = [](const OpSpec& op) { return op.kind == kOpAttend; };
  const auto attend = std::find_if(spec_.ops.begin(), spec_.ops.end(), is_attend);
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

void Executor::run_ops(int thread) {
  const bool timed = profile_ && thread == 0;
  for (size_t i = 0; i < spec_.ops.size(); ++i) {
    const OpSpec& op = spec_.ops[i];
    if (is_skipped(op)) continue;
    int64_t t0 = timed ? now_ns() : 0;
    if (waits(op)) team_.barrier();
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
  return next.kind == kOpPack && next.x == norm.out && next.groups == 1 &&
         !(step_.few ? next.barrier_few : next.barrier_many);
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
    case kOpEmbed: run_embed(op, thread); break;
    case kOpAngles: run_angles(op, thread); break;
    case kOpRmsNorm: {
      auto [begin, end] = rows_share(rows_of(op.x), thread);
      for (int64_t t = begin; t < end; ++t) {
        kernels_->rms_norm(row(op.x, t, thread), weights_[op.weight].vector, op.value, spec_.buffers[op.x].width,
                           row(op.out, t, thread));
      }
      break;
    }
    case kOpSiluMul: run_silu_mul(op, thread); break;
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
    case kOpHeadNorm: run_head_norm(op, thread); break;
    case kOpHyperMix: run_hyper_mix(op, thread); break;
    case kOpHyperMerge: run_hyper_merge(op, thread); break;
    case kOpEncodeRows: run_encode_rows(op, thread); break;
    case kOpCompress: run_compress(op, thread); break;
    case kOpStoreState: run_store_state(op, thread); break;
    case kOpStoreWindow: run_store_window(op, thread); break;
    case kOpIndexPack: run_index_pack(op, thread); break;
    case kOpIndexSelect: run_index_select(op, thread); break;
    case kOpIndexMerge: run_index_merge(op, thread); break;
    case kOpAttendRows: run_attend_rows(op, thread); break;
    case kOpAttendRowsMerge: run_attend_rows_merge(op, thread); break;
    case kOpRoute: run_route(op, thread); break;
    case kOpPairOrder: run_pair_order(op, thread); break;
    case kOpPackPairs: run_pack_pairs(op, thread); break;
    case kOpExpertGated: run_expert_gated(op, thread); break;
    case kOpExpertDown: run_expert_down(op, thread); break;
    default: break;
  }
}

void Executor::run_embed(const OpSpec& op, int thread) {
  const WeightSpec& w = spec_.weights[op.weight];
  auto [begin, end] = spec_.buffers[op.out].is_private ? rows_share(step_.n, thread) : share(step_.n, thread);
  for (int64_t t = begin; t < end; ++t) {
    const int32_t token = step_.tokens[t];
    float* out = row(op.out, t, thread);
    kernels_->unpack_row(w.format, tile(weights_[op.weight], token / kTileRows), token % kTileRows, w.in_width, out);
    for (int32_t i = 1; i < op.copies; ++i) std::memcpy(out + i * w.in_width, out, w.in_width * sizeof(float));
  }
}

// Cosines, then sines, of the op's `half` frequencies at a position.
void Executor::angles_at(const OpSpec& op, int64_t position, int64_t half, float* out) const {
  for (int64_t i = 0; i < half; ++i) {
    // The references round position times frequency to float before taking the cosine.
    const double angle = static_cast<float>(position) * spec_.frequencies[op.frequency + i];
    out[i] = static_cast<float>(std::cos(angle));
    out[half + i] = static_cast<float>(std::sin(angle));
  }
}

void Executor::run_angles(const OpSpec& op, int thread) {
  auto [begin, end] = rows_share(step_.n, thread);
  const int64_t half = spec_.buffers[op.out].width / 2;
  for (int64_t t = begin; t < end; ++t) angles_at(op, positions_[t], half, row(op.out, t, thread));
}

void Executor::run_silu_mul(const OpSpec& op, int thread) {
  constexpr int64_t kStep = 256;
  alignas(64) float gate[kStep], up[kStep];
  const int64_t width = lds_[op.out];
  auto [begin, end] = rows_share(rows_of(op.out), thread);
  for (int64_t t = begin; t < end; ++t) {
    const float *x = row(op.x, t, thread), *y = row(op.y, t, thread);
    float* out = row(op.out, t, thread);
    if (op.limit == 0.0f) {
      kernels_->silu_mul(x, y, width, out);
      continue;
    }
    for (int64_t first = 0; first < width; first += kStep) {
      const int64_t count = std::min(kStep, width - first);
      for (int64_t i = 0; i < count; ++i) {
        gate[i] = std::min(x[first + i], op.limit);
        up[i] = std::max(-op.limit, std::min(y[first + i], op.limit));
      }
      kernels_->silu_mul(gate, up, count, out + first);
    }
  }
}

void Executor::run_pack(const OpSpec& op, int thread) {
  const int64_t n = rows_of(op.x), k = spec_.buffers[op.x].width / op.groups;
  auto [begin, end] = rows_share(n, thread);
  auto pack = kernels_->pack_act[spec_.buffers[op.out].act];
  for (int64_t g = 0; g < op.groups; ++g) {
    const Act act = packed(op.out, thread, k, g);
    for (int64_t t = begin; t < end; ++t) pack(row(op.x, t, thread) + g * k, k, n, t, act);
  }
}

void Executor::run_linear(const OpSpec& op, int thread) {
  const WeightSpec& spec = spec_.weights[op.weight];
  const Weight& w = weights_[op.weight];
  const ActKind kind = static_cast<ActKind>(spec_.buffers[op.x].act);
  const int64_t n = rows_of(op.out), k = spec.in_width, group_tiles = w.num_tiles / op.groups;
  if (n == 0) return;
  auto product = (op.kind == kOpGated ? kernels_->gated : kernels_->linear)[spec.format];
  // A matrix with few rows (the streams' mix, the router) is also cut by tokens, at whole groups of packed rows.
  const int64_t run = step_.few || w.num_tiles >= kTilesPerThread * team_.size() ? n : kTokenRun;
  const int64_t runs = (n + run - 1) / run;
  const auto range = [&](int owner) {
    const auto [begin, end] = share(w.num_tiles, owner);
    return std::pair<int64_t, int64_t>(begin * runs, end * runs);
  };
  claim(op, thread, range, [&](int owner, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      // A piece may reach over groups: each has an input of its own.
      const int64_t tile = at / runs, first = at % runs * run, group = tile / group_tiles;
      const int64_t tiles = runs > 1 ? 1 : std::min(end, (group + 1) * group_tiles) - tile;
      const Act act = act_from(packed(op.x, thread, k, group), kind, k, first);
      LinearArgs args{tiles_of(w, owner, tile), w.tile_bytes, w.tile_stride, tiles, k, std::min(run, n - first), &act,
                      row(op.out, first, thread) + tile * kTileRows, lds_[op.out], op.add != 0};
      args.limit = op.limit;
      product(args);
      at += tiles;
    }
    if (step_.few && owner == thread && end == share(w.num_tiles, thread).second) {
      // What follows in the arena is the next matrix of the program: its first lines arrive while the team gathers.
      const uint8_t* next = tiles_of(w, owner, end);
      for (int64_t i = 0; i < kNextMatrixBytes; i += 64) __builtin_prefetch(next + i, 0, 3);
    }
  });
}

void Executor::run_rope(const OpSpec& op, int thread) {
  // In a small step a thread turns the heads of its own copy, or its share of the common one.
  const bool own = step_.few && spec_.buffers[op.x].is_private;
  auto [begin, end] = own ? std::pair<int64_t, int64_t>(0, rows_of(op.x) * op.num_heads)
                          : share(rows_of(op.x) * op.num_heads, thread);
  alignas(64) float back[kMaxHeadDim];
  int64_t turned = -1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t t = i / op.num_heads, h = i % op.num_heads;
    const float* angles = row(op.y, t, thread);
    if (op.inverse) {
      const int32_t half = op.rotary_dim / 2;
      if (turned != t) {
        std::memcpy(back, angles, half * sizeof(float));
        for (int32_t j = half; j < op.rotary_dim; ++j) back[j] = -angles[j];
        turned = t;
      }
      angles = back;
    }
    kernels_->rope_head(row(op.x, t, thread) + h * op.head_dim + op.first, angles, op.rotary_dim, op.adjacent != 0);
  }
}

void Executor::run_head_norm(const OpSpec& op, int thread) {
  const bool own = step_.few && spec_.buffers[op.x].is_private;
  auto [begin, end] = own ? std::pair<int64_t, int64_t>(0, rows_of(op.x) * op.num_heads)
                          : share(rows_of(op.x) * op.num_heads, thread);
  for (int64_t i = begin; i < end; ++i) {
    kernels_->head_norm(row(op.x, i / op.num_heads, thread) + i % op.num_heads * op.head_dim, op.head_dim, op.value);
  }
}

void Executor::run_hyper_mix(const OpSpec& op, int thread) {
  auto [begin, end] = rows_share(rows_of(op.x), thread);
  for (int64_t t = begin; t < end; ++t) {
    HyperArgs args{row(op.x, t, thread), row(op.y, t, thread), weights_[op.weight].vector, weights_[op.weight2].vector,
                   spec_.buffers[op.out].width, op.num_heads, op.iterations, op.value, op.value2,
                   row(op.out, t, thread), op.out2 < 0 ? nullptr : row(op.out2, t, thread)};
    kernels_->hyper_mix(args);
  }
}

// In a small step every thread merges its own copy: columns that it shared would go to and fro between the cores.
void Executor::run_hyper_merge(const OpSpec& op, int thread) {
  const int64_t width = spec_.buffers[op.y].width, n = rows_of(op.x), tiles = width / kTileRows;
  const auto merge = [&](int, int64_t begin, int64_t end) {
    for (int64_t t = 0; t < n; ++t) {
      kernels_->hyper_merge(row(op.x, t, thread), width, begin * kTileRows, (end - begin) * kTileRows,
                            row(op.y, t, thread), row(op.z, t, thread), op.num_heads);
    }
  };
  if (step_.few) return merge(thread, 0, tiles);
  claim(op, thread, [&](int owner) { return share(tiles, owner); }, merge);
}

void Executor::run_store(const OpSpec& op, int thread) {
  auto [begin, end] = share(step_.n * op.num_kv_heads, thread);
  const int64_t head_bytes = static_cast<int64_t>(kBlockTokens) * op.head_dim * 2;
  for (int64_t i = begin; i < end; ++i) {
    int64_t t = i / op.num_kv_heads, h = i % op.num_kv_heads, position = positions_[t];
    int32_t block = step_.segments[segment_of_[t]].blocks[position / kBlockTokens];
    uint8_t* keys = cache_.data() + block * spec_.block_bytes + op.cache_offset + h * 2 * head_bytes;
    kernels_->store_kv[op.cache_kind](row(op.x, t, thread) + h * op.head_dim, row(op.y, t, thread) + h * op.head_dim,
                                      op.head_dim, position % kBlockTokens, keys, keys + head_bytes);
  }
}

void Executor::run_attend(const OpSpec& op, int thread) {
  const int64_t rows_max = spec_.attend_rows, max_dim = spec_.attend_head_dim;
  float* base = reinterpret_cast<float*>(work(thread));
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
        float* out = reinterpret_cast<float*>(partials_.data()) + u.partial + at * (dim + 2);
        std::memcpy(out, total, sizeof(float) * (dim + 2));
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
