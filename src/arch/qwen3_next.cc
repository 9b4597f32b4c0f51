// Qwen3-Next (80B-A3B): the inputs of linear attention are two tensors whose rows are grouped by
// key head; experts in every layer but those that the config names.
#include "arch/spec.h"

namespace oscar {

Result<ModelSpec> MakeQwen3NextSpec(const ModelConfig& config) {
  OSCAR_ASSIGN_OR_RETURN(ModelSpec spec, MakeHybridSpec(config));
  if (config.experts.count > 0) OSCAR_RETURN_IF_ERROR(AddHybridExperts(config, &spec));
  return spec;
}

}  // namespace oscar
