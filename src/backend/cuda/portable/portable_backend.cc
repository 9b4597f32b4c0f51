// The operations in the CPU's order of sums, with activations in fp32: the same logits as a
// portable pass on the CPU, bit for bit. Nothing is recorded or tuned; for evaluation.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "cuda/device_backend.h"
#include "cuda/portable/portable_attention.h"
#include "cuda/portable/portable_kernels.h"
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
  Status ReadQkv(int index, std::span<float> out) override;

 protected:
  Status CreateKernels() override {
    if (decode_.has_value()) {
      OSCAR_ASSIGN_OR_RETURN(kernel_, PortableAttention::Create(shape_));
    }
    if (!mixed_layers_.empty()) {
      OSCAR_ASSIGN_OR_RETURN(mixed_kernel_, PortableAttention::Create(shape_, /*mixed=*/true));
    }
    return {};
  }
  void CarveActivations(DeviceCarver& carver, size_t rows, size_t logit_rows) override;
  Status NormAndHead(const int32_t* sources, int rows) override;

 private:
  PortableHeads Heads() const {
    return {qkv_,
            pass_.positions,
            pass_.table_rows,
            pass_.rows,
            attention_.num_heads,
            attention_.num_kv_heads,
            attention_.head_dim};
  }
  Status NormAndRope(int index);
  Status Multiply(const DeviceMatrix& matrix, const float* x, const float* bias, float* out,
                  int rows, bool add = false);

  std::optional<PortableAttention> kernel_, mixed_kernel_;
  float* normed_ = nullptr;          // [rows, hidden]
  float* attended_ = nullptr;        // [rows, q]
  float* gated_ = nullptr;           // [rows, intermediate]
  float* expert_gate_up_ = nullptr;  // [expert_pairs_, 2 intermediate], by place
  float* expert_gated_ = nullptr;    // [expert_pairs_, intermediate]
  bool turned_ = false;              // qkv_ has been through NormAndRope
};

void PortableBackend::CarveActivations(DeviceCarver& carver, size_t rows, size_t logit_rows) {
  normed_ = carver.Take<float>(std::max(rows, logit_rows) * static_cast<size_t>(spec_.hidden));
  attended_ = carver.Take<float>(rows * static_cast<size_t>(attention_.q_width()));
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
    const bool attended = op.matrix == LayerMatrix::kO;
    return Multiply(attended ? weights.o : weights.down, attended ? attended_ : gated_,
                    attended ? weights.o_bias : nullptr, x_, pass_.rows, /*add=*/true);
  }
  const float* norm =
      op.norm == Role::kAttentionNorm ? weights.attention_norm : weights.feed_forward_norm;
  OSCAR_RETURN_IF_ERROR(
      LaunchPortableNorm(x_, norm, spec_.norm_eps, nullptr, normed_, pass_.rows, hidden, stream_));
  if (op.output == Activation::kQkv) {
    turned_ = false;
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
  return {};
}

Status PortableBackend::Experts(int index) {
  const ExpertsSpec& experts = *spec_.layer(index).experts();
  const DeviceExperts& weights = layer(index).experts;
  const int rows = pass_.rows, hidden = spec_.hidden, middle = experts.intermediate;
  const int pairs = rows * experts.experts_per_token;
  OSCAR_RETURN_IF_ERROR(LaunchPortableNorm(x_, layer(index).feed_forward_norm, spec_.norm_eps,
                                           nullptr, normed_, rows, hidden, stream_));
  OSCAR_RETURN_IF_ERROR(LaunchPortableScores(normed_, weights.router, experts.score, router_logits_,
                                             rows, hidden, experts.num_experts, stream_));
  OSCAR_RETURN_IF_ERROR(LaunchChoose(experts, router_logits_, /*are_scores=*/true,
                                     weights.choice_bias, pass_.positions, rows, routing_,
                                     stream_));
  OSCAR_RETURN_IF_ERROR(
      LaunchSort(experts, rows, kPortableTileRows, routing_, expert_counts_ + index, stream_));
  PortableGroupedGemm gemm;
  gemm.tiles = routing_.tiles;
  gemm.num_tiles = routing_.num_tiles;
  gemm.max_tiles = MaxTiles(pairs, experts.num_experts, kPortableTileRows);
  gemm.experts = weights.gate_up_table;
  gemm.outputs = 2 * middle;
  gemm.inputs = hidden;
  gemm.x = normed_;
  gemm.x_rows = routing_.rows;
  gemm.out = expert_gate_up_;
  OSCAR_RETURN_IF_ERROR(LaunchPortableGroupedGemm(gemm, stream_));
  OSCAR_RETURN_IF_ERROR(
      LaunchPortableSiluMul(expert_gate_up_, expert_gated_, pairs, middle, stream_));
  gemm.experts = weights.down_table;
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

Status PortableBackend::Attend(int, int slot) {
  PortableArguments args;
  const PortableAttention& kernel = IsMixed(slot) ? *mixed_kernel_ : *kernel_;
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
  return kernel.Launch(args, stream_);
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
