// Tensors by other names. The decoder of a multimodal checkpoint lies behind
// "model.language_model." or "language_model.model.", and a checkpoint that was saved again may
// have lost or gained that. Hubs hold a layer's experts as tensors of each expert; a checkpoint
// that was saved again may hold all of them in two, "...experts.gate_up_proj" [experts, 2 x
// intermediate, hidden], gates first, and "...experts.down_proj" [experts, hidden, intermediate],
// and MiniMax's under the names of the other families.
//
// gpt-oss has its own form, which `...experts.7.gate_up_proj` and `...experts.7.down_proj` (without
// "weight"), and the same with "_bias", stand for: parts of "...experts.gate_up_proj" [experts,
// inputs, outputs], of "...experts.gate_up_proj_blocks" [experts, outputs, inputs / 32, 16] with
// "..._scales" [experts, outputs, inputs / 32] (base/mxfp4.h), and of
// "...experts.gate_up_proj_bias" [experts, outputs].
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

// What a name of gpt-oss's experts stands for.
struct ExpertPart {
  // [inputs, outputs] of one expert, or a bias [outputs]; or the blocks of MXFP4, [outputs, inputs
  // / 32, 16] of bytes.
  StoredTensor tensor;
  std::optional<StoredTensor> block_scales;  // [outputs, inputs / 32]: then it is MXFP4
};
// Nothing where the name is another; an error where the checkpoint has no such tensor, or one that
// cannot be divided.
Result<std::optional<ExpertPart>> FindExpertPart(const Checkpoint& checkpoint,
                                                 const std::string& name);

}  // namespace oscar
