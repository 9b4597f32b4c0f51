#include "bench/load_bench.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cmath>
#include <latch>
#include <numeric>
#include <thread>

namespace oscar {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPollInterval = std::chrono::milliseconds(50);
// Numbers of requests that are not among those of the load.
constexpr uint64_t kWarmNumber = 1'000'000'000, kBesideNumber = 1'000'000'001;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// The same figure as four servers name it; those with labels are added up.
struct MetricNames {
  std::array<std::string_view, 4> names;
};
constexpr MetricNames kRunning{{"oscar_requests_running", "vllm:num_requests_running",
                                "sglang:num_running_reqs", "llamacpp:requests_processing"}};
constexpr MetricNames kPreemptions{{"oscar_preemptions_total", "vllm:num_preemptions_total",
                                    "vllm:num_preemptions", "sglang:num_retracted_reqs"}};
constexpr MetricNames kKvBytes{{"oscar_kv_used_bytes"}};
constexpr MetricNames kKvBudget{{"oscar_kv_budget_bytes"}};

double ValueOf(const std::map<std::string, double>& metrics, const MetricNames& wanted) {
  for (const std::string_view name : wanted.names) {
    double sum = 0.0;
    bool found = false;
    for (auto at = metrics.lower_bound(std::string(name));
         !name.empty() && at != metrics.end() && at->first.starts_with(name); ++at) {
      if (at->first.size() != name.size() && at->first[name.size()] != '{') continue;
      sum += at->second;
      found = true;
    }
    if (found) return sum;
  }
  return -1.0;
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
    seen->most_running = std::max(seen->most_running, ValueOf(metrics, kRunning));
    seen->most_kv_bytes = std::max(seen->most_kv_bytes, ValueOf(metrics, kKvBytes));
    seen->kv_budget_bytes = ValueOf(metrics, kKvBudget);
    return ValueOf(metrics, kPreemptions);
  }

  const ServerAddress& address_;
  LoadReport report_;
  double before_ = -1.0;
  std::jthread thread_;
};

std::vector<double> CurveOf(std::vector<double> values) {
  if (values.empty()) return {};
  std::ranges::sort(values);
  std::vector<double> curve(101);
  for (size_t i = 0; i < curve.size(); ++i) {
    curve[i] = Quantile(values, static_cast<double>(i) / 100.0);
  }
  return curve;
}

// What the answers come to.
void Summarize(const LoadOptions& options, const std::vector<LoadAnswer>& answers,
               const std::vector<RequestLengths>& lengths, LoadReport* report) {
  std::vector<double> first, each, between, total;
  int64_t prompt = 0, cached = 0, generated = 0, good = 0;
  for (size_t i = 0; i < answers.size(); ++i) {
    const LoadAnswer& answer = answers[i];
    if (!answer.status.ok()) {
      ++report->failed;
      if (report->first_error.empty()) report->first_error = answer.status.message();
      continue;
    }
    ++report->answered;
    prompt += answer.prompt_tokens;
    cached += std::max<int64_t>(answer.cached_tokens, 0);
    generated += answer.completion_tokens;
    report->short_answers += answer.completion_tokens < lengths[i].output ? 1 : 0;
    report->uncounted += answer.has_usage ? 0 : 1;
    first.push_back(answer.first_token);
    total.push_back(answer.total);
    const double per_token = answer.per_token();
    if (per_token >= 0.0) each.push_back(per_token);
    between.insert(between.end(), answer.gaps.begin(), answer.gaps.end());
    good +=
        answer.first_token <= options.target_first_token && per_token <= options.target_per_token
            ? 1
            : 0;
  }
  const double seconds = std::max(report->seconds, 1e-9);
  report->requests_per_second = static_cast<double>(report->answered) / seconds;
  report->output_tokens_per_second = static_cast<double>(generated) / seconds;
  report->input_tokens_per_second = static_cast<double>(prompt) / seconds;
  report->good_per_second = static_cast<double>(good) / seconds;
  if (!answers.empty()) {
    report->good_share = static_cast<double>(good) / static_cast<double>(answers.size());
  }
  if (prompt > 0) report->cached_share = static_cast<double>(cached) / static_cast<double>(prompt);
  report->first_token_curve = CurveOf(first);
  report->per_token_curve = CurveOf(each);
  report->between_tokens_curve = CurveOf(between);
  report->first_token = PercentilesOf(std::move(first));
  report->per_token = PercentilesOf(std::move(each));
  report->between_tokens = PercentilesOf(std::move(between));
  report->latency = PercentilesOf(std::move(total));
}

}  // namespace

double Quantile(std::span<const double> sorted, double share) {
  if (sorted.empty()) return 0.0;
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  const double weight = at - static_cast<double>(low);
  return (1.0 - weight) * sorted[low] + weight * sorted[high];
}

Percentiles PercentilesOf(std::vector<double> values) {
  Percentiles out;
  if (values.empty()) return out;
  std::ranges::sort(values);
  out.count = static_cast<int64_t>(values.size());
  out.mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(out.count);
  out.p50 = Quantile(values, 0.5);
  out.p90 = Quantile(values, 0.9);
  out.p95 = Quantile(values, 0.95);
  out.p99 = Quantile(values, 0.99);
  out.max = values.back();
  return out;
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
  const auto body_of = [&](uint64_t number, const RequestLengths& lengths) {
    return RequestBody(options.workload, options.model, number, lengths);
  };
  if (options.workload.shared_tokens > 0) {
    const LoadAnswer warm =
        StreamCompletion(address, body_of(kWarmNumber, {1, 1}), options.timeout);
    if (!warm.status.ok()) return Unexpected(warm.status);
  }
  const auto count = static_cast<size_t>(options.requests);
  std::vector<LoadAnswer> answers(count);
  std::vector<RequestLengths> lengths(count);
  for (size_t i = 0; i < count; ++i) lengths[i] = LengthsOf(options.workload, i);
  const bool is_open = options.rate > 0.0;
  const std::vector<double> arrivals =
      is_open ? Arrivals(options.rate, options.requests, options.workload.seed)
              : std::vector<double>(count, 0.0);
  const int workers =
      std::min({is_open ? options.requests : options.clients, options.requests, kMaxInFlight});
  std::atomic<size_t> next{0};
  std::atomic<bool> beside_ended{false};
  LoadReport report;
  LoadAnswer beside;
  std::latch begun(1);  // the conversation beside
  std::vector<double> late(static_cast<size_t>(workers), 0.0);
  std::vector<uint8_t> sent(count, 0);
  {
    Observer observer(address);
    std::jthread conversation;
    if (options.beside_prompt_tokens > 0) {
      conversation = std::jthread([&] {
        bool has_begun = false;
        const auto begin = [&] {
          if (!std::exchange(has_begun, true)) begun.count_down();
        };
        beside = StreamCompletion(
            address,
            body_of(kBesideNumber, {options.beside_prompt_tokens, options.beside_max_tokens}),
            options.timeout, begin);
        beside_ended = true;
        begin();  // where nothing came
      });
      begun.wait();
    }
    const auto start = Clock::now();
    const auto work = [&](size_t worker) {
      for (size_t n = next++; n < count && !beside_ended; n = next++) {
        const auto due = start + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(arrivals[n]));
        const std::string body = body_of(n, lengths[n]);
        while (Clock::now() < due && !beside_ended) {
          std::this_thread::sleep_until(std::min(due, Clock::now() + kPollInterval));
        }
        if (beside_ended) return;
        sent[n] = 1;
        if (is_open) late[worker] = std::max(late[worker], Seconds(Clock::now() - due));
        answers[n] = StreamCompletion(address, body, options.timeout);
        if (on_answer) on_answer();
      }
    };
    {
      std::vector<std::jthread> clients;
      for (int i = 0; i < workers; ++i) clients.emplace_back(work, static_cast<size_t>(i));
    }
    report.seconds = Seconds(Clock::now() - start);
    if (conversation.joinable()) conversation.join();
    observer.Into(&report);
  }
  if (options.beside_prompt_tokens > 0) {
    if (!beside.status.ok()) return Unexpected(beside.status);
    report.beside.emplace();
    report.beside->first_token = beside.first_token;
    report.beside->prompt_tokens = beside.prompt_tokens;
    report.beside->completion_tokens = beside.completion_tokens;
    report.beside->between_tokens =
        PercentilesOf(std::vector<double>(beside.gaps.begin(), beside.gaps.end()));
  }
  report.latest_arrival = late.empty() ? 0.0 : std::ranges::max(late);
  for (size_t i = count; i-- > 0;) {
    if (sent[i] != 0) continue;  // the conversation had ended before
    answers.erase(answers.begin() + static_cast<std::ptrdiff_t>(i));
    lengths.erase(lengths.begin() + static_cast<std::ptrdiff_t>(i));
  }
  Summarize(options, answers, lengths, &report);
  return report;
}

}  // namespace oscar
