// Runs a lowered program on a team of threads: no lock, no allocation and no Python inside a step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"
#include "table.h"
#include "team.h"

namespace hotset {

enum OpKind : int32_t {
  kOpEmbed = 0, kOpAngles, kOpRmsNorm, kOpPack, kOpLinear, kOpGated, kOpSiluMul, kOpRope, kOpStoreKV, kOpAttend,
  kOpAttendMerge, kOpSelect, kOpHeadNorm, kOpHyperMix, kOpHyperMerge, kOpEncodeRows, kOpCompress, kOpStoreState, kOpStoreWindow,
  kOpIndexPack, kOpIndexSelect, kOpIndexMerge, kOpAttendRows, kOpAttendRowsMerge, kOpRoute, kOpPairOrder, kOpPackPairs, kOpExpertGated,
  kOpExpertDown, kNumOpKinds
};

constexpr int32_t kIndexRows = kNumRowKinds;  // in place of a row kind, this and an index kind: tiles of index rows
constexpr int32_t kMaxPooled = 256;           // tokens of one compressed row
constexpr int64_t kSelectSlack = 256;         // candidates beside 4 top_k: a block's rows always fit
constexpr int32_t kMaxExperts = 4096, kMaxTopK = 64;
constexpr int32_t kMaxUnitTokens = 4;         // neighbouring tokens that share a tile
constexpr int64_t kWindowCost = 192;          // rows that a token costs besides the compressed ones it sees

// One native op. Buffer fields index Executor buffers; -1 means none.
struct OpSpec {
  int32_t kind;
  int32_t x = -1, y = -1, z = -1, out = -1, out2 = -1;  // inputs and outputs (Pack: out is a packed buffer)
  int32_t weight = -1, weight2 = -1;
  int32_t barrier_few = 0, barrier_many = 0;  // wait for the team before this op (few: replicated small steps)
  int32_t is_lent = 0;               // in a small step, threads of one node may take columns of each other's shares
  int32_t add = 0;
  float value = 0, value2 = 0;       // eps, the attention scale, the router's scaling; HyperMix: eps, norm_eps
  float limit = 0;                   // clamp of a gated product; 0 for none
  int32_t num_heads = 0, num_kv_heads = 0, head_dim = 0, rotary_dim = 0, adjacent = 0;  // Hyper ops: heads are streams
  int32_t first = 0, inverse = 0;    // rope: first rotated channel of a head; turn back
  int32_t groups = 1, copies = 1;    // block-diagonal runs of columns; copies of an embedding row
  int32_t frequency = 0;             // the first of the op's rotary frequencies
  int32_t iterations = 0;
  int32_t cache_kind = 0;
  int64_t cache_offset = 0;          // bytes of this layer's rows inside a block; per kv head its keys, then its values
  // Rows that are key and value in one: all data bytes of a block, then all scale bytes. Or index rows (kIndexRows).
  int32_t row_kind = 0, row_bytes = 0, scale_bytes = 0, plain = 0;
  int32_t ratio = 0, overlap = 0, hadamard = 0;  // tokens per row; whether it also pools those of the row before
  int32_t top_k = 0, num_experts = 0, by_pair = 0;  // PackPairs: whether the rows of x are those of pairs already
  int32_t unit_tokens = 0;           // neighbouring tokens that attention takes together
  int32_t window = 0;                // tokens that attention sees uncompressed
  // The layer's ring in a frontier: row p % ring_rows is that of position p; all data bytes, then all scale bytes.
  int64_t ring_offset = 0;
  int32_t ring_rows = 0, ring_kind = 0, ring_row_bytes = 0, ring_scale_bytes = 0;
};

struct BufferSpec {
  int64_t width;
  int32_t slot;          // buffers of one slot share memory
  int32_t is_outputs;    // rows of the wanted outputs instead of the step's tokens
  int32_t is_packed;     // packed product input of act kind `act`
  int32_t act;
  int32_t is_private;    // every thread computes its own copy in a small step
  int32_t rows_per_token = 1;  // experts of a token in a buffer of pairs
  int32_t groups = 1;          // packed: runs of columns, one packed after another
  int64_t header_bytes = 0;    // before the rows
};

struct WeightSpec {
  int32_t format;
  int64_t out_width, in_width;  // in_width 0: a float vector (norm weights)
  int32_t pair = -1;            // index of the up matrix whose tiles alternate with this gate matrix
  int64_t count = 1;            // matrices of a stack, one per expert
  int32_t is_table = 0;         // int32 [out_width][in_width]
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
  int64_t work_bytes, candidate_bytes;   // per thread: workspace of one op, rows put forward by the indexer
  int64_t num_frontiers, frontier_bytes;
  int32_t logits;
};

struct Segment {
  int64_t first, count, position;
  const int32_t* blocks;
  int64_t frontier = 0;
};

// A weight's bytes in a file, and those of its scales where they are a tensor of their own.
struct Source {
  int fd;
  int64_t offset;
  int scale_fd = -1;
  int64_t scale_offset = 0;
};

// Where threads run and memory lies: threads in order of their nodes, the first node's first.
struct Seats {
  std::vector<int> cpus;   // per thread
  std::vector<int> nodes;  // per thread: the node of its CPU
  NumaPolicy policy = NumaPolicy::kTouch;
};

// Memory of one kind on one node.
struct Place {
  std::string name;
  const uint8_t* address;
  int64_t bytes;
  int node;
};

class Executor {
 public:
  Executor(Seats seats, const std::string& isa, ExecutorSpec spec);

  // Rows of weight `index`, matrix `part` of a stack; each thread reads and packs its own. Throws std::runtime_error.
  void load(int index, int64_t part, const Source& source);
  void set_vector(int index, const float* values, int64_t count);
  void set_table(int index, const int32_t* values, int64_t count);
  uint8_t* block(int64_t index) { return cache_.data() + slot_of(index) * spec_.block_bytes; }
  uint8_t* frontier(int64_t slot) { return frontier_.data() + slot * spec_.frontier_bytes; }
  // After the last load: touch and zero the cache and the workspace, so that the plan's bytes are real before the first
  // request, and free what loading needed.
  void touch();

  // One step; logits() holds `num_outputs` rows afterwards. The caller has checked every index.
  void step(const int32_t* tokens, int64_t num_tokens, const std::vector<Segment>& segments, const int32_t* outputs,
            int64_t num_outputs);
  const float* logits() const;
  int64_t logits_stride() const;

  // Everything that is allocated, without what is empty.
  std::vector<Place> places() const;
  Team& team() { return team_; }
  const ExecutorSpec& spec() const { return spec_; }
  // Nanoseconds thread 0 spent in each op since the last call with enable = true (barrier waits before the op apart).
  void profile(bool enable) { profile_ = enable, op_ns_.assign(spec_.ops.size(), 0), wait_ns_.assign(spec_.ops.size(), 0); }
  const std::vector<int64_t>& op_ns() const { return op_ns_; }
  const std::vector<int64_t>& wait_ns() const { return wait_ns_; }

 private:
  struct Weight {
    int64_t num_tiles = 0, tile_bytes = 0, tile_stride = 0;
    std::vector<uint8_t*> base;  // per thread: its first tile; a thread's tiles of a stack lie expert by expert
    float* vector = nullptr;     // a table's int32 lie there too
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

  // Ops whose tokens cost alike: one cut of the step into threads' shares serves all of them. An item is a token, or
  // one of `parts` runs of its heads; split, a run of `run` heads of one of a token's spans.
  struct CostClass {
    int64_t ratio = 0, top_k = 0, num_heads = 0, head_dim = 0, window = 0;
    std::vector<int64_t> start;  // per thread: its first item
    int64_t parts = 1;
    bool is_split = false;
    int64_t run = 1;
    std::vector<int64_t> first, base;  // split, per token: its first item, and floats into the partials
  };
  struct RowPlace {
    const uint8_t* data;
    const uint8_t* scales;
  };
  // Rows of one attention call: `num_heads` heads of each of `num_tokens` neighbouring tokens of one segment.
  struct RowsUnit {
    const Segment* segment;
    int64_t token;
    int32_t num_tokens, head, num_heads;
  };
  struct RowsWork;
  class SpanSum;

  void load_share(int index, int64_t part, const Source& source, int thread);
  void place_weights();
  void place_buffers();
  void place_cache();
  void place_costs();
  // Runs work(region offset begin, end) on the threads of `node`, each on its part of [begin, end).
  void zero_on(int thread, Region& region, int64_t begin, int64_t end, int node);
  void bind_whole(Region& region, int node) { region.bind(0, region.bytes(), node, seats_.policy); }
  // Blocks are dealt to the nodes in turn, those of a node lie together: where block `index` lies among all.
  int64_t slot_of(int64_t index) const {
    const int64_t nodes = static_cast<int64_t>(nodes_.size());
    return nodes == 1 ? index : first_slot_[index % nodes] + index / nodes;
  }
  void use_slots();
  void plan_attention();
  // How items over rows are dealt to the threads (executor_costs.cpp).
  void plan_costs();
  bool plan_spans(CostClass& c, int64_t wanted);
  template <class Cost> void deal(CostClass& c, int64_t count, Cost cost);
  bool is_split(const OpSpec& op) const { return costs_[cost_of_[&op - spec_.ops.data()]].is_split; }
  bool is_skipped(const OpSpec& op) const {
    return op.kind == kOpAttendMerge ? !step_.has_partials : op.kind == kOpAttendRowsMerge && !is_split(op);
  }
  // Cut by spans, heads in a small step are met by threads that have not made them.
  bool waits(const OpSpec& op) const {
    return step_.few ? op.barrier_few || (op.kind == kOpAttendRows && is_split(op)) : op.barrier_many;
  }
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
  void angles_at(const OpSpec& op, int64_t position, int64_t half, float* out) const;
  void run_embed(const OpSpec& op, int thread);
  void run_silu_mul(const OpSpec& op, int thread);
  // Hyper-connections.
  void run_head_norm(const OpSpec& op, int thread);
  void run_hyper_mix(const OpSpec& op, int thread);
  void run_hyper_merge(const OpSpec& op, int thread);
  // Window rows, compressed rows and attention over them (executor_rows.cpp).
  void run_encode_rows(const OpSpec& op, int thread);
  void run_compress(const OpSpec& op, int thread);
  void compress_entry(const OpSpec& op, const Segment& seg, int64_t entry, int thread);
  void run_store_state(const OpSpec& op, int thread);
  void run_store_window(const OpSpec& op, int thread);
  void run_attend_rows(const OpSpec& op, int thread);
  void attend_tokens(const OpSpec& op, int64_t begin, int64_t end, int thread);
  void attend_heads(const OpSpec& op, int64_t parts, int64_t begin, int64_t end, int thread);
  void attend_unit(const OpSpec& op, const RowsUnit& unit, int thread);
  void attend_spans(const OpSpec& op, const CostClass& costs, int64_t begin, int64_t end, int thread);
  void run_attend_rows_merge(const OpSpec& op, int thread);
  void pack_rows(const OpSpec& op, const RowsUnit& unit, RowsWork& work, int thread);
  template <class Fill, class See, class Into>
  void each_tile(int32_t kind, int64_t row_bytes, const OpSpec& op, const RowsUnit& unit, const RowsWork& work,
                 int64_t first, int64_t last, Fill fill, See see, Into into) const;
  template <class Sum>
  void attend_compressed(const OpSpec& op, const RowsUnit& unit, const RowsWork& work, int64_t begin, int64_t end,
                         Sum& sum, int thread);
  void attend_window(const OpSpec& op, const RowsUnit& unit, const RowsWork& work, float* acc, int thread);
  // Compressed rows that token t attends to, and their tiles.
  int64_t num_rows_seen(int64_t ratio, int64_t top_k, int64_t t) const {
    const int64_t seen = ratio > 0 ? (positions_[t] + 1) / ratio : 0;
    return top_k > 0 && top_k < seen ? top_k : seen;
  }
  int64_t num_row_tiles(int64_t ratio, int64_t top_k, int64_t t) const {
    return (num_rows_seen(ratio, top_k, t) + kTileKeys - 1) / kTileKeys;
  }
  float* span_partials(const OpSpec& op, const CostClass& costs, int64_t t, int64_t span) const {
    return reinterpret_cast<float*>(partials_.data()) + costs.base[t] + span * op.num_heads * (op.head_dim + 2);
  }
  RowPlace cached_row(const OpSpec& op, const Segment& seg, int64_t index) const;
  RowPlace window_row(const OpSpec& op, const Segment& seg, int64_t position, int thread) const;
  uint8_t* ring(const OpSpec& op, const Segment& seg) const {
    return frontier_.data() + seg.frontier * spec_.frontier_bytes + op.ring_offset;
  }
  // The indexer (executor_index.cpp).
  void run_index_pack(const OpSpec& op, int thread);
  void run_index_select(const OpSpec& op, int thread);
  void run_index_merge(const OpSpec& op, int thread);
  template <class Best>
  void score_blocks(const OpSpec& op, int64_t t, int64_t begin, int64_t end, int thread, Best& best) const;
  // Experts (executor_experts.cpp).
  void run_route(const OpSpec& op, int thread);
  void run_pair_order(const OpSpec& op, int thread);
  void run_pack_pairs(const OpSpec& op, int thread);
  void run_expert_gated(const OpSpec& op, int thread);
  void run_expert_down(const OpSpec& op, int thread);

  int64_t rows_of(int buffer) const {
    const BufferSpec& b = spec_.buffers[buffer];
    return (b.is_outputs ? step_.m : step_.n) * b.rows_per_token;
  }
  // The rows of an op that a small step replicates.
  std::pair<int64_t, int64_t> rows_share(int64_t count, int thread) const {
    return step_.few ? std::pair<int64_t, int64_t>(0, count) : share(count, thread);
  }
  uint8_t* place(int buffer, int thread) const;
  float* row(int buffer, int64_t t, int thread) const;
  Act packed(int buffer, int thread, int64_t k, int64_t group = 0) const;
  uint8_t* work(int thread) const { return scratch_[thread].data() + private_bytes_; }
  uint64_t* candidates(int thread) const {
    return reinterpret_cast<uint64_t*>(work(thread) + spec_.work_bytes);
  }
  std::pair<int64_t, int64_t> share(int64_t count, int thread) const {
    return {count * thread / team_.size(), count * (thread + 1) / team_.size()};
  }
  const uint8_t* tile(const Weight& w, int64_t index) const;
  const uint8_t* tiles_of(const Weight& w, int owner, int64_t first, int64_t part = 0) const {
    auto [begin, end] = share(w.num_tiles, owner);
    return w.base[owner] + (part * (end - begin) + first - begin) * w.tile_stride;
  }
  template <class Range, class Work> void claim(const OpSpec& op, int thread, Range range, Work work);
  template <class Range, class Work> void lend(const OpSpec& op, int thread, Range range, Work work);
  std::atomic<int64_t>& claimed_of(const OpSpec& op, int owner) {
    return claimed_[(&op - spec_.ops.data()) * team_.size() + owner].items;
  }

  Seats seats_;
  std::vector<int> nodes_;         // those of the seats, each once
  ExecutorSpec spec_;
  const KernelTable* kernels_;
  Team team_;
  std::vector<Region> arenas_;     // weights, one per thread
  Region vectors_, workspace_, cache_, partials_, frontier_;
  std::vector<Region> scratch_;    // per thread: private buffers, workspace, candidates
  std::vector<std::vector<uint8_t>> staging_;  // per thread: rows of the file, until all is loaded
  std::vector<int64_t> first_slot_, cache_end_;  // per node: its first block's slot; where its bytes end
  std::vector<int32_t> slots_;                   // of the step's blocks, with several nodes
  std::vector<Segment> segments_;                // the step's, their blocks by slot
  std::vector<Weight> weights_;
  std::vector<int64_t> lds_;       // floats per row of each buffer
  std::vector<int64_t> slot_offset_, private_offset_;
  int64_t private_bytes_ = 0;

  Step step_{};
  std::vector<int64_t> positions_;      // per token
  std::vector<int32_t> segment_of_;     // per token
  std::vector<CostClass> costs_;
  std::vector<int32_t> cost_of_;        // per op: its cost class, or -1
  std::vector<AttendUnit> units_;
  std::vector<int64_t> unit_start_;     // per thread
  struct Claimed {
    alignas(64) std::atomic<int64_t> items{0};
  };
  std::vector<Claimed> claimed_;  // per op and thread: items, or lent pieces, of that thread's share that are taken
  std::vector<double> unit_cost_;
  std::vector<int32_t> partial_tokens_; // tokens whose spans were split
  std::vector<int64_t> partial_base_;   // per such token: floats into partials
  bool profile_ = false;
  std::vector<int64_t> op_ns_, wait_ns_;
};

// Where the parts of `rows` packed rows of k inputs begin, and the bytes of all (Act in types.h).
struct ActPart {
  int64_t d, terms, bytes;
};
inline ActPart act_part(ActKind kind, int64_t k, int64_t rows) {
  if (kind == ActKind::kF32 || kind == ActKind::kBF16) return {0, 0, rows * k * (kind == ActKind::kF32 ? 4 : 2)};
  const int64_t terms = rows * k + rows * (k / 32) * 4;
  return {rows * k, terms, terms + rows * (k / (kind == ActKind::kQ8Offset32 ? 16 : 32)) * 4};
}

// The packed rows from row `first` on, packed as if they were the first: where groups begin anew.
inline Act act_from(const Act& act, ActKind kind, int64_t k, int64_t first) {
  Act out = act;
  if (kind == ActKind::kF32) {
    out.f32 += first * k;
  } else if (kind == ActKind::kBF16) {
    out.bf16 += first * k;
  } else {
    out.q += first * k;
    out.d += first * (k / 32);
    out.terms += first * (k / (kind == ActKind::kQ8Offset32 ? 16 : 32));
  }
  return out;
}

// Spans of a token's tiles of compressed rows: four of two tiles, then four to every doubling. So the few rows of a
// short context can be dealt out, and the sums of a long one stay few (row_spans in lower_types.py).
constexpr int64_t first_tile_of_span(int64_t span) {
  return span < 4 ? 2 * span : (4 + span % 4) << (span / 4);
}
inline int64_t span_of_tile(int64_t tile) {
  if (tile < 8) return tile / 2;
  const int doubling = 61 - __builtin_clzll(tile);  // tile / 4 is in [2^doubling, 2^(doubling + 1))
  return 4 * doubling + (tile >> doubling) - 4;
}
inline int64_t num_row_spans(int64_t tiles) { return tiles == 0 ? 0 : span_of_tile(tiles - 1) + 1; }

// Bytes of scratch for attention units of `rows` query rows, and for choosing rows: the formulas of lower_types.py.
int64_t rows_work_bytes(int64_t rows, int64_t dim);
inline int64_t select_room(int64_t top_k) { return 4 * top_k + kSelectSlack; }
inline int64_t select_bytes(int64_t top_k) { return 3 * select_room(top_k) * 8; }  // candidates, and two copies

// Calls work(owner, begin, end) on pieces of the threads' shares, range(owner), of an op that costs the same wherever
// it runs: a thread takes its own share first and then from those that are behind, so a thread that the system stopped
// does not hold up the step with all of its share.
template <class Range, class Work> void Executor::claim(const OpSpec& op, int thread, Range range, Work work) {
  if (step_.few) {
    if (op.is_lent) return lend(op, thread, range, work);
    const auto [begin, end] = range(thread);
    if (begin < end) work(thread, begin, end);
    return;
  }
  for (int i = 0; i < team_.size(); ++i) {
    const int owner = (thread + i) % team_.size();
    const auto [begin, end] = range(owner);
    std::atomic<int64_t>& claimed = claimed_of(op, owner);
    int64_t at = claimed.load(std::memory_order_relaxed);
    while (begin + at < end) {
      const int64_t next = at + (end - begin - at + 2) / 3;
      if (!claimed.compare_exchange_weak(at, next, std::memory_order_relaxed)) continue;
      work(owner, begin + at, begin + next);
      at = claimed.load(std::memory_order_relaxed);
    }
  }
}

// In a step of few tokens: up to a quarter of a share is taken in pieces, by its owner and by threads of its node that are
// done. Cores of one memory seldom get equal parts of its bandwidth, and all wait for the slowest; but a stream that is
// broken into short ones is slower, so the pieces of small matrices stay with their owner.
template <class Range, class Work> void Executor::lend(const OpSpec& op, int thread, Range range, Work work) {
  constexpr int64_t kPieces = 16, kLentPieces = 4, kLeastBytes = 128 << 10;
  const int64_t item_bytes = weights_[op.weight].tile_bytes * std::max<int64_t>(1, op.top_k);
  const int64_t least = (kLeastBytes + item_bytes - 1) / item_bytes;
  for (int i = 0; i < team_.size(); ++i) {
    const int owner = (thread + i) % team_.size();
    if (seats_.nodes[owner] != seats_.nodes[thread]) continue;
    const auto [begin, end] = range(owner);
    const int64_t piece = std::max(least, (end - begin) / kPieces);
    const int64_t lent = end - std::min(kLentPieces, (end - begin) / kLentPieces / piece) * piece;
    if (i == 0 && begin < lent) work(owner, begin, lent);
    std::atomic<int64_t>& claimed = claimed_of(op, owner);
    while (lent + claimed.load(std::memory_order_relaxed) * piece < end) {
      const int64_t at = lent + claimed.fetch_add(1, std::memory_order_relaxed) * piece;
      if (at < end) work(owner, at, at + piece);
    }
  }
}

}  // namespace hotset
