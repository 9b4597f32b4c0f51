// Qwen3-MoE (30B-A3B, 235B-A22B, Coder): Qwen3's attention; most layers have experts behind a
// softmax router, the others Qwen3's feed-forward part.
#include <algorithm>

#include "arch/spec.h"

namespace oscar {

Result<ModelSpec> MakeQwen3MoeSpec(const ModelConfig& config) {
  OSCAR_ASSIGN_OR_RETURN(ModelSpec spec, MakeQwen3Spec(config));
  if (config.experts.count == 0) return spec;
  OSCAR_ASSIGN_OR_RETURN(const ExpertsSpec experts, MakeExpertsSpec(config));
  NameExperts("mlp", &spec);
  const std::vector<int>& dense = config.experts.dense_layers;
  for (int i = 0; i < spec.num_layers(); ++i) {
    if (std::ranges::find(dense, i) != dense.end()) continue;
    if ((i + 1) % config.experts.sparse_step == 0) {
      spec.layers[static_cast<size_t>(i)].feed_forward = experts;
    }
  }
  return spec;
}

}  // namespace oscar
