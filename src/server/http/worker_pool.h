// WorkerPool: a few threads for what takes longer than moving bytes: JSON, templates, tokenising.
// Tasks that take much memory run one at a time, and never on all threads: others pass them by.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace oscar::server {

class WorkerPool {
 public:
  using Task = std::function<void()>;

  explicit WorkerPool(int threads);
  ~WorkerPool();  // ends what runs and drops what waits
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Any thread. Tasks must not throw.
  void Post(Task task, bool heavy);
  void Stop();

 private:
  void Run();
  bool NextTask(Task* task, bool* heavy);

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Task> light_, heavy_;
  bool heavy_runs_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace oscar::server
