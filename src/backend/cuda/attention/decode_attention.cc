#include "cuda/attention/decode_attention.h"

#include <fmt/core.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cache/block_codec.h"
#include "cuda/attention/decode_kernels.h"
#include "cuda/attention/decode_params.h"
#include "cuda/attention/head_blocks.h"
#include "cuda/attention/sink_params.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"

namespace oscar::cuda {
namespace {

constexpr int kMaxStages = 6;
constexpr int kMaxBatch = 1024;  // the plan takes 24 bytes of shared memory a row
constexpr int kMaxSplits = 128;
constexpr int kSplitRounds = 5;  // pages a consumer warp reads in a split, at least

const DecodeKernelInfo* FindKernel(const AttentionShape& shape, bool mixed, int heads) {
  const auto* table =
      DispatchHeadDim<const DecodeKernelInfo*>(shape.head_dim, nullptr, [&]<int kDim>() {
        return shape.form.has_value() ? FormDecodeKernels<kDim>()
               : mixed                ? MixedDecodeKernels<kDim>()
                                      : DecodeKernels<kDim>();
      });
  if (shape.has_sinks) {
    if (shape.head_dim != kSinkHeadDim || shape.form.has_value()) return nullptr;
    table = mixed ? SinkMixedDecodeKernels() : SinkDecodeKernels();
  }
  const bool any_kind = mixed || shape.form.has_value();
  const int group_dims = shape.history_layout().group_dims();
  for (; table != nullptr && table->function != nullptr; ++table) {
    const bool fits = any_kind || table->kind == shape.history_kind;
    const bool has_groups = any_kind || shape.history_kind != BlockKind::kBf16;
    if (fits && table->heads == heads &&
        (!has_groups || table->group_dims == (mixed ? shape.group_dims : group_dims))) {
      return table;
    }
  }
  return nullptr;
}

// The most splits that a head of these layers has in a history of any length. Beyond kRounds rounds
// numbers are rounded less, so that splits are not more.
int MostSplits(const DecodeAttention& decode, std::span<const HeadBlocks> layers, int warps) {
  constexpr int kRounds = 4096;
  int most = 1;
  for (const HeadBlocks& heads : layers) {
    const MixedSplit split = decode.SplitOf(heads);
    for (int rounds = 1; rounds <= kRounds; ++rounds) {
      const MixedSplit::Rounds of = split.RoundsOf(rounds * warps, warps);
      for (int size = 0; size < MixedSplit::kSizes; ++size) {
        if (split.heads[size] > 0) most = std::max(most, split.Splits(of, size));
      }
    }
  }
  return most;
}

// Partial states, their (R, l), arrival counters, the queue: byte offsets in the workspace.
struct Workspace {
  size_t o, ml, arrived, queue, total;
  Workspace(size_t heads_in_batch, size_t slots, size_t heads, size_t dim) {
    const size_t states = heads_in_batch * slots * heads;
    queue = 0;
    arrived = 128;
    ml = (arrived + heads_in_batch * 4 + 127) / 128 * 128;
    o = (ml + states * 8 + 127) / 128 * 128;
    total = o + states * dim * 4;
  }
};

}  // namespace

Result<DecodeAttention> DecodeAttention::Create(const AttentionShape& shape, int max_batch,
                                                int max_window_tokens,
                                                std::span<const HeadBlocks> layers) {
  const bool forms = shape.form.has_value();
  OSCAR_RETURN_IF_ERROR(CheckBlockShape(shape.head_dim, forms ? shape.form->layout.group_dims()
                                                        : shape.history_kind == BlockKind::kBf16
                                                            ? shape.head_dim
                                                            : shape.group_dims));
  if (forms && (!layers.empty() || shape.form->layout.head_dim() != shape.head_dim)) {
    return Unexpected(InvalidArgument("keys that are not rows beside heads of other kinds"));
  }
  if (shape.num_kv_heads < 1 || shape.num_q_heads % shape.num_kv_heads != 0 ||
      shape.group_size() < 1 || shape.group_size() > kMaxGroupSize) {
    return Unexpected(InvalidArgument(
        fmt::format("{} query and {} KV heads: the ratio must be a whole number from 1 to {}",
                    shape.num_q_heads, shape.num_kv_heads, kMaxGroupSize)));
  }
  if (max_batch < 1 || max_batch > kMaxBatch || max_window_tokens < 0) {
    return Unexpected(
        InvalidArgument(fmt::format("decode batch {}: 1 to {} rows", max_batch, kMaxBatch)));
  }
  for (const HeadBlocks& heads : layers) OSCAR_RETURN_IF_ERROR(CheckHeads(shape, heads));
  OSCAR_ASSIGN_OR_RETURN(const DeviceLimits limits, CurrentDeviceLimits());

  DecodeAttention self;
  self.shape_ = shape;
  self.max_batch_ = max_batch;
  self.mixed_ = !layers.empty();
  const DecodeKernelInfo* kernel = nullptr;
  if (shape.group_size() <= 4) kernel = FindKernel(shape, self.mixed_, 4);
  if (shape.group_size() > 8) kernel = FindKernel(shape, self.mixed_, 16);
  if (kernel == nullptr) kernel = FindKernel(shape, self.mixed_, 8);
  if (kernel == nullptr) {
    return Unexpected(Unimplemented(fmt::format("no decode kernel for head dim {}, group {}{}",
                                                shape.head_dim, shape.group_dims,
                                                shape.has_sinks ? ", with attention sinks" : "")));
  }
  self.kernel_ = kernel->function;
  self.heads_ = kernel->heads;
  self.head_blocks_ = (shape.group_size() + kernel->heads - 1) / kernel->heads;
  const int unit_bytes = kUnitTokens * shape.head_dim * 2;
  int stage_bytes = kernel->stage_bytes;
  if (forms) stage_bytes = std::max(unit_bytes, static_cast<int>(shape.form->stage_bytes()));
  const auto [smallest, largest] =
      self.mixed_ ? BlockSizes(shape, layers) : std::pair{stage_bytes, stage_bytes};

  // As many blocks an SM as the registers allow, if each still gets two stages; then the deepest
  // rings that fit. Where heads differ in bits, stages of the smallest blocks, in rings that hold
  // two of the largest as well, or one if two are too many.
  const int heads = std::min(shape.group_size(), kernel->heads);
  const auto find_ring = [&](int ctas_per_sm, int of_largest) {
    const int budget =
        std::min(limits.shared_per_block,
                 limits.shared_per_multiprocessor / ctas_per_sm - limits.shared_reserved);
    for (int stages = kMaxStages; stages >= (ctas_per_sm > 1 ? 2 : of_largest); --stages) {
      const int least = (of_largest * largest + stages - 1) / stages;
      const int each = std::max({unit_bytes, smallest, (least + 127) / 128 * 128});
      const int bytes = kernel->shared_bytes(stages, each, heads, max_batch);
      if (bytes > budget) continue;
      self.stages_ = stages;
      self.stage_bytes_ = each;
      self.shared_bytes_ = bytes;
      self.blocks_ = limits.multiprocessors * ctas_per_sm;
      return;
    }
  };
  for (int of_largest = smallest < largest ? 2 : 1; self.stages_ == 0 && of_largest > 0;
       --of_largest) {
    for (int ctas_per_sm = kernel->ctas_per_sm; self.stages_ == 0 && ctas_per_sm > 0;
         --ctas_per_sm) {
      find_ring(ctas_per_sm, of_largest);
    }
  }
  if (self.stages_ == 0) {
    return Unexpected(Unimplemented(fmt::format(
        "decode attention at head dim {}: needs {} bytes of shared memory per block; "
        "the device has {}",
        shape.head_dim, kernel->shared_bytes(1, std::max(unit_bytes, largest), heads, max_batch),
        limits.shared_per_block)));
  }
  // One long sequence alone fills every block: its splits and its window.
  const int window_items =
      (max_window_tokens / kUnitTokens + 2 + kUnitsPerItem - 1) / kUnitsPerItem;
  self.max_splits_ =
      std::clamp(self.blocks_ / (shape.num_kv_heads * self.head_blocks_) - 1, 1, kMaxSplits);
  // BF16 pages are dealt to warps in four units.
  const bool bf16 = !self.mixed_ && !forms && shape.history_kind == BlockKind::kBf16;
  self.warps_ = bf16 ? 1 : kernel->warps;
  self.split_pages_ = bf16 ? kSplitRounds : kSplitRounds * kernel->warps;
  self.threads_ = kernel->threads;
  if (self.mixed_) {
    // As above: all blocks but one of each head, which are left for the windows.
    self.target_splits_ =
        std::max(self.blocks_ / self.head_blocks_ - shape.num_kv_heads, shape.num_kv_heads);
    self.max_splits_ = kMaxSplits;
    self.max_splits_ = MostSplits(self, layers, self.warps_);
  }
  self.slots_ = self.max_splits_ + window_items;
  OSCAR_RETURN_IF_ERROR(
      AllowSharedMemory(self.kernel_, self.shared_bytes_, "preparing the decode kernel"));
  return self;
}

int DecodeAttention::NumSplits(int history_pages) const {
  SequenceView sequence;
  sequence.history_pages = history_pages;
  return ItemsOf(sequence, split_pages_, max_splits_, warps_).history;
}

MixedSplit DecodeAttention::SplitOf(const HeadBlocks& heads) const {
  return MixedSplit::Make(shape_.head_dim, shape_.group_dims, heads, kSplitRounds, target_splits_,
                          max_splits_);
}

size_t DecodeAttention::workspace_bytes() const {
  const auto heads_in_batch =
      static_cast<size_t>(max_batch_) * static_cast<size_t>(shape_.num_kv_heads * head_blocks_);
  return Workspace(heads_in_batch, static_cast<size_t>(slots_), static_cast<size_t>(heads_),
                   static_cast<size_t>(shape_.head_dim))
      .total;
}

Status DecodeAttention::Launch(const DecodeArguments& args, Stream stream) const {
  if (args.batch < 1 || args.batch > max_batch_) {
    return InvalidArgument(fmt::format("decode batch {}: 1 to {} rows", args.batch, max_batch_));
  }
  // Kernels multiply a page's id by 32 bits of stride.
  if (args.cache.history_page_stride >> 32 != 0) {
    return InvalidArgument(
        fmt::format("decode: pages {} bytes apart, 4 GiB or more", args.cache.history_page_stride));
  }
  const auto heads_in_batch =
      static_cast<size_t>(max_batch_) * static_cast<size_t>(shape_.num_kv_heads * head_blocks_);
  const Workspace at(heads_in_batch, static_cast<size_t>(slots_), static_cast<size_t>(heads_),
                     static_cast<size_t>(shape_.head_dim));
  auto* workspace = static_cast<std::byte*>(args.workspace);
  if (mixed_) OSCAR_RETURN_IF_ERROR(CheckHeads(shape_, args.heads));
  if (shape_.has_sinks != (args.sinks != nullptr)) {
    return InvalidArgument("decode: sinks that the shape does not have, or the other way round");
  }
  MixedDecodeParams params{};
  params.cache = args.cache;
  params.sequences = args.sequences;
  params.q = reinterpret_cast<const uint16_t*>(args.q);
  params.out = args.out;
  params.partial_o = reinterpret_cast<float*>(workspace + at.o);
  params.partial_ml = reinterpret_cast<float2*>(workspace + at.ml);
  params.arrived = reinterpret_cast<uint32_t*>(workspace + at.arrived);
  params.queue = reinterpret_cast<uint32_t*>(workspace + at.queue);
  params.scale_log2 = args.softmax_scale * 1.4426950408889634f;
  params.batch = args.batch;
  params.num_kv_heads = shape_.num_kv_heads;
  params.group_size = shape_.group_size();
  params.head_blocks = head_blocks_;
  params.slots = slots_;
  params.stages = stages_;
  params.split_pages = split_pages_;
  params.max_splits = max_splits_;
  params.out_fp32 = args.out_fp32;

  if (mixed_) {
    std::ranges::copy(args.heads, params.heads);
    params.stage_bytes = stage_bytes_;
    params.split = SplitOf({args.heads.begin(), args.heads.end()});
  }

  // Kernels of heads alike take the first part of it.
  void* kernel_args[] = {static_cast<DecodeKernelParams*>(&params)};
  static_assert(std::is_standard_layout_v<DecodeKernelParams>);
  SinkParams<MixedDecodeParams> mixed_sinks;
  SinkParams<DecodeKernelParams> sinks;
  std::optional<FormDecodeParams> form;
  if (shape_.has_sinks && mixed_) {
    mixed_sinks = {params, args.sinks, shape_.sliding_window};
    kernel_args[0] = &mixed_sinks;
  } else if (shape_.has_sinks) {
    sinks = {params, args.sinks, shape_.sliding_window};
    kernel_args[0] = &sinks;
  } else if (shape_.form.has_value()) {
    form.emplace(params, *shape_.form);
    form->stage_bytes = stage_bytes_;
    kernel_args[0] = &*form;
  }
  return LaunchOverlapping(kernel_, {blocks_, threads_, shared_bytes_, args.overlap_predecessor},
                           kernel_args, stream, "launching decode attention");
}

}  // namespace oscar::cuda
