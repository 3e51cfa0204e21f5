#include "probe.h"

#include <pthread.h>
#include <sched.h>

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
#include <random>
#include <stdexcept>
#include <thread>

#include "team.h"

namespace hotset {
namespace {

constexpr int kMaxSamples = 10000;
constexpr size_t kReadStep = 1024;  // what ProbeKernels::read takes in one turn
constexpr int kSpinsBeforeYield = 2000;
// Far above the cost of a barrier. Short ones are below a scheduling slice, so that some escape other programs.
constexpr double kLongSampleSeconds = 0.010;
constexpr double kShortSampleSeconds = 0.003;
// Work between two looks at the clock: 5 to 100 microseconds.
constexpr size_t kBytesPerTurn = size_t{1} << 20;
constexpr uint64_t kIterationsPerTurn = 2000;
constexpr int kLoadsPerTurn = 500;
constexpr size_t kLineBytes = 64;
constexpr uint64_t kSeed = 1;
// Many in one look at the clock, which takes a good part of the time of one.
constexpr int kRoundsPerSample = 16;
constexpr size_t kExchangedBytes = 4096;  // the hidden state of a small model

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

// Where a thread is in its part of the memory, on a line of its own.
struct alignas(64) Position {
  size_t at = 0;

  // The next piece of `bytes` bytes, over and over: (offset, size).
  std::pair<size_t, size_t> take(size_t bytes) {
    const size_t begin = at, turn = std::min(kBytesPerTurn, bytes - begin);
    at = begin + turn == bytes ? 0 : begin + turn;
    return {begin, turn};
  }
};

}  // namespace

std::vector<uint32_t> shuffled(uint32_t count, uint64_t seed) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937_64 random(seed);
  for (uint32_t i = count; i-- > 1;) std::swap(order[i], order[random() % (i + 1)]);
  return order;
}

// Sattolo's algorithm: shuffling that never leaves an element where it was ends in one circle.
std::vector<uint32_t> random_circle(uint32_t count, uint64_t seed) {
  std::vector<uint32_t> next(count);
  std::iota(next.begin(), next.end(), 0u);
  std::mt19937_64 random(seed);
  for (uint32_t i = count; i-- > 1;) std::swap(next[i], next[random() % i]);
  return next;
}

ProbeBuffers::ProbeBuffers(std::vector<std::vector<int>> cpus_by_region, const std::vector<int>& nodes,
                           size_t bytes_per_region)
    : cpus_by_region_(std::move(cpus_by_region)) {
  if (cpus_by_region_.empty() || cpus_by_region_.size() != nodes.size() || bytes_per_region == 0) {
    throw std::runtime_error("the probe needs a size, and CPUs and a node for each region");
  }
  const size_t unit = bytes_per_region < huge_page_bytes() ? kReadStep : huge_page_bytes();
  bytes_ = (bytes_per_region + unit - 1) / unit * unit;
  std::vector<int> all_cpus;
  for (size_t i = 0; i < nodes.size(); ++i) {
    try {
      regions_.emplace_back("the probe's buffer", bytes_);
    } catch (const std::bad_alloc&) {
      throw std::runtime_error("cannot map " + std::to_string(bytes_) + " bytes for the probe");
    }
    if (nodes[i] != kAnyNode) regions_.back().bind(0, bytes_, nodes[i], NumaPolicy::kBind);
    all_cpus.insert(all_cpus.end(), cpus_by_region_[i].begin(), cpus_by_region_[i].end());
  }
  const auto parts = slices(all_cpus);
  run_pinned(all_cpus, [&](int thread) {
    const Slice& part = parts[thread];
    const bool is_last = part.index + 1 == part.num_threads;
    std::memset(part.data, 1, is_last ? regions_[part.region].data() + bytes_ - part.data : part.bytes);
  });
}

std::vector<ProbeBuffers::Slice> ProbeBuffers::slices(const std::vector<int>& cpus) const {
  std::vector<Slice> result(cpus.size());
  size_t num_placed = 0;
  for (size_t region = 0; region < cpus_by_region_.size(); ++region) {
    std::vector<size_t> threads;
    for (size_t i = 0; i < cpus.size(); ++i) {
      const auto& own = cpus_by_region_[region];
      if (std::find(own.begin(), own.end(), cpus[i]) != own.end()) threads.push_back(i);
    }
    num_placed += threads.size();
    // Rounded down to whole read steps; the last bytes of the region, less than that for each thread, go unread.
    const size_t bytes = threads.empty() ? 0 : bytes_ / threads.size() / kReadStep * kReadStep;
    for (size_t i = 0; i < threads.size(); ++i) {
      result[threads[i]] = {region, i, threads.size(), regions_[region].data() + i * bytes, bytes};
    }
  }
  if (cpus.empty() || num_placed != cpus.size()) {
    throw std::runtime_error("the probe measures on CPUs that its buffers were made for, each in one region");
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
  std::vector<Position> positions(cpus.size());
  return sample(cpus, seconds, min_samples, bytes == 0 ? kLongSampleSeconds : kShortSampleSeconds, [&](int thread) {
    const Slice& part = parts[thread];
    const auto [at, turn] = positions[thread].take(part.bytes);
    const uint64_t repeats = std::max<size_t>(1, kBytesPerTurn / part.bytes);
    g_sink.fetch_add(kernels.read(part.data + at, turn, repeats, prefetch_bytes), std::memory_order_relaxed);
    return static_cast<double>(turn) * static_cast<double>(repeats);
  });
}

std::vector<std::vector<std::pair<size_t, size_t>>> ProbeBuffers::plan_chunks(const std::vector<int>& cpus,
                                                                              size_t chunk_bytes) const {
  const size_t num_steps = chunk_bytes / kReadStep;
  if (chunk_bytes == 0 || chunk_bytes % kReadStep != 0 || chunk_bytes > bytes_) {
    throw std::runtime_error("a chunk of the probe is a multiple of " + std::to_string(kReadStep) +
                             " bytes, at most " + std::to_string(bytes_));
  }
  const std::vector<uint32_t> order = shuffled(static_cast<uint32_t>(bytes_ / chunk_bytes), kSeed);
  std::vector<std::vector<std::pair<size_t, size_t>>> plan;
  for (const Slice& part : slices(cpus)) {
    const size_t first = num_steps * part.index / part.num_threads;
    const size_t last = num_steps * (part.index + 1) / part.num_threads;
    auto& reads = plan.emplace_back();
    for (const uint32_t chunk : order) {
      if (first < last) reads.emplace_back(chunk * chunk_bytes + first * kReadStep, (last - first) * kReadStep);
    }
  }
  return plan;
}

std::vector<double> ProbeBuffers::read_chunks(const ProbeKernels& kernels, const std::vector<int>& cpus,
                                              size_t chunk_bytes, size_t prefetch_bytes, double seconds,
                                              int min_samples) const {
  const auto plan = plan_chunks(cpus, chunk_bytes);
  const auto parts = slices(cpus);
  for (const auto& reads : plan) {
    if (reads.empty()) throw std::runtime_error("a chunk is too small to be shared by so many threads");
  }
  std::vector<Position> positions(cpus.size());
  return sample(cpus, seconds, min_samples, kLongSampleSeconds, [&](int thread) {
    size_t& next = positions[thread].at;
    const auto [offset, bytes] = plan[thread][next];
    next = (next + 1) % plan[thread].size();
    const uint8_t* data = regions_[parts[thread].region].data() + offset;
    g_sink.fetch_add(kernels.read(data, bytes, 1, prefetch_bytes), std::memory_order_relaxed);
    return static_cast<double>(bytes);
  });
}

std::vector<double> ProbeBuffers::write(const ProbeKernels& kernels, const std::vector<int>& cpus, double seconds,
                                        int min_samples) {
  circle_ = nullptr;
  const auto parts = slices(cpus);
  std::vector<Position> positions(cpus.size());
  return sample(cpus, seconds, min_samples, kLongSampleSeconds, [&](int thread) {
    const auto [at, turn] = positions[thread].take(parts[thread].bytes);
    kernels.write(parts[thread].data + at, turn);
    return static_cast<double>(turn);
  });
}

std::vector<double> ProbeBuffers::copy(const ProbeKernels& kernels, const std::vector<int>& cpus, double seconds,
                                       int min_samples) {
  circle_ = nullptr;
  const auto parts = slices(cpus);
  std::vector<Position> positions(cpus.size());
  return sample(cpus, seconds, min_samples, kLongSampleSeconds, [&](int thread) {
    const size_t half = parts[thread].bytes / 2 / kReadStep * kReadStep;
    const auto [at, turn] = positions[thread].take(half);
    kernels.copy(parts[thread].data + half + at, parts[thread].data + at, turn);
    return static_cast<double>(turn);
  });
}

size_t ProbeBuffers::link(size_t bytes) {
  const size_t count = std::min(bytes, bytes_) / kLineBytes;
  if (count < 2 || count > UINT32_MAX) throw std::runtime_error("the probe links 2 to 2^32 lines");
  const std::vector<uint32_t> next = random_circle(static_cast<uint32_t>(count), kSeed);
  uint8_t* data = regions_[0].data();
  for (size_t line = 0; line < count; ++line) {
    const void* target = data + next[line] * kLineBytes;
    std::memcpy(data + line * kLineBytes, &target, sizeof target);
  }
  circle_ = data;
  return count;
}

const void* ProbeBuffers::require_circle() const {
  if (circle_ == nullptr) throw std::runtime_error("the lines of the probe's buffer are not linked");
  return circle_;
}

size_t ProbeBuffers::walk() const {
  size_t count = 0;
  for (const void* at = require_circle();;) {
    at = *static_cast<const void* const*>(at);
    ++count;
    if (at == circle_) return count;
  }
}

std::vector<double> ProbeBuffers::chase(int cpu, double seconds, int min_samples) {
  const void* at = require_circle();
  return sample({cpu}, seconds, min_samples, kShortSampleSeconds, [&](int) {
    for (int i = 0; i < kLoadsPerTurn; ++i) at = *static_cast<const void* const*>(at);
    g_sink.fetch_add(reinterpret_cast<uintptr_t>(at), std::memory_order_relaxed);
    return static_cast<double>(kLoadsPerTurn);
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

ProbeSteps probe_steps(const ProbeKernels& kernels, const std::vector<int>& cpus, double seconds, int min_samples) {
  Team team(cpus);
  const auto measure = [&](int count, const std::function<double()>& once) {
    std::vector<double> values;
    once();
    const double begin = now();
    while (static_cast<int>(values.size()) < min_samples || (now() - begin < seconds && values.size() < kMaxSamples)) {
      values.push_back(once() / count);
    }
    return values;
  };
  double elapsed = 0;
  // Seconds of rounds inside one job, as thread 0 sees them.
  const auto rounds = [&](const std::function<void(int thread, int round)>& body) {
    const std::function<void(int)> job = [&](int thread) {
      team.barrier();
      const double start = now();
      for (int round = 0; round < kRoundsPerSample; ++round) body(thread, round);
      if (thread == 0) elapsed = now() - start;
    };
    return measure(kRoundsPerSample, [&] {
      team.run(job);
      return elapsed;
    });
  };
  ProbeSteps found;
  found.run_s = measure(1, [&] {
    const double start = now();
    team.run([](int) {});
    return now() - start;
  });
  found.barrier_s = rounds([&](int, int) { team.barrier(); });
  // Two vectors in turn: nobody writes one that others still read.
  Region vectors("the probe's vectors", 2 * kExchangedBytes);
  found.exchange_s = rounds([&](int thread, int round) {
    uint8_t* vector = vectors.data() + round % 2 * kExchangedBytes;
    const size_t begin = kExchangedBytes * thread / team.size(), end = kExchangedBytes * (thread + 1) / team.size();
    std::memset(vector + begin, round, end - begin);
    team.barrier();
    g_sink.fetch_add(kernels.read(vector, kExchangedBytes, 1, 0), std::memory_order_relaxed);
  });
  return found;
}

}  // namespace hotset
