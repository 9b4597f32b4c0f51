#include "cli/interrupt.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <utility>

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

ClearUpScope::ClearUpScope(std::function<void()> clear_up) : clear_up_(std::move(clear_up)) {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    ::sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&set, number);  // as nohup and shells have it
  }
  signals_ = ::signalfd(-1, &set, SFD_CLOEXEC);
  over_ = ::eventfd(0, EFD_CLOEXEC);
  OSCAR_CHECK(signals_ >= 0 && over_ >= 0, "signalfd, eventfd: errno {}", errno);
  // Threads inherit it: the signals wait for the one that reads them.
  ::pthread_sigmask(SIG_BLOCK, &set, &before_);
  waiter_ = std::thread([this] { Wait(); });
}

ClearUpScope::~ClearUpScope() {
  const uint64_t one = 1;
  OSCAR_CHECK(::write(over_, &one, sizeof(one)) == sizeof(one), "eventfd: errno {}", errno);
  waiter_.join();
  ::close(signals_);
  ::close(over_);
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void ClearUpScope::Wait() {
  std::array<pollfd, 2> entries = {{{signals_, POLLIN, 0}, {over_, POLLIN, 0}}};
  while (::poll(entries.data(), entries.size(), -1) < 0) {
  }
  if (entries[0].revents == 0) return;
  signalfd_siginfo info;
  OSCAR_CHECK(::read(signals_, &info, sizeof(info)) == sizeof(info), "signalfd: errno {}", errno);
  clear_up_();
  const int number = static_cast<int>(info.ssi_signo);
  ::signal(number, SIG_DFL);
  ::raise(number);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, number);
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);  // and there the program ends
}

}  // namespace oscar::cli
