#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace hotset {

namespace {

// Long enough for the skew between threads that share an op, far shorter than a scheduler slice.
constexpr int64_t kBarrierSpinNs = 30'000;
// Long enough for the Python work between two decode steps.
constexpr int64_t kIdleSpinNs = 200'000;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield" ::: "memory");
#endif
}

void pin_self(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  if (sched_setaffinity(0, sizeof set, &set) != 0) {
    throw std::runtime_error("cannot run on CPU " + std::to_string(cpu) + ": " + std::strerror(errno));
  }
}

}  // namespace

void Gate::open() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
  }
}

void Gate::wait_past(uint32_t seen, int64_t spin_ns) {
  for (int i = 0; i < 64; ++i) {
    if (value() != seen) return;
    pause_cpu();
  }
  int64_t end = now_ns() + spin_ns;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value() != seen) return;
      pause_cpu();
    }
  } while (now_ns() < end);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

Team::Team(std::vector<int> cpus) : cpus_(std::move(cpus)) {
  if (cpus_.empty()) throw std::runtime_error("a team needs at least one CPU");
  cpu_set_t before;
  sched_getaffinity(0, sizeof before, &before);
  for (int cpu : cpus_) {
    if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &before)) {
      throw std::runtime_error("CPU " + std::to_string(cpu) + " is not in the affinity mask of this process");
    }
  }
  for (int i = 1; i < size(); ++i) threads_.emplace_back([this, i] { work(i); });
}

Team::~Team() {
  stop_.store(true);
  start_.open();
  for (std::thread& t : threads_) t.join();
}

void Team::work(int thread) {
  pin_self(cpus_[thread]);
  pthread_setname_np(pthread_self(), ("hotset-" + std::to_string(thread)).c_str());
  uint32_t seen = 0;
  for (;;) {
    start_.wait_past(seen, kIdleSpinNs);
    seen = start_.value();
    if (stop_.load()) return;
    (*job_)(thread);
    barrier();
  }
}

void Team::run(const std::function<void(int)>& job) {
  cpu_set_t before;
  sched_getaffinity(0, sizeof before, &before);
  pin_self(cpus_[0]);
  job_ = &job;
  if (size() > 1) start_.open();
  job(0);
  barrier();
  sched_setaffinity(0, sizeof before, &before);
}

void Team::barrier() {
  if (size() == 1) return;
  uint32_t phase = phase_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size())) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.open();
  } else {
    phase_.wait_past(phase, kBarrierSpinNs);
  }
}

}  // namespace hotset
