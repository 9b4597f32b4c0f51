#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"

namespace oscar {
namespace {
// Set while a thread runs a body, so that nested calls run inline instead of deadlocking.
thread_local bool t_inside_body = false;
thread_local int t_thread = 0;

// About 20 microseconds of looking before a worker sleeps.
constexpr int kSpins = 500;
}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads <= 0) num_threads = static_cast<int>(std::thread::hardware_concurrency());
  num_threads = std::clamp(num_threads, 1, 1024);
  workers_.reserve(static_cast<size_t>(num_threads - 1));
  for (int i = 1; i < num_threads; ++i) {
    workers_.emplace_back([this, i](const std::stop_token& stop) { WorkerLoop(i, stop); });
  }
}

ThreadPool::~ThreadPool() {
  for (std::jthread& worker : workers_) worker.request_stop();
  work_ready_.notify_all();
}

void ThreadPool::RunShare(int thread) {
  const std::function<void(int64_t, int)>& body = *body_;
  t_inside_body = true;
  t_thread = thread;
  for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
    try {
      body(i, thread);
    } catch (...) {
      std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      next_.store(count_);  // skip the rest
    }
  }
  t_inside_body = false;
}

// Waits for a region after `seen`; false when the pool ends. Layers of a model open regions every
// few microseconds, faster than a sleeping thread wakes, so a worker first looks for a while.
bool ThreadPool::AwaitRegion(uint64_t seen, const std::stop_token& stop) {
  for (int i = 0; i < kSpins; ++i) {
    if (generation_.load(std::memory_order_relaxed) != seen) return true;
    __builtin_ia32_pause();
  }
  std::unique_lock lock(mutex_);
  ++sleepers_;
  const bool woken = work_ready_.wait(
      lock, stop, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
  --sleepers_;
  return woken;
}

void ThreadPool::WorkerLoop(int thread, const std::stop_token& stop) {
  uint64_t seen = 0;
  while (AwaitRegion(seen, stop)) {
    {
      std::lock_guard lock(mutex_);
      seen = generation_.load(std::memory_order_relaxed);
      if (!open_) continue;  // came too late
      ++active_;
    }
    RunShare(thread);
    std::lock_guard lock(mutex_);
    if (--active_ == 0) work_done_.notify_one();
  }
}

void ThreadPool::ParallelFor(int64_t count,
                             const std::function<void(int64_t index, int thread)>& body) {
  if (count <= 0) return;
  if (t_inside_body || workers_.empty() || count == 1) {
    const int thread = t_inside_body ? t_thread : 0;
    for (int64_t i = 0; i < count; ++i) body(i, thread);
    return;
  }
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    OSCAR_CHECK(!open_, "ParallelFor called from two threads at once");
    body_ = &body;
    count_ = count;
    next_.store(0);
    open_ = true;
    generation_.fetch_add(1, std::memory_order_relaxed);
    wake = sleepers_ > 0;
  }
  if (wake) work_ready_.notify_all();
  RunShare(0);
  // The others are at their last index: usually not worth sleeping for.
  for (int i = 0; i < kSpins && active_.load(std::memory_order_relaxed) > 0; ++i) {
    __builtin_ia32_pause();
  }
  std::exception_ptr error;
  {
    std::unique_lock lock(mutex_);
    work_done_.wait(lock, [&] { return active_ == 0; });
    open_ = false;
    body_ = nullptr;
    std::swap(error, error_);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace oscar
