#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/attention_prefill.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include "simd/attention_prefill-inl.h"
#include "simd/attention_prefill_amx-inl.h"
#include "simd/dispatch.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

using PrefillFunction = void (*)(const AttentionLayer&, const PrefillQuery&, int, int, int, int,
                                 int, float*);
// `bf16`: BF16 rows with BF16 numbers; `on_tiles`: those on tiles.
PrefillFunction ChoosePrefill([[maybe_unused]] Target target, [[maybe_unused]] bool bf16,
                              [[maybe_unused]] bool on_tiles) {
#if HWY_TARGET == HWY_AVX3
  using Floats = VectorPath<PairOp::kVnni, false>;
  using Bf16Numbers = VectorPath<PairOp::kVnni, true>;
  if (target == Target::kAmxInt8) {
    return !bf16      ? &PrefillBlock<CodeTilePath<AmxTiles, Floats>>
           : on_tiles ? &PrefillBlock<TilePath<AmxTiles>>
                      : &PrefillBlock<CodeTilePath<AmxTiles, Bf16Numbers>>;
  }
  if (HasVnni(target)) return bf16 ? &PrefillBlock<Bf16Numbers> : &PrefillBlock<Floats>;
#endif
  return &PrefillBlock<VectorPath<PairOp::kMadd, false>>;
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
#include <vector>

#include "base/check.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {

void PrefillAttention(ThreadPool& pool, AttentionWorkspace& workspace, const AttentionLayer& layer,
                      std::span<const PrefillQuery> batch) {
  OSCAR_CHECK(layer.IsValid());
  const int dims = layer.head_dim(), g = layer.q_heads / layer.kv_heads;
  const Target target = ActiveTarget();
  const bool avx2 = target == Target::kAvx2;
  const bool bf16 = layer.bf16_products && HasAvx512Bf16();
  // OSCAR_GEMM=bf16 asks for vectors here, too.
  const bool on_tiles = bf16 && HasAmx() && DefaultGemmPath() != GemmPath::kAvx512Bf16;
  const auto run = avx2 ? N_AVX2::ChoosePrefill(target, false, false)
                        : N_AVX3::ChoosePrefill(target, bf16, on_tiles);
  const int tokens_per_task =
      avx2 ? N_AVX2::PrefillTokensPerTask(g) : N_AVX3::PrefillTokensPerTask(g);
  struct Task {
    const PrefillQuery* query;
    int kv_head, first, count;
  };
  std::vector<Task> tasks;
  for (const PrefillQuery& query : batch) {
    // The last tokens see most; taking them first keeps the threads busy to the end. Fewer tokens
    // a task where the chunk alone would not occupy the threads: rows do not depend on it.
    const int wanted =
        (query.num_tokens * layer.kv_heads + pool.num_threads() * 2 - 1) / (pool.num_threads() * 2);
    const int step = std::clamp(wanted, 1, tokens_per_task);
    const int blocks = (query.num_tokens + step - 1) / step;
    for (int b = blocks - 1; b >= 0; --b) {
      for (int h = 0; h < layer.kv_heads; ++h) {
        tasks.push_back({&query, h, b * step, std::min(step, query.num_tokens - b * step)});
      }
    }
  }
  const int groups = layer.num_groups();
  const size_t scratch =
      avx2 ? N_AVX2::PrefillScratchSize(dims, groups) : N_AVX3::PrefillScratchSize(dims, groups);
  workspace.scratch.Grow(scratch * static_cast<size_t>(pool.num_threads()));
  pool.ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t i, int thread) {
    const Task& task = tasks[static_cast<size_t>(i)];
    run(layer, *task.query, task.kv_head, task.kv_head * g, g, task.first, task.count,
        workspace.scratch.data() + static_cast<size_t>(thread) * scratch);
  });
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
