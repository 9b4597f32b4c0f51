// Signals that ask the program to stop.
#pragma once

#include <csignal>
#include <functional>
#include <thread>

#include "oscar/language_model.h"

namespace oscar::cli {

// Ctrl-C as a request to stop an answer rather than the program. One scope at a time; its handler
// touches lock-free atomics and a pipe alone.
class InterruptScope {
 public:
  // kOnce leaves the second Ctrl-C to the system, which ends the program.
  enum class Mode { kEvery, kOnce };
  explicit InterruptScope(Mode mode);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  // The model to cancel when it comes; null: none.
  static void SetAnswering(LanguageModel* model);
  // Whether it came, and whether it came since this was asked last.
  static bool Pending();
  static bool Take();
  // Becomes readable whenever it comes, or Wake is called; what is read from it means nothing.
  static int WakeFd();
  static void Wake();  // for signal handlers

 private:
  struct sigaction before_;
};

// SIGINT, SIGTERM and SIGHUP end the program as ever, but only after `clear_up` has run, on a
// separate thread while the others continue. Begins before the threads of what it guards.
class ClearUpScope {
 public:
  explicit ClearUpScope(std::function<void()> clear_up);
  ~ClearUpScope();
  ClearUpScope(const ClearUpScope&) = delete;
  ClearUpScope& operator=(const ClearUpScope&) = delete;

 private:
  void Wait();

  std::function<void()> clear_up_;
  sigset_t before_;
  int signals_ = -1, over_ = -1;  // descriptors to wait at
  std::thread waiter_;
};

}  // namespace oscar::cli
