// Qwen3 (dense): Llama's layers with an RMS norm on each query and key head before RoPE.
#include "arch/spec.h"

namespace oscar {

Result<ModelSpec> MakeQwen3Spec(const ModelConfig& config) {
  ModelSpec spec = MakeCommonSpec(config);
  spec.names.q_norm = "model.layers.{}.self_attn.q_norm.weight";
  spec.names.k_norm = "model.layers.{}.self_attn.k_norm.weight";
  return spec;
}

}  // namespace oscar
