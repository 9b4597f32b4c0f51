#include "cli/interrupt.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

#include "base/check.h"

namespace oscar::cli {
namespace {

// The model that is answering is told (it looks between the chunks of a prompt, too); the flag also
// covers the moment before it has begun.
std::atomic<bool> g_interrupted{false};
std::atomic<LanguageModel*> g_answering{nullptr};
std::array<int, 2> g_wake = {-1, -1};  // never closed: handlers may run at any time

void OnInterrupt(int) {
  const int error = errno;
  g_interrupted.store(true, std::memory_order_relaxed);
  if (LanguageModel* model = g_answering.load(std::memory_order_relaxed)) model->Cancel();
  InterruptScope::Wake();
  errno = error;
}

}  // namespace

InterruptScope::InterruptScope(Mode mode) {
  if (g_wake[0] < 0) {
    OSCAR_CHECK(::pipe2(g_wake.data(), O_CLOEXEC | O_NONBLOCK) == 0, "pipe2: errno {}", errno);
  }
  g_interrupted.store(false);
  struct sigaction action {};
  action.sa_handler = OnInterrupt;  // no SA_RESTART: a waiting read returns
  if (mode == Mode::kOnce) action.sa_flags = static_cast<int>(SA_RESETHAND);
  ::sigaction(SIGINT, &action, &before_);
  if (before_.sa_handler == SIG_IGN) ::sigaction(SIGINT, &before_, nullptr);  // in the background
}

InterruptScope::~InterruptScope() {
  SetAnswering(nullptr);
  ::sigaction(SIGINT, &before_, nullptr);
}

void InterruptScope::SetAnswering(LanguageModel* model) { g_answering.store(model); }
bool InterruptScope::Pending() { return g_interrupted.load(std::memory_order_relaxed); }
bool InterruptScope::Take() { return g_interrupted.exchange(false); }
int InterruptScope::WakeFd() { return g_wake[0]; }

void InterruptScope::Wake() {
  if (g_wake[1] < 0) return;
  const ssize_t ignored = ::write(g_wake[1], "!", 1);  // full: it is readable, which is enough
  static_cast<void>(ignored);
}

}  // namespace oscar::cli
