#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"

namespace oscar {
namespace {
// Set while a thread runs a body, so that nested calls run inline instead of deadlocking.
thread_local bool t_inside_body = false;
thread_local int t_thread = 0;
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

void ThreadPool::WorkerLoop(int thread, const std::stop_token& stop) {
  uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (!work_ready_.wait(lock, stop, [&] { return generation_ != seen; })) return;
      seen = generation_;
    }
    RunShare(thread);
    std::lock_guard lock(mutex_);
    if (--running_ == 0) work_done_.notify_one();
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
  {
    std::lock_guard lock(mutex_);
    OSCAR_CHECK(running_ == 0, "ParallelFor called from two threads at once");
    body_ = &body;
    count_ = count;
    next_.store(0);
    running_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  work_ready_.notify_all();
  RunShare(0);
  std::exception_ptr error;
  {
    std::unique_lock lock(mutex_);
    work_done_.wait(lock, [&] { return running_ == 0; });
    body_ = nullptr;
    std::swap(error, error_);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace oscar
