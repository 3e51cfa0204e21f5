// Placement and loading: where weights, buffers, cache and scratch lie, and how they get filled.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "executor.h"

namespace hotset {

namespace {

constexpr int64_t kStagingBytes = 1 << 20;

int64_t align64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t tile_bytes_of(const WeightSpec& w) {
  const FormatInfo& info = format_info(w.format);
  return w.in_width / info.block_weights * info.block_bytes * kTileRows;
}

}  // namespace

Executor::Executor(std::vector<int> cpus, const std::string& isa, ExecutorSpec spec)
    : spec_(std::move(spec)), kernels_(kernel_table(isa.c_str())), team_(std::move(cpus)) {
  if (kernels_ == nullptr) throw std::runtime_error("no kernel set " + isa + " on this machine");
  place_weights();
  place_buffers();
  claimed_ = std::vector<std::atomic<int64_t>>(spec_.ops.size() * team_.size());
  positions_.resize(spec_.max_tokens);
  segment_of_.resize(spec_.max_tokens);
  units_.reserve(1024);
  unit_start_.resize(team_.size() + 1);
  op_ns_.assign(spec_.ops.size(), 0);
  wait_ns_.assign(spec_.ops.size(), 0);
}

// Each thread's tiles of all weights lie one after another in program order, so that in a decode step a thread
// reads one contiguous stream. A gate and its up matrix alternate tile by tile, since one op reads both.
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
    if (w.in_width == 0) {
      vector_floats += align64(w.out_width * 4) / 4;
      continue;
    }
    Weight& out = weights_[i];
    out.num_tiles = (w.out_width + kTileRows - 1) / kTileRows;
    out.tile_bytes = tile_bytes_of(w);
    out.tile_stride = out.tile_bytes * (w.pair >= 0 || is_up[i] ? 2 : 1);
    out.base.resize(threads);
    if (is_up[i]) continue;
    for (int t = 0; t < threads; ++t) {
      auto [begin, end] = share(out.num_tiles, t);
      offset[i][t] = used[t];
      used[t] += (end - begin) * out.tile_stride;
    }
  }
  for (int t = 0; t < threads; ++t) arenas_.emplace_back("weights of thread " + std::to_string(t), used[t]);
  vectors_ = Region("vectors", vector_floats * 4);
  int64_t next = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const WeightSpec& w = spec_.weights[i];
    if (w.in_width == 0) {
      weights_[i].vector = reinterpret_cast<float*>(vectors_.data()) + next;
      next += align64(w.out_width * 4) / 4;
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
  cache_ = Region("cache", spec_.num_blocks * spec_.block_bytes);
  partials_ = Region("attention partials", spec_.partial_floats * 4);
  int64_t rows = spec_.attend_rows, dim = spec_.attend_head_dim;
  int64_t attend = rows * (2 * dim + kBlockTokens + 2 * (dim + 2)) * 4 + 512;
  for (int t = 0; t < team_.size(); ++t) scratch_.emplace_back("scratch of thread " + std::to_string(t), own + attend);
}

void Executor::load(int index, int fd, int64_t offset) {
  const WeightSpec& w = spec_.weights.at(index);
  const Weight& weight = weights_[index];
  const FormatInfo& info = format_info(w.format);
  const int64_t row_bytes = w.in_width / info.block_weights * info.block_bytes;
  const int64_t tiles_per_read = std::max<int64_t>(1, kStagingBytes / (row_bytes * kTileRows));
  std::mutex mutex;
  std::string error;
  team_.run([&](int thread) {
    auto [begin, end] = share(weight.num_tiles, thread);
    std::vector<uint8_t> staging(tiles_per_read * kTileRows * row_bytes);
    for (int64_t tile = begin; tile < end; tile += tiles_per_read) {
      int64_t tiles = std::min(tiles_per_read, end - tile);
      int64_t rows = std::min(tiles * kTileRows, w.out_width - tile * kTileRows);
      int64_t at = 0, want = rows * row_bytes;
      while (at < want) {
        ssize_t got = pread(fd, staging.data() + at, want - at, offset + tile * kTileRows * row_bytes + at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
          std::lock_guard<std::mutex> lock(mutex);
          error = got == 0 ? "the file ended early" : std::strerror(errno);
          return;
        }
        at += got;
      }
      for (int64_t i = 0; i < tiles; ++i) {
        const uint8_t* rows_of_tile[kTileRows];
        for (int r = 0; r < kTileRows; ++r) {
          int64_t row = i * kTileRows + r;
          rows_of_tile[r] = row < rows ? staging.data() + row * row_bytes : nullptr;
        }
        kernels_->pack_tile(w.format, rows_of_tile, w.in_width,
                            weight.base[thread] + (tile + i - begin) * weight.tile_stride);
      }
    }
  });
  if (!error.empty()) throw std::runtime_error(error);
}

void Executor::set_vector(int index, const float* values, int64_t count) {
  if (spec_.weights.at(index).in_width != 0 || spec_.weights[index].out_width != count) {
    throw std::runtime_error("vector of " + std::to_string(count) + " values for weight " + std::to_string(index));
  }
  std::memcpy(weights_[index].vector, values, count * sizeof(float));
}

void Executor::touch() {
  team_.run([this](int thread) {
    for (Region* region : {&workspace_, &cache_, &partials_}) {
      auto [begin, end] = share(region->bytes() / 64, thread);
      if (thread == team_.size() - 1) end = (region->bytes() + 63) / 64;
      int64_t last = std::min<int64_t>(end * 64, region->bytes());
      if (last > begin * 64) std::memset(region->data() + begin * 64, 0, last - begin * 64);
    }
    std::memset(scratch_[thread].data(), 0, scratch_[thread].bytes());
  });
}

std::vector<std::pair<std::string, int64_t>> Executor::regions() const {
  std::vector<std::pair<std::string, int64_t>> out;
  auto add = [&out](const Region& r) { out.emplace_back(r.name(), r.bytes()); };
  for (const Region& r : arenas_) add(r);
  for (const Region* r : {&vectors_, &workspace_, &cache_, &partials_}) add(*r);
  for (const Region& r : scratch_) add(r);
  return out;
}

}  // namespace hotset
