// ModelSpec: everything the forward pass needs to know about a decoder, free of any model family's
// vocabulary. An architecture is one small file that turns a config into a spec; adding one means
// adding that file and a row to the table in spec.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/hf_config.h"
#include "oscar/status.h"

namespace oscar {

// Names of a checkpoint's tensors; "{}" stands for the layer number. Empty: there is none.
struct TensorNames {
  std::string embedding, final_norm;
  std::string head;       // empty: the embedding is the head as well
  std::string tied_head;  // where a checkpoint may keep a head all the same; see FollowCheckpoint
  std::string attention_norm, feed_forward_norm;
  std::string q, k, v, o, q_bias, k_bias, v_bias, o_bias, q_norm, k_norm;
  std::string gate, up, down;
};

struct ModelSpec {
  std::string architecture;
  int vocab_size = 0;
  int hidden = 0;
  int intermediate = 0;
  int num_layers = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  float norm_eps = 1e-6f;
  double rope_theta = 1e4;
  RopeScaling rope_scaling;
  int64_t max_positions = 0;
  std::vector<int32_t> stop_tokens;
  TensorNames names;

  int queries_per_kv_head() const { return num_heads / num_kv_heads; }
  uint64_t num_parameters() const;
  // Where the layers' matrices take a byte a weight, but for those of V and the output where V is
  // rotated, and the rest two; without scales.
  uint64_t Fp8WeightBytes(bool rotates_v) const;
};

// Refuses what the forward pass cannot compute, naming the field.
Result<ModelSpec> MakeModelSpec(const ModelConfig& config);

// The architectures; each is defined in a file of its own.
Result<ModelSpec> MakeQwen3Spec(const ModelConfig& config);
Result<ModelSpec> MakeLlamaSpec(const ModelConfig& config);
// What they have in common, for those files.
ModelSpec MakeCommonSpec(const ModelConfig& config);

}  // namespace oscar
