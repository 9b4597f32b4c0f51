// Qwen3 (dense): Llama's layers with an RMS norm on each query and key head before RoPE.
#include "arch/spec.h"

namespace oscar {

Result<ModelSpec> MakeQwen3Spec(const ModelConfig& config) {
  ModelSpec spec = MakeCommonSpec(config);
  for (LayerSpec& layer : spec.layers) {
    std::get<AttentionSpec>(layer.mixer).qk_norm = QkNorm::kPerHead;
  }
  return spec;
}

}  // namespace oscar
