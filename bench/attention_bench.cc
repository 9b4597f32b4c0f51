// Prefill attention and page writing. Decode attention is `oscar bench attention`, which prints the
// machine's read bandwidth beside it.
#include <benchmark/benchmark.h>

#include <cmath>
#include <vector>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "simd/attention.h"
#include "simd/block_writer.h"

namespace oscar::simd {
namespace {

constexpr int kQHeads = 32, kKvHeads = 8, kDims = 128;

std::vector<Bf16> RandomRows(uint64_t stream) {
  const Philox rng(1, stream);
  std::vector<Bf16> rows(static_cast<size_t>(kPageTokens * kDims));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = ToBf16(rng.Normal(i));
  return rows;
}

// A chunk of `rows` prompt tokens at the end of `context` tokens, the rest sealed.
void BM_Prefill(benchmark::State& state) {
  const int rows = static_cast<int>(state.range(0));
  const int64_t context = state.range(1);
  ThreadPool pool(0);
  const BlockLayout open(BlockKind::kBf16, CodeOrder::kCpu, kDims, kDims);
  const BlockLayout sealed(BlockKind::kInt2, CodeOrder::kCpu, kDims, kDims);
  const auto k = RandomRows(1), v = RandomRows(2);
  const auto page_of = [&](const BlockLayout& layout) {
    std::vector<std::byte> page(layout.block_bytes() * kKvHeads);
    for (size_t h = 0; h < kKvHeads; ++h) {
      WriteBlock(layout, {}, k, v, {page.data() + h * layout.block_bytes(), layout.block_bytes()});
    }
    return page;
  };
  const auto open_page = page_of(open), sealed_page = page_of(sealed);
  std::vector<const std::byte*> pages;
  std::vector<uint8_t> is_sealed;
  for (int64_t t = 0; t < context; t += kPageTokens) {
    const bool old = t + kPageTokens <= context - rows;
    pages.push_back(old ? sealed_page.data() : open_page.data());
    is_sealed.push_back(old ? 1 : 0);
  }
  const PageLayout shape({sealed}, kKvHeads);
  const AttentionLayer layer{.q_heads = kQHeads,
                             .kv_heads = kKvHeads,
                             .softmax_scale = 1.0f / std::sqrt(static_cast<float>(kDims)),
                             .open = open,
                             .sealed = shape.blocks(0)};
  const size_t stride = kQHeads * kDims;
  std::vector<float> q(static_cast<size_t>(rows) * stride, 0.1f), out(q.size());
  const PrefillQuery query{
      {pages.data(), is_sealed.data()}, context - rows, rows, q.data(), stride, out.data(), stride};
  AttentionWorkspace workspace;
  for (auto _ : state) PrefillAttention(pool, workspace, layer, {&query, 1});
  const double seen = static_cast<double>(rows) * (static_cast<double>(context) - rows / 2.0);
  state.counters["flop/s"] =
      benchmark::Counter(4.0 * seen * kQHeads * kDims * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}
BENCHMARK(BM_Prefill)
    ->ArgNames({"rows", "context"})
    ->Args({256, 256})
    ->Args({256, 4096})
    ->Args({256, 16384})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

// One thread; bytes are those of the BF16 rows.
void BM_WritePage(benchmark::State& state) {
  const auto rule = static_cast<RowRule>(state.range(0));
  const BlockRules rules{rule, rule, 0.96f, 0.92f};
  const BlockLayout layout(state.range(1) == 2 ? BlockKind::kInt2 : BlockKind::kInt4,
                           CodeOrder::kCpu, kDims, static_cast<int>(state.range(2)));
  const auto k = RandomRows(1), v = RandomRows(2);
  std::vector<std::byte> block(layout.block_bytes());
  for (auto _ : state) {
    benchmark::DoNotOptimize(WriteBlock(layout, rules, k, v, block));
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() *
                          static_cast<int64_t>((k.size() + v.size()) * sizeof(Bf16)));
}
BENCHMARK(BM_WritePage)
    ->ArgNames({"rule", "bits", "group"})
    ->ArgsProduct({{0, 1, 2, 3}, {2, 4}, {32, 128}});

}  // namespace
}  // namespace oscar::simd

BENCHMARK_MAIN();
