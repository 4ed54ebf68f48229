// Threads that go through many short phases together. Leaving and entering a parallel region costs microseconds, and
// much more where the threads went to sleep meanwhile; a barrier that spins costs a tenth of one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagedllm {

inline void relax(int64_t& waited) {
  constexpr int64_t kSpins = 4000;  // some tens of microseconds: after that, whoever we wait for may need this CPU
  if (waited++ < kSpins) {
#if defined(__x86_64__)
    _mm_pause();
#endif
  } else {
#if defined(__linux__)
    sched_yield();
#endif
  }
}

// Shared by the members of a team.
class Team {
 public:
  explicit Team(int64_t size) : size_(size), next_(new Counter[kSets * size]) {}
  int64_t size() const { return size_; }

 private:
  friend class Member;
  static constexpr int64_t kSets = 4;
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  const int64_t size_;
  std::unique_ptr<Counter[]> next_;  // [kSets, size]: next item of each member's range, for phases modulo kSets
  Counter arrived_, phase_;
};

// One thread's view of its team. All members call `share` in the same order.
class Member {
 public:
  Member(Team& team, int64_t id) : team_(team), id_(id) {}
  int64_t id() const { return id_; }

  // Calls f(i) once for each i below count, over all members, and returns when all calls have. Each member walks down a
  // range of its own, so that what lies side by side in memory is read by one CPU; who is done early takes from others.
  template <typename F>
  void share(int64_t count, F f) {
    auto* counters = &team_.next_[phase_ % Team::kSets * team_.size_];
    for (int64_t k = 0; k < team_.size_; k++) {
      int64_t owner = (id_ + k) % team_.size_;
      int64_t begin = count * owner / team_.size_, end = count * (owner + 1) / team_.size_;
      for (;;) {
        int64_t i = begin + counters[owner].value.fetch_add(1, std::memory_order_relaxed);
        if (i >= end) break;
        f(i);
      }
    }
    wait();
  }

 private:
  void wait() {
    // The counters of the phase after the next: nobody has used them since the barrier before the last.
    team_.next_[(phase_ + 2) % Team::kSets * team_.size_ + id_].value.store(0, std::memory_order_relaxed);
    phase_++;
    if (team_.arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == team_.size_) {
      team_.arrived_.value.store(0, std::memory_order_relaxed);
      team_.phase_.value.store(phase_, std::memory_order_release);
      return;
    }
    for (int64_t waited = 0; team_.phase_.value.load(std::memory_order_acquire) < phase_;) relax(waited);
  }

  Team& team_;
  const int64_t id_;
  int64_t phase_ = 0;
};

}  // namespace pagedllm
