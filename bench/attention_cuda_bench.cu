// The CUDA kernels against the device's memory and tensor-core roofs, one table:
//   oscar_bench_cuda [--only SUBSTRING] [--bits K/V,K/V,...] [--json FILE]
// --bits: decode alone, over pages whose 8 KV heads have those bits (2, 3 or 4), beside pages of 2
// bits: `--bits 4/2` gives the heads that are not named 2/2.
// 32 query and 8 KV heads, D 128, one layer. L2-cold: each launch reads another copy of its pages
// (or the data is many times the L2), pages lie at shuffled ids unless a row says otherwise: at
// random places of 36 KB HBM gives less than the read roof. Pools are cut from one allocation, as
// the engine's are; "pools of their own" shows what cudaMalloc of just their size costs. Times are
// medians; "graph" rows replay a graph of 40 launches, the others lie between two events.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/attention/decode_attention.h"
#include "cuda/attention/head_blocks.h"
#include "cuda/attention/prefill_attention.h"
#include "cuda/device/device_buffer.h"
#include "cuda/kv/form_seal.h"
#include "cuda/kv/kv_write.h"
#include "cuda/kv/page_seal.h"

namespace oscar::cuda {
namespace {

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "oscar_bench_cuda: %s\n", status.ToString().c_str());
  std::exit(InfoOf(status.code()).exit_code);
}
template <typename T>
T Check(Result<T> result) {
  if (!result.has_value()) Check(result.error());
  return std::move(result).value();
}
void Check(cudaError_t error) { Check(CudaStatus(error, "CUDA")); }

constexpr int kQHeads = 32, kKvHeads = 8, kDim = 128;
constexpr int kSink = 64, kRecent = 256;

__device__ uint32_t Hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x >> 32);
}
__device__ float Gaussian(uint64_t i) {  // sum of four uniforms, unit variance
  float sum = 0.0f;
  for (int k = 0; k < 4; ++k) sum += static_cast<float>(Hash(i * 4 + k)) * 0x1p-32f;
  return (sum - 2.0f) * 1.7320508f;
}
// Random codes, plausible metadata.
__global__ void FillPages(uint32_t* words, int64_t count, int block_words, int meta_word) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t value = Hash(static_cast<uint64_t>(i));
    if (i % block_words >= meta_word) {
      const float scale = 0.5f + static_cast<float>(value & 255) / 512.0f;
      const float minimum = -1.5f * scale + static_cast<float>((value >> 8) & 255) / 2560.0f;
      value = static_cast<uint32_t>(ToFp16(scale).bits) |
              static_cast<uint32_t>(ToFp16(minimum).bits) << 16;
    }
    words[i] = value;
  }
}
__global__ void FillBf16(uint16_t* values, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    values[i] = ToBf16(Gaussian(static_cast<uint64_t>(i))).bits;
  }
}
__global__ void ReadAll(const uint4* data, int64_t count, uint32_t* sink) {
  uint32_t x = 0;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = __ldcs(data + i), b = __ldcs(data + i + stride),
                c = __ldcs(data + i + 2 * stride), d = __ldcs(data + i + 3 * stride);
    x ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^
         d.w;
  }
  if (x == 0x12345u) *sink = x;
}

using Work = std::function<void(int copy, cudaStream_t stream)>;

// Median microseconds of one call, between events.
double TimeEvents(const Work& work, int copies, int iterations) {
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < iterations + 3; ++i) {
    Check(cudaEventRecord(begin, stream));
    work(i % copies, stream);
    Check(cudaEventRecord(end, stream));
    Check(cudaEventSynchronize(end));
    float ms = 0.0f;
    Check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms * 1e3f);
  }
  Check(cudaGetLastError());
  std::sort(times.begin(), times.end());
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return times[times.size() / 2];
}
// Median microseconds of one call inside a replayed graph of `calls`.
double TimeGraph(const Work& work, int copies, int calls = 40) {
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < calls; ++i) work(i % copies, stream);
  cudaGraph_t graph;
  Check(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  Check(cudaGraphInstantiate(&exec, graph, 0));
  const double us = TimeEvents([&](int, cudaStream_t s) { Check(cudaGraphLaunch(exec, s)); }, 1, 9);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return us / calls;
}

struct Row {
  std::string name, unit;
  double value, bar, goal;
  bool lower_is_better;
  double us, bytes, roof_fraction;
};
std::vector<Row> rows;
double read_roof = 0.0;  // bytes / s
const char* only = "";

bool Wanted(const std::string& name) { return name.find(only) != std::string::npos; }
void Report(Row row) {
  const bool pass = row.lower_is_better ? row.value <= row.bar : row.value >= row.bar;
  const bool goal = row.lower_is_better ? row.value <= row.goal : row.value >= row.goal;
  char bytes[64] = "";
  if (row.bytes > 0.0) {
    std::snprintf(bytes, sizeof(bytes), "%8.1f MB %5.2f TB/s %3.0f%% of read roof",
                  row.bytes * 1e-6, row.bytes / row.us * 1e-6, row.roof_fraction * 100.0);
  }
  if (row.bar > 1e8) row.bar = row.goal = 0.0;
  std::printf("%-52s %8.1f us %8.2f %-8s bar %7.1f %-5s goal %7.1f %-4s %s\n", row.name.c_str(),
              row.us, row.value, row.unit.c_str(), row.bar, pass ? "pass" : "BELOW", row.goal,
              goal ? "met" : "no", bytes);
  std::fflush(stdout);
  rows.push_back(std::move(row));
}

enum class PageOrder { kShuffled, kInOrder };

// One allocation that every row's pools are cut from, from its beginning.
class Slab {
 public:
  static constexpr size_t kBytes = size_t{40} << 30, kAlignment = size_t{2} << 20;

  void Allocate() {
    size_t available = 0, total = 0;
    Check(cudaMemGetInfo(&available, &total));
    memory_ = Check(DeviceBuffer<std::byte>::Allocate(std::min(kBytes, available / 2)));
  }
  void Clear() { taken_ = 0; }
  std::byte* Take(size_t bytes) {
    std::byte* const at = memory_.data() + taken_;
    taken_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (taken_ <= memory_.size()) return at;
    std::fprintf(stderr, "oscar_bench_cuda: %zu bytes of pools, %zu to take them from\n", taken_,
                 memory_.size());
    std::exit(1);
  }

 private:
  DeviceBuffer<std::byte> memory_;
  size_t taken_ = 0;
};
Slab slab;
enum class PoolMemory { kSlab, kOwn };

std::vector<int32_t> PageIds(int count, PageOrder order = PageOrder::kShuffled) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  if (order == PageOrder::kInOrder) return ids;
  std::mt19937 rng(1);
  std::shuffle(ids.begin(), ids.end(), rng);
  return ids;
}

AttentionShape BenchShape(BlockKind kind, const std::optional<FormBlocks>& form = {}) {
  return {.history_kind = kind,
          .head_dim = kDim,
          .group_dims = kDim,
          .num_q_heads = kQHeads,
          .num_kv_heads = kKvHeads,
          .form = form};
}

// Heads one after the other, as a page has them.
HeadBlocks BenchHeads(const std::vector<std::pair<BlockKind, BlockKind>>& kinds) {
  std::vector<BlockLayout> layouts;
  for (const auto& [k, v] : kinds) {
    layouts.emplace_back(k, v, CodeOrder::kTensorCore, kDim, kDim);
  }
  return HeadBlocksOf(PageLayout({layouts}), 0);
}
// Bytes of a page of one layer.
size_t PageBytes(BlockKind kind, const HeadBlocks& heads, const std::optional<FormBlocks>& form) {
  if (form.has_value()) return form->PageBytes(kKvHeads);
  if (heads.empty()) return BenchShape(kind).history_layout().block_bytes() * size_t{kKvHeads};
  return heads.back().offset + heads.back().Layout(kDim, kDim).block_bytes();
}

// Metadata of blocks whose heads differ in bits; their codes are any bits.
__global__ void FillMeta(std::byte* pages, int64_t count, int64_t page_bytes, HeadBlock head) {
  const BlockLayout layout = head.Layout(kDim, kDim);
  const int words = static_cast<int>(2 * layout.meta_bytes() / 4);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count * words;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t x = Hash(static_cast<uint64_t>(i));
    const bool is_v = i % words >= words / 2;
    const auto levels = static_cast<float>((1 << (is_v ? layout.v_bits() : layout.k_bits())) - 1);
    const float scale = (1.5f + static_cast<float>(x & 255) * (3.0f / 512.0f)) / levels;
    const float minimum = -0.5f * levels * scale + static_cast<float>((x >> 8) & 255) / 2560.0f;
    std::byte* block = pages + i / words * page_bytes + head.offset + layout.k_meta_offset();
    reinterpret_cast<uint32_t*>(block)[i % words] =
        static_cast<uint32_t>(ToFp16(scale).bits) | static_cast<uint32_t>(ToFp16(minimum).bits)
                                                        << 16;
  }
}

// The same where keys are not rows; every eighth dim is boosted, as far as there are planes.
__global__ void FillFormMeta(std::byte* pages, int64_t count, int64_t page_bytes, FormBlocks form) {
  const BlockLayout& layout = form.layout;
  const auto pair = [](uint32_t x, int bits) {
    const auto levels = static_cast<float>((1 << bits) - 1);
    const float scale = (1.5f + static_cast<float>(x & 255) * (3.0f / 512.0f)) / levels;
    const float minimum = -0.5f * levels * scale + static_cast<float>((x >> 8) & 255) / 2560.0f;
    return static_cast<uint32_t>(ToFp16(scale).bits) | static_cast<uint32_t>(ToFp16(minimum).bits)
                                                           << 16;
  };
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count * kKvHeads;
       i += int64_t{gridDim.x} * blockDim.x) {
    std::byte* const page = pages + i / kKvHeads * page_bytes;
    std::byte* const block = page + i % kKvHeads * layout.block_bytes();
    auto* k = reinterpret_cast<uint32_t*>(block + layout.k_meta_offset());
    const bool is_codebook = layout.k_form() == SideForm::kCodebook;
    for (uint32_t w = 0; w < layout.k_meta_bytes() / 4; ++w) {
      k[w] = is_codebook ? ToFp16(11.0f).bits * 0x00010001u
                         : pair(Hash(static_cast<uint64_t>(i) * 4096 + w), layout.k_bits());
    }
    if (layout.k_form() == SideForm::kMixed) {
      for (int d = 0; d < layout.channel_dims(); ++d) {
        block[layout.KIndex(d)] = static_cast<std::byte>(d % 8 == 0 ? d / 8 : 255);
      }
    }
    auto* v = reinterpret_cast<uint32_t*>(block + layout.v_meta_offset());
    for (uint32_t w = 0; w < layout.meta_bytes() / 4; ++w) {
      v[w] = pair(Hash(static_cast<uint64_t>(i) * 4096 + 2048 + w), layout.v_bits());
    }
    for (int t = 0; t < kPageTokens; ++t) {
      if (layout.has_head_norms()) *reinterpret_cast<float*>(block + layout.KNorm(t)) = 1.0f;
      if (form.norm_offset != 0 && i % kKvHeads == 0) {
        reinterpret_cast<float*>(page + form.norm_offset)[t] = 1.0f;
      }
    }
  }
}

// One layer's pools and tables: `rows` sequences of so many pages, random contents.
class BenchCache {
 public:
  BenchCache(BlockKind kind, int rows, int history_pages, int window_pages, int sink_pages,
             PageOrder order = PageOrder::kShuffled, PoolMemory memory = PoolMemory::kSlab,
             const HeadBlocks& heads = {}, const std::optional<FormBlocks>& form = {})
      : block_(BenchShape(kind).history_layout().block_bytes()),
        window_block_(BenchShape(kind).window_layout().block_bytes()),
        history_table_(
            Check(DeviceBuffer<int32_t>::Copy(PageIds(rows * history_pages + 1, order)))),
        window_table_(Check(DeviceBuffer<int32_t>::Copy(PageIds(rows * window_pages, order)))) {
    // A page more, so that a cache without history has a pool.
    const size_t page_bytes = PageBytes(kind, heads, form);
    const size_t history_bytes = static_cast<size_t>(rows * history_pages + 1) * page_bytes;
    const size_t window_bytes = static_cast<size_t>(rows * window_pages) * window_block_ * kKvHeads;
    std::byte* history = nullptr;
    std::byte* window = nullptr;
    if (memory == PoolMemory::kOwn) {
      own_history_ = Check(DeviceBuffer<std::byte>::Allocate(history_bytes));
      own_window_ = Check(DeviceBuffer<std::byte>::Allocate(window_bytes));
      history = own_history_.data();
      window = own_window_.data();
    } else {
      slab.Clear();
      history = slab.Take(history_bytes);
      window = slab.Take(window_bytes);
    }
    if (kind == BlockKind::kBf16) {
      FillBf16<<<1056, 256>>>(reinterpret_cast<uint16_t*>(history),
                              static_cast<int64_t>(history_bytes / 2));
    } else {
      FillPages<<<1056, 256>>>(
          reinterpret_cast<uint32_t*>(history), static_cast<int64_t>(history_bytes / 4),
          static_cast<int>(block_ / 4),
          static_cast<int>(BenchShape(kind).history_layout().k_meta_offset() / 4));
      for (const HeadBlock& head : heads) {
        FillMeta<<<1056, 256>>>(history, rows * history_pages + 1, static_cast<int64_t>(page_bytes),
                                head);
      }
      if (form.has_value()) {
        FillFormMeta<<<1056, 256>>>(history, rows * history_pages + 1,
                                    static_cast<int64_t>(page_bytes), *form);
      }
    }
    FillBf16<<<1056, 256>>>(reinterpret_cast<uint16_t*>(window),
                            static_cast<int64_t>(window_bytes / 2));
    view.history_pool = history;
    view.window_pool = window;
    view.history_page_stride = static_cast<int64_t>(page_bytes);
    view.window_page_stride = static_cast<int64_t>(window_block_) * kKvHeads;
    view.history_table = history_table_.data();
    view.window_table = window_table_.data();
    view.history_table_stride = history_pages;
    view.window_table_stride = window_pages;
    view.sink_pages = sink_pages;
    view.ring_pages = window_pages - sink_pages;
  }
  CacheView view;

 private:
  size_t block_, window_block_;
  DeviceBuffer<std::byte> own_history_, own_window_;
  DeviceBuffer<int32_t> history_table_, window_table_;
};

// Decode at batch x context with 64 + 256 BF16 tokens and the rest in pages of `kind`, or of
// `heads`. Returns microseconds, and the bytes read.
struct DecodeTime {
  double us = 0.0, bytes = 0.0;
};
DecodeTime BenchDecode(const std::string& name, BlockKind kind, int batch, int context, bool graph,
                       double bar, double goal, bool rate, PageOrder order = PageOrder::kShuffled,
                       PoolMemory memory = PoolMemory::kSlab, const HeadBlocks& heads = {},
                       const std::optional<FormBlocks>& form = {}) {
  if (!Wanted(name)) return {};
  const AttentionShape shape = BenchShape(kind, form);
  // Whole pairs, which some are sealed in.
  const int history = (context - kSink - kRecent) / kPageTokens / 2 * 2;
  const int recent = context - kSink - history * kPageTokens;
  const int window_pages = 1 + (kRecent / kPageTokens + 2);
  const double bytes =
      static_cast<double>(batch) *
      (static_cast<double>(history) * static_cast<double>(PageBytes(kind, heads, form)) +
       static_cast<double>(kSink + recent) * kDim * 4 * kKvHeads);
  const int copies = std::max(1, static_cast<int>(400e6 / bytes) + 1);
  const BenchCache cache(kind, batch * copies, history, window_pages, 1, order, memory, heads,
                         form);
  std::vector<SequenceView> sequences;
  for (int i = 0; i < batch * copies; ++i) sequences.push_back({kSink, history, recent, i});
  const auto views = Check(DeviceBuffer<SequenceView>::Copy(sequences));
  auto q = Check(DeviceBuffer<Bf16>::Allocate(static_cast<size_t>(batch * kQHeads * kDim)));
  FillBf16<<<64, 256>>>(reinterpret_cast<uint16_t*>(q.data()), static_cast<int64_t>(q.size()));
  auto out = Check(DeviceBuffer<Bf16>::Allocate(q.size()));
  const auto decode =
      Check(DecodeAttention::Create(shape, batch, kSink + kRecent + 64,
                                    std::span(&heads, heads.empty() ? size_t{0} : size_t{1})));
  auto workspace = Check(DeviceBuffer<std::byte>::Allocate(decode.workspace_bytes()));
  Check(workspace.Fill(0));
  Check(cudaDeviceSynchronize());
  const Work work = [&](int copy, cudaStream_t stream) {
    DecodeArguments args;
    args.cache = cache.view;
    args.sequences = views.data() + static_cast<size_t>(copy) * static_cast<size_t>(batch);
    args.q = q.data();
    args.out = out.data();
    args.softmax_scale = 0.08838835f;
    args.batch = batch;
    args.workspace = workspace.data();
    args.overlap_predecessor = graph;
    args.heads = heads;
    Check(decode.Launch(args, stream));
  };
  const double us = graph ? TimeGraph(work, copies) : TimeEvents(work, copies, 20);
  Report({name, rate ? "TB/s" : "us", rate ? bytes / us * 1e-6 : us, bar, goal, !rate, us, bytes,
          bytes / us * 1e6 / read_roof});
  return {us, bytes};
}

// Pages whose heads differ in bits beside pages of 2 bits, which read fewer bytes.
void BenchMap(const std::string& name, const HeadBlocks& heads, double single_bar) {
  const std::string two = "decode 2/2 in every head", all = "decode " + name;
  for (const auto& [batch, context] : {std::pair{32, 100000}, {32, 30000}, {1, 100000}}) {
    const bool graph = batch == 1;
    const std::string at = ", batch " + std::to_string(batch) + " x " +
                           std::to_string(context / 1000) + "K" + (graph ? " (graph)" : "");
    const DecodeTime plain =
        BenchDecode(two + at, BlockKind::kInt2, batch, context, graph, 1e9, 1e9, false);
    const DecodeTime mixed = BenchDecode(all + at, BlockKind::kInt2, batch, context, graph,
                                         graph ? single_bar : 1e9, graph ? single_bar : 1e9, false,
                                         PageOrder::kShuffled, PoolMemory::kSlab, heads);
    if (plain.us == 0.0 || mixed.us == 0.0) continue;
    const double ratio = mixed.us / plain.us / (mixed.bytes / plain.bytes);
    Report({all + at + ", time per byte against 2/2", "x", ratio, 1.05, 1.02, true, mixed.us,
            mixed.bytes, mixed.bytes / mixed.us * 1e6 / read_roof});
  }
}

// Methods whose keys are not rows, at the sizes of docs/benchmarks.md; `share`: of the read
// bandwidth at 32 x 100K, the bar.
struct FormBench {
  const char* name;
  KeyFormat k;
  BlockKind v_kind;
  int v_group;
  bool all_norms;
  BlockRules rules;
  double share;
};
const FormBench kFormBenches[] = {
    {"kivi",
     {.form = SideForm::kChannels, .group_tokens = 32},
     BlockKind::kInt2,
     32,
     false,
     {RowRule::kRealMin, RowRule::kRealMin},
     0.70},
    {"kivi-sink",
     {.form = SideForm::kChannels, .group_tokens = 128},
     BlockKind::kInt2,
     128,
     false,
     {RowRule::kRealMin, RowRule::kRealMin},
     0.70},
    {"oscar-su",
     {.form = SideForm::kChannels, .group_tokens = 32},
     BlockKind::kInt2,
     32,
     true,
     {RowRule::kIntegerZero, RowRule::kIntegerZero},
     0.70},
    {"oscar-su:norm=head",
     {.form = SideForm::kChannels, .group_tokens = 32, .head_norms = true},
     BlockKind::kInt2,
     32,
     false,
     {RowRule::kIntegerZero, RowRule::kIntegerZero},
     0.70},
    {"kitty",
     {.form = SideForm::kMixed, .group_tokens = 128, .boosted_dims = 16},
     BlockKind::kInt2,
     128,
     false,
     {RowRule::kMinMax, RowRule::kMinMax},
     0.65},
    {"turboquant",
     {.kind = BlockKind::kInt3, .form = SideForm::kCodebook},
     BlockKind::kInt3,
     128,
     false,
     {RowRule::kMinMax, RowRule::kMinMax},
     0.65},
    {"turboquant:k_bits=4:v_bits=2",
     {.kind = BlockKind::kInt4, .form = SideForm::kCodebook},
     BlockKind::kInt2,
     128,
     false,
     {RowRule::kMinMax, RowRule::kMinMax},
     0.65}};

FormBlocks BlocksOf(const FormBench& bench) {
  const BlockLayout layout(bench.k, bench.v_kind, CodeOrder::kTensorCore, kDim, bench.v_group);
  return {layout, bench.all_norms ? kKvHeads * layout.block_bytes() : 0};
}

void BenchForm(const FormBench& bench) {
  const FormBlocks form = BlocksOf(bench);
  for (const auto& [batch, context] : {std::pair{32, 100000}, {32, 30000}, {1, 100000}}) {
    const bool graph = batch == 1, rate = batch * context >= 3200000;
    const double bar = rate ? bench.share * read_roof * 1e-12 : graph ? 35.0 : 1e9;
    BenchDecode(std::string("decode ") + bench.name + ", batch " + std::to_string(batch) + " x " +
                    std::to_string(context / 1000) + "K" + (graph ? " (graph)" : ""),
                BlockKind::kInt2, batch, context, graph, bar, bar, rate, PageOrder::kShuffled,
                PoolMemory::kSlab, {}, form);
  }
}

// "4/2,3/3": the first heads; the others have 2 bits. Empty: not a map.
std::vector<std::pair<BlockKind, BlockKind>> ParseMap(const char* text) {
  std::vector<std::pair<BlockKind, BlockKind>> kinds;
  const auto kind = [](char c) {
    return c == '2' ? BlockKind::kInt2 : c == '3' ? BlockKind::kInt3 : BlockKind::kInt4;
  };
  const auto is_bits = [](char c) { return c >= '2' && c <= '4'; };
  for (const char* at = text; *at != '\0';) {
    if (!is_bits(at[0]) || at[1] != '/' || !is_bits(at[2]) || kinds.size() == kKvHeads) return {};
    kinds.emplace_back(kind(at[0]), kind(at[2]));
    at += 3;
    if (*at == ',' && at[1] != '\0') {
      ++at;
    } else if (*at != '\0') {
      return {};
    }
  }
  if (!kinds.empty()) kinds.resize(kKvHeads, {BlockKind::kInt2, BlockKind::kInt2});
  return kinds;
}

// Quantise and write whole pages of a prompt.
void BenchSeal(const std::string& name, const BlockRules& rules, double bar, double goal,
               const std::optional<FormBlocks>& form = {}) {
  if (!Wanted(name)) return;
  constexpr int kPages = 4096 / kPageTokens, kCopies = 24;  // 16.8 MB read a copy
  const AttentionShape shape{.num_q_heads = kQHeads, .num_kv_heads = kKvHeads};
  const auto open = static_cast<int64_t>(shape.window_layout().block_bytes()) * kKvHeads;
  const auto sealed = static_cast<int64_t>(PageBytes(BlockKind::kInt2, {}, form));
  auto window =
      Check(DeviceBuffer<std::byte>::Allocate(static_cast<size_t>(open * kPages * kCopies)));
  auto history =
      Check(DeviceBuffer<std::byte>::Allocate(static_cast<size_t>(sealed * kPages * kCopies)));
  FillBf16<<<1056, 256>>>(reinterpret_cast<uint16_t*>(window.data()),
                          static_cast<int64_t>(window.size() / 2));
  const auto ids = Check(DeviceBuffer<int32_t>::Copy(PageIds(kPages * kCopies)));
  std::optional<PageSeal> seal;
  std::optional<FormSeal> form_seal;
  if (form.has_value()) {
    form_seal = Check(FormSeal::Create(form->layout, rules, kKvHeads, form->norm_offset));
  } else {
    seal = Check(PageSeal::Create(shape, rules));
  }
  Check(cudaDeviceSynchronize());
  const Work work = [&](int copy, cudaStream_t stream) {
    SealArguments args;
    args.window_pool = window.data();
    args.history_pool = history.data();
    args.window_page_stride = open;
    args.history_page_stride = sealed;
    args.source_pages = ids.data() + copy * kPages;
    args.target_pages = ids.data() + copy * kPages;
    args.jobs = kPages;
    Check(form_seal.has_value() ? form_seal->Launch(args, stream) : seal->Launch(args, stream));
  };
  const double us = TimeGraph(work, kCopies);
  const double bytes = static_cast<double>((open + sealed) * kPages);
  Report({name, "us", us, bar, goal, true, us, bytes, bytes / us * 1e6 / read_roof});
}

// Norm, RoPE, rotation and append; no bar of its own.
void BenchWrite(const std::string& name, int tokens, RotationKind rotation) {
  if (!Wanted(name)) return;
  const AttentionShape shape{.num_q_heads = kQHeads, .num_kv_heads = kKvHeads};
  const int pages = (tokens + kPageTokens - 1) / kPageTokens;
  const auto page = static_cast<int64_t>(shape.window_layout().block_bytes()) * kKvHeads;
  constexpr int kHeads = kQHeads + 2 * kKvHeads;
  auto window = Check(DeviceBuffer<std::byte>::Allocate(static_cast<size_t>(page * pages)));
  const std::vector<float> rows(static_cast<size_t>(tokens * kHeads * kDim), 0.7071f);
  const auto qkv = Check(DeviceBuffer<float>::Copy(rows));
  auto q = Check(DeviceBuffer<Bf16>::Allocate(static_cast<size_t>(tokens * kQHeads * kDim)));
  const auto table = Check(DeviceBuffer<int32_t>::Copy(PageIds(pages)));
  std::vector<int32_t> positions(static_cast<size_t>(tokens));
  std::iota(positions.begin(), positions.end(), 0);
  const auto d_positions = Check(DeviceBuffer<int32_t>::Copy(positions));
  const auto d_rows =
      Check(DeviceBuffer<int32_t>::Copy(std::vector<int32_t>(static_cast<size_t>(tokens), 0)));
  const auto cos_sin = Check(
      DeviceBuffer<float>::Copy(std::vector<float>(static_cast<size_t>(tokens * kDim), 0.7071f)));
  const auto norm = Check(DeviceBuffer<float>::Copy(std::vector<float>(kDim, 1.0f)));
  std::vector<uint32_t> words;
  for (int h = 0; h < kKvHeads; ++h) {
    const auto packed = PackRotation(std::vector<float>(kDim * kDim, 0.0883f), kDim);
    words.insert(words.end(), packed.begin(), packed.end());
  }
  const auto fragments = Check(DeviceBuffer<uint32_t>::Copy(words));
  Check(cudaDeviceSynchronize());
  const Work work = [&](int, cudaStream_t stream) {
    WriteArguments args;
    args.qkv = qkv.data();
    args.qkv_stride = kHeads * kDim;
    args.positions = d_positions.data();
    args.table_rows = d_rows.data();
    args.cos_sin = cos_sin.data();
    args.q_norm = norm.data();
    args.k_norm = norm.data();
    args.rotation = rotation;
    args.rotation_fragments = fragments.data();
    args.rotations = kKvHeads;
    args.q_out = q.data();
    args.window_pool = window.data();
    args.cache.window_page_stride = page;
    args.cache.window_table = table.data();
    args.cache.window_table_stride = pages;
    args.cache.sink_pages = pages;
    args.cache.ring_pages = 1;
    args.tokens = tokens;
    Check(WriteTokens(shape, args, stream));
  };
  const double us = TimeGraph(work, 1);
  const double bytes = static_cast<double>(tokens) * kHeads * kDim * 6;  // fp32 in, BF16 out
  Report({name, "us", us, 1e9, 1e9, true, us, bytes, bytes / us * 1e6 / read_roof});
}

// A chunk of `queries` new tokens after `prefix` tokens of history. Returns TFLOP/s.
double PrefillRate(BlockKind kind, int prefix, int queries, PrefillPrecision precision,
                   double* us) {
  const int history = prefix / kPageTokens, window_pages = queries / kPageTokens;
  // Without a prefix the chunk begins the sequence: its first page is the sink.
  const int sink = history == 0 ? kSink : 0;
  const BenchCache cache(kind, 1, history, window_pages, sink / kPageTokens);
  const auto views = Check(DeviceBuffer<SequenceView>::Copy(
      std::vector<SequenceView>{{sink, history, queries - sink, 0}}));
  const auto chunks =
      Check(DeviceBuffer<PrefillChunk>::Copy(std::vector<PrefillChunk>{{0, queries}}));
  auto q = Check(DeviceBuffer<Bf16>::Allocate(static_cast<size_t>(queries * kQHeads * kDim)));
  FillBf16<<<1056, 256>>>(reinterpret_cast<uint16_t*>(q.data()), static_cast<int64_t>(q.size()));
  auto out = Check(DeviceBuffer<Bf16>::Allocate(q.size()));
  const auto prefill = Check(PrefillAttention::Create(BenchShape(kind)));
  Check(cudaDeviceSynchronize());
  *us = TimeEvents(
      [&](int, cudaStream_t stream) {
        PrefillArguments args;
        args.cache = cache.view;
        args.sequences = views.data();
        args.chunks = chunks.data();
        args.q = q.data();
        args.out = out.data();
        args.precision = precision;
        args.softmax_scale = 0.08838835f;
        args.batch = 1;
        args.max_query_tokens = queries;
        Check(prefill.Launch(args, stream));
      },
      1, 10);
  const double pairs = static_cast<double>(queries) * prefix + 0.5 * queries * (queries + 1.0);
  return 4.0 * kDim * kQHeads * pairs / *us * 1e-6;
}
void BenchPrefill(const std::string& name, PrefillPrecision precision) {
  if (!Wanted(name)) return;
  double us = 0.0, bf16_us = 0.0;
  const double causal = PrefillRate(BlockKind::kBf16, 0, 8192, precision, &us);
  Report({name + ", 8K causal, BF16", "TFLOP/s", causal, 300, 550, false, us, 0.0, 0.0});
  const double first = PrefillRate(BlockKind::kInt2, 0, 8192, precision, &us);
  Report({name + ", 8K causal, INT2 cache", "TFLOP/s", first, 0, 0, false, us, 0.0, 0.0});
  const double bf16 = PrefillRate(BlockKind::kBf16, 65536, 4096, precision, &bf16_us);
  const double int2 = PrefillRate(BlockKind::kInt2, 65536, 4096, precision, &us);
  std::printf("  4K over a 64K prefix: BF16 %.1f us %.0f TFLOP/s, INT2 %.1f us %.0f TFLOP/s\n",
              bf16_us, bf16, us, int2);
  Report({name + ", 4K over 64K INT2 against BF16", "%", int2 / bf16 * 100.0, 60, 85, false, us,
          0.0, 0.0});
}

void MeasureReadRoof() {
  constexpr int64_t kBytes = int64_t{4} << 30;
  auto data = Check(DeviceBuffer<std::byte>::Allocate(kBytes));
  FillBf16<<<1056, 256>>>(reinterpret_cast<uint16_t*>(data.data()), kBytes / 2);
  auto sink = Check(DeviceBuffer<uint32_t>::Allocate(1));
  int multiprocessors = 0;
  Check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  const double us = TimeEvents(
      [&](int, cudaStream_t stream) {
        ReadAll<<<multiprocessors * 4, 512, 0, stream>>>(
            reinterpret_cast<const uint4*>(data.data()), kBytes / 16, sink.data());
      },
      1, 10);
  read_roof = static_cast<double>(kBytes) / us * 1e6;
}

void WriteJson(const char* path, const cudaDeviceProp& device, int driver) {
  FILE* file = std::fopen(path, "w");
  if (file == nullptr) Check(NotFound(std::string("cannot write ") + path));
  std::fprintf(file, "{\"device\": \"%s\", \"driver\": %d, \"read_roof_tb_s\": %.3f, \"rows\": [\n",
               device.name, driver, read_roof * 1e-12);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& r = rows[i];
    std::fprintf(file,
                 "  {\"name\": \"%s\", \"us\": %.2f, \"value\": %.3f, \"unit\": \"%s\", "
                 "\"bar\": %.1f, \"goal\": %.1f, \"bytes\": %.0f, \"roof_fraction\": %.3f}%s\n",
                 r.name.c_str(), r.us, r.value, r.unit.c_str(), r.bar, r.goal, r.bytes,
                 r.roof_fraction, i + 1 < rows.size() ? "," : "");
  }
  std::fprintf(file, "]}\n");
  std::fclose(file);
}

int Main(int argc, char** argv) {
  const char* json = nullptr;
  std::vector<std::pair<BlockKind, BlockKind>> map;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      json = argv[++i];
    } else if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
      only = argv[++i];
    } else if (std::strcmp(argv[i], "--bits") == 0 && i + 1 < argc &&
               !(map = ParseMap(argv[i + 1])).empty()) {
      ++i;
    } else {
      std::fprintf(stderr,
                   "usage: oscar_bench_cuda [--only SUBSTRING] [--bits K/V,K/V,...] [--json FILE]\n"
                   "K and V are 2, 3 or 4 bits; %d heads at most\n",
                   kKvHeads);
      return 2;
    }
  }
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0));
  int driver = 0;
  Check(cudaDriverGetVersion(&driver));
  MeasureReadRoof();
  slab.Allocate();
  std::printf("%s, CUDA driver %d, measured read roof %.2f TB/s (cuDNN's best rows imply 4.6)\n",
              device.name, driver, read_roof * 1e-12);
  if (!map.empty()) {
    std::string name;
    for (const auto& [k, v] : map) {
      name += std::to_string(BitsOf(k)) + "/" + std::to_string(BitsOf(v)) + " ";
    }
    name.pop_back();
    BenchMap(name, BenchHeads(map), 1e9);
    if (json != nullptr) WriteJson(json, device, driver);
    return 0;
  }
  constexpr BlockKind kInt2 = BlockKind::kInt2;
  BenchDecode("decode int2, batch 32 x 100K", kInt2, 32, 100000, false, 520, 470, false);
  BenchDecode("decode int2, batch 32 x 30K", kInt2, 32, 30000, false, 160, 142, false);
  BenchDecode("decode int2, batch 1 x 100K (graph)", kInt2, 1, 100000, true, 26, 18, false);
  BenchDecode("decode int2, batch 128 x 8K", kInt2, 128, 8192, false, 205, 185, false);
  BenchDecode("decode int2, batch 32 x 100K, pages in order", kInt2, 32, 100000, false, 1e9, 1e9,
              false, PageOrder::kInOrder);
  BenchDecode("decode int2, batch 32 x 30K, pages in order", kInt2, 32, 30000, false, 1e9, 1e9,
              false, PageOrder::kInOrder);
  BenchDecode("decode int2, batch 32 x 100K, pools of their own", kInt2, 32, 100000, false, 1e9,
              1e9, false, PageOrder::kShuffled, PoolMemory::kOwn);
  BenchDecode("decode int2, batch 32 x 30K, pools of their own", kInt2, 32, 30000, false, 1e9, 1e9,
              false, PageOrder::kShuffled, PoolMemory::kOwn);
  BenchDecode("decode bf16, batch 8 x 100K", BlockKind::kBf16, 8, 100000, false, 4.0, 4.4, true);
  BenchDecode("decode int4, batch 32 x 100K", BlockKind::kInt4, 32, 100000, false,
              0.65 * read_roof * 1e-12, 0.85 * read_roof * 1e-12, true);
  BenchDecode("decode int4, batch 32 x 30K", BlockKind::kInt4, 32, 30000, false, 1e9, 1e9, false);
  BenchDecode("decode int4, batch 1 x 100K (graph)", BlockKind::kInt4, 1, 100000, true, 35, 35,
              false);
  BenchMap("4/2 in one head of 8", BenchHeads(ParseMap("4/2")), 24.5);
  const HeadBlocks three = BenchHeads(ParseMap("3/3,3/3,3/3,3/3,3/3,3/3,3/3,3/3"));
  BenchDecode("decode int3, batch 32 x 100K", kInt2, 32, 100000, false, 0.8 * read_roof * 1e-12,
              0.9 * read_roof * 1e-12, true, PageOrder::kShuffled, PoolMemory::kSlab, three);
  BenchDecode("decode int3, batch 32 x 30K", kInt2, 32, 30000, false, 1e9, 1e9, false,
              PageOrder::kShuffled, PoolMemory::kSlab, three);
  BenchDecode("decode int3, batch 1 x 100K (graph)", kInt2, 1, 100000, true, 35, 35, false,
              PageOrder::kShuffled, PoolMemory::kSlab, three);
  BenchSeal("seal 4096 tokens x 8 heads, clip rule (graph)",
            {RowRule::kMinMax, RowRule::kMinMax, 0.96f, 0.92f}, 25, 10);
  BenchSeal("seal 4096 tokens x 8 heads, oscar+ (graph)",
            {RowRule::kMseFitUnbiased, RowRule::kMseFitUnbiased, 0.0f, 0.0f}, 40, 15);
  for (const FormBench& bench : kFormBenches) {
    BenchForm(bench);
    BenchSeal(std::string("seal 4096 tokens x 8 heads, ") + bench.name + " (graph)", bench.rules,
              60, 60, BlocksOf(bench));
  }
  BenchWrite("write 4096 tokens, matrix (graph, warm)", 4096, RotationKind::kCalibrated);
  BenchWrite("write 4096 tokens, Hadamard (graph, warm)", 4096, RotationKind::kHadamard);
  BenchWrite("write 32 tokens, matrix (graph, warm)", 32, RotationKind::kCalibrated);
  BenchPrefill("prefill", PrefillPrecision::kPrecise);
  BenchPrefill("prefill, P rounded to BF16", PrefillPrecision::kFast);
  if (json != nullptr) WriteJson(json, device, driver);
  return 0;
}

}  // namespace
}  // namespace oscar::cuda

int main(int argc, char** argv) { return oscar::cuda::Main(argc, argv); }
