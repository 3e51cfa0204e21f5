// What the probe measures, and the kernels it measures with.
//
// kernels/probe_kernels.h defines one set of these kernels per instruction set; probe.cpp runs them on
// pinned threads and takes the time. No intrinsics here and in probe.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

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
  ProbeCompute computes[kMaxProbeComputes];
  int num_computes;
};

// One region of memory per NUMA node, written first by threads of that node, so that it lies there.
class ProbeBuffers {
 public:
  // cpus_by_node: the CPUs that may read, one list per node, none empty. bytes_per_node is rounded up to a
  // multiple of huge_page_bytes. Throws std::runtime_error when memory cannot be mapped or a CPU not be used.
  ProbeBuffers(std::vector<std::vector<int>> cpus_by_node, size_t bytes_per_node, size_t huge_page_bytes);
  ProbeBuffers(const ProbeBuffers&) = delete;  // owns its maps; without this a vector of them looks copyable
  ProbeBuffers& operator=(const ProbeBuffers&) = delete;

  // Bandwidths in bytes per second, one per sample, of one thread on each of `cpus`. Threads of one node split
  // its region into equal contiguous slices; each reads the first `bytes` bytes of its slice (0: all of it) in
  // order, over and over. Samples are taken for `seconds`, at least `min_samples` and at most 10,000.
  std::vector<double> read(const ProbeKernels& kernels, const std::vector<int>& cpus, size_t bytes,
                           size_t prefetch_bytes, double seconds, int min_samples) const;
  size_t bytes_per_node() const { return bytes_; }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(void* address) const;
  };
  struct Slice {
    const char* data;
    size_t bytes;
  };
  std::vector<Slice> slices(const std::vector<int>& cpus) const;

  std::vector<std::vector<int>> cpus_by_node_;
  size_t bytes_ = 0;
  std::vector<std::unique_ptr<void, Unmap>> maps_;
  std::vector<char*> regions_;  // each begins on a huge page inside its map
};

// False for an arithmetic peak that this processor has no instruction for.
bool can_run(const ProbeCompute& compute);

// Operations per second over all `cpus` together, one value per sample; same rules as ProbeBuffers::read.
std::vector<double> probe_compute(const ProbeCompute& compute, const std::vector<int>& cpus, double seconds,
                                  int min_samples);

}  // namespace hotset
