#include "bench/attention_bench.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "base/rng.h"
#include "cache/block_codec.h"
#include "cache/method_layout.h"
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

// What a row measures.
struct Format {
  std::string name;
  std::vector<BlockLayout> heads;  // of one layer
  BlockRules rules;
  bool token_norms = false;  // of all heads
};

// "4/2,3/3" as kinds of K and V; kInvalidArgument for anything else.
Result<std::vector<std::pair<BlockKind, BlockKind>>> ParseBits(const std::string& text,
                                                               int num_heads) {
  std::vector<std::pair<BlockKind, BlockKind>> out;
  const auto kind = [](char c) {
    return c == '2' ? BlockKind::kInt2 : c == '3' ? BlockKind::kInt3 : BlockKind::kInt4;
  };
  const auto is_bits = [](char c) { return c >= '2' && c <= '4'; };
  for (size_t at = 0; at < text.size(); at += 4) {
    const bool ends = at + 3 == text.size();
    if (at + 3 > text.size() || !is_bits(text[at]) || text[at + 1] != '/' ||
        !is_bits(text[at + 2]) || (!ends && (text[at + 3] != ',' || at + 4 == text.size())) ||
        std::ssize(out) == num_heads) {
      return Unexpected(InvalidArgument(
          fmt::format("--bits {}: expected K/V,K/V,... of 2, 3 or 4 bits, for {} heads at most",
                      text, num_heads)));
    }
    out.emplace_back(kind(text[at]), kind(text[at + 2]));
  }
  return out;
}

Result<std::vector<Format>> FormatsOf(const AttentionBenchOptions& options) {
  std::vector<Format> out;
  const auto alike = [&](const BlockLayout& layout) {
    return std::vector(static_cast<size_t>(options.kv_heads), layout);
  };
  for (const BlockKind kind : options.kinds) {
    const char* const name = kind == BlockKind::kInt2   ? "int2"
                             : kind == BlockKind::kInt4 ? "int4"
                                                        : "bf16";
    out.push_back({name,
                   alike({kind, CodeOrder::kCpu, options.head_dim, options.group_dims}),
                   {.k_clip_ratio = 0.96f, .v_clip_ratio = 0.92f}});
  }
  if (!options.bits.empty()) {
    OSCAR_ASSIGN_OR_RETURN(const auto bits, ParseBits(options.bits, options.kv_heads));
    Format format{options.bits,
                  alike({BlockKind::kInt2, CodeOrder::kCpu, options.head_dim, options.group_dims}),
                  {.k_clip_ratio = 0.96f, .v_clip_ratio = 0.92f}};
    for (size_t h = 0; h < bits.size(); ++h) {
      format.heads[h] = {bits[h].first, bits[h].second, CodeOrder::kCpu, options.head_dim,
                         options.group_dims};
    }
    out.push_back(std::move(format));
  }
  for (const std::string& name : options.methods) {
    OSCAR_ASSIGN_OR_RETURN(const KvMethod method,
                           MakeKvMethod({.name = name, .head_dim = options.head_dim}));
    if (!method.is_quantized) {
      return Unexpected(InvalidArgument(
          fmt::format("--kv {}: is measured anyhow; name methods that quantise", name)));
    }
    out.push_back({name, alike(LayoutOf(method, CodeOrder::kCpu, options.head_dim)),
                   RulesOf(method), method.k.norm == TokenNorm::kAllHeads});
  }
  return out;
}

// About what a token's keys have: of one head, which is as good as of several.
float NormOf(const BlockLayout& layout) { return std::sqrt(static_cast<float>(layout.head_dim())); }

// One head of as many pages as are sealed together, of random rows.
std::vector<std::byte> RandomBlocks(const Format& format, const BlockLayout& layout,
                                    uint64_t stream) {
  const auto size = static_cast<size_t>(kPageTokens * layout.head_dim());
  const auto pages = static_cast<size_t>(layout.pages_together());
  std::vector<std::vector<Bf16>> rows(2 * pages);
  std::vector<const Bf16*> k, v;
  std::vector<std::byte> bytes(pages * layout.block_bytes());
  std::vector<std::byte*> blocks;
  for (size_t i = 0; i < rows.size(); ++i) {
    for (const float x : RandomRow(size, 4 * stream + i)) rows[i].push_back(ToBf16(x));
    (i % 2 == 0 ? k : v).push_back(rows[i].data());
  }
  for (size_t i = 0; i < pages; ++i) blocks.push_back(bytes.data() + i * layout.block_bytes());
  const std::vector<float> norms(pages * kPageTokens, NormOf(layout));
  simd::WriteBlocks(layout, format.rules,
                    {k, v, blocks, format.token_norms ? norms.data() : nullptr});
  return bytes;
}

AttentionBenchRow MeasureRow(ThreadPool& pool, const AttentionBenchOptions& options,
                             const Format& format, int64_t context) {
  const size_t heads = format.heads.size();
  const PageLayout shape(std::vector<std::vector<BlockLayout>>{format.heads}, format.token_norms);
  const size_t page_bytes = shape.bytes();
  const auto together = static_cast<size_t>(format.heads[0].pages_together());
  const auto num_pages = static_cast<size_t>(context / kPageTokens);
  const size_t layer_bytes = page_bytes * num_pages;
  const size_t layers =
      std::clamp<size_t>((options.footprint_bytes + layer_bytes - 1) / layer_bytes, 1, 256);

  // A handful of distinct blocks, repeated: the arithmetic does not look at the values.
  constexpr size_t kPatterns = 13;
  std::vector<std::vector<std::vector<std::byte>>> patterns(heads);
  for (size_t h = 0; h < heads; ++h) {
    if (h > 0 && format.heads[h] == format.heads[h - 1]) {
      patterns[h] = patterns[h - 1];
      continue;
    }
    for (uint64_t i = 0; i < kPatterns; ++i) {
      patterns[h].push_back(RandomBlocks(format, format.heads[h], i));
    }
  }
  simd::AlignedBuffer<std::byte> memory(layer_bytes * layers);
  const std::vector<float> norms(kPageTokens, NormOf(format.heads[0]));
  pool.ParallelFor(static_cast<int64_t>(layers * num_pages), [&](int64_t index, int) {
    const auto page = static_cast<size_t>(index);
    std::byte* const to = memory.data() + page * page_bytes;
    for (size_t h = 0; h < heads; ++h) {
      const size_t run = page / together * heads + h;
      const size_t bytes = format.heads[h].block_bytes();
      std::memcpy(to + shape.BlockOffset(0, static_cast<int>(h)),
                  patterns[h][run % kPatterns].data() + page % together * bytes, bytes);
    }
    if (shape.has_norms(0)) std::memcpy(to + shape.NormOffset(0), norms.data(), 4 * norms.size());
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
      .norm_offset = shape.NormOffset(0),
      .has_norms = shape.has_norms(0),
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
  AttentionBenchRow row{format.name, context, layer_bytes, Median(times), 0.0, 0.0, 0.0};
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

Result<AttentionBenchReport> RunAttentionBench(
    ThreadPool& pool, const AttentionBenchOptions& options,
    const std::function<void(const AttentionBenchReport&)>& on_row) {
  OSCAR_ASSIGN_OR_RETURN(const std::vector<Format> formats, FormatsOf(options));
  AttentionBenchReport report;
  report.threads = pool.num_threads();
  report.target = simd::TargetName(simd::ActiveTarget());
  report.read_bytes_per_second = MeasureReadBandwidth(pool, options.footprint_bytes);
  for (const int64_t context : options.contexts) {
    double bf16_seconds = 0.0;  // best, as for the others
    for (const Format& format : formats) {
      // Whole runs of pages.
      const int64_t tokens = format.heads[0].pages_together() * kPageTokens;
      AttentionBenchRow row = MeasureRow(pool, options, format, context / tokens * tokens);
      if (format.heads[0].is_bf16()) bf16_seconds = row.best_seconds;
      row.speedup_vs_bf16 = bf16_seconds / row.best_seconds;
      report.rows.push_back(row);
      if (on_row) on_row(report);
    }
  }
  return report;
}

}  // namespace oscar
