#include "server/metrics.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace oscar::server {
namespace {

constexpr std::array<double, 18> kLatency = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                             0.1,   0.25,   0.5,   1.0,  2.5,   5.0,
                                             10.0,  30.0,   60.0,  120., 300.,  600.};
constexpr std::array<double, 14> kTokenLatency = {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                                  0.1,    0.25,  0.5,    1.0,   2.5,  5.0,   10.0};

constexpr std::array<double, 17> kTokenCounts = {
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};

std::string Number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

std::string Escape(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

std::span<const double> LatencyBounds() { return kLatency; }
std::span<const double> TokenLatencyBounds() { return kTokenLatency; }
std::span<const double> TokenCountBounds() { return kTokenCounts; }

Histogram::Histogram(std::span<const double> bounds) : bounds_(bounds.begin(), bounds.end()) {
  OSCAR_CHECK(bounds_.size() <= kMaxBuckets && std::is_sorted(bounds_.begin(), bounds_.end()));
}

void Histogram::Observe(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  counts_[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

Histogram::Snapshot Histogram::Read() const {
  // The count is the sum of the buckets read, so that the two agree whatever happens meanwhile.
  Snapshot snapshot;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    snapshot.count += counts_[i].load(std::memory_order_relaxed);
    snapshot.cumulative.emplace_back(bounds_[i], snapshot.count);
  }
  snapshot.count += counts_[bounds_.size()].load(std::memory_order_relaxed);
  snapshot.sum = sum_.load(std::memory_order_relaxed);
  return snapshot;
}

void LabelledCounter::Add(const Labels& labels, uint64_t amount) {
  std::lock_guard lock(mutex_);
  counts_[labels] += amount;
}

std::map<Labels, uint64_t> LabelledCounter::Read() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

void ExpositionWriter::Family(std::string_view name, std::string_view help, std::string_view type) {
  text_ += fmt::format("# HELP {0}{1} {2}\n# TYPE {0}{1} {3}\n", prefix_, name, help, type);
}

void ExpositionWriter::Sample(std::string_view name, const Labels& labels, double value) {
  text_ += fmt::format("{}{}", prefix_, name);
  bool is_first = true;
  for (const Labels* part : {&common_, &labels}) {
    for (const auto& [label, text] : *part) {
      text_ += fmt::format("{}{}=\"{}\"", is_first ? "{" : ",", label, Escape(text));
      is_first = false;
    }
  }
  text_ += fmt::format("{} {}\n", is_first ? "" : "}", Number(value));
}

void ExpositionWriter::Counter(std::string_view name, std::string_view help, uint64_t value) {
  Family(name, help, "counter");
  Sample(name, {}, static_cast<double>(value));
}

void ExpositionWriter::Counter(std::string_view name, std::string_view help,
                               const std::map<Labels, uint64_t>& values) {
  Family(name, help, "counter");
  for (const auto& [labels, value] : values) Sample(name, labels, static_cast<double>(value));
}

void ExpositionWriter::Gauge(std::string_view name, std::string_view help, double value) {
  Family(name, help, "gauge");
  Sample(name, {}, value);
}

void ExpositionWriter::Gauge(std::string_view name, std::string_view help,
                             const std::vector<std::pair<Labels, double>>& values) {
  Family(name, help, "gauge");
  for (const auto& [labels, value] : values) Sample(name, labels, value);
}

void ExpositionWriter::Add(std::string_view name, std::string_view help,
                           const Histogram::Snapshot& snapshot) {
  Family(name, help, "histogram");
  const std::string bucket = fmt::format("{}_bucket", name);
  for (const auto& [bound, count] : snapshot.cumulative) {
    Sample(bucket, {{"le", Number(bound)}}, static_cast<double>(count));
  }
  Sample(bucket, {{"le", "+Inf"}}, static_cast<double>(snapshot.count));
  Sample(fmt::format("{}_sum", name), {}, snapshot.sum);
  Sample(fmt::format("{}_count", name), {}, static_cast<double>(snapshot.count));
}

}  // namespace oscar::server
