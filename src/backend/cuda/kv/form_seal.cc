#include "cuda/kv/form_seal.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>

#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/kv/form_seal_params.h"
#include "quant/lloyd_max.h"

namespace oscar::cuda {
namespace {

bool IsAffine(RowRule rule) {
  return rule == RowRule::kMinMax || rule == RowRule::kRealMin || rule == RowRule::kIntegerZero;
}

int ClipOf(RowRule rule, float ratio, int head_dim) {
  return rule == RowRule::kMinMax && ratio > 0.0f ? ClipIndex(ratio, head_dim) : -1;
}

}  // namespace

bool FormSeal::Takes(const BlockLayout& layout, const BlockRules& rules) {
  const auto is_published = [](RowRule rule) {
    return rule == RowRule::kRealMin || rule == RowRule::kIntegerZero;
  };
  return !layout.is_bf16() &&
         (!layout.is_rows() || is_published(rules.k_rule) || is_published(rules.v_rule));
}

Result<FormSeal> FormSeal::Create(const BlockLayout& layout, const BlockRules& rules,
                                  int num_kv_heads, int64_t norm_offset) {
  OSCAR_RETURN_IF_ERROR(CheckBlockShape(layout.head_dim(), layout.group_dims()));
  const bool keys = layout.k_form() == SideForm::kCodebook || IsAffine(rules.k_rule);
  if (!layout.is_bf16() && (!keys || !IsAffine(rules.v_rule))) {
    return Unexpected(
        Unimplemented(fmt::format("no seal kernel for rules {} and {}",
                                  static_cast<int>(rules.k_rule), static_cast<int>(rules.v_rule))));
  }
  if (layout.order() != CodeOrder::kTensorCore || num_kv_heads < 1 ||
      (norm_offset != 0 && num_kv_heads > kMaxNormHeads)) {
    return Unexpected(InvalidArgument(fmt::format(
        "sealing {} KV heads: pages in tensor-core order, at most {} heads that share norms",
        num_kv_heads, kMaxNormHeads)));
  }
  FormSeal self(layout, rules);
  self.num_kv_heads_ = num_kv_heads;
  self.norm_offset_ = layout.is_bf16() ? 0 : norm_offset;
  const FormSealKernels kernels = FindFormSealKernels(layout.head_dim());
  self.kernel_ = kernels.seal;
  self.norms_ = kernels.norms;
  if (!layout.is_bf16()) {
    self.shared_bytes_ =
        static_cast<int>((layout.block_bytes() + 15) / 16 * 16) + kernels.shared_bytes;
  }
  OSCAR_RETURN_IF_ERROR(
      AllowSharedMemory(self.kernel_, self.shared_bytes_, "preparing the seal kernel"));
  return self;
}

Status FormSeal::Launch(const SealArguments& args, Stream stream) const {
  if (args.jobs == 0) return {};
  const int together = layout_.pages_together();
  if (args.jobs < 0 || args.jobs % together != 0 || args.layers < 1 || args.layers > 65535 ||
      args.heads != nullptr) {
    return InvalidArgument(fmt::format("sealing {} pages, {} together, in {} layers", args.jobs,
                                       together, args.layers));
  }
  FormSealParams params{
      .window_pool = args.window_pool,
      .history_pool = args.history_pool,
      .window_page_stride = args.window_page_stride,
      .window_layer_stride = args.window_layer_stride,
      .history_page_stride = args.history_page_stride,
      .history_layer_stride = args.history_layer_stride,
      .source_pages = args.source_pages,
      .target_pages = args.target_pages,
      .saturated = args.saturated,
      .num_kv_heads = num_kv_heads_,
      .norm_offset = norm_offset_,
      .layout = layout_,
      .k_rule = rules_.k_rule,
      .v_rule = rules_.v_rule,
      .k_clip_index = ClipOf(rules_.k_rule, rules_.k_clip_ratio, layout_.head_dim()),
      .v_clip_index = ClipOf(rules_.v_rule, rules_.v_clip_ratio, layout_.head_dim()),
      .thresholds = {}};
  if (layout_.k_form() == SideForm::kCodebook) {
    const std::vector<double>& thresholds = LloydMaxCodebook(layout_.k_bits()).thresholds;
    std::ranges::transform(thresholds, std::begin(params.thresholds),
                           [](double t) { return static_cast<float>(t); });
  }
  void* kernel_args[] = {&params};
  const auto layers = static_cast<unsigned>(args.layers);
  if (norm_offset_ != 0) {
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaLaunchKernel(norms_, dim3(static_cast<unsigned>(args.jobs), layers),
                                    dim3(kFormSealThreads), kernel_args, 0, stream),
                   "launching token norms"));
  }
  const dim3 grid(static_cast<unsigned>(args.jobs / together * num_kv_heads_), layers);
  return CudaStatus(cudaLaunchKernel(kernel_, grid, dim3(kFormSealThreads), kernel_args,
                                     static_cast<size_t>(shared_bytes_), stream),
                    "launching page sealing");
}

}  // namespace oscar::cuda
