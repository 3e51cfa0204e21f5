// What the probe measures, and the kernels it measures with.
//
// kernels/probe_kernels.h defines one set of these kernels per instruction set; probe.cpp runs them on
// pinned threads and takes the time. No intrinsics here and in probe.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"

namespace hotset {

// One arithmetic peak: independent chains of one instruction on registers, no memory.
struct ProbeCompute {
  const char* kind;              // "int8", "int8_matrix", "bf16", "f32"
  const char* instruction;       // what runs, for the printed row: "vpdpbusd zmm"
  void (*run)(uint64_t iterations);
  double ops_per_iteration;      // a multiply and its add are two
  bool needs_arm_bf16;           // not every processor that can run the kernel set has it
};

constexpr int kMaxProbeComputes = 4;

struct ProbeKernels {
  // Sums the words of [data, data + bytes) `repeats` times over; data is 64-byte aligned, bytes a multiple of 1024.
  // prefetch_bytes > 0: every line is also prefetched that far ahead (past the end too: the hint never faults).
  uint64_t (*read)(const void* data, size_t bytes, uint64_t repeats, size_t prefetch_bytes);
  // Non-temporal stores, which do not read the lines first; alignment and sizes as for read.
  void (*write)(void* data, size_t bytes);
  void (*copy)(void* to, const void* from, size_t bytes);
  const char* write_instruction;
  ProbeCompute computes[kMaxProbeComputes];
  int num_computes;
};

// One order of `count` things, each once, the same for the same seed.
std::vector<uint32_t> shuffled(uint32_t count, uint64_t seed);
// For each of `count` places the next one, on one random circle through all of them.
std::vector<uint32_t> random_circle(uint32_t count, uint64_t seed);

// Regions of memory to measure on, each on a node of its own choice and used by CPUs of its own.
class ProbeBuffers {
 public:
  // cpus_by_region: the CPUs that may use each region, none twice. nodes: where it lies; kAnyNode: where its CPUs are,
  // which write it first. bytes_per_region is rounded up to whole huge pages when it is as large as one. Throws
  // std::runtime_error when memory cannot be had or bound, or a CPU not be used.
  ProbeBuffers(std::vector<std::vector<int>> cpus_by_region, const std::vector<int>& nodes, size_t bytes_per_region);

  ProbeBuffers(const ProbeBuffers&) = delete;  // without this a vector of regions looks copyable
  ProbeBuffers& operator=(const ProbeBuffers&) = delete;

  // All return bandwidths in bytes per second, one per sample, of one thread on each of `cpus` together. Samples are
  // taken for `seconds`, at least `min_samples` and at most 10,000.

  // Threads of one region split it into equal contiguous slices; each reads the first `bytes` bytes of its slice (0:
  // all of it) in order, over and over.
  std::vector<double> read(const ProbeKernels& kernels, const std::vector<int>& cpus, size_t bytes,
                           size_t prefetch_bytes, double seconds, int min_samples) const;
  // Reads chunks in random order, as plan_chunks says: all threads of a region share each chunk, as a team does an
  // expert's rows.
  std::vector<double> read_chunks(const ProbeKernels& kernels, const std::vector<int>& cpus, size_t chunk_bytes,
                                  size_t prefetch_bytes, double seconds, int min_samples) const;
  // Each thread writes its slice.
  std::vector<double> write(const ProbeKernels& kernels, const std::vector<int>& cpus, double seconds, int min_samples);
  // Each thread copies the first half of its slice to the second; bytes copied, of which each is read and written.
  std::vector<double> copy(const ProbeKernels& kernels, const std::vector<int>& cpus, double seconds, int min_samples);

  // For each thread the (offset, bytes) that it reads in one round of read_chunks, in order. Offsets into its region.
  std::vector<std::vector<std::pair<size_t, size_t>>> plan_chunks(const std::vector<int>& cpus,
                                                                  size_t chunk_bytes) const;

  // Links the lines of the first `bytes` bytes of the first region to a random circle; returns their number.
  size_t link(size_t bytes);
  // Lines of the circle, counted along it. Throws std::runtime_error when there is none (write and copy destroy it).
  size_t walk() const;
  // Loads per second along the circle, each of which needs the one before, from one CPU.
  std::vector<double> chase(int cpu, double seconds, int min_samples);

  size_t bytes_per_region() const { return bytes_; }
  uint8_t* data(size_t region) const { return regions_.at(region).data(); }

 private:
  struct Slice {
    size_t region, index, num_threads;  // which thread of the region's it is
    uint8_t* data;
    size_t bytes;
  };
  std::vector<Slice> slices(const std::vector<int>& cpus) const;
  const void* require_circle() const;

  std::vector<std::vector<int>> cpus_by_region_;
  size_t bytes_ = 0;
  std::vector<Region> regions_;
  const void* circle_ = nullptr;
};

// False for an arithmetic peak that this processor has no instruction for.
bool can_run(const ProbeCompute& compute);

// Operations per second over all `cpus` together, one value per sample; same rules as for ProbeBuffers.
std::vector<double> probe_compute(const ProbeCompute& compute, const std::vector<int>& cpus, double seconds,
                                  int min_samples);

// What the work of a team costs however small it is, in seconds, one value per sample: an empty Team::run; inside one,
// a Team::barrier alone; and the smallest op that does something: each thread writes its part of a vector of 1,024
// floats, all meet, each reads all of it.
struct ProbeSteps {
  std::vector<double> run_s, barrier_s, exchange_s;
};
ProbeSteps probe_steps(const ProbeKernels& kernels, const std::vector<int>& cpus, double seconds, int min_samples);

}  // namespace hotset
