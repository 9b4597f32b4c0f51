#include "cuda/kv/page_seal.h"

#include <fmt/core.h>

#include "cuda/attention/head_blocks.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/kv/seal_kernels.h"
#include "cuda/kv/seal_params.h"

namespace oscar::cuda {
namespace {

bool Fits(RowRule rule) { return rule == RowRule::kMseFit || rule == RowRule::kMseFitUnbiased; }

SealSide Side(RowRule rule, float clip_ratio, int head_dim) {
  const bool clips = Clips(rule) && clip_ratio > 0.0f;
  return {static_cast<int32_t>(rule), clips ? ClipIndex(clip_ratio, head_dim) : -1};
}

}  // namespace

Result<PageSeal> PageSeal::Create(const AttentionShape& shape, const BlockRules& rules,
                                  std::span<const HeadBlocks> layers) {
  OSCAR_RETURN_IF_ERROR(CheckBlockShape(shape.head_dim, shape.group_dims));
  const bool mixed = !layers.empty();
  if (!mixed && shape.history_kind == BlockKind::kBf16) {
    return Unexpected(InvalidArgument("sealing into BF16 pages: nothing to quantise"));
  }
  if ((rules.k_rule == RowRule::kLloydMax || rules.v_rule == RowRule::kLloydMax) &&
      (mixed || shape.history_kind != BlockKind::kInt2)) {
    return Unexpected(Unimplemented("sealing Lloyd-Max rows of other than 2 bits"));
  }
  PageSeal self;
  self.shape_ = shape;
  self.rules_ = rules;
  self.mixed_ = mixed;
  const bool fits = Fits(rules.k_rule) || Fits(rules.v_rule);
  self.kernel_ = mixed ? FindMixedSealKernel(shape.head_dim, shape.group_dims)
                 : shape.history_kind == BlockKind::kInt2
                     ? FindSealKernel<BlockKind::kInt2>(shape.head_dim, shape.group_dims, fits)
                     : FindSealKernel<BlockKind::kInt4>(shape.head_dim, shape.group_dims, fits);
  if (self.kernel_ == nullptr) {
    return Unexpected(Unimplemented(
        fmt::format("no seal kernel for head dim {}, group {}", shape.head_dim, shape.group_dims)));
  }
  const int block = mixed ? BlockSizes(shape, layers).second
                          : static_cast<int>(shape.history_layout().block_bytes());
  self.shared_bytes_ = static_cast<int>(shape.window_layout().block_bytes()) + block;
  OSCAR_RETURN_IF_ERROR(
      AllowSharedMemory(self.kernel_, self.shared_bytes_, "preparing the seal kernel"));
  return self;
}

Status PageSeal::Launch(const SealArguments& args, Stream stream) const {
  if (args.jobs == 0) return {};
  if (args.jobs < 0 || args.layers < 1 || args.layers > 65535) {
    return InvalidArgument(fmt::format("sealing {} pages in {} layers", args.jobs, args.layers));
  }
  if (mixed_ && (args.heads == nullptr || args.heads_stride < shape_.num_kv_heads)) {
    return InvalidArgument("sealing heads of different bits without saying which");
  }
  MixedSealParams params{};
  params.heads = args.heads;
  params.heads_stride = args.heads_stride;
  params.window_pool = args.window_pool;
  params.history_pool = args.history_pool;
  params.window_page_stride = args.window_page_stride;
  params.window_layer_stride = args.window_layer_stride;
  params.history_page_stride = args.history_page_stride;
  params.history_layer_stride = args.history_layer_stride;
  params.source_pages = args.source_pages;
  params.target_pages = args.target_pages;
  params.saturated = args.saturated;
  params.num_kv_heads = shape_.num_kv_heads;
  params.k = Side(rules_.k_rule, rules_.k_clip_ratio, shape_.head_dim);
  params.v = Side(rules_.v_rule, rules_.v_clip_ratio, shape_.head_dim);
  // Kernels of heads alike take the first part of it.
  void* kernel_args[] = {static_cast<SealKernelParams*>(&params)};
  const dim3 grid(static_cast<unsigned>(args.jobs * shape_.num_kv_heads),
                  static_cast<unsigned>(args.layers));
  return CudaStatus(cudaLaunchKernel(kernel_, grid, dim3(kSealThreads), kernel_args,
                                     static_cast<size_t>(shared_bytes_), stream),
                    "launching page sealing");
}

}  // namespace oscar::cuda
