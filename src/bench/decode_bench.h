// Times whole decode steps of a model over caches of a given length, and prompts. The caches of the
// decode rows are each filled with copies of a page of Gaussian rows, sealed as generation would, so
// that no prompt of 128K tokens has to be computed; speed does not depend on what the rows hold.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/loaded_model.h"
#include "oscar/status.h"

namespace oscar {

struct DecodeBenchRow {
  int64_t context = 0;
  int batch = 0;
  // Medians, host work and sampling the token included. Where the model can run ahead, each step is
  // launched before the one before it is waited for, as the engine does; alone: one after another.
  double seconds_per_step = 0.0, seconds_alone = 0.0;
  double tokens_per_second = 0.0;
  uint64_t weight_bytes = 0;       // read once a step; of experts, those that a step touched
  double experts_per_layer = 0.0;  // that a step touched; 0: the model has none
  uint64_t kv_bytes = 0;           // read once a step, all sequences
  double bytes_per_second = 0.0;

  uint64_t bytes() const { return weight_bytes + kv_bytes; }
};

// A model whose caches may hold `longest` tokens and the steps after them. Positions beyond the
// trained ones cost the same, so the context is stretched where it must be; answers mean nothing.
Result<std::unique_ptr<LoadedModel>> LoadForDecodeBench(ModelOptions options, int64_t longest,
                                                        int steps);

// Bytes of pages that `batch` sequences hold while RunDecodeBench times them.
uint64_t DecodeBenchBytes(const KvPlan& kv, int64_t context, int batch, int steps);
// The largest batch whose weights, workspaces and pages fit `memory` bytes; 0 where none does.
int LargestBatch(LoadedModel& loaded, uint64_t memory, int64_t context, int steps);

// kResourceExhausted, naming the bytes, where the caches do not fit the budget.
Result<DecodeBenchRow> RunDecodeBench(LoadedModel& loaded, int64_t context, int batch, int steps);

struct PrefillBenchRow {
  int64_t tokens = 0;
  double seconds = 0.0;  // best of a few
  double flops = 0.0;    // of the model: products and causal attention, nothing counted twice
};
Result<PrefillBenchRow> RunPrefillBench(LoadedModel& loaded, int64_t tokens);

}  // namespace oscar
