#include "cuda/attention/prefill_attention.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>

#include "cache/block_codec.h"
#include "cuda/attention/head_blocks.h"
#include "cuda/attention/prefill_kernels.h"
#include "cuda/attention/sink_params.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"

namespace oscar::cuda {

Result<PrefillAttention> PrefillAttention::Create(const AttentionShape& shape, PrefillPath path,
                                                  std::span<const HeadBlocks> layers) {
  const bool forms = shape.form.has_value();
  OSCAR_RETURN_IF_ERROR(CheckBlockShape(shape.head_dim, forms ? shape.form->layout.group_dims()
                                                        : shape.history_kind == BlockKind::kBf16
                                                            ? shape.head_dim
                                                            : shape.group_dims));
  if (shape.num_kv_heads < 1 || shape.num_q_heads % shape.num_kv_heads != 0) {
    return Unexpected(
        InvalidArgument(fmt::format("{} query and {} KV heads: the ratio must be a whole number",
                                    shape.num_q_heads, shape.num_kv_heads)));
  }
  const bool mixed = !layers.empty();
  for (const HeadBlocks& heads : layers) OSCAR_RETURN_IF_ERROR(CheckHeads(shape, heads));
  OSCAR_ASSIGN_OR_RETURN(const DeviceLimits limits, CurrentDeviceLimits());
  const bool wgmma = path == PrefillPath::kBest && limits.major == 9 && !forms;
  PrefillAttention self;
  self.shape_ = shape;
  self.mixed_ = mixed;
  self.rows_ = wgmma ? kPrefillRows : kGenericRows;
  const PrefillKernelInfo* kernel = forms   ? kPrefillKernelsForms
                                    : wgmma ? kPrefillKernelsSm90
                                            : kPrefillKernelsGeneric;
  for (; kernel->function != nullptr; ++kernel) {
    const bool fits =
        forms || (mixed ? kernel->mixed : !kernel->mixed && kernel->kind == shape.history_kind);
    if (!fits || kernel->sinks != shape.has_sinks || kernel->head_dim != shape.head_dim) continue;
    self.kernel_ = kernel->function;
    self.threads_ = kernel->threads;
    self.shared_bytes_ = kernel->shared_bytes;
    if (kernel->raw_pages == 0) continue;
    // Raw blocks of two tiles where they fit, so that one is fetched while the other is expanded.
    const int block = mixed ? BlockSizes(shape, layers).second
                            : static_cast<int>(shape.history_layout().block_bytes());
    const int raw = kernel->raw_pages * block;
    self.raw_slots_log2_ = self.shared_bytes_ + 2 * raw <= limits.shared_per_block ? 1 : 0;
    self.shared_bytes_ += raw << self.raw_slots_log2_;
  }
  if (self.kernel_ == nullptr) {
    return Unexpected(
        Unimplemented(fmt::format("no prefill kernel for head dim {}{}", shape.head_dim,
                                  shape.has_sinks ? " with attention sinks" : "")));
  }
  if (self.shared_bytes_ > limits.shared_per_block) {
    return Unexpected(Unimplemented(
        fmt::format("prefill attention at head dim {}: needs {} bytes of shared memory per block; "
                    "the device has {}",
                    shape.head_dim, self.shared_bytes_, limits.shared_per_block)));
  }
  OSCAR_RETURN_IF_ERROR(
      AllowSharedMemory(self.kernel_, self.shared_bytes_, "preparing the prefill kernel"));
  return self;
}

Status PrefillAttention::Launch(const PrefillArguments& args, Stream stream) const {
  if (args.batch == 0 || args.max_query_tokens == 0) return {};
  if (args.batch < 0 || args.batch > 65535 || args.max_query_tokens < 0) {
    return InvalidArgument(
        fmt::format("prefill of {} chunks of up to {} tokens", args.batch, args.max_query_tokens));
  }
  if (mixed_) OSCAR_RETURN_IF_ERROR(CheckHeads(shape_, args.heads));
  if (shape_.has_sinks != (args.sinks != nullptr)) {
    return InvalidArgument("prefill: sinks that the shape does not have, or the other way round");
  }
  MixedPrefillParams params{};
  params.cache = args.cache;
  params.sequences = args.sequences;
  params.chunks = args.chunks;
  params.q = reinterpret_cast<const uint16_t*>(args.q);
  params.out = args.out;
  params.scale_log2 = args.softmax_scale * 1.4426950408889634f;
  params.num_q_heads = shape_.num_q_heads;
  params.num_kv_heads = shape_.num_kv_heads;
  params.history_block_bytes = static_cast<int32_t>(shape_.history_layout().block_bytes());
  params.group_steps_log2 = std::countr_zero(static_cast<unsigned>(
      (mixed_ ? shape_.group_dims : shape_.history_layout().group_dims()) / 16));
  params.raw_slots_log2 = raw_slots_log2_;
  params.out_fp32 = args.out_fp32;
  params.precise = args.precision == PrefillPrecision::kPrecise;
  if (mixed_) std::ranges::copy(args.heads, params.heads);
  const dim3 grid(static_cast<unsigned>(shape_.num_q_heads),
                  static_cast<unsigned>((args.max_query_tokens + rows_ - 1) / rows_),
                  static_cast<unsigned>(args.batch));
  // Kernels of heads alike take the first part of it.
  void* kernel_args[] = {static_cast<PrefillKernelParams*>(&params)};
  SinkParams<MixedPrefillParams> mixed_sinks;
  SinkParams<PrefillKernelParams> sinks;
  std::optional<FormPrefillParams> form;
  if (shape_.has_sinks && mixed_) {
    mixed_sinks = {params, args.sinks, shape_.sliding_window};
    kernel_args[0] = &mixed_sinks;
  } else if (shape_.has_sinks) {
    sinks = {params, args.sinks, shape_.sliding_window};
    kernel_args[0] = &sinks;
  } else if (shape_.form.has_value()) {
    form.emplace(params, *shape_.form);
    kernel_args[0] = &*form;
  }
  return CudaStatus(cudaLaunchKernel(kernel_, grid, dim3(static_cast<unsigned>(threads_)),
                                     kernel_args, static_cast<size_t>(shared_bytes_), stream),
                    "launching prefill attention");
}

}  // namespace oscar::cuda
