// Qwen2 and Qwen2.5 (dense): Llama's layers with biases on q, k and v, whatever the config says.
#include "arch/spec.h"

namespace oscar {

Result<ModelSpec> MakeQwen2Spec(const ModelConfig& config) {
  ModelSpec spec = MakeCommonSpec(config);
  for (LayerSpec& layer : spec.layers) {
    auto& attention = std::get<AttentionSpec>(layer.mixer);
    attention.qkv_bias = true;
    attention.o_bias = false;
  }
  return spec;
}

}  // namespace oscar
