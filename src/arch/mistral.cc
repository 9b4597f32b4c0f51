// Mistral (7B, Nemo, Small): Llama's layers, with a head_dim that need not be hidden / heads. A
// window shorter than the context is refused with the other windows (MakeModelSpec).
#include "arch/spec.h"

namespace oscar {

Result<ModelSpec> MakeMistralSpec(const ModelConfig& config) {
  if (config.attention_bias) {
    return Unexpected(
        Unimplemented("config.json: attention_bias: mistral has no biases, and none are read"));
  }
  return MakeCommonSpec(config);
}

}  // namespace oscar
