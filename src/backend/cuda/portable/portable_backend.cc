// The operations in the CPU's order of sums, with activations in fp32: the same logits as a
// portable pass on the CPU, bit for bit. Nothing is recorded or tuned; for evaluation.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "cuda/device_backend.h"
#include "cuda/portable/portable_attention.h"
#include "cuda/portable/portable_kernels.h"
#include "cuda/portable/portable_state.h"
#include "numeric/hadamard.h"

namespace oscar::cuda {
namespace {

class PortableBackend final : public DeviceBackend {
 public:
  using DeviceBackend::DeviceBackend;

  Status Linear(const LinearOp& op) override;
  Status Experts(int index) override;
  Status WriteKv(int index, int slot) override;
  Status Attend(int index, int slot) override;
  Status AdvanceState(int index, int slot) override;
  Status ReadQkv(int index, std::span<float> out) override;

 protected:
  Status CreateKernels() override {
    if (decode_.has_value()) {
      OSCAR_ASSIGN_OR_RETURN(kernel_, PortableAttention::Create(shape_));
    }
    if (windowed_decode_.has_value()) {
      OSCAR_ASSIGN_OR_RETURN(windowed_kernel_, PortableAttention::Create(windowed_shape_));
    }
    if (!mixed_layers_.empty()) {
      OSCAR_ASSIGN_OR_RETURN(mixed_kernel_, PortableAttention::Create(shape_, /*mixed=*/true));
    }
    if (form_decode_.has_value()) {
      OSCAR_ASSIGN_OR_RETURN(form_kernel_, PortableAttention::Create(form_shape_));
    }
    return {};
  }
  void CarveActivations(DeviceCarver& carver, size_t rows, size_t logit_rows) override;
  Status NormAndHead(const int32_t* sources, int rows) override;

 private:
  PortableHeads Heads() const {
    return {qkv_,       attention_.qkv_width(), pass_.positions,         pass_.table_rows,
            pass_.rows, attention_.num_heads,   attention_.num_kv_heads, attention_.head_dim};
  }
  Status NormAndRope(int index);
  Status Multiply(const DeviceMatrix& matrix, const float* x, const float* bias, float* out,
                  int rows, bool add = false);

  std::optional<PortableAttention> kernel_, mixed_kernel_, windowed_kernel_, form_kernel_;
  float* normed_ = nullptr;    // [rows, hidden]
  float* attended_ = nullptr;  // [rows, MixerOutputs()]
  // Of linear attention: q, k and v behind the convolution [rows, channels]; gates [rows, heads].
  PortableStateScratch state_;
  float* gated_ = nullptr;           // [rows, intermediate]
  float* expert_gate_up_ = nullptr;  // [expert_pairs_, 2 intermediate], by place
  float* expert_gated_ = nullptr;    // [expert_pairs_, intermediate]
  bool turned_ = false;              // qkv_ has been through NormAndRope
};

void PortableBackend::CarveActivations(DeviceCarver& carver, size_t rows, size_t logit_rows) {
  normed_ = carver.Take<float>(std::max(rows, logit_rows) * static_cast<size_t>(spec_.hidden));
  attended_ = carver.Take<float>(rows * MixerOutputs());
  if (const LinearAttentionSpec* linear = spec_.linear_attention()) {
    state_.convolved = carver.Take<float>(rows * static_cast<size_t>(linear->conv_channels()));
    state_.decay = carver.Take<float>(rows * static_cast<size_t>(linear->value_heads));
    state_.beta = carver.Take<float>(rows * static_cast<size_t>(linear->value_heads));
  }
  gated_ = carver.Take<float>(rows * static_cast<size_t>(spec_.max_intermediate()));
  size_t middle = 0;
  for (const LayerSpec& layer : spec_.layers) {
    if (layer.experts() == nullptr) continue;
    middle = std::max(middle, static_cast<size_t>(layer.experts()->intermediate));
  }
  expert_gate_up_ = carver.Take<float>(expert_pairs_ * 2 * middle);
  expert_gated_ = carver.Take<float>(expert_pairs_ * middle);
}

Status PortableBackend::Multiply(const DeviceMatrix& matrix, const float* x, const float* bias,
                                 float* out, int rows, bool add) {
  PortableGemm product;
  product.weights = matrix.weights;
  product.outputs = matrix.outputs;
  product.inputs = matrix.inputs;
  product.x = x;
  product.bias = bias;
  product.out = out;
  product.out_stride = matrix.outputs;
  product.rows = rows;
  product.add = add;
  return LaunchPortableGemm(product, stream_);
}

Status PortableBackend::Linear(const LinearOp& op) {
  const DeviceLayer& weights = layer(op.layer);
  const int hidden = spec_.hidden;
  if (op.output == Activation::kStream) {
    const bool attended = op.input == Activation::kAttended;
    const bool from_state = op.matrix == LayerMatrix::kStateOut;
    const DeviceMatrix& matrix = from_state ? weights.state.out
                                 : attended ? weights.o
                                            : weights.down;
    return Multiply(matrix, attended ? attended_ : gated_,
                    op.matrix == LayerMatrix::kO ? weights.o_bias : nullptr, x_, pass_.rows,
                    /*add=*/true);
  }
  const float* norm =
      op.norm == Role::kAttentionNorm ? weights.attention_norm : weights.feed_forward_norm;
  OSCAR_RETURN_IF_ERROR(
      LaunchPortableNorm(x_, norm, spec_.norm_eps, nullptr, normed_, pass_.rows, hidden, stream_));
  if (op.output == Activation::kQkv) {
    turned_ = false;
    if (spec_.layer(op.layer).linear_attention() != nullptr) {
      return Multiply(weights.state.in, normed_, nullptr, qkv_, pass_.rows);
    }
    return Multiply(weights.qkv, normed_, weights.qkv_bias, qkv_, pass_.rows);
  }
  const int middle = weights.gate_up.outputs / 2;
  for (int first = 0; first < pass_.rows; first += kFeedForwardRows) {
    const int rows = std::min(kFeedForwardRows, pass_.rows - first);
    OSCAR_RETURN_IF_ERROR(
        Multiply(weights.gate_up, normed_ + int64_t{first} * hidden, nullptr, gate_up_, rows));
    OSCAR_RETURN_IF_ERROR(
        LaunchPortableSiluMul(gate_up_, gated_ + int64_t{first} * middle, rows, middle, stream_));
  }
  if (op.matrix != LayerMatrix::kSharedGateUp || weights.shared_share == nullptr) return {};
  // A router of one expert, before the layer's own.
  OSCAR_RETURN_IF_ERROR(LaunchPortableScores(normed_, weights.shared_share, nullptr,
                                             RouterScore::kSigmoid, router_logits_, pass_.rows,
                                             hidden, 1, stream_));
  return LaunchPortableScale(gated_, router_logits_, pass_.rows, middle, stream_);
}

Status PortableBackend::Experts(int index) {
  const ExpertsSpec& experts = *spec_.layer(index).experts();
  const DeviceExperts& weights = layer(index).experts;
  const int rows = pass_.rows, hidden = spec_.hidden, middle = experts.intermediate;
  const int pairs = rows * experts.experts_per_token;
  OSCAR_RETURN_IF_ERROR(LaunchPortableNorm(x_, layer(index).feed_forward_norm, spec_.norm_eps,
                                           nullptr, normed_, rows, hidden, stream_));
  OSCAR_RETURN_IF_ERROR(LaunchPortableScores(normed_, weights.router, weights.logit_bias,
                                             experts.score, router_logits_, rows, hidden,
                                             experts.num_experts, stream_));
  OSCAR_RETURN_IF_ERROR(LaunchChoiceAndSort(experts,
                                            {.logits = router_logits_,
                                             .are_scores = true,
                                             .bias = weights.choice_bias,
                                             .positions = pass_.positions,
                                             .rows = rows,
                                             .tile_rows = kPortableTileRows},
                                            routing_, expert_counts_ + index, stream_));
  PortableGroupedGemm gemm;
  gemm.tiles = routing_.tiles;
  gemm.num_tiles = routing_.num_tiles;
  gemm.max_tiles = MaxTiles(pairs, experts.num_experts, kPortableTileRows);
  gemm.experts = weights.gate_up_table;
  gemm.bias = weights.gate_up_bias;
  gemm.outputs = 2 * middle;
  gemm.inputs = hidden;
  gemm.x = normed_;
  gemm.x_rows = routing_.rows;
  gemm.out = expert_gate_up_;
  OSCAR_RETURN_IF_ERROR(LaunchPortableGroupedGemm(gemm, stream_));
  OSCAR_RETURN_IF_ERROR(
      experts.clamped.has_value()
          ? LaunchPortableClampedGate(expert_gate_up_, *experts.clamped, expert_gated_, pairs,
                                      middle, stream_)
          : LaunchPortableSiluMul(expert_gate_up_, expert_gated_, pairs, middle, stream_));
  gemm.experts = weights.down_table;
  gemm.bias = weights.down_bias;
  gemm.outputs = hidden;
  gemm.inputs = middle;
  gemm.x = expert_gated_;
  gemm.x_rows = nullptr;
  gemm.out = expert_outputs_;
  OSCAR_RETURN_IF_ERROR(LaunchPortableGroupedGemm(gemm, stream_));
  return LaunchCombine(routing_, expert_outputs_, x_, rows, hidden, experts.experts_per_token,
                       stream_);
}

Status PortableBackend::NormAndRope(int index) {
  if (turned_) return {};
  turned_ = true;
  const DeviceLayer& weights = layer(index);
  PortableNorm norm{weights.q_norm, weights.k_norm, nullptr, spec_.norm_eps};
  if (spec_.layer(index).attention()->qk_norm == QkNorm::kAllHeads) {
    OSCAR_RETURN_IF_ERROR(LaunchPortableFactors(Heads(), spec_.norm_eps, head_factors_, stream_));
    norm.factors = head_factors_;
  }
  return LaunchPortableRope(Heads(), norm, weights_.cos_sin, attention_.rotary_dims, stream_);
}

Status PortableBackend::WriteKv(int index, int slot) {
  OSCAR_RETURN_IF_ERROR(NormAndRope(index));
  const SideTransform& k = plan_.k(slot);
  PortableRotation rotation;
  if (k.kind == RotationKind::kHadamard || k.kind == RotationKind::kBlockHadamard) {
    rotation.hadamard_order =
        k.kind == RotationKind::kHadamard ? attention_.head_dim : k.hadamard_block;
    rotation.hadamard_scale = HadamardScale(rotation.hadamard_order);
  } else if (k.kind == RotationKind::kCalibrated) {
    rotation.matrices = layer(index).rotation_matrices;
    rotation.num_matrices = k.num_matrices;
  }
  return LaunchPortableStore(Heads(), rotation, ViewOf(slot), stream_);
}

Status PortableBackend::Attend(int index, int slot) {
  PortableArguments args;
  const PortableAttention& kernel = IsWindowed(slot) ? *windowed_kernel_
                                    : IsForm(slot)   ? *form_kernel_
                                    : IsMixed(slot)  ? *mixed_kernel_
                                                     : *kernel_;
  args.sinks = layer(index).sinks;
  args.cache = ViewOf(slot);
  args.heads = HeadsOf(slot);
  args.q = qkv_;
  args.q_stride = attention_.qkv_width();
  args.out = attended_;
  args.softmax_scale = static_cast<float>(attention_.softmax_scale);
  args.sequences = pass_.decode_views;
  args.batch = pass_.decodes;
  OSCAR_RETURN_IF_ERROR(kernel.Launch(args, stream_));
  args.sequences = pass_.chunk_views;
  args.chunks = pass_.chunk_rows;
  args.batch = pass_.chunks;
  args.max_query_tokens = std::max(pass_.longest_chunk, 1);
  OSCAR_RETURN_IF_ERROR(kernel.Launch(args, stream_));
  if (!attention_.has_output_gate) return {};
  PortableGate gate;
  const SideTransform& v = plan_.v(slot);
  if (v.kind == RotationKind::kHadamard || v.kind == RotationKind::kBlockHadamard) {
    gate.turn.hadamard_order =
        v.kind == RotationKind::kHadamard ? attention_.head_dim : v.hadamard_block;
    gate.turn.hadamard_scale = HadamardScale(gate.turn.hadamard_order);
  } else {
    gate.turn.matrices = layer(index).value_turn;
    gate.turn.num_matrices = v.num_matrices;
  }
  gate.attended = attended_;
  return LaunchPortableGate(Heads(), gate, stream_);
}

Status PortableBackend::AdvanceState(int index, int slot) {
  StateArguments args = StatesOf(index, slot);
  args.states = pass_.decode_states;
  args.batch = pass_.decodes;
  OSCAR_RETURN_IF_ERROR(LaunchPortableStates(args, 1, state_, attended_, stream_));
  args.states = pass_.chunk_states;
  args.chunks = pass_.chunk_rows;
  args.batch = pass_.chunks;
  return LaunchPortableStates(args, pass_.longest_chunk, state_, attended_, stream_);
}

Status PortableBackend::ReadQkv(int index, std::span<float> out) {
  OSCAR_RETURN_IF_ERROR(NormAndRope(index));
  OSCAR_RETURN_IF_ERROR(Fetch(out.data(), qkv_, out.size(), "reading the calibration tap"));
  return Synchronize();
}

Status PortableBackend::NormAndHead(const int32_t* sources, int rows) {
  OSCAR_RETURN_IF_ERROR(LaunchPortableNorm(x_, weights_.final_norm, spec_.norm_eps, sources,
                                           normed_, rows, spec_.hidden, stream_));
  return Multiply(weights_.head, normed_, nullptr, logits_, rows);
}

}  // namespace

std::unique_ptr<DeviceBackend> NewPortableBackend(const ModelSpec& spec, const KvPlan& plan,
                                                  ThreadPool& threads,
                                                  const BackendOptions& options) {
  return std::make_unique<PortableBackend>(spec, plan, threads, options);
}

}  // namespace oscar::cuda
