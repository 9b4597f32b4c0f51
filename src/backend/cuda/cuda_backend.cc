// The operations on tensor cores: fp32 residual stream, BF16 or FP8 weights, fp32 sums; attention
// straight from the pages. Numbers are rounded to BF16 where they enter a GEMM or the cache and
// nowhere else, the places where the CPU's BF16 paths round them: norms, scaled queries, keys,
// values, attention's outputs, gated activations.
#include "cuda/cuda_backend.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/log.h"
#include "cuda/attention/prefill_attention.h"
#include "cuda/device_backend.h"
#include "cuda/experts/grouped_gemm.h"
#include "cuda/experts/routing.h"
#include "cuda/gemm/gemm_dispatch.h"
#include "cuda/kv/kv_write.h"
#include "cuda/kv/token_write.h"
#include "cuda/step_kernels.h"

namespace oscar {
namespace cuda {
namespace {

constexpr double kLog2E = 1.4426950408889634;
// What is left of the softmax's scale for kernels that multiply by it and by log2(e) themselves:
// queries carry both before they are rounded, as on the CPU.
constexpr float kScaledQuerySoftmax = 0.69314718f;
static_assert(kScaledQuerySoftmax * static_cast<float>(kLog2E) == 1.0f);

class CudaBackend final : public DeviceBackend {
 public:
  using DeviceBackend::DeviceBackend;

  int max_recorded_rows() const override { return options_.max_sequences; }
  Status Linear(const LinearOp& op) override;
  Status Experts(int index) override;
  Status WriteKv(int index, int slot) override;
  Status Attend(int index, int slot) override;
  Status ReadQkv(int index, std::span<float> out) override;

 protected:
  Status CreateKernels() override {
    if (decode_.has_value()) {
      OSCAR_ASSIGN_OR_RETURN(prefill_, PrefillAttention::Create(shape_));
    }
    if (!mixed_layers_.empty()) {
      OSCAR_ASSIGN_OR_RETURN(mixed_prefill_,
                             PrefillAttention::Create(shape_, PrefillPath::kBest, mixed_layers_));
    }
    return {};
  }
  void CarveActivations(DeviceCarver& carver, size_t rows, size_t logit_rows) override;
  Status FinishLoading() override;
  Status NormAndHead(const int32_t* sources, int rows) override;

 private:
  NormedInput Normed(const float* norm, int first_row = 0) const {
    return {x_ + int64_t{first_row} * spec_.hidden, norm, spec_.norm_eps, normed_};
  }
  Status GateAndUp(const DeviceLayer& weights, const float* norm);
  // What norm and RoPE of a layer's q and k need, rows by rows of the pass.
  Result<WriteArguments> NormAndRope(int index);

  std::optional<PrefillAttention> prefill_, mixed_prefill_;
  std::unique_ptr<GemmDispatch> gemms_;
  Bf16* normed_ = nullptr;         // [rows, hidden]
  Bf16* q_ = nullptr;              // [rows, q]
  Bf16* attended_ = nullptr;       // [rows, q]
  Bf16* gated_ = nullptr;          // [rows, intermediate]
  Bf16* expert_inputs_ = nullptr;  // [rows, padded hidden], the normed stream
  Bf16* expert_gated_ = nullptr;   // [expert_pairs_, padded intermediate], by place
};

void CudaBackend::CarveActivations(DeviceCarver& carver, size_t rows, size_t logit_rows) {
  const auto q_width = static_cast<size_t>(attention_.q_width());
  normed_ = carver.Take<Bf16>(std::max(rows, logit_rows) * static_cast<size_t>(spec_.hidden));
  q_ = carver.Take<Bf16>(rows * q_width);
  attended_ = carver.Take<Bf16>(rows * q_width);
  gated_ = carver.Take<Bf16>(rows * static_cast<size_t>(spec_.max_intermediate()));
  size_t hidden = 0, middle = 0;
  for (const DeviceLayer& layer : weights_.layers) {
    hidden = std::max(hidden, static_cast<size_t>(layer.experts.gate_up.inputs));
    middle = std::max(middle, static_cast<size_t>(layer.experts.down.inputs));
  }
  expert_inputs_ = carver.Take<Bf16>(rows * hidden);
  expert_gated_ = carver.Take<Bf16>(expert_pairs_ * middle);
}

Status CudaBackend::FinishLoading() {
  std::unique_ptr<Blas> blas;
  if (!options_.batch_invariant) {
    auto loaded = Blas::Load(blas_workspace_);
    if (loaded.has_value()) {
      blas = std::move(*loaded);
    } else {
      LogWarning("{}: prompts and batches beyond {} rows will be slow", loaded.error().message(),
                 kSkinnyRows);
    }
  }
  gemms_ =
      std::make_unique<GemmDispatch>(std::move(blas), weight_scratch_, options_.batch_invariant);
  return {};
}

Status CudaBackend::Linear(const LinearOp& op) {
  const DeviceLayer& weights = layer(op.layer);
  const float* norm =
      op.norm == Role::kAttentionNorm ? weights.attention_norm : weights.feed_forward_norm;
  if (op.output == Activation::kGated) return GateAndUp(weights, norm);
  if (op.output == Activation::kStream) {
    const bool attended = op.matrix == LayerMatrix::kO;
    return gemms_->Of(attended ? weights.o : weights.down, attended ? attended_ : gated_, x_,
                      spec_.hidden, pass_.rows, GemmOutput::kAdd,
                      attended ? weights.o_bias : nullptr, stream_);
  }
  const int width = attention_.qkv_width(), first = weights.qkv.outputs;
  OSCAR_RETURN_IF_ERROR(gemms_->OfNormed(weights.qkv, Normed(norm), qkv_, width, pass_.rows,
                                         GemmOutput::kFloat, weights.qkv_bias, stream_));
  if (weights.v.outputs == 0) return {};
  return gemms_->OfNormed(
      weights.v, Normed(norm), qkv_ + first, width, pass_.rows, GemmOutput::kFloat,
      weights.qkv_bias == nullptr ? nullptr : weights.qkv_bias + first, stream_);
}

Status CudaBackend::GateAndUp(const DeviceLayer& weights, const float* norm) {
  const int rows = pass_.rows, middle = weights.gate_up.outputs / 2;
  if (gemms_->TakesSiluMul(weights.gate_up, rows)) {
    return gemms_->OfNormed(weights.gate_up, Normed(norm), gated_, middle, rows,
                            GemmOutput::kSiluMul, nullptr, stream_);
  }
  OSCAR_ASSIGN_OR_RETURN(const DeviceMatrix gate_up,
                         gemms_->Expanded(weights.gate_up, rows, stream_));
  for (int first = 0; first < rows; first += kFeedForwardRows) {
    const int count = std::min(kFeedForwardRows, rows - first);
    OSCAR_RETURN_IF_ERROR(gemms_->OfNormed(gate_up, Normed(norm, first), gate_up_, 2 * middle,
                                           count, GemmOutput::kFloat, nullptr, stream_));
    OSCAR_RETURN_IF_ERROR(
        LaunchSiluMul(gate_up_, gated_ + int64_t{first} * middle, count, middle, stream_));
  }
  return {};
}

Status CudaBackend::Experts(int index) {
  const ExpertsSpec& experts = *spec_.layer(index).experts();
  const DeviceExperts& weights = layer(index).experts;
  const int rows = pass_.rows, pairs = rows * experts.experts_per_token;
  RouterArguments router;
  router.x = x_;
  router.norm = layer(index).feed_forward_norm;
  router.router = weights.router;
  router.logits = router_logits_;
  router.normed = expert_inputs_;
  router.normed_stride = weights.gate_up.inputs;
  router.raise = weights.gate_up.is_fp8();
  router.epsilon = spec_.norm_eps;
  router.rows = rows;
  router.hidden = spec_.hidden;
  router.num_experts = experts.num_experts;
  OSCAR_RETURN_IF_ERROR(LaunchRouter(router, stream_));
  OSCAR_RETURN_IF_ERROR(LaunchChoose(experts, router_logits_, /*are_scores=*/false,
                                     weights.choice_bias, pass_.positions, rows, routing_,
                                     stream_));
  const int tile_rows = TileRowsFor(
      experts, rows, weights.gate_up.is_fp8() || weights.down.is_fp8(), options_.batch_invariant);
  OSCAR_RETURN_IF_ERROR(
      LaunchSort(experts, rows, tile_rows, routing_, expert_counts_ + index, stream_));
  GroupedGemm gemm;
  gemm.num_experts = experts.num_experts;
  gemm.tiles = routing_.tiles;
  gemm.num_tiles = routing_.num_tiles;
  gemm.max_tiles = MaxTiles(pairs, experts.num_experts, tile_rows);
  gemm.matrix = weights.gate_up;
  gemm.x = expert_inputs_;
  gemm.x_rows = routing_.rows;
  gemm.out = expert_gated_;
  gemm.out_stride = weights.down.inputs;
  gemm.raise = weights.down.is_fp8();
  gemm.output = GemmOutput::kSiluMul;
  OSCAR_RETURN_IF_ERROR(LaunchGroupedGemm(gemm, tile_rows, stream_));
  gemm.matrix = weights.down;
  gemm.x = expert_gated_;
  gemm.x_rows = nullptr;
  gemm.out = expert_outputs_;
  gemm.out_stride = spec_.hidden;
  gemm.output = GemmOutput::kFloat;
  OSCAR_RETURN_IF_ERROR(LaunchGroupedGemm(gemm, tile_rows, stream_));
  return LaunchCombine(routing_, expert_outputs_, x_, rows, spec_.hidden, experts.experts_per_token,
                       stream_);
}

Result<WriteArguments> CudaBackend::NormAndRope(int index) {
  const DeviceLayer& weights = layer(index);
  WriteArguments args;
  args.qkv = qkv_;
  args.qkv_stride = attention_.qkv_width();
  args.positions = pass_.positions;
  args.cos_sin = weights_.cos_sin;
  args.rotary_dims = attention_.rotary_dims;
  args.q_norm = weights.q_norm;
  args.k_norm = weights.k_norm;
  args.norm_epsilon = spec_.norm_eps;
  args.tokens = pass_.rows;
  if (spec_.layer(index).attention()->qk_norm == QkNorm::kAllHeads) {
    OSCAR_RETURN_IF_ERROR(LaunchHeadFactors(shape_, qkv_, args.qkv_stride, spec_.norm_eps,
                                            head_factors_, pass_.rows, stream_));
    args.factors = head_factors_;
  }
  return args;
}

Status CudaBackend::WriteKv(int index, int slot) {
  const DeviceLayer& weights = layer(index);
  const CacheView view = ViewOf(slot);
  OSCAR_ASSIGN_OR_RETURN(WriteArguments write, NormAndRope(index));
  write.table_rows = pass_.table_rows;
  write.q_scale = static_cast<float>(kLog2E * attention_.softmax_scale);
  write.rotation = weights.rotation;
  write.rotation_fragments = weights.rotation_fragments;
  write.rotations = weights.rotations;
  write.q_out = q_;
  write.window_pool = const_cast<std::byte*>(view.window_pool);
  write.cache = view;
  return HasTokenWrite(shape_, weights.rotation) ? LaunchTokenWrite(shape_, write, stream_)
                                                 : WriteTokens(shape_, write, stream_);
}

Status CudaBackend::Attend(int, int slot) {
  const CacheView view = ViewOf(slot);
  const int64_t q_width = attention_.q_width();
  for (int first = 0; first < pass_.decodes; first += options_.max_sequences) {
    DecodeArguments args;
    args.cache = view;
    args.sequences = pass_.decode_views + first;
    args.q = q_ + first * q_width;
    args.out = attended_ + first * q_width;
    args.softmax_scale = kScaledQuerySoftmax;
    args.batch = std::min(options_.max_sequences, pass_.decodes - first);
    args.workspace = attention_workspace_;
    args.heads = HeadsOf(slot);
    args.overlap_predecessor = first == 0;
    OSCAR_RETURN_IF_ERROR(DecodeOf(slot).Launch(args, stream_));
  }
  if (pass_.chunks == 0) return {};
  PrefillArguments args;
  args.cache = view;
  args.sequences = pass_.chunk_views;
  args.chunks = pass_.chunk_rows;
  args.q = q_;
  args.out = attended_;
  args.softmax_scale = kScaledQuerySoftmax;
  args.batch = pass_.chunks;
  args.max_query_tokens = pass_.longest_chunk;
  args.heads = HeadsOf(slot);
  return (IsMixed(slot) ? *mixed_prefill_ : *prefill_).Launch(args, stream_);
}

Status CudaBackend::ReadQkv(int index, std::span<float> out) {
  const auto width = static_cast<size_t>(attention_.qkv_width());
  OSCAR_CHECK(out.size() == static_cast<size_t>(pass_.rows) * width);
  OSCAR_ASSIGN_OR_RETURN(const WriteArguments all, NormAndRope(index));
  const auto at_once = static_cast<int>(std::min<size_t>(gate_up_size_ / width, 1 << 16));
  for (int first = 0; first < pass_.rows; first += at_once) {
    const auto at = static_cast<size_t>(first) * width;
    WriteArguments args = all;
    args.qkv += at;
    args.positions += first;
    if (args.factors != nullptr) args.factors += 2 * first;
    args.tokens = std::min(at_once, pass_.rows - first);
    OSCAR_RETURN_IF_ERROR(LaunchTap(shape_, args, gate_up_, stream_));
    OSCAR_RETURN_IF_ERROR(Fetch(out.data() + at, gate_up_, static_cast<size_t>(args.tokens) * width,
                                "reading the calibration tap"));
  }
  return Synchronize();
}

Status CudaBackend::NormAndHead(const int32_t* sources, int rows) {
  OSCAR_RETURN_IF_ERROR(LaunchNorm(x_, weights_.final_norm, spec_.norm_eps, sources, normed_, rows,
                                   spec_.hidden, stream_));
  return gemms_->Of(weights_.head, normed_, logits_, spec_.vocab_size, rows, GemmOutput::kFloat,
                    nullptr, stream_);
}

}  // namespace
}  // namespace cuda

Result<std::unique_ptr<Backend>> MakeCudaBackend(const ModelSpec& spec, const WeightSource& source,
                                                 const KvPlan& plan, ThreadPool& threads,
                                                 const BackendOptions& options) {
  std::unique_ptr<cuda::DeviceBackend> backend;
  if (options.portable) {
    backend = cuda::NewPortableBackend(spec, plan, threads, options);
  } else {
    backend = std::make_unique<cuda::CudaBackend>(spec, plan, threads, options);
  }
  OSCAR_RETURN_IF_ERROR(backend->Load(source));
  return backend;
}

}  // namespace oscar
