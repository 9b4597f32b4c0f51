#include "http/worker_pool.h"

#include <algorithm>
#include <utility>

namespace oscar::server {

WorkerPool::WorkerPool(int threads) {
  // With one thread, what is heavy would keep everything else waiting.
  for (int i = 0; i < std::max(threads, 2); ++i) threads_.emplace_back([this] { Run(); });
}

WorkerPool::~WorkerPool() { Stop(); }

void WorkerPool::Stop() {
  std::deque<Task> light, heavy;  // destroyed outside the lock
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    light.swap(light_);
    heavy.swap(heavy_);
  }
  ready_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void WorkerPool::Post(Task task, bool heavy) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    (heavy ? heavy_ : light_).push_back(std::move(task));
  }
  ready_.notify_one();
}

bool WorkerPool::NextTask(Task* task, bool* heavy) {
  std::unique_lock lock(mutex_);
  ready_.wait(lock,
              [this] { return stopping_ || !light_.empty() || (!heavy_.empty() && !heavy_runs_); });
  if (stopping_) return false;
  *heavy = !heavy_.empty() && !heavy_runs_;  // the other threads are for the rest
  std::deque<Task>& from = *heavy ? heavy_ : light_;
  *task = std::move(from.front());
  from.pop_front();
  if (*heavy) heavy_runs_ = true;
  return true;
}

void WorkerPool::Run() {
  Task task;
  bool heavy = false;
  while (NextTask(&task, &heavy)) {
    task();
    task = nullptr;
    if (!heavy) continue;
    {
      std::lock_guard lock(mutex_);
      heavy_runs_ = false;
    }
    ready_.notify_one();
  }
}

}  // namespace oscar::server
