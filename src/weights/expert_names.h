// Experts by other names. Hubs hold a layer's experts as tensors of each expert; a checkpoint that
// was saved again may hold all of them in two, "...experts.gate_up_proj" [experts, 2 x
// intermediate, hidden], gates first, and "...experts.down_proj" [experts, hidden, intermediate],
// and MiniMax's under the names of the other families.
#pragma once

#include <optional>
#include <string>

#include "io/safetensors.h"
#include "oscar/status.h"

namespace oscar {

// The tensor of this name, or the part of a fused one that it stands for, with its name; nothing
// where the checkpoint has neither. An error where the fused one cannot be divided.
Result<std::optional<StoredTensor>> FindTensor(const Checkpoint& checkpoint,
                                               const std::string& name);

}  // namespace oscar
