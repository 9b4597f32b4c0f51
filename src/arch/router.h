// Which experts a token goes to and with what weights: the part of a router that is not a GEMM.
// Scores are the backend's business, since a processor's exponential is.
#pragma once

#include <cstdint>
#include <span>

#include "arch/spec.h"

namespace oscar {

struct ExpertChoice {
  int32_t expert = 0;
  float weight = 0.0f;
};

// `scores`: of all experts, a softmax's or sigmoids; `bias`: as many, or none. Fills `out`, of
// size experts_per_token, by falling biased score; equals go to the lower number. NaN counts as
// less than anything, so that broken activations stay finite in number; their weights are NaN.
void RouteToken(const ExpertsSpec& experts, std::span<const float> scores,
                std::span<const float> bias, std::span<ExpertChoice> out);

}  // namespace oscar
