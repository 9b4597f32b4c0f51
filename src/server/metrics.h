// Metrics: counters, gauges and fixed-bucket histograms with Prometheus text exposition (0.0.4).
// Recording is lock-free on atomics except for labelled counters, which take a short lock.
// Everything may be called from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oscar::server {

class Histogram {
 public:
  // Upper bounds, ascending; one more bucket is +Inf. At most kMaxBuckets.
  static constexpr size_t kMaxBuckets = 24;
  explicit Histogram(std::span<const double> bounds);
  void Observe(double value);

  struct Snapshot {
    std::vector<std::pair<double, uint64_t>> cumulative;  // bound -> observations up to it
    uint64_t count = 0;
    double sum = 0.0;
  };
  Snapshot Read() const;

 private:
  std::vector<double> bounds_;
  std::array<std::atomic<uint64_t>, kMaxBuckets + 1> counts_{};
  std::atomic<double> sum_{0.0};
};

// Bounds in seconds: 1 ms to about 10 min.
std::span<const double> LatencyBounds();
// 0.5 ms to 10 s, for single tokens.
std::span<const double> TokenLatencyBounds();

// 1 to 65536 in powers of two, for counts of tokens.
std::span<const double> TokenCountBounds();

using Labels = std::vector<std::pair<std::string, std::string>>;

class LabelledCounter {
 public:
  void Add(const Labels& labels, uint64_t amount = 1);
  std::map<Labels, uint64_t> Read() const;

 private:
  mutable std::mutex mutex_;
  std::map<Labels, uint64_t> counts_;
};

// Writes families in exposition order; every family once, with HELP and TYPE. Names get the prefix,
// and every sample the common labels; label values are escaped.
class ExpositionWriter {
 public:
  explicit ExpositionWriter(std::string prefix = "oscar_", Labels common = {})
      : prefix_(std::move(prefix)), common_(std::move(common)) {}
  void Counter(std::string_view name, std::string_view help, uint64_t value);
  void Counter(std::string_view name, std::string_view help,
               const std::map<Labels, uint64_t>& values);
  void Gauge(std::string_view name, std::string_view help, double value);
  void Gauge(std::string_view name, std::string_view help,
             const std::vector<std::pair<Labels, double>>& values);
  void Add(std::string_view name, std::string_view help, const Histogram& histogram) {
    Add(name, help, histogram.Read());
  }
  void Add(std::string_view name, std::string_view help, const Histogram::Snapshot& snapshot);
  const std::string& text() const { return text_; }

 private:
  void Family(std::string_view name, std::string_view help, std::string_view type);
  void Sample(std::string_view name, const Labels& labels, double value);
  const std::string prefix_;
  const Labels common_;
  std::string text_;
};

// What the server itself counts; the engine has its own numbers.
struct ServerMetrics {
  LabelledCounter requests;        // endpoint, finish_reason
  LabelledCounter http_responses;  // code
  std::atomic<uint64_t> cancelled{0};
  std::atomic<int64_t> streams{0};
  Histogram time_to_first_token{LatencyBounds()};
  Histogram time_per_output_token{TokenLatencyBounds()};  // mean of a choice
  Histogram inter_token{TokenLatencyBounds()};            // every gap
  Histogram request_prompt_tokens{TokenCountBounds()};
  Histogram request_generation_tokens{TokenCountBounds()};
  Histogram request_duration{LatencyBounds()};
  Histogram queue{LatencyBounds()};
  Histogram prefill{LatencyBounds()};
  Histogram decode{LatencyBounds()};
};

}  // namespace oscar::server
