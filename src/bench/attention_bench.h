// Measures decode attention over INT2, INT4 and BF16 pages, and those of methods, beside the
// machine's own read bandwidth, all in one run. Layers are rotated through a footprint larger than
// the caches, as a model of many layers does.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "cache/block_layout.h"
#include "oscar/status.h"

namespace oscar {

struct AttentionBenchOptions {
  int q_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int group_dims = 128;
  std::vector<int64_t> contexts = {4096, 16384, 32768, 65536, 131072};  // tokens, all in pages
  std::vector<BlockKind> kinds = {BlockKind::kBf16, BlockKind::kInt4, BlockKind::kInt2};
  std::vector<std::string> methods = {};  // --kv names whose pages are measured besides
  // "4/2,3/3": bits of K and V of the first heads; the others have 2/2. Empty: no such row.
  std::string bits = {};
  double seconds_per_row = 0.5;
  uint64_t footprint_bytes = uint64_t{256} << 20;  // rotate among layers until this is touched
};

struct AttentionBenchRow {
  std::string name;  // "bf16", "int2", the method's, or the heads' bits
  int64_t context;
  uint64_t bytes;           // of one layer's pages, metadata included
  double seconds;           // one layer, the median of the repetitions
  double best_seconds;      // the fastest: what the machine does when nobody else is on it
  double bytes_per_second;  // at best_seconds
  double speedup_vs_bf16;   // of best_seconds; 0 where BF16 was not measured
};

struct AttentionBenchReport {
  int threads = 0;
  std::string target;
  double read_bytes_per_second = 0.0;  // plain sequential read, same threads
  std::vector<AttentionBenchRow> rows;
};

// Bytes per second of reading `bytes` of fresh memory with all threads; the best of five.
double MeasureReadBandwidth(ThreadPool& pool, uint64_t bytes);

// Calls `on_row` as rows come, if given. kInvalidArgument for a method that is none, or that stores
// nothing but BF16, and for bits that are no such list.
Result<AttentionBenchReport> RunAttentionBench(
    ThreadPool& pool, const AttentionBenchOptions& options,
    const std::function<void(const AttentionBenchReport&)>& on_row = {});

}  // namespace oscar
