// Vector operations of a transformer layer on one row each; the caller splits rows over threads, so
// results cannot depend on how many there are. All sums run in 16 lanes folded 8, 4, 2, 1 (Sum16's
// order), whatever the instruction set. Stateless; safe from any thread. Outputs may alias the
// inputs they replace element by element, and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/half.h"

namespace oscar::simd {

// out = x / sqrt(mean(x^2) + epsilon) * weight. Sizes equal, any length.
void RmsNorm(std::span<const float> x, std::span<const float> weight, float epsilon,
             std::span<float> out);
// residual += x; out = RmsNorm(residual).
void AddRmsNorm(std::span<float> residual, std::span<const float> x, std::span<const float> weight,
                float epsilon, std::span<float> out);
// x += y.
void Add(std::span<float> x, std::span<const float> y);
// x += factor * y, fused.
void AddScaled(std::span<float> x, float factor, std::span<const float> y);
// x += a * b, element by element, fused.
void AddMul(std::span<float> x, std::span<const float> a, std::span<const float> b);
// Sum of x[i] * y[i], fused.
float Dot(std::span<const float> x, std::span<const float> y);
// x <- 1 / (1 + exp(-x)).
void Sigmoid(std::span<float> x);
// out = silu(gate) * up, silu(x) = x / (1 + exp(-x)).
void SiluMul(std::span<const float> gate, std::span<const float> up, std::span<float> out);

// out[i] = (up + 1) * gate / (1 + exp(-slope * gate)) of gate = gate_up[2 i], at most `limit`, and
// up = gate_up[2 i + 1], within +-`limit`. gate_up: twice the size of `out`, and another memory.
void ClampedGateMul(std::span<const float> gate_up, float limit, float slope, std::span<float> out);

// Half-split rotary embedding in place: (x[i], x[i + half]) turned by the angle i. cos, sin:
// [half].
void ApplyRope(std::span<float> x, std::span<const float> cos, std::span<const float> sin);

// x <- x H, bit-equal to FastHadamard of numeric/hadamard.h. REQUIRES: size a power of two, >= 16.
void FastHadamardRow(std::span<float> x);

// out = x R for R [D, D] row-major fp32, D = x.size() a multiple of 16. fp32 fused sums over the
// rows of R in order; no rounding to BF16. `out` may not alias `x`.
void RotateRow(std::span<const float> x, std::span<const float> rotation, std::span<float> out);

// Round to nearest even; NaN stays NaN (quiet), as ToBf16.
void ToBf16Row(std::span<const float> x, std::span<Bf16> out);
void ToFloatRow(std::span<const Bf16> x, std::span<float> out);
void ToFloatRow(std::span<const Fp16> x, std::span<float> out);

// Index of the largest element, the first of equals; NaN counts as less than anything.
// REQUIRES: not empty.
int64_t ArgMax(std::span<const float> x);
// Largest element; NaN counts as less than anything (-infinity where all are).
float MaxElement(std::span<const float> x);
// log(sum(exp(x))), natural base.
float LogSumExp(std::span<const float> x);
// x <- exp(x - max) / sum.
void Softmax(std::span<float> x);

}  // namespace oscar::simd
