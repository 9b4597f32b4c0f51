#include "server/signals.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "base/check.h"

namespace oscar::server {
namespace {

constexpr int kExitInterrupted = 130;

// What the handler touches: lock-free atomics and write(2) only.
std::atomic<int> g_event{-1};
std::atomic<int> g_count{0};
static_assert(std::atomic<int>::is_always_lock_free);

void OnSignal(int) {
  if (g_count.fetch_add(1) > 0) ::_exit(kExitInterrupted);
  const int saved = errno;
  const uint64_t one = 1;
  if (::write(g_event.load(), &one, sizeof(one)) < 0) ::_exit(kExitInterrupted);
  errno = saved;
}

struct sigaction g_former[3];
constexpr int kSignals[3] = {SIGINT, SIGTERM, SIGPIPE};

}  // namespace

SignalWatch::SignalWatch() {
  OSCAR_CHECK(g_event.load() < 0, "only one SignalWatch at a time");
  g_event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  g_count = 0;
  for (int i = 0; i < 3; ++i) {
    struct sigaction action {};
    action.sa_handler = kSignals[i] == SIGPIPE ? SIG_IGN : OnSignal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    ::sigaction(kSignals[i], &action, &g_former[i]);
  }
}

SignalWatch::~SignalWatch() {
  for (int i = 0; i < 3; ++i) ::sigaction(kSignals[i], &g_former[i], nullptr);
  ::close(g_event.exchange(-1));
}

bool SignalWatch::Wait(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (g_count.load() == 0) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd entry = {g_event.load(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(std::min<int64_t>(left.count(), 1 << 30)));
  }
  return true;
}

}  // namespace oscar::server
