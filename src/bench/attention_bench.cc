#include "bench/attention_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "base/rng.h"
#include "cache/block_codec.h"
#include "simd/attention.h"
#include "simd/block_writer.h"
#include "simd/dispatch.h"
#include "simd/gemm.h"

namespace oscar {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

std::vector<float> RandomRow(size_t size, uint64_t stream) {
  const Philox rng(11, stream);
  std::vector<float> x(size);
  for (size_t i = 0; i < size; ++i) x[i] = rng.Normal(i);
  return x;
}

// One block of random rows.
std::vector<std::byte> RandomBlock(const BlockLayout& layout, uint64_t stream) {
  const auto size = static_cast<size_t>(kPageTokens * layout.head_dim());
  std::vector<Bf16> k(size), v(size);
  const auto kf = RandomRow(size, 2 * stream), vf = RandomRow(size, 2 * stream + 1);
  for (size_t i = 0; i < size; ++i) k[i] = ToBf16(kf[i]), v[i] = ToBf16(vf[i]);
  std::vector<std::byte> block(layout.block_bytes());
  simd::WriteBlock(layout, BlockRules{.k_clip_ratio = 0.96f, .v_clip_ratio = 0.92f}, k, v, block);
  return block;
}

AttentionBenchRow MeasureRow(ThreadPool& pool, const AttentionBenchOptions& options, BlockKind kind,
                             int64_t context) {
  const BlockLayout layout(kind, CodeOrder::kCpu, options.head_dim, options.group_dims);
  const auto heads = static_cast<size_t>(options.kv_heads);
  const PageLayout shape({layout}, options.kv_heads);
  const size_t page_bytes = layout.block_bytes() * heads;
  const auto num_pages = static_cast<size_t>(context / kPageTokens);
  const size_t layer_bytes = page_bytes * num_pages;
  const size_t layers =
      std::clamp<size_t>((options.footprint_bytes + layer_bytes - 1) / layer_bytes, 1, 256);

  // A handful of distinct blocks, repeated: the arithmetic does not look at the values.
  std::vector<std::vector<std::byte>> patterns;
  for (uint64_t i = 0; i < 16; ++i) patterns.push_back(RandomBlock(layout, i));
  simd::AlignedBuffer<std::byte> memory(layer_bytes * layers);
  const size_t blocks = num_pages * heads;
  pool.ParallelFor(static_cast<int64_t>(layers * num_pages), [&](int64_t page, int) {
    for (size_t h = 0; h < heads; ++h) {
      const size_t at = static_cast<size_t>(page) * heads + h;
      std::memcpy(memory.data() + at * layout.block_bytes(), patterns[at % blocks % 13].data(),
                  layout.block_bytes());
    }
  });
  std::vector<const std::byte*> pages(num_pages * layers);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = memory.data() + i * page_bytes;
  const std::vector<uint8_t> sealed(num_pages, 1);

  const simd::AttentionLayer layer{
      .q_heads = options.q_heads,
      .kv_heads = options.kv_heads,
      .softmax_scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim)),
      .open = BlockLayout(BlockKind::kBf16, CodeOrder::kCpu, options.head_dim, options.head_dim),
      .sealed = shape.blocks(0),
      .bf16_products = simd::DefaultGemmPath() != simd::GemmPath::kFma};
  const auto q = RandomRow(static_cast<size_t>(options.q_heads * options.head_dim), 999);
  std::vector<float> out(q.size());
  simd::AttentionWorkspace workspace;
  std::vector<double> times;
  const Clock::time_point start = Clock::now();
  while (times.size() < 3 || SecondsSince(start) < options.seconds_per_row) {
    for (size_t l = 0; l < layers; ++l) {
      const Clock::time_point begin = Clock::now();
      const simd::DecodeQuery query{
          {pages.data() + l * num_pages, sealed.data()}, context, q.data(), out.data()};
      simd::DecodeAttention(pool, workspace, layer, {&query, 1});
      times.push_back(SecondsSince(begin));
    }
  }
  AttentionBenchRow row{kind, context, layer_bytes, Median(times), 0.0, 0.0, 0.0};
  row.best_seconds = *std::min_element(times.begin(), times.end());
  row.bytes_per_second = static_cast<double>(layer_bytes) / row.best_seconds;
  return row;
}

}  // namespace

double MeasureReadBandwidth(ThreadPool& pool, uint64_t bytes) {
  simd::AlignedBuffer<uint64_t> memory(bytes / sizeof(uint64_t));
  constexpr size_t kChunk = size_t{1} << 18;  // 2 MiB
  const size_t chunks = memory.size() / kChunk;
  pool.ParallelFor(static_cast<int64_t>(chunks), [&](int64_t c, int) {
    std::fill_n(memory.data() + static_cast<size_t>(c) * kChunk, kChunk, static_cast<uint64_t>(c));
  });
  double best = 0.0;
  std::vector<uint64_t> sums(chunks);
  for (int round = 0; round < 5; ++round) {
    const Clock::time_point start = Clock::now();
    pool.ParallelFor(static_cast<int64_t>(chunks), [&](int64_t c, int) {
      // 16 independent sums: the compiler vectorises them and no chain limits the loads.
      uint64_t lanes[16] = {};
      const uint64_t* p = memory.data() + static_cast<size_t>(c) * kChunk;
      for (size_t i = 0; i < kChunk; i += 16) {
        for (size_t l = 0; l < 16; ++l) lanes[l] ^= p[i + l];
      }
      uint64_t sum = 0;
      for (const uint64_t lane : lanes) sum ^= lane;
      sums[static_cast<size_t>(c)] = sum;
    });
    const double rate =
        static_cast<double>(chunks * kChunk * sizeof(uint64_t)) / SecondsSince(start);
    best = std::max(best, rate);
  }
  // Keeps the sums alive.
  return sums[0] == 1 ? best * (1.0 + 1e-12) : best;
}

AttentionBenchReport RunAttentionBench(
    ThreadPool& pool, const AttentionBenchOptions& options,
    const std::function<void(const AttentionBenchReport&)>& on_row) {
  AttentionBenchReport report;
  report.threads = pool.num_threads();
  report.target = simd::TargetName(simd::ActiveTarget());
  report.read_bytes_per_second = MeasureReadBandwidth(pool, options.footprint_bytes);
  for (const int64_t context : options.contexts) {
    double bf16_seconds = 0.0;  // best, as for the others
    for (const BlockKind kind : options.kinds) {
      AttentionBenchRow row = MeasureRow(pool, options, kind, context / kPageTokens * kPageTokens);
      if (kind == BlockKind::kBf16) bf16_seconds = row.best_seconds;
      row.speedup_vs_bf16 = bf16_seconds / row.best_seconds;
      report.rows.push_back(row);
      if (on_row) on_row(report);
    }
  }
  return report;
}

}  // namespace oscar
