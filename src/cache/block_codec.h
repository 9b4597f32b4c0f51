// Scalar encode, decode and random access of a block: the specification that SIMD and CUDA
// writers and readers are tested against. Stateless; safe from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/half.h"
#include "cache/block_layout.h"
#include "oscar/status.h"
#include "quant/row_quantizer.h"

namespace oscar {

// How the rows of a block are quantised. Bits and groups come from the layout.
struct BlockRules {
  RowRule k_rule = RowRule::kMinMax;
  RowRule v_rule = RowRule::kMinMax;
  float k_clip_ratio = 0.0f;
  float v_clip_ratio = 0.0f;
};

// A clear reason why a block of this shape cannot be, or OK.
Status CheckBlockShape(int head_dim, int group_dims);

// k, v: [64, D] BF16 rows as they lie in the window. `block` has layout.block_bytes() bytes and
// every one of them is written. Returns the number of values that were NaN or saturated.
int EncodeBlock(const BlockLayout& layout, const BlockRules& rules, std::span<const Bf16> k,
                std::span<const Bf16> v, std::span<std::byte> block);

// k, v: [64, D].
void DecodeBlock(const BlockLayout& layout, std::span<const std::byte> block, std::span<float> k,
                 std::span<float> v);

// One element. BF16 blocks give the BF16 value.
float DecodeK(const BlockLayout& layout, std::span<const std::byte> block, int token, int dim);
float DecodeV(const BlockLayout& layout, std::span<const std::byte> block, int token, int dim);

}  // namespace oscar
