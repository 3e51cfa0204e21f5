// Placement and loading: where weights, buffers, cache and scratch lie, and how they get filled.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "executor.h"

namespace hotset {

namespace {

// What a thread reads at a time: it must still be in the L2 cache when it is packed.
constexpr int64_t kStagingBytes = 1 << 18;

int64_t align64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Vectors and tables: 4-byte numbers that no product reads.
bool is_plain(const WeightSpec& w) { return w.in_width == 0 || w.is_table; }
int64_t plain_count(const WeightSpec& w) { return w.out_width * std::max<int64_t>(1, w.in_width); }

void read_fully(int fd, uint8_t* to, int64_t want, int64_t offset) {
  for (int64_t at = 0; at < want;) {
    const ssize_t got = pread(fd, to + at, want - at, offset + at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw std::runtime_error(got == 0 ? "the file ended early" : std::strerror(errno));
    at += got;
  }
}

}  // namespace

int64_t rows_work_bytes(int64_t rows, int64_t dim) {
  return align64(rows * dim * 2) + 2 * align64(rows * (dim + 2) * 4) + align64(tile_attend_scratch(rows) * 4);
}

Executor::Executor(Seats seats, const std::string& isa, ExecutorSpec spec)
    : seats_(std::move(seats)), spec_(std::move(spec)), kernels_(kernel_table(isa.c_str())), team_(seats_.cpus) {
  if (kernels_ == nullptr) throw std::runtime_error("no kernel set " + isa + " on this machine");
  if (seats_.nodes.size() != seats_.cpus.size()) throw std::runtime_error("every thread needs a node");
  for (const int node : seats_.nodes) {
    if (std::find(nodes_.begin(), nodes_.end(), node) == nodes_.end()) nodes_.push_back(node);
  }
  place_weights();
  place_buffers();
  place_cache();
  place_costs();
  staging_.resize(team_.size());
  claimed_ = std::vector<Claimed>(spec_.ops.size() * team_.size());
  positions_.resize(spec_.max_tokens);
  segment_of_.resize(spec_.max_tokens);
  units_.reserve(1024);
  unit_start_.resize(team_.size() + 1);
  op_ns_.assign(spec_.ops.size(), 0);
  wait_ns_.assign(spec_.ops.size(), 0);
}

// Each thread's tiles of all weights lie one after another in program order, so that in a decode step a thread
// reads one contiguous stream. A gate and its up matrix alternate tile by tile, since one op reads both. Of a stack of
// experts, a thread's tiles of one expert lie together.
void Executor::place_weights() {
  const int threads = team_.size();
  weights_.resize(spec_.weights.size());
  std::vector<int64_t> used(threads, 0);
  std::vector<std::vector<int64_t>> offset(spec_.weights.size(), std::vector<int64_t>(threads, 0));
  int64_t vector_floats = 0;
  std::vector<bool> is_up(spec_.weights.size(), false);
  for (const WeightSpec& w : spec_.weights)
    if (w.pair >= 0) is_up[w.pair] = true;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const WeightSpec& w = spec_.weights[i];
    if (is_plain(w)) {
      vector_floats += align64(plain_count(w) * 4) / 4;
      continue;
    }
    Weight& out = weights_[i];
    out.num_tiles = (w.out_width + kTileRows - 1) / kTileRows;
    out.tile_bytes = tile_bytes(w.format, w.in_width);
    out.tile_stride = out.tile_bytes * (w.pair >= 0 || is_up[i] ? 2 : 1);
    out.base.resize(threads);
    if (is_up[i]) continue;
    for (int t = 0; t < threads; ++t) {
      auto [begin, end] = share(out.num_tiles, t);
      offset[i][t] = used[t];
      used[t] += w.count * (end - begin) * out.tile_stride;
    }
  }
  for (int t = 0; t < threads; ++t) {
    arenas_.emplace_back("weights of thread " + std::to_string(t), used[t]);
    bind_whole(arenas_[t], seats_.nodes[t]);
  }
  vectors_ = Region("vectors", vector_floats * 4);
  bind_whole(vectors_, nodes_[0]);
  // Whoever reads the file writes them, on any node: where nothing binds, a thread of theirs must be first.
  team_.run([this](int thread) { zero_on(thread, vectors_, 0, vectors_.bytes(), nodes_[0]); });
  int64_t next = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const WeightSpec& w = spec_.weights[i];
    if (is_plain(w)) {
      weights_[i].vector = reinterpret_cast<float*>(vectors_.data()) + next;
      next += align64(plain_count(w) * 4) / 4;
    } else if (!is_up[i]) {
      for (int t = 0; t < threads; ++t) {
        weights_[i].base[t] = arenas_[t].data() + offset[i][t];
        if (w.pair >= 0) weights_[w.pair].base[t] = weights_[i].base[t] + weights_[i].tile_bytes;
      }
    }
  }
}

void Executor::place_buffers() {
  slot_offset_.resize(spec_.slot_bytes.size());
  private_offset_.resize(spec_.private_slot_bytes.size());
  int64_t shared = 0, own = 0;
  for (size_t i = 0; i < spec_.slot_bytes.size(); ++i) slot_offset_[i] = shared, shared += spec_.slot_bytes[i];
  for (size_t i = 0; i < spec_.private_slot_bytes.size(); ++i) private_offset_[i] = own, own += spec_.private_slot_bytes[i];
  for (const BufferSpec& b : spec_.buffers) lds_.push_back((b.width + 15) / 16 * 16);
  private_bytes_ = own;
  workspace_ = Region("workspace", shared);
  partials_ = Region("attention partials", spec_.partial_floats * 4);
  frontier_ = Region("frontier", spec_.num_frontiers * spec_.frontier_bytes);
  for (Region* region : {&workspace_, &partials_, &frontier_}) bind_whole(*region, nodes_[0]);
  for (const OpSpec& op : spec_.ops) {
    const int64_t rows = spec_.attend_rows, dim = spec_.attend_head_dim;
    int64_t need = 0;
    if (op.kind == kOpAttend) need = rows * (2 * dim + kBlockTokens + 2 * (dim + 2)) * 4 + 512;
    if (op.kind == kOpAttendRows) need = rows_work_bytes(int64_t{op.unit_tokens} * op.num_heads, op.head_dim);
    if (op.kind == kOpIndexSelect) need = select_bytes(op.top_k);
    const int64_t candidates = op.kind == kOpIndexSelect ? spec_.few_tokens * (op.top_k + 1) * 8 : 0;
    if (need > spec_.work_bytes || candidates > spec_.candidate_bytes) {
      throw std::runtime_error("no workspace for an op of kind " + std::to_string(op.kind));
    }
  }
  for (int t = 0; t < team_.size(); ++t) {
    scratch_.emplace_back("scratch of thread " + std::to_string(t), own + spec_.work_bytes + spec_.candidate_bytes);
    bind_whole(scratch_[t], seats_.nodes[t]);
  }
}

// Attention of one token reads every block, whichever thread takes a head: blocks dealt to the nodes in turn keep all
// memory channels busy at any context, where runs of blocks would leave a short one to the first node.
void Executor::place_cache() {
  const int64_t nodes = static_cast<int64_t>(nodes_.size()), page = static_cast<int64_t>(page_bytes());
  cache_ = Region("cache", spec_.num_blocks * spec_.block_bytes);
  int64_t slot = 0, begin = 0;
  for (int64_t i = 0; i < nodes; ++i) {
    first_slot_.push_back(slot);
    slot += (spec_.num_blocks - i + nodes - 1) / nodes;
    const int64_t end = i + 1 == nodes ? cache_.bytes() : (slot * spec_.block_bytes + page - 1) / page * page;
    cache_end_.push_back(std::min<int64_t>(end, cache_.bytes()));
    cache_.bind(begin, cache_end_[i], nodes_[i], seats_.policy);
    if (seats_.policy == NumaPolicy::kTouch && i + 1 < nodes) cache_.split(cache_end_[i]);
    begin = cache_end_[i];
  }
  if (nodes > 1) slots_.reserve(spec_.num_blocks);
}

void Executor::place_costs() {
  cost_of_.assign(spec_.ops.size(), -1);
  for (size_t i = 0; i < spec_.ops.size(); ++i) {
    const OpSpec& op = spec_.ops[i];
    const bool attends = op.kind == kOpAttendRows || op.kind == kOpAttendRowsMerge;
    if (!attends && op.kind != kOpIndexSelect) continue;
    CostClass wanted;
    wanted.ratio = op.ratio;
    wanted.start.resize(team_.size() + 1);
    // Scoring reads all rows for all heads at once, attention those chosen.
    if (attends) {
      wanted.top_k = op.top_k, wanted.num_heads = op.num_heads, wanted.head_dim = op.head_dim, wanted.window = op.window;
      wanted.first.resize(spec_.max_tokens), wanted.base.resize(spec_.max_tokens);
    }
    auto same = std::find_if(costs_.begin(), costs_.end(), [&](const CostClass& c) {
      return c.ratio == wanted.ratio && c.top_k == wanted.top_k && c.num_heads == wanted.num_heads &&
             c.head_dim == wanted.head_dim && c.window == wanted.window;
    });
    cost_of_[i] = static_cast<int32_t>(same - costs_.begin());
    if (same == costs_.end()) costs_.push_back(std::move(wanted));
  }
}

void Executor::load(int index, int64_t part, const Source& source) {
  if (part < 0 || part >= spec_.weights.at(index).count) throw std::runtime_error("no part " + std::to_string(part));
  std::mutex mutex;
  std::string error;
  team_.run([&](int thread) {
    try {
      load_share(index, part, source, thread);
    } catch (const std::exception& problem) {
      std::lock_guard<std::mutex> lock(mutex);
      error = problem.what();
    }
  });
  if (!error.empty()) throw std::runtime_error(error);
}

// Reads and packs the tiles of one thread.
void Executor::load_share(int index, int64_t part, const Source& source, int thread) {
  const WeightSpec& w = spec_.weights[index];
  const FormatInfo& info = format_info(w.format);
  const bool is_scaled = source.scale_fd >= 0, is_fp8 = w.format == kFP8;
  // Packed MXFP4 rows have their scales apart, GGUF blocks of 17 bytes inside.
  const int64_t row_bytes = is_scaled && !is_fp8 ? w.in_width / 2 : w.in_width / info.block_weights * info.block_bytes;
  const int64_t inputs_per_scale = is_fp8 ? kScaleInputs : 32, rows_per_scale = is_fp8 ? kScaleInputs : 1;
  const int64_t scale_bytes = is_scaled ? (w.in_width + inputs_per_scale - 1) / inputs_per_scale : 0;
  const int64_t tiles_per_read = std::max<int64_t>(1, kStagingBytes / ((row_bytes + scale_bytes) * kTileRows));
  auto [begin, end] = share(weights_[index].num_tiles, thread);
  const int64_t most = std::min(tiles_per_read, end - begin) * kTileRows;
  std::vector<uint8_t>& staging = staging_[thread];
  staging.resize(std::max<size_t>(staging.size(), most * (row_bytes + scale_bytes)));
  uint8_t *const read = staging.data(), *const scales = read + most * row_bytes;
  for (int64_t tile = begin; tile < end; tile += tiles_per_read) {
    const int64_t tiles = std::min(tiles_per_read, end - tile), first = tile * kTileRows;
    const int64_t rows = std::min(tiles * kTileRows, w.out_width - first);
    const int64_t scale_row = first / rows_per_scale, scale_rows = (first + rows - 1) / rows_per_scale + 1 - scale_row;
    read_fully(source.fd, read, rows * row_bytes, source.offset + first * row_bytes);
    read_fully(source.scale_fd, scales, scale_rows * scale_bytes, source.scale_offset + scale_row * scale_bytes);
    for (int64_t i = 0; i < tiles; ++i) {
      const uint8_t *rows_of_tile[kTileRows], *scales_of_tile[kTileRows];
      for (int64_t r = 0; r < kTileRows; ++r) {
        const int64_t row = i * kTileRows + r, scale = (first + row) / rows_per_scale - scale_row;
        rows_of_tile[r] = row < rows ? read + row * row_bytes : nullptr;
        scales_of_tile[r] = row < rows ? scales + scale * scale_bytes : nullptr;
      }
      uint8_t* out = const_cast<uint8_t*>(tiles_of(weights_[index], thread, tile + i, part));
      kernels_->pack_tile(w.format, rows_of_tile, is_scaled ? scales_of_tile : nullptr, w.in_width, out);
    }
  }
  kernels_->pack_fence();
}

void Executor::set_vector(int index, const float* values, int64_t count) {
  const WeightSpec& w = spec_.weights.at(index);
  if (w.in_width != 0 || w.out_width != count) {
    throw std::runtime_error("vector of " + std::to_string(count) + " values for weight " + std::to_string(index));
  }
  std::memcpy(weights_[index].vector, values, count * sizeof(float));
}

void Executor::set_table(int index, const int32_t* values, int64_t count) {
  const WeightSpec& w = spec_.weights.at(index);
  if (!w.is_table || plain_count(w) != count) {
    throw std::runtime_error("table of " + std::to_string(count) + " values for weight " + std::to_string(index));
  }
  std::memcpy(weights_[index].vector, values, count * sizeof(int32_t));
}

void Executor::zero_on(int thread, Region& region, int64_t begin, int64_t end, int node) {
  const int64_t count = std::count(seats_.nodes.begin(), seats_.nodes.end(), node);
  const int64_t place = std::count(seats_.nodes.begin(), seats_.nodes.begin() + thread, node);
  if (seats_.nodes[thread] != node) return;
  const int64_t lines = (end - begin + 63) / 64;
  const int64_t first = begin + lines * place / count * 64, last = begin + lines * (place + 1) / count * 64;
  if (first < end) std::memset(region.data() + first, 0, std::min(last, end) - first);
}

void Executor::touch() {
  staging_ = std::vector<std::vector<uint8_t>>(team_.size());
  team_.run([this](int thread) {
    for (Region* region : {&workspace_, &partials_, &frontier_}) zero_on(thread, *region, 0, region->bytes(), nodes_[0]);
    for (size_t i = 0; i < nodes_.size(); ++i) {
      zero_on(thread, cache_, i == 0 ? 0 : cache_end_[i - 1], cache_end_[i], nodes_[i]);
    }
    std::memset(scratch_[thread].data(), 0, scratch_[thread].bytes());
  });
}

std::vector<Place> Executor::places() const {
  std::vector<Place> out;
  auto add = [&out](const std::string& name, const uint8_t* address, int64_t bytes, int node) {
    if (bytes > 0) out.push_back({name, address, bytes, node});
  };
  for (int t = 0; t < team_.size(); ++t) {
    add(arenas_[t].name(), arenas_[t].data(), arenas_[t].bytes(), seats_.nodes[t]);
    add(scratch_[t].name(), scratch_[t].data(), scratch_[t].bytes(), seats_.nodes[t]);
  }
  for (const Region* r : {&vectors_, &workspace_, &partials_, &frontier_}) add(r->name(), r->data(), r->bytes(), nodes_[0]);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const int64_t begin = i == 0 ? 0 : cache_end_[i - 1];
    add(nodes_.size() == 1 ? "cache" : "cache of node " + std::to_string(nodes_[i]), cache_.data() + begin,
        cache_end_[i] - begin, nodes_[i]);
  }
  return out;
}

}  // namespace hotset
