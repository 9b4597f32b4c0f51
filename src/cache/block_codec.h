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

// What is encoded together: one KV head of layout.pages_together() consecutive pages.
struct BlockRun {
  // Of each page, [64, D] BF16 rows as they lie in the window.
  std::span<const Bf16*const> k, v;
  // Of each, layout.block_bytes() bytes, all of which are written.
  std::span<std::byte* const> blocks;
  // What keys are divided by first, [pages, 64]; null: nothing, or the head's own norms.
  const float* norms = nullptr;
};

// Returns the number of values that were NaN or saturated.
int EncodeBlocks(const BlockLayout& layout, const BlockRules& rules, const BlockRun& run);
// A block that is encoded alone; k, v: [64, D].
int EncodeBlock(const BlockLayout& layout, const BlockRules& rules, std::span<const Bf16> k,
                std::span<const Bf16> v, std::span<std::byte> block);

// A row of BF16 numbers as quantisers see it: NaN is 0, values saturate at +-65504. Returns how
// many were changed.
int FiniteRow(std::span<const Bf16> source, std::span<float> row);
// TokenNormOf of 64 tokens: `rows` [heads], each [64, D].
void TokenNorms(std::span<const Bf16* const> rows, int head_dim, std::span<float> norms);

// k, v: [64, D].
void DecodeBlock(const BlockLayout& layout, const SealedBlock& block, std::span<float> k,
                 std::span<float> v);
// One that was sealed alone and has no norms but its own.
void DecodeBlock(const BlockLayout& layout, std::span<const std::byte> block, std::span<float> k,
                 std::span<float> v);

// One element. BF16 blocks give the BF16 value.
float DecodeK(const BlockLayout& layout, const SealedBlock& block, int token, int dim);
float DecodeV(const BlockLayout& layout, const SealedBlock& block, int token, int dim);

}  // namespace oscar
