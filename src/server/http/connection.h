// Connection: one client from its first byte to its last. A state machine on a strand: nothing in
// it waits, and no thread belongs to it. Reads are bounded in bytes and in time for the whole of a
// head and for the whole of a body; writes in time without progress; what is read ahead while an
// answer is computed is bounded as well. For .cc files of this module.
#pragma once

#include <array>
#include <atomic>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "http/body_budget.h"
#include "http/http.h"
#include "http/http_server.h"
#include "http/request_reader.h"
#include "http/transport.h"
#include "http/worker_pool.h"

namespace oscar::server {

class Connection;

// What connections share. Safe from any thread.
class ConnectionHost {
 public:
  ConnectionHost(const HttpOptions& http_options, int num_workers)
      : options(http_options), budget(http_options.max_bytes_in_flight), workers(num_workers) {}
  virtual ~ConnectionHost() = default;
  // Idle connections should make room.
  virtual bool Crowded() = 0;
  virtual void Ended(Connection& connection) = 0;
  // A large request has ended: its memory should go back to the system.
  virtual void MemoryFreed() = 0;

  const HttpOptions options;
  HttpHandler* handler = nullptr;
  std::atomic<bool> stopping{false};
  BodyBudget budget;
  WorkerPool workers;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<ConnectionHost> host, Socket socket, boost::asio::ssl::context* tls);

  // From any thread.
  void Start();
  void CloseIfIdle();  // the server stops
  void CutOff();

 private:
  using Clock = std::chrono::steady_clock;
  using Bytes = std::string;
  enum class Phase : uint8_t {
    kHandshake,
    kIdle,  // between requests
    kHead,  // some of a head has arrived
    kBody,
    kPaused,    // a body that waits for the others' bytes to go
    kHandling,  // the handler has the request, or its source the answer
    kLinger,    // answered; what still comes is discarded
    kClosed,
  };

  // Reading
  void StartRead();
  void OnRead(ErrorCode error, std::string_view bytes);
  void OnEnd(bool reset);
  void ProcessInput();
  void OnHead();
  void ContinueBody();
  void AwaitRequest();

  // Answering
  void Dispatch(bool on_worker);
  void OnResponse(HttpResponse response);
  void Pump();
  void SendWhole(HttpResponse response);
  void Refuse(int status, std::string_view message, bool linger);
  std::string HeadText(HttpResponse& response, bool stream);
  template <typename Function>
  HttpResponse Guarded(const Function& function);
  void EndExchange();

  // Writing
  void Write(Bytes first, Bytes second, std::function<void()> then);
  void WriteMore();

  void ArmTimer(Clock::time_point when);
  bool CheckIdle();
  void OnTimer();
  void Linger();
  void Gone();
  void Close();

  const std::shared_ptr<ConnectionHost> host_;
  Transport transport_;
  Strand strand_;
  boost::asio::steady_timer timer_;
  uint64_t timer_number_ = 0;  // of the timer that counts
  Phase phase_ = Phase::kIdle;
  std::string peer_address_;

  RequestReader reader_;
  std::unique_ptr<BodyBudget::Share> share_;
  bool reading_ = false, half_closed_ = false;
  bool first_request_ = true;
  Clock::time_point idle_since_, deadline_, paused_at_;
  uint64_t lingered_ = 0;

  std::shared_ptr<HttpRequest> request_;  // shared with the worker that handles it
  std::unique_ptr<AnswerSource> source_;
  bool close_after_ = false, linger_after_ = false;
  bool is_head_ = false, is_http_1_0_ = false;
  bool prefix_sent_ = false;  // the first bytes of any response went out to see who is there
  bool probed_ = false;
  bool stream_open_ = false;  // status and headers of a stream are out
  bool composing_ = false;
  std::atomic<bool> wake_posted_{false};

  std::array<Bytes, 2> out_;
  size_t written_ = 0;  // of both
  bool writing_ = false;
  std::function<void()> after_write_;
};

}  // namespace oscar::server
