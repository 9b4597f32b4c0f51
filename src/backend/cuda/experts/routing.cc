#include "cuda/experts/routing.h"

#include <fmt/core.h>

namespace oscar::cuda {

Status CheckExperts(const ExpertsSpec& experts) {
  const auto refuse = [](int count, const char* what, int most) {
    return Unimplemented(
        fmt::format("{} {}: the GPU takes {}; use --device cpu", count, what, most));
  };
  if (experts.num_experts > kMaxDeviceExperts) {
    return refuse(experts.num_experts, "experts", kMaxDeviceExperts);
  }
  if (experts.experts_per_token > kMaxDeviceChoices) {
    return refuse(experts.experts_per_token, "experts per token", kMaxDeviceChoices);
  }
  if (experts.groups > kMaxDeviceGroups) {
    return refuse(experts.groups, "groups of experts", kMaxDeviceGroups);
  }
  return {};
}

}  // namespace oscar::cuda
