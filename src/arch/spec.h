// ModelSpec: everything the forward pass needs to know about a decoder, layer by layer and free of
// any model family's vocabulary. An architecture is one small file that turns a config into a spec;
// adding one means adding that file and a row to the table in spec.cc. Which tensors a checkpoint
// must have follows from the spec: arch/tensor_table.h.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "io/hf_config.h"
#include "oscar/status.h"

namespace oscar {

// What a tensor of a checkpoint is for.
enum class Role : uint8_t {
  kEmbedding,
  kFinalNorm,
  kHead,
  kAttentionNorm,
  kFeedForwardNorm,
  kQ,
  kK,
  kV,
  kO,
  kQBias,
  kKBias,
  kVBias,
  kOBias,
  kQNorm,
  kKNorm,
  kSinks,  // a logit per head
  kGate,
  kUp,
  kDown,
  kRouter,
  kExpertGate,  // of each expert, as are kExpertUp and kExpertDown
  kExpertUp,
  kExpertDown,
  kExpertGateUp,  // of each expert: rows are a gate, an up, a gate, ...
  kExpertGateUpBias,
  kExpertDownBias,
  kRouterBias,  // added to the scores by which experts are chosen, never to their weights
  kRouterLogitBias,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kSharedShare,  // [1, hidden]: how much of the shared part is added
  // Of linear attention; the inputs are four tensors, or two of grouped rows.
  kStateQkv,
  kStateZ,
  kStateB,
  kStateA,
  kStateQkvz,
  kStateBa,
  kStateConv,
  kStateDecay,     // A_log
  kStateStepBias,  // dt_bias
  kStateNorm,
  kStateOut,
};
inline constexpr size_t kNumRoles = static_cast<size_t>(Role::kStateOut) + 1;

enum class QkNorm : uint8_t { kNone, kPerHead, kAllHeads };

struct AttentionSpec {
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  // Leading dims of a head that RoPE turns, in pairs (i, i + rotary_dims / 2); the others keep
  // their position-free values.
  int rotary_dims = 0;
  QkNorm qk_norm = QkNorm::kNone;
  bool qkv_bias = false, o_bias = false;
  int64_t sliding_window = 0;  // tokens seen, the query's own among them; 0: all
  bool has_sinks = false;      // a learned logit per head that takes weight and gives no value
  // What attention gives is multiplied by sigmoids of a gate, [heads, D] beside the queries: in
  // rows of W_q, each head's D queries come before its D gates.
  bool has_output_gate = false;
  double softmax_scale = 0.0;

  int queries_per_kv_head() const { return num_heads / num_kv_heads; }
  int q_width() const { return num_heads * head_dim; }
  int kv_width() const { return num_kv_heads * head_dim; }
  int gate_width() const { return has_output_gate ? q_width() : 0; }
  // Queries, keys, values, gates.
  int qkv_width() const { return q_width() + 2 * kv_width() + gate_width(); }
};

// Gated DeltaNet. A value head keeps a matrix S [key_dim, value_dim], fp32, zero at first. Each
// token passes q, k and v through a causal convolution over the last `conv_kernel` tokens and SiLU,
// brings q and k to length 1 (q then to key_dim^-0.5), and with alpha = exp(-exp(A_log) softplus(a
// + dt_bias)) and beta = sigmoid(b) of the head computes
//   S <- alpha S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q
// which, normed and multiplied by SiLU(z), is what the head gives (numeric/delta_rule.h). Value
// heads share the q and k of a key head, as queries share keys in attention.
struct LinearAttentionSpec {
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  int conv_kernel = 0;
  // Rows of the inputs: all q, all k, all v, all z, all b, all a; or by key head: q, k, v, z, and
  // after all of those b, a.
  bool grouped_inputs = false;

  constexpr int values_per_key_head() const { return value_heads / key_heads; }
  constexpr int key_width() const { return key_heads * key_dim; }
  constexpr int value_width() const { return value_heads * value_dim; }
  // Channels of the convolution: all q, all k, all v.
  constexpr int conv_channels() const { return 2 * key_width() + value_width(); }
  constexpr int input_width() const { return conv_channels() + value_width() + 2 * value_heads; }
  // Where a head's part begins in a row of inputs.
  constexpr int QOf(int key_head) const {
    return key_head * (grouped_inputs ? group_width() : key_dim);
  }
  constexpr int KOf(int key_head) const {
    return QOf(key_head) + (grouped_inputs ? key_dim : key_width());
  }
  constexpr int VOf(int head) const {
    if (!grouped_inputs) return 2 * key_width() + head * value_dim;
    const int group = head / values_per_key_head();
    return KOf(group) + key_dim + head % values_per_key_head() * value_dim;
  }
  constexpr int ZOf(int head) const {
    return VOf(head) + (grouped_inputs ? values_per_key_head() * value_dim : value_width());
  }
  constexpr int BOf(int head) const {
    const int first = conv_channels() + value_width();
    if (!grouped_inputs) return first + head;
    const int each = values_per_key_head();
    return first + head / each * 2 * each + head % each;
  }
  constexpr int AOf(int head) const {
    return BOf(head) + (grouped_inputs ? values_per_key_head() : value_heads);
  }
  // fp32 numbers that a sequence keeps: S of all heads, then the convolution's last inputs, oldest
  // first, [conv_kernel - 1, channels].
  constexpr size_t matrix_floats() const {
    return static_cast<size_t>(value_width()) * static_cast<size_t>(key_dim);
  }
  constexpr size_t conv_floats() const {
    return static_cast<size_t>(conv_kernel - 1) * static_cast<size_t>(conv_channels());
  }
  constexpr size_t state_bytes() const { return (matrix_floats() + conv_floats()) * sizeof(float); }

 private:
  constexpr int group_width() const { return 2 * (key_dim + values_per_key_head() * value_dim); }
};

// gate and up [intermediate, hidden], down [hidden, intermediate]; SiLU.
struct DenseSpec {
  int intermediate = 0;
};

enum class RouterScore : uint8_t { kSoftmax, kSigmoid };

// In place of SiLU: (up + 1) * gate * sigmoid(slope * gate), where gate is at most `limit` and up
// within +-`limit`.
struct ClampedGate {
  float limit = 0.0f, slope = 0.0f;
};

// Experts, each as DenseSpec. The router's logits (fp32, [num_experts, hidden]) become scores;
// the experts with the largest scores, the bias added, are chosen (RouteToken, arch/router.h), and
// their outputs are added with their scores, without the bias, as weights.
struct ExpertsSpec {
  int num_experts = 0, experts_per_token = 0;
  int intermediate = 0;  // of each
  RouterScore score = RouterScore::kSoftmax;
  bool choice_bias = false;
  // Experts come from the best `chosen_groups` of `groups` groups of neighbours, a group counting
  // as the sum of its two largest.
  int groups = 1, chosen_groups = 1;
  bool normalize_weights = false;  // divided by their sum
  float weight_scale = 1.0f;       // after that
  int shared_intermediate = 0;     // of a part that every token goes through; 0: none
  // The shared part is added times a sigmoid of the token, Role::kSharedShare.
  bool has_shared_share = false;
  // Biases of the router's logits and of every matrix; gate and up in one tensor, row by row in
  // turn, and clamped.
  bool has_biases = false;
  bool alternates_gate_up = false;
  std::optional<ClampedGate> clamped = {};
};

// A layer is a mixer (none: its tokens do not meet) and a feed-forward part, each behind a norm and
// added to the residual stream.
struct LayerSpec {
  std::variant<std::monostate, AttentionSpec, LinearAttentionSpec> mixer;
  std::variant<DenseSpec, ExpertsSpec> feed_forward;
  int kv_slot = -1;     // among the layers that have keys and values in the cache; -1: it has none
  int state_slot = -1;  // among those that have a state there; -1: it has none

  const AttentionSpec* attention() const { return std::get_if<AttentionSpec>(&mixer); }
  const LinearAttentionSpec* linear_attention() const {
    return std::get_if<LinearAttentionSpec>(&mixer);
  }
  const DenseSpec* dense() const { return std::get_if<DenseSpec>(&feed_forward); }
  const ExpertsSpec* experts() const { return std::get_if<ExpertsSpec>(&feed_forward); }
};

struct ModelSpec {
  std::string architecture;
  int vocab_size = 0;
  int hidden = 0;
  float norm_eps = 1e-6f;
  // Added to the stored weights of the norms, but for Role::kStateNorm.
  float norm_offset = 0.0f;
  double rope_theta = 1e4;
  RopeScaling rope_scaling;
  int64_t max_positions = 0;
  std::vector<int32_t> stop_tokens;
  std::vector<LayerSpec> layers;
  // The embedding is the head as well; see FollowCheckpoint for checkpoints that disagree.
  bool tied_head = false;
  // Of the tensors on disk, by role; "{}" stands for the layer number, a second one for the
  // expert's.
  std::array<std::string, kNumRoles> names;

  std::string& name(Role role) { return names[static_cast<size_t>(role)]; }
  const std::string& name(Role role) const { return names[static_cast<size_t>(role)]; }
  int num_layers() const { return static_cast<int>(layers.size()); }
  const LayerSpec& layer(int index) const { return layers[static_cast<size_t>(index)]; }
  // The largest sliding window of a layer, in tokens; 0: every layer sees all.
  int64_t max_window() const;
  // Layers with keys and values, and their numbers among all layers, by slot.
  std::vector<int> kv_layers() const;
  int num_kv_layers() const { return static_cast<int>(kv_layers().size()); }
  // Of these, the ones that see all tokens: what they keep of old ones is quantised. Layers with a
  // sliding window keep none.
  std::vector<int> history_layers() const;
  // By slot, whether it is one of them.
  std::vector<bool> slots_with_history() const;
  // The shape of attention, which all layers with attention share but for windows. REQUIRES: there
  // is one.
  const AttentionSpec& attention() const;
  // The same of linear attention; null where no layer has it.
  const LinearAttentionSpec* linear_attention() const;
  int num_state_layers() const;
  // Of all layers together, for one sequence; layer by state_slot.
  uint64_t state_bytes() const;
  // The widest feed-forward part.
  int max_intermediate() const;
};

// What a spec may ask for that not every backend computes.
enum class Feature : uint8_t {
  kPartialRope,
  kQkNormAllHeads,
  kSlidingWindow,
  kSinks,
  kOutputGate,
  kExperts,
  kLinearAttention,
  kSharedShare,
  kClampedExperts,
};
// kUnimplemented with the feature's name, where `spec` has one that is not in `supported`.
Status CheckFeatures(const ModelSpec& spec, std::initializer_list<Feature> supported,
                     std::string_view device);

// Refuses what no spec can say, naming the field of the config.
Result<ModelSpec> MakeModelSpec(const ModelConfig& config);

// The architectures; each has its own file.
Result<ModelSpec> MakeQwen3Spec(const ModelConfig& config);
Result<ModelSpec> MakeLlamaSpec(const ModelConfig& config);
Result<ModelSpec> MakeQwen2Spec(const ModelConfig& config);
Result<ModelSpec> MakeMistralSpec(const ModelConfig& config);
Result<ModelSpec> MakeQwen3MoeSpec(const ModelConfig& config);
Result<ModelSpec> MakeGlm4MoeSpec(const ModelConfig& config);
Result<ModelSpec> MakeMiniMaxM2Spec(const ModelConfig& config);
Result<ModelSpec> MakeQwen3NextSpec(const ModelConfig& config);
Result<ModelSpec> MakeQwen35Spec(const ModelConfig& config);
Result<ModelSpec> MakeGptOssSpec(const ModelConfig& config);
// What they have in common, for those files: Llama's layers, all alike.
ModelSpec MakeCommonSpec(const ModelConfig& config);
// A spec of `count` layers like this one.
void SetLayers(const LayerSpec& layer, int count, ModelSpec* spec);
// Counts, widths, groups and weights of the config's experts; kDataLoss where it has none.
Result<ExpertsSpec> MakeExpertsSpec(const ModelConfig& config);
// Gated attention and Gated DeltaNet by the config, feed-forward parts dense: Qwen3-Next's layers.
Result<ModelSpec> MakeHybridSpec(const ModelConfig& config);
// Its experts, with a shared one that has its own gate.
Status AddHybridExperts(const ModelConfig& config, ModelSpec* spec);
// Names of the experts' tensors inside `block` ("mlp", ...) of a layer.
void NameExperts(std::string_view block, ModelSpec* spec);

}  // namespace oscar
