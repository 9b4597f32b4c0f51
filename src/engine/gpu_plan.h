// How many GPUs a model would need, split by heads, feed-forward width or experts, and why:
// weights, a conversation's cache, and what divides. A plan for `oscar serve --dry-run`; this
// version runs on one GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arch/tensor_table.h"
#include "backend/kv_plan.h"

namespace oscar {

// One GPU of the `gpus` that share the model.
struct GpuShare {
  int gpus = 1;
  uint64_t weight_bytes = 0;
  uint64_t conversation_bytes = 0;   // of one conversation of the planned length
  bool kv_heads_are_copied = false;  // more GPUs than KV heads: some hold the same ones
  std::string problem;               // what does not divide; empty: nothing

  uint64_t bytes() const { return weight_bytes + conversation_bytes; }
};

// Part of a GPU's memory that weights and cache may take; the rest is for activations, workspaces
// and the driver.
inline constexpr double kShareOfGpu = 0.9;

// For 1, 2, 4, ... GPUs up to the first that holds its share in `gpu_memory` bytes, or 64.
// `block_rows`: weights that share an FP8 scale, whose blocks are not cut; 1: no blocks.
std::vector<GpuShare> PlanGpus(const ModelSpec& spec, TensorTable::Fp8 fp8, int block_rows,
                               const KvPlan& kv, int64_t tokens, uint64_t gpu_memory);

}  // namespace oscar
