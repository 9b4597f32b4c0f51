// The operations on tensor cores: fp32 residual stream, BF16 or FP8 weights, fp32 sums; attention
// straight from the pages. Numbers are rounded to BF16 where they enter a GEMM or the cache and
// nowhere else, the places where the CPU's BF16 paths round them: norms, scaled queries, keys,
// values, attention's outputs, gated activations.
#include "cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/log.h"
#include "cuda/attention/output_gate.h"
#include "cuda/attention/prefill_attention.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device_backend.h"
#include "cuda/experts/grouped_gemm.h"
#include "cuda/experts/routing.h"
#include "cuda/experts/shared_share.h"
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
  Status AdvanceState(int index, int slot) override;
  Status ReadQkv(int index, std::span<float> out) override;

 protected:
  Status CreateKernels() override {
    if (decode_.has_value()) {
      OSCAR_ASSIGN_OR_RETURN(prefill_, PrefillAttention::Create(shape_));
    }
    if (windowed_decode_.has_value()) {
      OSCAR_ASSIGN_OR_RETURN(windowed_prefill_, PrefillAttention::Create(windowed_shape_));
    }
    if (!mixed_layers_.empty()) {
      OSCAR_ASSIGN_OR_RETURN(mixed_prefill_,
                             PrefillAttention::Create(shape_, PrefillPath::kBest, mixed_layers_));
    }
    if (form_decode_.has_value()) {
      OSCAR_ASSIGN_OR_RETURN(form_prefill_, PrefillAttention::Create(form_shape_));
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
  // Norm and matrices below one another, to columns of qkv_ that are side by side.
  Status MultiplyInto(std::initializer_list<const DeviceMatrix*> matrices, const float* norm,
                      const float* bias, int width);
  Status GateAndUp(const DeviceLayer& weights, const float* norm);
  Status GateAttended(int index, int slot);
  // What norm and RoPE of a layer's q and k need, rows by rows of the pass.
  Result<WriteArguments> NormAndRope(int index);

  const PrefillAttention& PrefillOf(int slot) const {
    return IsWindowed(slot) ? *windowed_prefill_
           : IsForm(slot)   ? *form_prefill_
           : IsMixed(slot)  ? *mixed_prefill_
                            : *prefill_;
  }

  std::optional<PrefillAttention> prefill_, mixed_prefill_, windowed_prefill_, form_prefill_;
  std::unique_ptr<GemmDispatch> gemms_;
  Bf16* normed_ = nullptr;    // [rows, hidden]
  Bf16* q_ = nullptr;         // [rows, q]
  Bf16* attended_ = nullptr;  // [rows, MixerOutputs()]
  float* ungated_ = nullptr;  // [rows, q], where attention has gates
  // Of prompts through linear attention in tiles; null: token by token.
  std::byte* chunk_workspace_ = nullptr;
  size_t num_arrivals_ = 0;
  uint32_t* arrivals_ = nullptr;   // [rows, key heads] of linear attention, zero between launches
  Bf16* gated_ = nullptr;          // [rows, intermediate]
  Bf16* expert_inputs_ = nullptr;  // [rows, padded hidden], the normed stream
  Bf16* expert_gated_ = nullptr;   // [expert_pairs_, padded intermediate], by place
};

void CudaBackend::CarveActivations(DeviceCarver& carver, size_t rows, size_t logit_rows) {
  const auto q_width = static_cast<size_t>(attention_.q_width());
  normed_ = carver.Take<Bf16>(std::max(rows, logit_rows) * static_cast<size_t>(spec_.hidden));
  q_ = carver.Take<Bf16>(rows * q_width);
  attended_ = carver.Take<Bf16>(rows * MixerOutputs());
  if (attention_.has_output_gate) ungated_ = carver.Take<float>(rows * q_width);
  if (const LinearAttentionSpec* linear = spec_.linear_attention()) {
    num_arrivals_ = rows * static_cast<size_t>(linear->key_heads);
    arrivals_ = carver.Take<uint32_t>(num_arrivals_);
    // Tiles of tokens would show where a prompt was cut.
    if (!options_.batch_invariant && HasStateChunks(*linear)) {
      chunk_workspace_ =
          carver.Take<std::byte>(StateChunkWorkspace(*linear, static_cast<int>(rows)));
    }
  }
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
  if (arrivals_ == nullptr) return {};
  return CudaStatus(cudaMemsetAsync(arrivals_, 0, num_arrivals_ * sizeof(uint32_t), stream_),
                    "clearing memory");
}

Status CudaBackend::Linear(const LinearOp& op) {
  const DeviceLayer& weights = layer(op.layer);
  const float* norm =
      op.norm == Role::kAttentionNorm ? weights.attention_norm : weights.feed_forward_norm;
  if (op.output == Activation::kGated) {
    OSCAR_RETURN_IF_ERROR(GateAndUp(weights, norm));
    if (op.matrix != LayerMatrix::kSharedGateUp || weights.shared_share == nullptr) return {};
    return LaunchSharedShare(x_, weights.shared_share, spec_.norm_eps, gated_, pass_.rows,
                             spec_.hidden, weights.down.inputs, stream_);
  }
  if (op.output == Activation::kStream) {
    const bool attended = op.input == Activation::kAttended;
    const bool from_state = op.matrix == LayerMatrix::kStateOut;
    const DeviceMatrix& matrix = from_state ? weights.state.out
                                 : attended ? weights.o
                                            : weights.down;
    return gemms_->Of(matrix, attended ? attended_ : gated_, x_, spec_.hidden, pass_.rows,
                      GemmOutput::kAdd, op.matrix == LayerMatrix::kO ? weights.o_bias : nullptr,
                      stream_);
  }
  if (const LinearAttentionSpec* linear = spec_.layer(op.layer).linear_attention()) {
    return MultiplyInto({&weights.state.in, &weights.state.gates}, norm, nullptr,
                        linear->input_width());
  }
  return MultiplyInto({&weights.qkv, &weights.v, &weights.gates}, norm, weights.qkv_bias,
                      attention_.qkv_width());
}

Status CudaBackend::MultiplyInto(std::initializer_list<const DeviceMatrix*> matrices,
                                 const float* norm, const float* bias, int width) {
  int first = 0;
  for (const DeviceMatrix* matrix : matrices) {
    if (matrix->outputs == 0) continue;
    OSCAR_RETURN_IF_ERROR(gemms_->OfNormed(*matrix, Normed(norm), qkv_ + first, width, pass_.rows,
                                           GemmOutput::kFloat,
                                           bias == nullptr ? nullptr : bias + first, stream_));
    first += matrix->outputs;
  }
  return {};
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
  const bool fp8 = weights.gate_up.is_fp8() || weights.down.is_fp8();
  const bool coded = weights.gate_up.weights == nullptr;  // FP8 or MXFP4
  const bool alike = coded == (weights.down.weights == nullptr);
  const GroupedTiles tiles =
      TilesFor(experts, rows, fp8, options_.batch_invariant, HasGroupedWgmma() && alike);
  RouterArguments router;
  router.x = x_;
  router.norm = layer(index).feed_forward_norm;
  router.router = weights.router;
  router.bias = weights.logit_bias;
  router.logits = router_logits_;
  router.normed = expert_inputs_;
  router.normed_stride = weights.gate_up.inputs;
  router.raise = weights.gate_up.is_fp8();
  router.lane_order = tiles.wgmma && coded;
  router.epsilon = spec_.norm_eps;
  router.rows = rows;
  router.hidden = spec_.hidden;
  router.num_experts = experts.num_experts;
  OSCAR_RETURN_IF_ERROR(LaunchRouter(router, stream_));
  OSCAR_RETURN_IF_ERROR(LaunchChoiceAndSort(experts,
                                            {.logits = router_logits_,
                                             .bias = weights.choice_bias,
                                             .positions = pass_.positions,
                                             .rows = rows,
                                             .tile_rows = tiles.rows},
                                            routing_, expert_counts_ + index, stream_));
  GroupedGemm gemm;
  gemm.num_experts = experts.num_experts;
  gemm.tiles = routing_.tiles;
  gemm.num_tiles = routing_.num_tiles;
  gemm.max_tiles = MaxTiles(pairs, experts.num_experts, tiles.rows);
  gemm.matrix = weights.gate_up;
  gemm.bias = weights.gate_up_bias;
  gemm.clamped = experts.clamped;
  gemm.x = expert_inputs_;
  gemm.x_rows = routing_.rows;
  gemm.out = expert_gated_;
  gemm.out_stride = weights.down.inputs;
  gemm.raise = weights.down.is_fp8();
  gemm.lane_order = tiles.wgmma && coded;
  gemm.output = GemmOutput::kSiluMul;
  OSCAR_RETURN_IF_ERROR(LaunchGroupedGemm(gemm, tiles, stream_));
  gemm.matrix = weights.down;
  gemm.bias = weights.down_bias;
  gemm.x = expert_gated_;
  gemm.x_rows = nullptr;
  gemm.out = expert_outputs_;
  gemm.out_stride = spec_.hidden;
  gemm.output = GemmOutput::kFloat;
  const bool combines = rows <= kCombineRows;
  if (combines) {
    gemm.combine = {x_,
                    routing_.places,
                    routing_.rows,
                    routing_.weights,
                    expert_arrivals_,
                    experts.experts_per_token};
  }
  OSCAR_RETURN_IF_ERROR(LaunchGroupedGemm(gemm, tiles, stream_));
  if (combines) return {};
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

Status CudaBackend::Attend(int index, int slot) {
  const CacheView view = ViewOf(slot);
  const float* sinks = layer(index).sinks;
  const int64_t q_width = attention_.q_width();
  const bool gated = attention_.has_output_gate;
  for (int first = 0; first < pass_.decodes; first += options_.max_sequences) {
    DecodeArguments args;
    args.cache = view;
    args.sequences = pass_.decode_views + first;
    args.q = q_ + first * q_width;
    args.out = gated ? static_cast<void*>(ungated_ + first * q_width) : attended_ + first * q_width;
    args.out_fp32 = gated;
    args.softmax_scale = kScaledQuerySoftmax;
    args.batch = std::min(options_.max_sequences, pass_.decodes - first);
    args.workspace = attention_workspace_;
    args.heads = HeadsOf(slot);
    args.sinks = sinks;
    args.overlap_predecessor = first == 0;
    OSCAR_RETURN_IF_ERROR(DecodeOf(slot).Launch(args, stream_));
  }
  if (pass_.chunks > 0) {
    PrefillArguments args;
    args.cache = view;
    args.sequences = pass_.chunk_views;
    args.chunks = pass_.chunk_rows;
    args.q = q_;
    args.out = gated ? static_cast<void*>(ungated_) : attended_;
    args.out_fp32 = gated;
    // What a BF16 output loses by itself is as much as P loses where it is rounded.
    args.precision = gated ? PrefillPrecision::kPrecise : PrefillPrecision::kFast;
    args.softmax_scale = kScaledQuerySoftmax;
    args.batch = pass_.chunks;
    args.max_query_tokens = pass_.longest_chunk;
    args.heads = HeadsOf(slot);
    args.sinks = sinks;
    OSCAR_RETURN_IF_ERROR(PrefillOf(slot).Launch(args, stream_));
  }
  return gated ? GateAttended(index, slot) : Status();
}

Status CudaBackend::GateAttended(int index, int slot) {
  const DeviceLayer& weights = layer(index);
  OutputGateArguments args;
  args.attended = ungated_;
  args.gates = qkv_ + attention_.q_width() + 2 * attention_.kv_width();
  args.gate_stride = attention_.qkv_width();
  args.rotation = plan_.v(slot).kind;
  args.turns = weights.value_turn;
  args.num_turns = weights.value_turns;
  args.rows = pass_.rows;
  args.heads = attention_.num_heads;
  args.kv_heads = attention_.num_kv_heads;
  args.head_dim = attention_.head_dim;
  args.out = attended_;
  return LaunchOutputGate(args, stream_);
}

Status CudaBackend::AdvanceState(int index, int slot) {
  StateArguments args = StatesOf(index, slot);
  args.states = pass_.decode_states;
  args.batch = pass_.decodes;
  OSCAR_RETURN_IF_ERROR(LaunchStates(args, arrivals_, attended_, stream_));
  args.states = pass_.chunk_states;
  args.chunks = pass_.chunk_rows;
  args.batch = pass_.chunks;
  if (chunk_workspace_ == nullptr) return LaunchStates(args, arrivals_, attended_, stream_);
  return LaunchStateChunks(args, pass_.tiles, pass_.state_tiles, pass_.tile_ranges,
                           chunk_workspace_, attended_, stream_);
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
