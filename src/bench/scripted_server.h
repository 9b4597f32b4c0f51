// For tests: a server that says exactly what a test tells it to, byte by byte, to each connection.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "bench/http_exchange.h"

namespace oscar {

class ScriptedServer {
 public:
  // One connection: its request's first line and body, and how to answer. The connection closes
  // when the script returns.
  struct Caller {
    int fd;
    std::string line, head, body;
    // False: the client has left.
    bool Say(std::string_view bytes) const {
      while (!bytes.empty()) {
        const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (sent <= 0) return false;
        bytes.remove_prefix(static_cast<size_t>(sent));
      }
      return true;
    }
    bool SayEvents(std::string_view events) const {
      return Say("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" +
                 std::string(events));
    }
  };
  using Script = std::function<void(const Caller&)>;

  explicit ScriptedServer(Script script)
      : script_(std::move(script)), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(listener_, 256), 0);
    socklen_t size = sizeof(address);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::jthread([this] {
      for (int fd = 0; (fd = ::accept(listener_, nullptr, nullptr)) >= 0;) {
        const std::lock_guard lock(mutex_);
        callers_.emplace_back([this, fd] { Serve(fd); });
      }
    });
  }
  ~ScriptedServer() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    callers_.clear();
    ::close(listener_);
  }
  ScriptedServer(const ScriptedServer&) = delete;
  ScriptedServer& operator=(const ScriptedServer&) = delete;

  ServerAddress address() const {
    ServerAddress out;
    out.port = port_;
    return out;
  }
  std::vector<std::string> bodies() const {
    const std::lock_guard lock(mutex_);
    return bodies_;
  }

 private:
  void Serve(int fd) {
    Caller caller{fd, {}, {}, {}};
    std::string text;
    size_t end = std::string::npos, length = 0;
    char buffer[4096];
    while (end == std::string::npos || text.size() < end + 4 + length) {
      const ssize_t got = ::recv(fd, buffer, sizeof(buffer), 0);
      if (got <= 0) break;
      text.append(buffer, static_cast<size_t>(got));
      end = text.find("\r\n\r\n");
      const size_t field = text.find("Content-Length: ");
      if (field < end) length = std::stoul(text.substr(field + 16));
    }
    if (end != std::string::npos) {
      caller.line = text.substr(0, text.find("\r\n"));
      caller.head = text.substr(0, end + 2);
      caller.body = text.substr(end + 4);
      if (!caller.body.empty()) {
        const std::lock_guard lock(mutex_);
        bodies_.push_back(caller.body);
      }
      script_(caller);
    }
    ::close(fd);
  }

  Script script_;
  int listener_, port_ = 0;
  mutable std::mutex mutex_;
  std::vector<std::string> bodies_;
  std::vector<std::jthread> callers_;
  std::jthread thread_;
};

}  // namespace oscar
