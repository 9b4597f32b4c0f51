#include "arch/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"

namespace oscar {
namespace {

constexpr float kLeast = -std::numeric_limits<float>::infinity();

}  // namespace

void RouteToken(const ExpertsSpec& experts, std::span<const float> scores,
                std::span<const float> bias, std::span<ExpertChoice> out) {
  const auto count = static_cast<size_t>(experts.num_experts);
  OSCAR_DCHECK(scores.size() == count && (bias.empty() || bias.size() == count) &&
               out.size() == static_cast<size_t>(experts.experts_per_token));
  // What experts are ranked by; a chosen one leaves the ranking.
  std::vector<float> rank(scores.begin(), scores.end());
  for (size_t e = 0; e < bias.size(); ++e) rank[e] += bias[e];
  for (float& r : rank) {
    if (std::isnan(r)) r = std::numeric_limits<float>::lowest();
  }
  if (experts.groups > 1) {
    const size_t groups = static_cast<size_t>(experts.groups), size = count / groups;
    std::vector<float> totals(groups);
    for (size_t g = 0; g < groups; ++g) {
      float first = kLeast, second = kLeast;
      for (size_t e = g * size; e < (g + 1) * size; ++e) {
        if (rank[e] > first) {
          second = first;
          first = rank[e];
        } else {
          second = std::max(second, rank[e]);
        }
      }
      totals[g] = first + second;
    }
    std::vector<size_t> order(groups);
    for (size_t g = 0; g < groups; ++g) order[g] = g;
    std::ranges::stable_sort(order, [&](size_t a, size_t b) { return totals[a] > totals[b]; });
    for (size_t i = static_cast<size_t>(experts.chosen_groups); i < groups; ++i) {
      std::fill_n(rank.begin() + static_cast<ptrdiff_t>(order[i] * size), size, kLeast);
    }
  }
  float sum = 0.0f;
  for (ExpertChoice& choice : out) {
    const auto best = std::ranges::max_element(rank) - rank.begin();  // the first of equals
    choice = {static_cast<int32_t>(best), scores[static_cast<size_t>(best)]};
    rank[static_cast<size_t>(best)] = kLeast;
    sum += choice.weight;
  }
  for (ExpertChoice& choice : out) {
    if (experts.normalize_weights) choice.weight /= sum + 1e-20f;
    choice.weight *= experts.weight_scale;
  }
}

}  // namespace oscar
