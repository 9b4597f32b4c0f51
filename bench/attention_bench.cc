// Prefill attention and page writing. Decode attention is `oscar bench attention`, which prints the
// machine's read bandwidth beside it.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "simd/attention.h"
#include "simd/block_writer.h"
#include "simd/dispatch.h"

namespace oscar::simd {
namespace {

constexpr int kDims = 128;

std::vector<Bf16> RandomRows(uint64_t stream, int dims = kDims) {
  const Philox rng(1, stream);
  std::vector<Bf16> rows(static_cast<size_t>(kPageTokens * dims));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = ToBf16(rng.Normal(i));
  return rows;
}

struct PrefillShape {
  int rows;         // prompt tokens, at the end of
  int64_t context;  // tokens, the rest sealed
  int dims = kDims;
  int kv_heads = 8;
  int heads = 4;  // query heads of a KV head
  bool bf16_products = false;
  BlockKind kind = BlockKind::kInt2;
  bool channels = false;  // keys in groups of 32 tokens, values of 32 dims
};

void TimePrefill(benchmark::State& state, ThreadPool& pool, const PrefillShape& shape) {
  const BlockLayout open(BlockKind::kBf16, CodeOrder::kCpu, shape.dims, shape.dims);
  const BlockLayout sealed =
      shape.channels
          ? BlockLayout({.kind = shape.kind, .form = SideForm::kChannels, .group_tokens = 32},
                        shape.kind, CodeOrder::kCpu, shape.dims, 32)
          : BlockLayout(shape.kind, CodeOrder::kCpu, shape.dims, shape.dims);
  // A few distinct pages, repeated: a running maximum that never moved would be too easy.
  constexpr uint64_t kPatterns = 13;
  const auto kv_heads = static_cast<size_t>(shape.kv_heads);
  std::vector<std::vector<std::byte>> pages_of[2];
  for (uint64_t i = 0; i < kPatterns; ++i) {
    const auto k = RandomRows(2 * i, shape.dims), v = RandomRows(2 * i + 1, shape.dims);
    for (const BlockLayout& layout : {open, sealed}) {
      auto& page = pages_of[layout.is_bf16() ? 0 : 1].emplace_back(layout.block_bytes() * kv_heads);
      for (size_t h = 0; h < kv_heads; ++h) {
        WriteBlock(layout, {}, k, v,
                   {page.data() + h * layout.block_bytes(), layout.block_bytes()});
      }
    }
  }
  std::vector<const std::byte*> pages;
  std::vector<uint8_t> is_sealed;
  for (int64_t t = 0; t < shape.context; t += kPageTokens) {
    const bool old = t + kPageTokens <= shape.context - shape.rows;
    pages.push_back(pages_of[old ? 1 : 0][pages.size() % kPatterns].data());
    is_sealed.push_back(old ? 1 : 0);
  }
  const PageLayout page_layout({sealed}, shape.kv_heads);
  const int q_heads = shape.kv_heads * shape.heads;
  const AttentionLayer layer{.q_heads = q_heads,
                             .kv_heads = shape.kv_heads,
                             .softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape.dims)),
                             .open = open,
                             .sealed = page_layout.blocks(0),
                             .bf16_products = shape.bf16_products};
  const auto stride = static_cast<size_t>(q_heads * shape.dims);
  std::vector<float> q(static_cast<size_t>(shape.rows) * stride), out(q.size());
  const Philox rng(2, 0);
  for (size_t i = 0; i < q.size(); ++i) q[i] = rng.Normal(i);
  const PrefillQuery query{{pages.data(), is_sealed.data()},
                           shape.context - shape.rows,
                           shape.rows,
                           q.data(),
                           stride,
                           out.data(),
                           stride};
  AttentionWorkspace workspace;
  for (auto _ : state) PrefillAttention(pool, workspace, layer, {&query, 1});
  const double seen =
      static_cast<double>(shape.rows) * (static_cast<double>(shape.context) - shape.rows / 2.0);
  state.counters["flop/s"] = benchmark::Counter(
      4.0 * seen * q_heads * shape.dims * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}

// A chunk of `rows` prompt tokens at the end of `context` tokens, the rest sealed.
void BM_Prefill(benchmark::State& state) {
  ThreadPool pool(0);
  TimePrefill(state, pool, {.rows = static_cast<int>(state.range(0)), .context = state.range(1)});
}
BENCHMARK(BM_Prefill)
    ->ArgNames({"rows", "context"})
    ->Args({256, 256})
    ->Args({256, 4096})
    ->Args({256, 16384})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

// One KV head on one thread, without tiles and with them, BF16 products. CPU time counts: use
// --benchmark_repetitions=5 --benchmark_enable_random_interleaving=true on a busy machine.
void TimeTiles(benchmark::State& state, BlockKind kind, bool channels) {
  const Target target = state.range(4) != 0 ? Target::kAmxInt8 : Target::kAvx512Vnni;
  if (std::ranges::count(SupportedTargets(), target) == 0) {
    state.SkipWithError("not on this processor");
    return;
  }
  const ScopedTarget scope(target);
  ThreadPool pool(1);
  TimePrefill(state, pool,
              {.rows = static_cast<int>(state.range(0)),
               .context = state.range(1),
               .dims = static_cast<int>(state.range(2)),
               .kv_heads = 1,
               .heads = static_cast<int>(state.range(3)),
               .bf16_products = true,
               .kind = kind,
               .channels = channels});
}
void BM_PrefillTiles(benchmark::State& state) { TimeTiles(state, BlockKind::kInt2, false); }
void BM_PrefillTilesInt3(benchmark::State& state) { TimeTiles(state, BlockKind::kInt3, false); }
void BM_PrefillTilesInt4(benchmark::State& state) { TimeTiles(state, BlockKind::kInt4, false); }
void BM_PrefillTilesChannels(benchmark::State& state) { TimeTiles(state, BlockKind::kInt2, true); }

void AddTileShapes(benchmark::internal::Benchmark* bench,
                   const std::vector<std::pair<int, int>>& lengths,
                   const std::vector<int>& groups) {
  bench->ArgNames({"rows", "context", "dims", "heads", "tiles"})->Unit(benchmark::kMillisecond);
  for (const auto& [rows, context] : lengths) {
    for (const int dims : {128, 64}) {
      for (const int heads : groups) {
        for (const int tiles : {0, 1}) bench->Args({rows, context, dims, heads, tiles});
      }
    }
  }
}
void AllTileShapes(benchmark::internal::Benchmark* bench) {
  AddTileShapes(bench, {{4096, 4096}, {16384, 16384}, {512, 16896}}, {1, 4, 8});
}
void LongTileShape(benchmark::internal::Benchmark* bench) {
  AddTileShapes(bench, {{512, 16896}}, {4});
}
BENCHMARK(BM_PrefillTiles)->Apply(AllTileShapes);
BENCHMARK(BM_PrefillTilesInt3)->Apply(LongTileShape);
BENCHMARK(BM_PrefillTilesInt4)->Apply(LongTileShape);
BENCHMARK(BM_PrefillTilesChannels)->Apply(LongTileShape);

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
