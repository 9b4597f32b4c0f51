// Qwen3.5 and 3.6, dense and mixtures of experts: the text part. Where the config nests it, its
// tensors lie beside those of a vision encoder, behind a prefix. Weights of experts always add up
// to 1.
#include "arch/spec.h"

namespace oscar {

Result<ModelSpec> MakeQwen35Spec(const ModelConfig& config) {
  OSCAR_ASSIGN_OR_RETURN(ModelSpec spec, MakeHybridSpec(config));
  if (config.model_type == "qwen3_5_moe") {
    ModelConfig always = config;
    always.experts.normalize_weights = true;
    always.experts.dense_layers.clear();
    always.experts.sparse_step = 1;
    OSCAR_RETURN_IF_ERROR(AddHybridExperts(always, &spec));
  }
  if (config.is_nested) {
    constexpr std::string_view kInner = "model.";
    for (std::string& name : spec.names) {
      if (name.starts_with(kInner)) name = "model.language_model." + name.substr(kInner.size());
    }
  }
  return spec;
}

}  // namespace oscar
