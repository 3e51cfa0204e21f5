// Runs a lowered program on a team of threads: no lock, no allocation and no Python inside a step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "table.h"
#include "team.h"

namespace hotset {

enum OpKind : int32_t {
  kOpEmbed = 0, kOpAngles, kOpRmsNorm, kOpPack, kOpLinear, kOpGated, kOpSiluMul, kOpRope, kOpStoreKV, kOpAttend, kOpAttendMerge,
  kOpSelect, kNumOpKinds
};

// One native op. Buffer fields index Executor buffers; -1 means none.
struct OpSpec {
  int32_t kind;
  int32_t x = -1, y = -1, out = -1;  // inputs and output (Pack: out is a packed buffer)
  int32_t weight = -1, weight2 = -1;
  int32_t barrier_few = 0, barrier_many = 0;  // wait for the team before this op (few: replicated small steps)
  int32_t add = 0;
  float value = 0;                   // eps, or the attention scale
  int32_t num_heads = 0, num_kv_heads = 0, head_dim = 0, rotary_dim = 0, adjacent = 0;
  int32_t cache_kind = 0;
  int64_t cache_offset = 0;          // bytes of this layer's rows inside a block; per kv head its keys, then its values
};

struct BufferSpec {
  int64_t width;
  int32_t slot;          // buffers of one slot share memory
  int32_t is_outputs;    // rows of the wanted outputs instead of the step's tokens
  int32_t is_packed;     // packed product input of act kind `act`
  int32_t act;
  int32_t is_private;    // every thread computes its own copy in a small step
};

struct WeightSpec {
  int32_t format;
  int64_t out_width, in_width;  // in_width 0: a float vector (norm weights)
  int32_t pair = -1;            // index of the up matrix whose tiles alternate with this gate matrix
};

struct ExecutorSpec {
  std::vector<OpSpec> ops;
  std::vector<BufferSpec> buffers;
  std::vector<int64_t> slot_bytes;          // shared, for max_tokens / max_outputs
  std::vector<int64_t> private_slot_bytes;  // per thread, for few_tokens
  std::vector<WeightSpec> weights;
  std::vector<float> frequencies;
  int64_t max_tokens, max_outputs, few_tokens;
  int64_t num_blocks, block_bytes;
  int64_t partial_floats;   // attention partials of span-split segments
  int32_t attend_rows, attend_head_dim;  // scratch size
  int32_t logits;
};

struct Segment {
  int64_t first, count, position;
  const int32_t* blocks;
};

class Executor {
 public:
  Executor(std::vector<int> cpus, const std::string& isa, ExecutorSpec spec);

  // Rows of weight `index` from `fd` at `offset`; each thread reads and packs its own. Throws std::runtime_error.
  void load(int index, int fd, int64_t offset);
  void set_vector(int index, const float* values, int64_t count);
  // Touch and zero the cache and the workspace, so that the plan's bytes are real before the first request.
  void touch();

  // One step; logits() holds `num_outputs` rows afterwards. The caller has checked every index.
  void step(const int32_t* tokens, int64_t num_tokens, const std::vector<Segment>& segments, const int32_t* outputs,
            int64_t num_outputs);
  const float* logits() const;
  int64_t logits_stride() const;

  std::vector<std::pair<std::string, int64_t>> regions() const;
  Team& team() { return team_; }
  const ExecutorSpec& spec() const { return spec_; }
  // Nanoseconds thread 0 spent in each op since the last call with enable = true (barrier waits before the op apart).
  void profile(bool enable) { profile_ = enable, op_ns_.assign(spec_.ops.size(), 0), wait_ns_.assign(spec_.ops.size(), 0); }
  const std::vector<int64_t>& op_ns() const { return op_ns_; }
  const std::vector<int64_t>& wait_ns() const { return wait_ns_; }

 private:
  struct Weight {
    int64_t num_tiles = 0, tile_bytes = 0, tile_stride = 0;
    std::vector<uint8_t*> base;  // per thread: its first tile
    float* vector = nullptr;
  };
  struct AttendUnit {
    int32_t segment, token, num_tokens, kv_head, head, num_heads, span, num_spans;
    int64_t partial;  // floats into partials, or -1: the unit sees all spans and writes the result
  };
  struct Step {
    const int32_t* tokens;
    int64_t n, m;
    const int32_t* outputs;
    const Segment* segments;
    int64_t num_segments;
    bool few, has_partials;
  };

  void place_weights();
  void place_buffers();
  void plan_attention();
  void run_ops(int thread);
  void run_op(const OpSpec& op, int thread);
  bool can_fuse(const OpSpec& norm, const OpSpec& next) const;
  void run_norm_pack(const OpSpec& norm, const OpSpec& pack, int thread);
  void run_pack(const OpSpec& op, int thread);
  void run_linear(const OpSpec& op, int thread);
  void run_attend(const OpSpec& op, int thread);
  void attend_unit(const OpSpec& op, const AttendUnit& u, const AttendScratch& scratch, int thread);
  void run_attend_merge(const OpSpec& op, int thread);
  void run_rope(const OpSpec& op, int thread);
  void run_store(const OpSpec& op, int thread);
  void run_angles(const OpSpec& op, int thread);

  int64_t rows_of(int buffer) const { return spec_.buffers[buffer].is_outputs ? step_.m : step_.n; }
  float* row(int buffer, int64_t t, int thread) const;
  Act packed(int buffer, int thread, int64_t k) const;
  std::pair<int64_t, int64_t> share(int64_t count, int thread) const {
    return {count * thread / team_.size(), count * (thread + 1) / team_.size()};
  }
  const uint8_t* tile(const Weight& w, int64_t index) const;
  template <class Range, class Work> void claim(const OpSpec& op, int thread, Range range, Work work);

  ExecutorSpec spec_;
  const KernelTable* kernels_;
  Team team_;
  std::vector<Region> arenas_;     // weights, one per thread
  Region vectors_, workspace_, cache_, partials_;
  std::vector<Region> scratch_;    // per thread: private buffers, attention scratch, load staging
  std::vector<Weight> weights_;
  std::vector<int64_t> lds_;       // floats per row of each buffer
  std::vector<int64_t> slot_offset_, private_offset_;
  int64_t private_bytes_ = 0;

  Step step_{};
  std::vector<int64_t> positions_;      // per token
  std::vector<int32_t> segment_of_;     // per token
  std::vector<AttendUnit> units_;
  std::vector<int64_t> unit_start_;     // per thread
  std::vector<std::atomic<int64_t>> claimed_;  // per op and thread: items of that thread's share that are taken
  std::vector<double> unit_cost_;
  std::vector<int32_t> partial_tokens_; // tokens whose spans were split
  std::vector<int64_t> partial_base_;   // per such token: floats into partials
  bool profile_ = false;
  std::vector<int64_t> op_ns_, wait_ns_;
};

}  // namespace hotset
