#include "engine/sampler.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "base/check.h"
#include "base/rng.h"
#include "numeric/matrix.h"

namespace oscar {
namespace {

double LogSumExp(std::span<const float> logits, float* largest) {
  *largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (float logit : logits) sum += std::exp(static_cast<double>(logit) - *largest);
  return std::log(sum);
}

}  // namespace

Sampler::Sampler(const SamplingOptions& options) : options_(options) {
  if (options.seed.has_value()) {
    seed_ = *options.seed;
  } else {
    std::random_device device;
    seed_ = (uint64_t{device()} << 32) | device();
  }
}

void Sampler::ObservePrompt(std::span<const int32_t> tokens) {
  if (options_.repetition_penalty == 1.0f) return;
  for (int32_t token : tokens) ++prompt_[token];
}

bool Sampler::NeedsPenalties() const {
  return !options_.logit_bias.empty() || options_.repetition_penalty != 1.0f ||
         options_.presence_penalty != 0.0f || options_.frequency_penalty != 0.0f;
}

int32_t Sampler::Sample(std::span<const float> logits, std::span<const int32_t> masked,
                        const uint32_t* allowed) {
  OSCAR_CHECK(!logits.empty());
  if (!AllFinite(logits)) return SampleParams::kNotFinite;
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  if (NeedsPenalties() || !masked.empty() || allowed != nullptr) {
    adjusted_.assign(logits.begin(), logits.end());
    for (const auto& [token, bias] : options_.logit_bias) {
      adjusted_[static_cast<size_t>(token)] += bias;
    }
    const auto repeat = [&](int32_t token) {
      float& logit = adjusted_[static_cast<size_t>(token)];
      logit = logit > 0 ? logit / options_.repetition_penalty : logit * options_.repetition_penalty;
    };
    if (options_.repetition_penalty != 1.0f) {
      for (const auto& [token, count] : prompt_) repeat(token);
      for (const auto& [token, count] : generated_) {
        if (!prompt_.contains(token)) repeat(token);
      }
    }
    for (const auto& [token, count] : generated_) {
      adjusted_[static_cast<size_t>(token)] -=
          options_.presence_penalty + options_.frequency_penalty * static_cast<float>(count);
    }
    if (allowed != nullptr) {
      for (size_t i = 0; i < adjusted_.size(); ++i) {
        if ((allowed[i / 32] >> (i % 32) & 1) == 0) adjusted_[i] = kNever;
      }
    }
    std::vector<float> kept;  // of the masked ones
    for (int32_t token : masked) {
      kept.push_back(std::exchange(adjusted_[static_cast<size_t>(token)], kNever));
    }
    if (allowed != nullptr &&
        std::ranges::all_of(adjusted_, [](float logit) { return logit == kNever; })) {
      for (size_t i = masked.size(); i-- > 0;) {  // a token may be masked twice
        adjusted_[static_cast<size_t>(masked[i])] = kept[i];
      }
    }
    logits = adjusted_;
  }

  int32_t token = 0;
  if (options_.temperature == 0.0f) {
    token = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  } else {
    candidates_.clear();
    for (size_t i = 0; i < logits.size(); ++i) {
      if (logits[i] != kNever) candidates_.push_back({logits[i], static_cast<int32_t>(i)});
    }
    token = SampleFrom(candidates_);
  }
  Observe(token);
  return token;
}

void Sampler::Observe(int32_t token) {
  ++step_;
  ++generated_[token];
}

std::optional<SampleParams> Sampler::NextSample(uint64_t ahead) const {
  if (NeedsPenalties()) return std::nullopt;
  SampleParams sample;
  sample.temperature = options_.temperature;
  sample.top_k = options_.top_k;
  sample.top_p = options_.top_p;
  sample.min_p = options_.min_p;
  sample.uniform = Uniform(step_ + ahead);
  return sample;
}

double Sampler::Uniform(uint64_t step) const {
  const auto block = Philox(seed_, 0).Block(step);
  return static_cast<double>((uint64_t{block[0]} << 21) ^ (block[1] >> 11)) * 0x1p-53;
}

int32_t Sampler::SampleFrom(std::vector<Candidate>& candidates) {
  const auto more_likely = [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  };
  if (options_.top_k > 0 && static_cast<size_t>(options_.top_k) < candidates.size()) {
    std::nth_element(candidates.begin(), candidates.begin() + options_.top_k, candidates.end(),
                     more_likely);
    candidates.resize(static_cast<size_t>(options_.top_k));
    // The order in which they are sampled from, which devices share, is not nth_element's to
    // choose.
    std::ranges::sort(candidates, more_likely);
  }
  const float largest = std::min_element(candidates.begin(), candidates.end(), more_likely)->logit;
  const double inverse = 1.0 / options_.temperature;
  const auto weight = [&](const Candidate& c) {
    return std::exp((static_cast<double>(c.logit) - largest) * inverse);
  };
  double total = 0.0;
  if (options_.top_p < 1.0f) {
    double all = 0.0;
    for (const Candidate& c : candidates) all += weight(c);
    // Sort only as far as the nucleus reaches: it is usually a handful of a large vocabulary.
    size_t sorted = 0, kept = 0;
    while (kept < candidates.size() && total < options_.top_p * all) {
      if (kept == sorted) {
        const size_t next = std::min(candidates.size(), std::max<size_t>(64, 4 * sorted));
        std::partial_sort(candidates.begin() + static_cast<ptrdiff_t>(sorted),
                          candidates.begin() + static_cast<ptrdiff_t>(next), candidates.end(),
                          more_likely);
        sorted = next;
      }
      total += weight(candidates[kept++]);
    }
    candidates.resize(kept);
  } else {
    for (const Candidate& c : candidates) total += weight(c);
  }
  if (options_.min_p > 0.0f) {  // the most likely token has weight 1 and always stays
    std::erase_if(candidates, [&](const Candidate& c) { return weight(c) < options_.min_p; });
    total = 0.0;
    for (const Candidate& c : candidates) total += weight(c);
  }
  const double u = Uniform(step_) * total;
  double sum = 0.0;
  for (const Candidate& c : candidates) {
    sum += weight(c);
    if (u < sum) return c.token;
  }
  return candidates.back().token;  // rounding put u at the very end
}

Status NotFinite(int64_t position) {
  return Internal(fmt::format(
      "the model's logits are not finite at token {}; the weights or the rope settings do not fit",
      position));
}

float LogProbability(std::span<const float> logits, int32_t token) {
  float largest = 0.0f;
  const double log_sum = LogSumExp(logits, &largest);
  return static_cast<float>(static_cast<double>(logits[static_cast<size_t>(token)]) - largest -
                            log_sum);
}

std::vector<TokenLogprob> TopLogprobs(std::span<const float> logits, int count) {
  float largest = 0.0f;
  const double log_sum = LogSumExp(logits, &largest);
  std::vector<int32_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  const auto kept =
      static_cast<ptrdiff_t>(std::min<size_t>(order.size(), static_cast<size_t>(count)));
  std::partial_sort(order.begin(), order.begin() + kept, order.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  });
  std::vector<TokenLogprob> top;
  for (ptrdiff_t i = 0; i < kept; ++i) {
    const auto at = static_cast<size_t>(order[static_cast<size_t>(i)]);
    top.push_back({static_cast<int32_t>(at),
                   static_cast<float>(static_cast<double>(logits[at]) - largest - log_sum)});
  }
  return top;
}

}  // namespace oscar
