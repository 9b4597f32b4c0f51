#include "measure/token_distribution.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <numeric>

#include "simd/vec_ops.h"

namespace oscar {
namespace {

// Below it a probability is rounding alone.
constexpr double kSmallest = 1e-9;

}  // namespace

TokenDistribution LikelyTokens(std::span<const float> logits) {
  const double norm = simd::LogSumExp(logits);
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const size_t most = std::min(order.size(), TokenDistribution::kMaxLikely);
  const auto value = [&](int32_t token) { return logits[static_cast<size_t>(token)]; };
  std::partial_sort(
      order.begin(), order.begin() + static_cast<std::ptrdiff_t>(most), order.end(),
      [&](int32_t a, int32_t b) { return value(a) != value(b) ? value(a) > value(b) : a < b; });
  TokenDistribution out;
  out.rest = 1.0;
  for (size_t i = 0; i < most && out.rest > TokenDistribution::kMaxRest; ++i) {
    const double log_p = value(order[i]) - norm;
    out.likely.emplace_back(order[i], log_p);
    out.rest -= std::exp(log_p);
  }
  out.rest = order.size() == out.likely.size() ? 0.0 : std::max(out.rest, 0.0);
  return out;
}

double Divergence(const TokenDistribution& reference, std::span<const float> logits) {
  const double norm = simd::LogSumExp(logits);
  double sum = 0, rest = 1.0;
  for (const auto& [token, log_p] : reference.likely) {
    const double log_q = logits[static_cast<size_t>(token)] - norm;
    sum += std::exp(log_p) * (log_p - log_q);
    rest -= std::exp(log_q);
  }
  if (reference.rest > kSmallest) {
    sum += reference.rest * std::log(reference.rest / std::max(rest, kSmallest));
  }
  return std::max(sum, 0.0);
}

std::string EncodeDistributions(std::span<const TokenDistribution> distributions) {
  std::string out;
  for (const TokenDistribution& d : distributions) {
    fmt::format_to(std::back_inserter(out), "{:.4g}", d.rest);
    for (const auto& [token, log_p] : d.likely) {
      fmt::format_to(std::back_inserter(out), " {} {:.7g}", token, log_p);
    }
    out += ';';
  }
  return out;
}

Result<std::vector<TokenDistribution>> DecodeDistributions(std::string_view text, int vocab_size) {
  const auto wrong = [] { return Unexpected(DataLoss("not distributions over tokens")); };
  std::vector<TokenDistribution> out;
  const char *at = text.data(), *const end = at + text.size();
  const auto read = [&](auto* value) {
    const auto [stop, error] = std::from_chars(at, end, *value);
    at = stop;
    return error == std::errc();
  };
  while (at != end) {
    TokenDistribution& d = out.emplace_back();
    if (!read(&d.rest) || !(d.rest >= 0 && d.rest <= 1)) return wrong();
    for (; at != end && *at == ' ';) {
      auto& [token, log_p] = d.likely.emplace_back();
      if (!read(&(++at, token)) || token < 0 || token >= vocab_size) return wrong();
      if (at == end || *at != ' ' || d.likely.size() > TokenDistribution::kMaxLikely)
        return wrong();
      ++at;
      if (!read(&log_p) || !(log_p <= 0.001) || !std::isfinite(log_p)) return wrong();
    }
    if (at == end || *at != ';') return wrong();
    ++at;
  }
  return out;
}

}  // namespace oscar
