#include "bench/workload.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/rng.h"

namespace oscar {
namespace {

// Streams of random numbers, so that none follows from another.
constexpr uint64_t kLengthStream = uint64_t{1} << 62, kArrivalStream = uint64_t{1} << 63;
constexpr double kShortest = 4.0, kLongest = 1024.0;

// Each a token, or nearly so, in the vocabularies of today's models.
constexpr std::array<std::string_view, 64> kWords = {
    "time",     "year",    "people",   "way",    "day",        "man",    "thing",   "woman",
    "life",     "child",   "world",    "school", "state",      "family", "student", "group",
    "country",  "problem", "hand",     "part",   "place",      "case",   "week",    "company",
    "system",   "program", "question", "work",   "government", "number", "night",   "point",
    "home",     "water",   "room",     "mother", "area",       "money",  "story",   "fact",
    "month",    "lot",     "right",    "study",  "book",       "eye",    "job",     "word",
    "business", "issue",   "side",     "kind",   "head",       "house",  "service", "friend",
    "father",   "power",   "hour",     "game",   "line",       "end",    "member",  "law"};

std::vector<int32_t> RandomIds(uint64_t seed, uint64_t stream, int64_t count, int vocab_size) {
  const Philox rng(seed, stream);
  const int first = vocab_size / 64;  // special tokens tend to be the first ones, or the last
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (uint64_t i = 0; i < ids.size(); ++i) {
    ids[i] = first + static_cast<int32_t>(rng.Below(i, static_cast<uint32_t>(vocab_size - first)));
  }
  return ids;
}

}  // namespace

RequestLengths LengthsOf(const Workload& workload, uint64_t number) {
  if (workload.dataset == Dataset::kRandom) return {workload.prompt_tokens, workload.max_tokens};
  const Philox rng(workload.seed, kLengthStream);
  const auto length = [&](double median, double sigma, uint64_t index) {
    const double value = median * std::exp(sigma * double{rng.Normal(index)});
    return static_cast<int64_t>(std::lround(std::clamp(value, kShortest, kLongest)));
  };
  return {length(95.0, 1.5, 2 * number), length(120.0, 1.1, 2 * number + 1)};
}

std::string RequestBody(const Workload& workload, const std::string& model, uint64_t number,
                        const RequestLengths& lengths) {
  std::vector<int32_t> prompt =
      RandomIds(workload.seed, 0, workload.shared_tokens, workload.vocab_size);
  const auto own = RandomIds(workload.seed, number + 1, lengths.prompt, workload.vocab_size);
  prompt.insert(prompt.end(), own.begin(), own.end());
  nlohmann::ordered_json body;
  if (!model.empty()) body["model"] = model;
  if (workload.format == PromptFormat::kIds) {
    body["prompt"] = prompt;
  } else {
    std::string text;
    for (const int32_t id : prompt) {
      text += text.empty() ? "" : " ";
      text += kWords[static_cast<size_t>(id) % kWords.size()];
    }
    body["prompt"] = text;
  }
  body["max_tokens"] = lengths.output;
  body["temperature"] = 0;
  body["ignore_eos"] = true;
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  return body.dump();
}

std::vector<double> Arrivals(double rate, int count, uint64_t seed) {
  std::vector<double> times(static_cast<size_t>(count));
  if (!std::isfinite(rate)) return times;
  const Philox rng(seed, kArrivalStream);
  double at = 0.0;
  for (size_t i = 0; i < times.size(); ++i) {  // the first arrives at once
    times[i] = at;
    at -= std::log(1.0 - double{rng.Uniform(i)}) / rate;
  }
  return times;
}

Result<double> ParseRate(std::string_view text) {
  if (text == "inf") return std::numeric_limits<double>::infinity();
  double rate = 0.0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), rate);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || !(rate > 0.0) ||
      !std::isfinite(rate)) {
    return Unexpected(InvalidArgument(
        fmt::format("--rate {}: requests per second, such as 2.5, or inf for all at once", text)));
  }
  return rate;
}

}  // namespace oscar
