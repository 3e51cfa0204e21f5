// A team of pinned threads that run one function together, with a barrier that spins briefly and then sleeps.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include <sched.h>

namespace hotset {

// A counter that threads wait on: spin for a while, then sleep in the kernel. An engine that only spins
// collapses as soon as another process wants the processor; one that only sleeps pays a wake-up per op.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void open();                                       // value += 1, wake sleepers
  void wait_past(uint32_t seen, int64_t spin_ns);    // until value != seen

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
};

class Team {
 public:
  // Thread i runs on cpus[i]; thread 0 is the caller of run(), pinned only while it runs. Throws
  // std::runtime_error when a CPU cannot be used.
  explicit Team(std::vector<int> cpus);
  ~Team();
  Team(const Team&) = delete;

  int size() const { return static_cast<int>(cpus_.size()); }
  const std::vector<int>& cpus() const { return cpus_; }
  // Runs job(thread) on every thread and returns when all have finished. The job must not throw.
  void run(const std::function<void(int)>& job);
  // Inside a job: waits until every thread of the team has arrived.
  void barrier();

 private:
  void work(int thread);

  std::vector<int> cpus_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  Gate start_;
  Gate phase_;
  alignas(64) std::atomic<uint32_t> arrived_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace hotset
