#include "probe.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <thread>

namespace hotset {
namespace {

constexpr int kMaxSamples = 10000;
constexpr size_t kReadStep = 1024;  // what ProbeKernels::read takes in one turn
constexpr int kSpinsBeforeYield = 2000;
// Far above the cost of a barrier. Short ones are below a scheduling slice, so that some escape other programs.
constexpr double kReadSampleSeconds = 0.010;
constexpr double kShortSampleSeconds = 0.003;
// Work between two looks at the clock: 5 to 100 microseconds.
constexpr size_t kBytesPerTurn = size_t{1} << 20;
constexpr uint64_t kIterationsPerTurn = 2000;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns an errno value: a thread must not throw.
int pin_this_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < 0 || cpu >= CPU_SETSIZE) return EINVAL;
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Spins briefly and then yields: on a busy machine a peer may need this very CPU to arrive.
class Barrier {
 public:
  explicit Barrier(int num_threads) : num_threads_(num_threads) {}

  void wait() {
    const uint64_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins > kSpinsBeforeYield) std::this_thread::yield();
    }
  }

 private:
  const int num_threads_;
  std::atomic<int> arrived_{0};
  std::atomic<uint64_t> round_{0};
};

// Runs body(thread) on one pinned thread per CPU and waits for all of them.
void run_pinned(const std::vector<int>& cpus, const std::function<void(int)>& body) {
  std::vector<int> pin_errors(cpus.size(), 0);
  std::vector<std::thread> threads;
  Barrier pinned(static_cast<int>(cpus.size()));
  for (size_t i = 0; i < cpus.size(); ++i) {
    threads.emplace_back([&, i] {
      pin_errors[i] = pin_this_thread(cpus[i]);
      pinned.wait();
      for (int error : pin_errors) {
        if (error != 0) return;
      }
      body(static_cast<int>(i));
    });
  }
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < cpus.size(); ++i) {
    if (pin_errors[i] != 0) {
      throw std::runtime_error("cannot pin a thread to CPU " + std::to_string(cpus[i]) + ": " +
                               std::strerror(pin_errors[i]));
    }
  }
}

// Takes samples on all CPUs at once: in each, every thread repeats `work`, which returns the amount that it did,
// until the sample's time is over. Returns amounts per second, summed over the threads. Threads have a common
// time, not a common amount: on a shared machine one thread may be stopped for a while, and waiting for it
// would count the others as slow, too.
std::vector<double> sample(const std::vector<int>& cpus, double seconds, int min_samples, double sample_seconds,
                           const std::function<double(int)>& work) {
  const int num_threads = static_cast<int>(cpus.size());
  std::vector<double> thread_rates(num_threads), rates;
  Barrier barrier(num_threads);
  std::atomic<bool> is_done{false};
  run_pinned(cpus, [&](int thread) {
    work(thread);  // warm-up: page tables, clock
    const double begin = now();
    while (true) {
      barrier.wait();
      if (is_done.load(std::memory_order_acquire)) return;
      const double start = now();
      double amount = 0, elapsed = 0;
      while (elapsed < sample_seconds) {
        amount += work(thread);
        elapsed = now() - start;
      }
      thread_rates[thread] = amount / elapsed;
      barrier.wait();
      if (thread != 0) continue;
      rates.push_back(std::accumulate(thread_rates.begin(), thread_rates.end(), 0.0));
      const int taken = static_cast<int>(rates.size());
      is_done.store((taken >= min_samples && now() - begin >= seconds) || taken >= kMaxSamples,
                    std::memory_order_release);
    }
  });
  return rates;
}

std::atomic<uint64_t> g_sink{0};  // makes every sum an observable result

}  // namespace

void ProbeBuffers::Unmap::operator()(void* address) const { munmap(address, bytes); }

ProbeBuffers::ProbeBuffers(std::vector<std::vector<int>> cpus_by_node, size_t bytes_per_node, size_t huge_page_bytes)
    : cpus_by_node_(std::move(cpus_by_node)) {
  if (cpus_by_node_.empty() || bytes_per_node == 0 || huge_page_bytes == 0) {
    throw std::runtime_error("the probe needs a CPU, a size and a page size");
  }
  bytes_ = (bytes_per_node + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
  const size_t mapped_bytes = bytes_ + huge_page_bytes;  // so that the used part can begin on a huge page
  std::vector<int> all_cpus;
  for (const auto& cpus : cpus_by_node_) {
    void* base = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
      throw std::runtime_error("cannot map " + std::to_string(mapped_bytes) +
                               " bytes for the probe: " + std::strerror(errno));
    }
    maps_.emplace_back(base, Unmap{mapped_bytes});
    const uintptr_t address = reinterpret_cast<uintptr_t>(base);
    regions_.push_back(
        reinterpret_cast<char*>((address + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes));
    // A refusal only means small pages; which pages they are is read from /proc/self/smaps_rollup.
    madvise(regions_.back(), bytes_, MADV_HUGEPAGE);
    all_cpus.insert(all_cpus.end(), cpus.begin(), cpus.end());
  }
  const auto parts = slices(all_cpus);
  run_pinned(all_cpus, [&](int thread) { std::memset(const_cast<char*>(parts[thread].data), 1, parts[thread].bytes); });
}

std::vector<ProbeBuffers::Slice> ProbeBuffers::slices(const std::vector<int>& cpus) const {
  std::vector<Slice> result(cpus.size());
  size_t num_placed = 0;
  for (size_t node = 0; node < cpus_by_node_.size(); ++node) {
    std::vector<size_t> threads;
    for (size_t i = 0; i < cpus.size(); ++i) {
      const auto& own = cpus_by_node_[node];
      if (std::find(own.begin(), own.end(), cpus[i]) != own.end()) threads.push_back(i);
    }
    num_placed += threads.size();
    // Rounded down to whole read steps; the last bytes of the region, less than that for each thread, go unread.
    const size_t bytes = threads.empty() ? 0 : bytes_ / threads.size() / kReadStep * kReadStep;
    for (size_t i = 0; i < threads.size(); ++i) result[threads[i]] = {regions_[node] + i * bytes, bytes};
  }
  if (cpus.empty() || num_placed != cpus.size()) {
    throw std::runtime_error("the probe reads on CPUs that its buffers were made for, each in one node");
  }
  return result;
}

std::vector<double> ProbeBuffers::read(const ProbeKernels& kernels, const std::vector<int>& cpus, size_t bytes,
                                       size_t prefetch_bytes, double seconds, int min_samples) const {
  auto parts = slices(cpus);
  for (auto& part : parts) {
    if (bytes > part.bytes || bytes % kReadStep != 0 || part.bytes == 0) {
      throw std::runtime_error("the probe reads a multiple of " + std::to_string(kReadStep) + " bytes, at most " +
                               std::to_string(part.bytes));
    }
    if (bytes != 0) part.bytes = bytes;
  }
  // A cached part is read over and over between two looks at the clock; a large one goes on where it stopped.
  struct alignas(64) Position {
    size_t at = 0;
  };
  std::vector<Position> positions(cpus.size());
  return sample(cpus, seconds, min_samples, bytes == 0 ? kReadSampleSeconds : kShortSampleSeconds, [&](int thread) {
    const Slice& part = parts[thread];
    size_t& at = positions[thread].at;
    const size_t turn = std::min(kBytesPerTurn, part.bytes - at);
    const uint64_t repeats = std::max<size_t>(1, kBytesPerTurn / part.bytes);
    g_sink.fetch_add(kernels.read(part.data + at, turn, repeats, prefetch_bytes), std::memory_order_relaxed);
    at = at + turn == part.bytes ? 0 : at + turn;
    return static_cast<double>(turn) * static_cast<double>(repeats);
  });
}

bool can_run(const ProbeCompute& compute) {
#if defined(__aarch64__)
  constexpr unsigned long kBf16Bit = 1ul << 14;  // HWCAP2_BF16, which older headers do not name
  return !compute.needs_arm_bf16 || (getauxval(AT_HWCAP2) & kBf16Bit) != 0;
#else
  return !compute.needs_arm_bf16;
#endif
}

std::vector<double> probe_compute(const ProbeCompute& compute, const std::vector<int>& cpus, double seconds,
                                  int min_samples) {
  if (cpus.empty()) throw std::runtime_error("the probe needs a CPU");
  return sample(cpus, seconds, min_samples, kShortSampleSeconds, [&](int) {
    compute.run(kIterationsPerTurn);
    return compute.ops_per_iteration * static_cast<double>(kIterationsPerTurn);
  });
}

}  // namespace hotset
