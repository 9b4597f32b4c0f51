// Ctrl-C as a request to stop an answer rather than the program. One scope at a time; its handler
// touches lock-free atomics and a pipe alone.
#pragma once

#include <csignal>

#include "oscar/language_model.h"

namespace oscar::cli {

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

}  // namespace oscar::cli
