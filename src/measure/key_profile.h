// What makes the keys of a prompt hard to quantise, and what a method's transforms leave of it:
// channels that are larger than the others, and tokens whose norms differ from their neighbours'.
// Keys are as attention sees them, after RoPE. One thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/loaded_model.h"
#include "measure/layer_errors.h"
#include "oscar/status.h"

namespace oscar {

// Tokens whose norms are compared: those that share a scale in groups along tokens.
inline constexpr int64_t kProfileGroup = 32;

// Of the keys of one head at one stage.
struct KeyShape {
  std::vector<double> channel_rms;  // [D], root mean square over tokens
  std::vector<double> token_norms;  // [tokens], L2
  // The largest channel over the median one: 1 where all are alike.
  double channel_outlier = 0;
  // Mean over groups of kProfileGroup tokens of the largest norm over the smallest.
  double norm_imbalance = 0;
};

// Stages, in the order a method applies them: "as computed", "rotated", "divided by token norms".
struct KeyStage {
  std::string name;
  std::vector<std::vector<KeyShape>> shapes;  // [layers with a history][KV heads]
  // |k| of one head, [tokens][D]; of the layer and head that were asked for.
  std::vector<std::vector<float>> magnitudes;
};

struct KeyProfile {
  std::string method;  // as described by its plan
  int64_t tokens = 0;
  std::vector<int> layers;     // ids of those with a history
  int layer = 0, kv_head = 0;  // whose magnitudes are kept
  std::vector<KeyStage> stages;
};

// Reads at most LayerErrorProbe::kMaxTokens of `prompt` on a BF16 cache and applies the transforms
// of `plan`. `layer` -1: the one whose channels stand out most, and then the head of it; `kv_head`
// -1: the head of the layer. kInvalidArgument where a layer has no history, or where there are
// fewer tokens than a group. REQUIRES: model of a bf16 plan, `plan` of the same spec.
Result<KeyProfile> MeasureKeys(LoadedModel& model, const KvPlan& plan,
                               std::span<const int32_t> prompt, int layer, int kv_head);

// The shape of rows [tokens, dim].
KeyShape ShapeOfKeys(std::span<const float> rows, size_t dim);

}  // namespace oscar
