// The gate of gated attention (AttentionSpec::has_output_gate): attention's outputs times sigmoids,
// element by element. Gates are in the model's own basis, so V's rotation is undone before them
// instead of inside W_o. Asynchronous; may be captured.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "cuda/attention/cache_view.h"
#include "oscar/status.h"
#include "quant/rotation_kind.h"

namespace oscar::cuda {

struct OutputGateArguments {
  const float* attended = nullptr;  // [rows, heads, D]
  // Gates [heads, D] of row r at gates + r * gate_stride.
  const float* gates = nullptr;
  int64_t gate_stride = 0;
  RotationKind rotation = RotationKind::kNone;  // of V
  // DeviceLayer::value_turn where that is one by matrices.
  const float* turns = nullptr;
  int num_turns = 1;
  int rows = 0, heads = 0, kv_heads = 0, head_dim = 0;
  Bf16* out = nullptr;  // [rows, heads, D], rounded once
};
Status LaunchOutputGate(const OutputGateArguments& args, Stream stream);

}  // namespace oscar::cuda
