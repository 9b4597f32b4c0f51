// SignalWatch: SIGINT and SIGTERM as something to wait for. The handler only counts and writes to
// an event descriptor; the second signal ends the process at once (exit code 130). SIGPIPE is
// ignored. One object a process.
#pragma once

#include <chrono>

namespace oscar::server {

class SignalWatch {
 public:
  SignalWatch();
  ~SignalWatch();  // restores the former handlers
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  // True as soon as a signal has come; false after `timeout`.
  bool Wait(std::chrono::milliseconds timeout);
};

}  // namespace oscar::server
