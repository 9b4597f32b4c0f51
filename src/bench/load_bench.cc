#include "bench/load_bench.h"

#include <fmt/core.h>
#include <httplib.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/json.h"
#include "base/rng.h"

namespace oscar {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr std::chrono::seconds kSilence{600};  // a queue may be long
constexpr size_t kMaxBody = size_t{64} << 20;
constexpr auto kPollInterval = std::chrono::milliseconds(50);

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Sends one request on a connection of its own and appends the response's body to `body` as it
// comes; `on_data` sees the status after every piece. The status at the end.
Result<int> Send(const ServerAddress& address, httplib::Request request, std::string* body,
                 const std::function<Status(int)>& on_data = {}) {
  // The library's sends raise it where a server hangs up.
  sigset_t broken_pipe;
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr);
  if (!address.api_key.empty()) {
    request.set_header("Authorization", "Bearer " + address.api_key);
  }
  int http_status = 0;
  Status status;
  request.response_handler = [&](const httplib::Response& response) {
    http_status = response.status;
    return true;
  };
  request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
    body->append(data, size);
    if (body->size() > kMaxBody) status = DataLoss("the response is too long");
    if (status.ok() && on_data) status = on_data(http_status);
    return status.ok();
  };
  httplib::Client client(address.host, address.port);
  client.set_read_timeout(kSilence);
  client.set_write_timeout(kSilence);
  client.set_tcp_nodelay(true);
  const httplib::Result result = client.send(request);
  OSCAR_RETURN_IF_ERROR(status);
  if (!result) {
    return Unexpected(Unavailable(fmt::format("{}:{}: {} error", address.host, address.port,
                                              httplib::to_string(result.error()))));
  }
  return http_status;
}

Status ErrorOf(int status, const std::string& body) {
  std::string message = body.substr(0, 300);
  if (const auto json = ParseOrderedJson(body, "response"); json.has_value() && json->is_object()) {
    if (const auto error = json->find("error"); error != json->end() && error->is_object()) {
      message = error->value("message", message);
    }
  }
  return Unavailable(fmt::format("HTTP {}: {}", status, message));
}

// One "data:" line of a stream. True: an event with text.
Result<bool> TakeEvent(std::string_view line, LoadAnswer* answer) {
  if (line == "[DONE]") return false;
  OSCAR_ASSIGN_OR_RETURN(const Json event, ParseOrderedJson(line, "event"));
  if (!event.is_object()) return Unexpected(DataLoss("an event is not an object"));
  if (event.contains("error")) {
    return Unexpected(Unavailable(event["error"].value("message", std::string("failed"))));
  }
  if (const auto usage = event.find("usage"); usage != event.end() && usage->is_object()) {
    answer->prompt_tokens = usage->value("prompt_tokens", int64_t{0});
    answer->completion_tokens = usage->value("completion_tokens", int64_t{0});
    if (usage->contains("prompt_tokens_details")) {
      answer->cached_tokens = (*usage)["prompt_tokens_details"].value("cached_tokens", int64_t{0});
    }
  }
  const auto choices = event.find("choices");
  return choices != event.end() && choices->is_array() && !choices->empty();
}

Status Stream(const ServerAddress& address, const std::string& body, LoadAnswer* answer) {
  const auto start = Clock::now();
  httplib::Request request;
  request.method = "POST";
  request.path = "/v1/completions";
  request.body = body;
  request.set_header("Content-Type", "application/json");
  std::string pending;
  bool done = false;
  const auto take_events = [&](int status) -> Status {
    for (size_t end = 0; status == 200 && (end = pending.find("\n\n")) != std::string::npos;) {
      const std::string frame = pending.substr(0, end);
      pending.erase(0, end + 2);
      if (!frame.starts_with("data: ")) continue;  // a ping
      const std::string_view line = std::string_view(frame).substr(6);
      done = done || line == "[DONE]";
      OSCAR_ASSIGN_OR_RETURN(const bool has_text, TakeEvent(line, answer));
      if (has_text && answer->first_token == 0.0) {
        answer->first_token = Seconds(Clock::now() - start);
      }
    }
    return {};
  };
  OSCAR_ASSIGN_OR_RETURN(const int status,
                         Send(address, std::move(request), &pending, take_events));
  if (status != 200) return ErrorOf(status, pending);
  answer->total = Seconds(Clock::now() - start);
  return done ? Status{} : DataLoss("the stream ended without [DONE]");
}

double Quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0.0;
  std::ranges::sort(values);
  const double at = share * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  const double weight = at - static_cast<double>(low);
  return (1.0 - weight) * values[low] + weight * values[high];
}

std::vector<int32_t> RandomIds(uint64_t seed, uint64_t stream, int64_t count, int vocab_size) {
  const Philox rng(seed, stream);
  const int first = vocab_size / 64;  // special tokens tend to be the first ones, or the last
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (uint64_t i = 0; i < ids.size(); ++i) {
    ids[i] = first + static_cast<int32_t>(rng.Below(i, static_cast<uint32_t>(vocab_size - first)));
  }
  return ids;
}

std::string RequestBody(const LoadOptions& options, uint64_t number, int64_t own_tokens,
                        int64_t max_tokens) {
  std::vector<int32_t> prompt =
      RandomIds(options.seed, 0, options.shared_tokens, options.vocab_size);
  const auto own = RandomIds(options.seed, number + 1, own_tokens, options.vocab_size);
  prompt.insert(prompt.end(), own.begin(), own.end());
  Json body = {{"prompt", prompt}, {"max_tokens", max_tokens},
               {"temperature", 0}, {"ignore_eos", true},
               {"stream", true},   {"stream_options", {{"include_usage", true}}}};
  if (!options.model.empty()) body["model"] = options.model;
  return body.dump();
}

// Reads the server's own numbers while the load runs.
class Observer {
 public:
  explicit Observer(const ServerAddress& address) : address_(address) {
    before_ = Preemptions(&report_);
    thread_ = std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        Preemptions(&report_);
        std::this_thread::sleep_for(kPollInterval);
      }
    });
  }
  void Into(LoadReport* report) {
    thread_.request_stop();
    thread_.join();
    const double after = Preemptions(&report_);
    report->most_running = report_.most_running;
    report->most_kv_bytes = report_.most_kv_bytes;
    report->kv_budget_bytes = report_.kv_budget_bytes;
    if (after >= 0.0 && before_ >= 0.0) report->preemptions = after - before_;
  }

 private:
  double Preemptions(LoadReport* seen) const {
    const auto text = HttpGet(address_, "/metrics");
    if (!text.has_value()) return -1.0;
    const auto metrics = ParseMetrics(*text);
    const auto value = [&](const char* name) {
      const auto found = metrics.find(name);
      return found == metrics.end() ? -1.0 : found->second;
    };
    seen->most_running = std::max(seen->most_running, value("oscar_requests_running"));
    seen->most_kv_bytes = std::max(seen->most_kv_bytes, value("oscar_kv_used_bytes"));
    seen->kv_budget_bytes = value("oscar_kv_budget_bytes");
    return value("oscar_preemptions_total");
  }

  const ServerAddress& address_;
  LoadReport report_;
  double before_ = -1.0;
  std::jthread thread_;
};

}  // namespace

Result<ServerAddress> ParseServerAddress(std::string_view url) {
  ServerAddress address;
  const auto refuse = [&] {
    return Unexpected(InvalidArgument(
        fmt::format("'{}' is not the address of a server; expected http://HOST:PORT", url)));
  };
  constexpr std::string_view kScheme = "http://";
  std::string_view rest = url;
  if (!rest.starts_with(kScheme)) return refuse();
  rest.remove_prefix(kScheme.size());
  std::string_view authority = rest.substr(0, rest.find('/'));
  const std::string_view path = rest.substr(authority.size());
  if (!path.empty() && path != "/" && path != "/v1" && path != "/v1/") return refuse();
  const size_t colon = authority.rfind(':');
  address.port = 80;
  if (colon != std::string_view::npos && authority.find(']', colon) == std::string_view::npos) {
    const std::string_view port = authority.substr(colon + 1);
    const auto parsed = std::from_chars(port.data(), port.data() + port.size(), address.port);
    if (parsed.ec != std::errc() || parsed.ptr != port.data() + port.size()) return refuse();
    if (address.port < 1 || address.port > 65535) return refuse();
    authority = authority.substr(0, colon);
  }
  if (authority.starts_with('[') && authority.ends_with(']')) {
    authority = authority.substr(1, authority.size() - 2);
  }
  if (authority.empty()) return refuse();
  address.host = authority;
  return address;
}

LoadAnswer StreamCompletion(const ServerAddress& address, const std::string& body) {
  LoadAnswer answer;
  answer.status = Stream(address, body, &answer);
  return answer;
}

Result<std::string> HttpGet(const ServerAddress& address, const std::string& path) {
  httplib::Request request;
  request.method = "GET";
  request.path = path;
  std::string body;
  OSCAR_ASSIGN_OR_RETURN(const int status, Send(address, std::move(request), &body));
  if (status != 200) return Unexpected(ErrorOf(status, body));
  return body;
}

std::map<std::string, double> ParseMetrics(std::string_view text) {
  std::map<std::string, double> samples;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const size_t space = line.rfind(' ');
    if (line.starts_with('#') || space == std::string_view::npos) continue;
    double value = 0.0;
    const std::string_view number = line.substr(space + 1);
    const auto parsed = std::from_chars(number.data(), number.data() + number.size(), value);
    if (parsed.ec == std::errc() && parsed.ptr == number.data() + number.size())
      samples[std::string(line.substr(0, space))] = value;
  }
  return samples;
}

Result<LoadReport> RunLoad(const ServerAddress& address, const LoadOptions& options,
                           const std::function<void()>& on_answer) {
  if (options.shared_tokens > 0) {
    const LoadAnswer warm =
        StreamCompletion(address, RequestBody(options, 1'000'000, 1, /*max_tokens=*/1));
    if (!warm.status.ok()) return Unexpected(warm.status);
  }
  std::vector<LoadAnswer> answers(static_cast<size_t>(options.requests));
  std::atomic<size_t> next{0};
  LoadReport report;
  {
    Observer observer(address);
    const auto start = Clock::now();
    {
      std::vector<std::jthread> clients;
      for (int i = 0; i < options.clients; ++i) {
        clients.emplace_back([&] {
          for (size_t n = next++; n < answers.size(); n = next++) {
            const std::string body =
                RequestBody(options, n, options.prompt_tokens, options.max_tokens);
            answers[n] = StreamCompletion(address, body);
            if (on_answer) on_answer();
          }
        });
      }
    }
    report.seconds = Seconds(Clock::now() - start);
    observer.Into(&report);
  }
  std::vector<double> first, each;
  int64_t prompt = 0, cached = 0, generated = 0;
  for (const LoadAnswer& answer : answers) {
    if (!answer.status.ok()) {
      ++report.failed;
      if (report.first_error.empty()) report.first_error = answer.status.message();
      continue;
    }
    ++report.answered;
    prompt += answer.prompt_tokens;
    cached += answer.cached_tokens;
    generated += answer.completion_tokens;
    first.push_back(answer.first_token);
    if (answer.completion_tokens > 1) {
      each.push_back((answer.total - answer.first_token) /
                     static_cast<double>(answer.completion_tokens - 1));
    }
  }
  report.output_tokens_per_second = static_cast<double>(generated) / report.seconds;
  report.input_tokens_per_second = static_cast<double>(prompt) / report.seconds;
  report.cached_share =
      prompt > 0 ? static_cast<double>(cached) / static_cast<double>(prompt) : 0.0;
  report.first_token_p50 = Quantile(first, 0.5);
  report.first_token_p95 = Quantile(first, 0.95);
  report.per_token_p50 = Quantile(each, 0.5);
  report.per_token_p95 = Quantile(each, 0.95);
  return report;
}

}  // namespace oscar
