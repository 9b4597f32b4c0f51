// A fixed set of worker threads, passed explicitly to whatever computes in parallel. Callers divide
// work into units whose results do not depend on who runs them; the pool then guarantees nothing
// about order and results are the same for any number of threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace oscar {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread; 1 runs everything inline, 0 means one per core.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(index, thread) for every index in [0, count) and returns when all are done; the
  // caller works too. `thread` is in [0, num_threads()), for per-thread scratch. The first
  // exception (bad_alloc, from a library) is rethrown here after all indices have finished or
  // been skipped. Calls from one outside thread at a time; a call from inside a body runs inline.
  void ParallelFor(int64_t count, const std::function<void(int64_t index, int thread)>& body);

 private:
  void WorkerLoop(int thread, const std::stop_token& stop);
  bool AwaitRegion(uint64_t seen, const std::stop_token& stop);
  void RunShare(int thread);

  // A parallel region is open from ParallelFor's start until its caller has run out of indices.
  // Workers that wake while it is open join it; ones that wake later go back to sleep, so that a
  // short region never waits for a sleeping thread.
  std::mutex mutex_;
  std::condition_variable_any work_ready_;
  std::condition_variable work_done_;
  std::atomic<uint64_t> generation_{0};  // regions opened so far; written under mutex_
  bool open_ = false;                    // guarded by mutex_, as is all up to error_
  std::atomic<int> active_{0};           // workers inside the region; written under mutex_
  int sleepers_ = 0;
  std::exception_ptr error_;
  const std::function<void(int64_t, int)>* body_ = nullptr;  // constant while the region is open
  int64_t count_ = 0;                                        // likewise
  std::atomic<int64_t> next_{0};
  std::vector<std::jthread> workers_;  // last: joins before the state above goes
};

}  // namespace oscar
