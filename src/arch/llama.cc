// Llama 3.x: the common decoder as it is; its own RoPE scaling comes with the config.
#include "arch/spec.h"

namespace oscar {

Result<ModelSpec> MakeLlamaSpec(const ModelConfig& config) { return MakeCommonSpec(config); }

}  // namespace oscar
