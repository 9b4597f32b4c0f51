// Linear attention and the gates of hybrids in the CPU's order of sums (cpu/cpu_linear_attention.h,
// simd/delta_rule.h, simd/vec_ops.h), bit for bit. Asynchronous.
#pragma once

#include "cuda/linear_attention/linear_attention.h"
#include "cuda/portable/portable_kernels.h"
#include "oscar/status.h"

namespace oscar::cuda {

struct PortableStateScratch {
  float* convolved = nullptr;               // [rows, channels]
  float *decay = nullptr, *beta = nullptr;  // [rows, value heads]
};
// `out` [rows, value_width]; `longest`: tokens of any chunk, at least 1.
Status LaunchPortableStates(const StateArguments& args, int longest,
                            const PortableStateScratch& scratch, float* out, Stream stream);

// Attention's outputs [tokens, heads, D], in place: V's rotation undone, times sigmoids of the
// gates behind q, k and v, which become those.
struct PortableGate {
  float* attended = nullptr;
  PortableRotation turn;  // of V
};
Status LaunchPortableGate(const PortableHeads& heads, const PortableGate& gate, Stream stream);

// x[r] [width] *= factors[r].
Status LaunchPortableScale(float* x, const float* factors, int rows, int width, Stream stream);

}  // namespace oscar::cuda
