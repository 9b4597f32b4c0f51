// Tensors by other names. The decoder of a multimodal checkpoint lies behind
// "model.language_model." or "language_model.model.", and a checkpoint that was saved again may
// have lost or gained that. Hubs hold a layer's experts as tensors of each expert; a checkpoint
// that was saved again may hold all of them in two, "...experts.gate_up_proj" [experts, 2 x
// intermediate, hidden], gates first, and "...experts.down_proj" [experts, hidden, intermediate],
// and MiniMax's under the names of the other families.
#pragma once

#include <optional>
#include <string>

#include "io/safetensors.h"
#include "oscar/status.h"

namespace oscar {

// The tensor of this name, behind another prefix if need be, or the part of a fused one that it
// stands for, with its name; nothing where the checkpoint has neither. An error where the fused one
// cannot be divided.
Result<std::optional<StoredTensor>> FindTensor(const Checkpoint& checkpoint,
                                               const std::string& name);

}  // namespace oscar
