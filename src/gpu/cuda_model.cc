// The decoder on one CUDA device: fp32 residual stream, BF16 activations and weights, fp32 sums;
// attention straight from the pages. Longer than most files: planning, capturing and running a pass
// share the state of one class, and a split would only move it into a header.
#include "gpu/cuda_model.h"

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "base/progress.h"
#include "cuda/cuda_status.h"
#include "cuda/decode_attention.h"
#include "cuda/device_buffer.h"
#include "cuda/kv_write.h"
#include "cuda/prefill_attention.h"
#include "gpu/blas.h"
#include "gpu/decode_write.h"
#include "gpu/device_pages.h"
#include "gpu/device_weights.h"
#include "gpu/draw_kernels.h"
#include "gpu/page_tables.h"
#include "gpu/skinny_gemm.h"
#include "gpu/step_kernels.h"

namespace oscar {
namespace {

using cuda::CudaStatus;
using cuda::DeviceBuffer;
using gpu::ProductOutput;

// Left to the driver, to code and to graphs when the page arena takes the rest.
constexpr uint64_t kReserve = uint64_t{1} << 30;
// Rows that a captured step may have.
constexpr int kBuckets[] = {1,  2,  4,   8,   12,  16,  24,  32,  40,  48,  56,  64,
                            80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512};
constexpr int kMinLogitRows = 64;
// Up to here a warp a head writes tokens sooner than tensor-core tiles do.
constexpr int kDecodeWriteRows = 64;

cuda::AttentionShape ShapeOf(const ModelSpec& spec, const KvPlan& plan) {
  cuda::AttentionShape shape;
  const PageLayout& sealed = plan.cache().sealed.layout(0);
  const bool plain = plan.cache().sealer == nullptr;
  shape.history_kind = plain ? PageKind::kBf16 : sealed.kind();
  shape.head_dim = spec.head_dim;
  shape.group_dims = shape.history_kind == PageKind::kBf16 ? spec.head_dim : sealed.group_dims();
  shape.num_q_heads = spec.num_heads;
  shape.num_kv_heads = spec.num_kv_heads;
  return shape;
}

class CudaDecoder final : public CudaModel {
 public:
  CudaDecoder(const ModelSpec& spec, KvPlan& plan, ThreadPool& threads,
              const CudaModelOptions& options)
      : spec_(spec), plan_(plan), threads_(threads), options_(options) {}
  ~CudaDecoder() override;

  Status Load(const WeightSource& source);

  const ModelSpec& spec() const override { return spec_; }
  const KvPlan& kv() const override { return plan_; }
  uint64_t weight_bytes() const override { return weights_.matrix_bytes; }
  uint64_t weight_bytes_per_step() const override { return weights_.bytes_per_step; }
  uint64_t fingerprint() const override { return fingerprint_; }
  int max_batch_tokens() const override { return options_.max_batch_tokens; }
  int max_draws() const override { return logit_rows_; }
  Status SetTap(QkvTap tap) override;
  Status Forward(std::span<const ForwardItem> items, std::span<float> logits) override;
  Status ForwardAndDraw(std::span<const ForwardItem> items, std::span<const TokenDraw> draws,
                        std::span<int32_t> ids) override;
  Status ReadLogits(size_t row, std::span<float> logits) override;

  PageMemory& pages() override { return *pages_; }
  uint64_t page_budget() const override { return pages_->budget(); }
  const CudaMemoryPlan& memory() const override { return memory_; }
  const CudaDevice& device() const override { return device_; }
  void SetPool(const BlockPool& pool) override { pool_ = &pool; }
  Result<double> MeasureReadBandwidth() override;

 private:
  // What a pass computes, and where its inputs lie on the device. The first `decodes` rows are
  // generated tokens, the rest are prompt chunks in order.
  struct Pass {
    int rows = 0, decodes = 0, chunks = 0, longest_chunk = 0;
    const int32_t *tokens = nullptr, *positions = nullptr, *table_rows = nullptr;
    const cuda::SequenceView *decode_views = nullptr, *chunk_views = nullptr;
    const cuda::PrefillChunk* chunk_rows = nullptr;
    const int32_t* logit_rows = nullptr;
  };
  // Inputs of a pass as one block of bytes, the same on host and device.
  struct Inputs {
    size_t tokens, positions, table_rows, decode_views, chunk_views, chunk_rows, logit_rows, bytes;
    Inputs(size_t rows, size_t decodes, size_t chunks, size_t logits);
  };
  // The caller's view of a pass: which row of the logits each of its rows is.
  struct Planned {
    Pass pass;
    size_t num_logits = 0;
    bool graph = false;
    std::vector<int32_t> logit_of;  // captured passes: row of the logits, by item
  };

  int QkvWidth() const { return (spec_.num_heads + 2 * spec_.num_kv_heads) * spec_.head_dim; }
  int QWidth() const { return spec_.num_heads * spec_.head_dim; }
  void CarveWork(gpu::DeviceCarver& carver);
  Status TakeMemory();
  Status Warm();
  Pass PassAt(const Inputs& at, std::byte* base) const;

  Status Prepare(std::span<const ForwardItem> items);
  Result<Planned> PlanPass(std::span<const ForwardItem> items);
  Status SendInputs(const Inputs& at);
  Status Compute(std::span<const ForwardItem> items, Planned* planned);
  Status Layers(const Pass& pass, std::span<const ForwardItem> items);
  Status Attend(const Pass& pass, int layer);
  Status Product(const Bf16* weights, const Bf16* x, void* out, int outputs, int inputs, int rows,
                 ProductOutput output, const float* bias);
  // The same of the RMSNorm of the residual stream.
  Status NormedProduct(const float* norm, const Bf16* weights, void* out, int outputs, int rows,
                       ProductOutput output, const float* bias);
  Status FeedForward(const gpu::DeviceLayer& layer, int rows);
  Status Logits(const float* x, const int32_t* sources, int rows);
  Status RunTap(int layer, const Pass& pass, std::span<const ForwardItem> items);
  Result<cudaGraphExec_t> GraphFor(int bucket);
  bool Skinny(int rows, int inputs) const {
    return (rows <= gpu::kSkinnyRows || blas_ == nullptr || options_.batch_invariant) &&
           inputs % 32 == 0;
  }
  static void AdvanceAll(std::span<const ForwardItem> items) {
    for (const ForwardItem& item : items) {
      item.cache->Advance(static_cast<int64_t>(item.tokens.size()));
    }
  }

  const ModelSpec spec_;
  KvPlan& plan_;
  ThreadPool& threads_;
  CudaModelOptions options_;
  CudaDevice device_;
  CudaMemoryPlan memory_;
  const BlockPool* pool_ = nullptr;
  uint64_t fingerprint_ = 0;
  int64_t positions_ = 0;
  int logit_rows_ = 0;
  QkvTap tap_;

  cudaStream_t stream_ = nullptr;
  cudaEvent_t inputs_sent_ = nullptr;
  DeviceBuffer<std::byte> weight_memory_, work_memory_, page_memory_;
  DeviceBuffer<float> tap_memory_;
  gpu::DeviceWeights weights_;
  cuda::AttentionShape shape_;
  std::optional<cuda::DecodeAttention> decode_;
  std::optional<cuda::PrefillAttention> prefill_;
  gpu::PageTables::Shape table_shape_;
  std::unique_ptr<gpu::Blas> blas_;
  std::unique_ptr<gpu::DevicePages> pages_;
  std::unique_ptr<gpu::PageTables> tables_;
  std::map<int, cudaGraphExec_t> graphs_;
  std::byte* staging_ = nullptr;  // pinned

  // In work_memory_.
  float* x_ = nullptr;        // [rows, hidden]
  Bf16* normed_ = nullptr;    // [rows, hidden]
  Bf16* qkv_ = nullptr;       // [rows, qkv]
  Bf16* q_ = nullptr;         // [rows, q]
  Bf16* attended_ = nullptr;  // [rows, q]
  Bf16* gate_up_ = nullptr;   // [rows, 2 intermediate]
  Bf16* product_ = nullptr;   // [rows, intermediate]
  float* logits_ = nullptr;   // [logit_rows_, vocab]
  std::byte* inputs_ = nullptr;
  int32_t* ids_ = nullptr;        // [logit_rows_]
  TokenDraw* draws_ = nullptr;    // [logit_rows_]
  int32_t* draw_rows_ = nullptr;  // [logit_rows_]
  void* attention_workspace_ = nullptr;
  void* blas_workspace_ = nullptr;
  int32_t* table_memory_ = nullptr;
  size_t input_bytes_ = 0;
  std::vector<int32_t> draw_sources_;  // of the last pass: row of the logits, by draw
};

CudaDecoder::Inputs::Inputs(size_t rows, size_t decodes, size_t chunks, size_t logits) {
  size_t at = 0;
  const auto take = [&](size_t size) {
    const size_t here = at;
    at += (size + 15) / 16 * 16;
    return here;
  };
  tokens = take(rows * sizeof(int32_t));
  positions = take(rows * sizeof(int32_t));
  table_rows = take(rows * sizeof(int32_t));
  decode_views = take(decodes * sizeof(cuda::SequenceView));
  chunk_views = take(chunks * sizeof(cuda::SequenceView));
  chunk_rows = take(chunks * sizeof(cuda::PrefillChunk));
  logit_rows = take(logits * sizeof(int32_t));
  bytes = at;
}

CudaDecoder::~CudaDecoder() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  for (auto& [bucket, graph] : graphs_) cudaGraphExecDestroy(graph);
  blas_.reset();
  tables_.reset();
  pages_.reset();
  cudaFreeHost(staging_);
  if (inputs_sent_ != nullptr) cudaEventDestroy(inputs_sent_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void CudaDecoder::CarveWork(gpu::DeviceCarver& carver) {
  const auto rows = static_cast<size_t>(options_.max_batch_tokens);
  const auto logit_rows = static_cast<size_t>(logit_rows_);
  const auto hidden = static_cast<size_t>(spec_.hidden);
  const auto middle = static_cast<size_t>(spec_.intermediate);
  x_ = carver.Take<float>(rows * hidden);
  normed_ = carver.Take<Bf16>(std::max(rows, logit_rows) * hidden);
  qkv_ = carver.Take<Bf16>(rows * static_cast<size_t>(QkvWidth()));
  q_ = carver.Take<Bf16>(rows * static_cast<size_t>(QWidth()));
  attended_ = carver.Take<Bf16>(rows * static_cast<size_t>(QWidth()));
  gate_up_ = carver.Take<Bf16>(rows * 2 * middle);
  product_ = carver.Take<Bf16>(rows * middle);
  logits_ = carver.Take<float>(logit_rows * static_cast<size_t>(spec_.vocab_size));
  input_bytes_ = Inputs(rows, rows, rows, rows).bytes;
  inputs_ = carver.Take<std::byte>(input_bytes_);
  ids_ = carver.Take<int32_t>(logit_rows);
  draws_ = carver.Take<TokenDraw>(logit_rows);
  draw_rows_ = carver.Take<int32_t>(logit_rows);
  attention_workspace_ = carver.Take<std::byte>(decode_->workspace_bytes());
  blas_workspace_ = carver.Take<std::byte>(gpu::Blas::kWorkspaceBytes);
  table_memory_ = carver.Take<int32_t>(table_shape_.bytes() / sizeof(int32_t));
}

Status CudaDecoder::TakeMemory() {
  const CacheConfig& config = plan_.cache();
  const PageArena::Sizes sizes = gpu::DevicePages::SizesOf(config);
  gpu::DeviceCarver count_weights(nullptr), count_work(nullptr);
  gpu::CarveWeights(spec_, plan_, positions_, count_weights);
  CarveWork(count_work);
  memory_.weights = count_weights.used();
  memory_.activations = count_work.used();
  size_t free = 0, total = 0;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "reading the device's memory"));
  const uint64_t fixed =
      memory_.weights + memory_.activations + gpu::DevicePages::ScratchBytes(config) + kReserve;
  uint64_t arena = sizes.ArenaBytes(options_.kv_bytes);
  const uint64_t room = free > fixed ? free - fixed : 0;
  if (options_.kv_bytes == 0) {
    arena = sizes.ArenaBytes(sizes.BudgetOf(room));
  }
  if (arena > room || sizes.BudgetOf(arena) < config.open.bytes()) {
    return ResourceExhausted(fmt::format(
        "{} has {} free; weights take {}, activations and workspaces {}, {} stay in reserve, and "
        "the cache wants {}: lower --kv-memory, --max-model-len or --chunk",
        device_.name, FormatBytes(free), FormatBytes(memory_.weights),
        FormatBytes(memory_.activations), FormatBytes(kReserve),
        FormatBytes(std::max<uint64_t>(arena, config.open.bytes()))));
  }
  memory_.pages = arena;
  OSCAR_ASSIGN_OR_RETURN(weight_memory_, DeviceBuffer<std::byte>::Allocate(memory_.weights));
  OSCAR_ASSIGN_OR_RETURN(work_memory_, DeviceBuffer<std::byte>::Allocate(memory_.activations));
  OSCAR_ASSIGN_OR_RETURN(page_memory_, DeviceBuffer<std::byte>::Allocate(
                                           arena + gpu::DevicePages::ScratchBytes(config)));
  gpu::DeviceCarver carve_weights(weight_memory_.data()), carve_work(work_memory_.data());
  weights_ = gpu::CarveWeights(spec_, plan_, positions_, carve_weights);
  CarveWork(carve_work);
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(attention_workspace_, 0, decode_->workspace_bytes(), stream_),
                 "clearing the attention workspace"));
  OSCAR_ASSIGN_OR_RETURN(pages_,
                         gpu::DevicePages::Create(config, shape_, plan_, page_memory_.data(), arena,
                                                  page_memory_.data() + arena, stream_));
  OSCAR_ASSIGN_OR_RETURN(
      tables_, gpu::PageTables::Create(config, table_shape_, table_memory_, *pages_, stream_));
  if (config.sealer != nullptr) {
    plan_.ReplaceSealer(std::make_unique<gpu::DeviceSealer>(*pages_));
  }
  void* pinned = nullptr;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMallocHost(&pinned, input_bytes_), "pinned memory"));
  staging_ = static_cast<std::byte*>(pinned);
  return {};
}

Status CudaDecoder::Load(const WeightSource& source) {
  OSCAR_ASSIGN_OR_RETURN(device_, FindCudaDevice());
  OSCAR_RETURN_IF_ERROR(CheckCudaPlan(spec_, plan_));
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"));
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&inputs_sent_, cudaEventDisableTiming),
                                   "creating an event"));
  fingerprint_ = source.Fingerprint();
  shape_ = ShapeOf(spec_, plan_);
  const CacheConfig& config = plan_.cache();
  positions_ = options_.max_context > 0 ? options_.max_context : spec_.max_positions;
  options_.max_sequences = std::clamp(options_.max_sequences, 1, 512);
  options_.max_batch_tokens =
      std::clamp(options_.max_batch_tokens, options_.max_sequences, 1 << 16);
  logit_rows_ = std::max(options_.max_sequences, kMinLogitRows);
  // A step that generates holds at most this much in BF16: see SequenceCache::SealForGeneration.
  const int window =
      config.sealer == nullptr ? 2 * kPageTokens : config.sink + config.recent + 2 * kPageTokens;
  OSCAR_ASSIGN_OR_RETURN(decode_,
                         cuda::DecodeAttention::Create(shape_, options_.max_sequences, window));
  OSCAR_ASSIGN_OR_RETURN(prefill_, cuda::PrefillAttention::Create(shape_));
  table_shape_ = gpu::PageTables::ShapeFor(config, std::max(256, 2 * options_.max_sequences),
                                           positions_, options_.max_batch_tokens);
  OSCAR_RETURN_IF_ERROR(TakeMemory());
  OSCAR_RETURN_IF_ERROR(gpu::LoadWeights(spec_, plan_, source, positions_, stream_, weights_));
  if (!options_.batch_invariant) {
    auto blas = gpu::Blas::Load(blas_workspace_);
    if (blas.has_value()) {
      blas_ = std::move(*blas);
    } else {
      LogWarning("{}: prompts and batches beyond {} rows will be slow", blas.error().message(),
                 gpu::kSkinnyRows);
    }
  }
  OSCAR_RETURN_IF_ERROR(Warm());
  size_t free = 0, total = 0;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "reading the device's memory"));
  memory_.free = free;
  return {};
}

// Every kernel is loaded and every graph captured before the first request.
Status CudaDecoder::Warm() {
  for (const int bucket : kBuckets) {
    if (bucket > options_.max_sequences) break;
    OSCAR_ASSIGN_OR_RETURN([[maybe_unused]] const auto graph, GraphFor(bucket));
  }
  return CudaStatus(cudaStreamSynchronize(stream_), "the first step");
}

CudaDecoder::Pass CudaDecoder::PassAt(const Inputs& at, std::byte* base) const {
  Pass pass;
  pass.tokens = reinterpret_cast<const int32_t*>(base + at.tokens);
  pass.positions = reinterpret_cast<const int32_t*>(base + at.positions);
  pass.table_rows = reinterpret_cast<const int32_t*>(base + at.table_rows);
  pass.decode_views = reinterpret_cast<const cuda::SequenceView*>(base + at.decode_views);
  pass.chunk_views = reinterpret_cast<const cuda::SequenceView*>(base + at.chunk_views);
  pass.chunk_rows = reinterpret_cast<const cuda::PrefillChunk*>(base + at.chunk_rows);
  pass.logit_rows = reinterpret_cast<const int32_t*>(base + at.logit_rows);
  return pass;
}

Result<cudaGraphExec_t> CudaDecoder::GraphFor(int bucket) {
  const auto found = graphs_.find(bucket);
  if (found != graphs_.end()) return found->second;
  const auto rows = static_cast<size_t>(bucket);
  const Inputs at(rows, rows, 0, 0);
  // Padding alone: nothing of the cache is touched.
  std::memset(staging_, 0, at.bytes);
  std::fill_n(reinterpret_cast<int32_t*>(staging_ + at.positions), rows, -1);
  OSCAR_RETURN_IF_ERROR(SendInputs(at));
  Pass pass = PassAt(at, inputs_);
  pass.rows = pass.decodes = bucket;
  const auto step = [&]() -> Status {
    OSCAR_RETURN_IF_ERROR(Layers(pass, {}));
    return Logits(x_, nullptr, bucket);
  };
  // Once outside of the capture, so that code is loaded and algorithms are chosen.
  OSCAR_RETURN_IF_ERROR(step());
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), "the first step"));
  OSCAR_RETURN_IF_ERROR(CudaStatus(
      cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a step"));
  const Status launched = step();
  cudaGraph_t graph = nullptr;
  const Status captured = CudaStatus(cudaStreamEndCapture(stream_, &graph), "capturing a step");
  cudaGraphExec_t executable = nullptr;
  Status status = launched.ok() ? captured : launched;
  if (status.ok()) {
    status = CudaStatus(cudaGraphInstantiate(&executable, graph, 0), "instantiating a step");
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  OSCAR_RETURN_IF_ERROR(status);
  graphs_.emplace(bucket, executable);
  return executable;
}

Status CudaDecoder::SetTap(QkvTap tap) {
  for (int i = 0; i < spec_.num_layers && tap; ++i) {
    if (plan_.v(i).kind != RotationKind::kNone) {
      return InvalidArgument(
          "calibration needs a cache method that leaves values unrotated, such as bf16");
    }
  }
  if (tap && tap_memory_.size() == 0) {
    OSCAR_ASSIGN_OR_RETURN(
        tap_memory_, DeviceBuffer<float>::Allocate(static_cast<size_t>(options_.max_batch_tokens) *
                                                   static_cast<size_t>(QkvWidth())));
  }
  tap_ = std::move(tap);
  return {};
}

Status CudaDecoder::Prepare(std::span<const ForwardItem> items) {
  int64_t total = 0;
  for (const ForwardItem& item : items) {
    SequenceCache& cache = *item.cache;
    const auto count = static_cast<int64_t>(item.tokens.size());
    OSCAR_CHECK(count > 0 && (item.is_prompt || count == 1));
    const int64_t cell = cache.config().cell;
    OSCAR_CHECK(!item.is_prompt || cache.length() / cell == (cache.length() + count - 1) / cell,
                "a prompt chunk crosses a cell boundary");
    if (cache.length() + count > positions_) {
      return OutOfRange(fmt::format("position {} is beyond the {} that the device was set up for",
                                    cache.length() + count - 1, positions_));
    }
    total += count;
  }
  OSCAR_CHECK(total <= options_.max_batch_tokens, "{} tokens in one pass", total);
  for (const ForwardItem& item : items) {
    SequenceCache& cache = *item.cache;
    if (cache.attachment() == nullptr) OSCAR_RETURN_IF_ERROR(cache.SealGaps(threads_));
    OSCAR_RETURN_IF_ERROR(item.is_prompt ? cache.SealForPrompt(threads_)
                                         : cache.SealForGeneration(threads_));
  }
  // Room for every item or for none: pages that an earlier item got are given back.
  for (size_t i = 0; i < items.size(); ++i) {
    Status status = items[i].cache->Reserve(static_cast<int64_t>(items[i].tokens.size()));
    if (status.ok()) continue;
    for (size_t j = 0; j < i; ++j) items[j].cache->Trim(items[j].cache->length());
    return status;
  }
  return {};
}

Result<CudaDecoder::Planned> CudaDecoder::PlanPass(std::span<const ForwardItem> items) {
  Planned planned;
  Pass& pass = planned.pass;
  size_t decodes = 0, chunks = 0, rows = 0, logits = 0;
  for (const ForwardItem& item : items) {
    (item.is_prompt ? chunks : decodes) += 1;
    rows += item.tokens.size();
    logits += static_cast<size_t>(item.num_logits);
  }
  // A pass of generated tokens alone is padded to a captured size.
  size_t padded = rows;
  if (chunks == 0 && !tap_) {
    const auto* bucket =
        std::ranges::find_if(kBuckets, [&](int size) { return static_cast<size_t>(size) >= rows; });
    if (bucket != std::end(kBuckets) && *bucket <= options_.max_sequences) {
      planned.graph = true;
      padded = static_cast<size_t>(*bucket);
    }
  }
  const Inputs at =
      planned.graph ? Inputs(padded, padded, 0, 0) : Inputs(rows, decodes, chunks, logits);
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaEventSynchronize(inputs_sent_), "waiting for a step's inputs"));
  auto* tokens = reinterpret_cast<int32_t*>(staging_ + at.tokens);
  auto* positions = reinterpret_cast<int32_t*>(staging_ + at.positions);
  auto* table_rows = reinterpret_cast<int32_t*>(staging_ + at.table_rows);
  auto* decode_views = reinterpret_cast<cuda::SequenceView*>(staging_ + at.decode_views);
  auto* chunk_views = reinterpret_cast<cuda::SequenceView*>(staging_ + at.chunk_views);
  auto* chunk_rows = reinterpret_cast<cuda::PrefillChunk*>(staging_ + at.chunk_rows);
  auto* logit_rows = reinterpret_cast<int32_t*>(staging_ + at.logit_rows);

  tables_->BeginPass();
  size_t next_decode = 0, next_row = decodes, next_chunk = 0, next_logit = 0;
  const uint64_t moves = pool_ != nullptr ? pool_->moves() : 0;
  for (const ForwardItem& item : items) {
    const auto count = static_cast<int64_t>(item.tokens.size());
    OSCAR_ASSIGN_OR_RETURN(const cuda::SequenceView view,
                           tables_->Enter(*item.cache, count, moves));
    size_t row;
    if (item.is_prompt) {
      row = next_row;
      next_row += item.tokens.size();
      chunk_views[next_chunk] = view;
      chunk_rows[next_chunk++] = {static_cast<int32_t>(row), static_cast<int32_t>(count)};
      pass.longest_chunk = std::max(pass.longest_chunk, static_cast<int>(count));
    } else {
      row = next_decode++;
      decode_views[row] = view;
    }
    for (size_t t = 0; t < item.tokens.size(); ++t) {
      tokens[row + t] = item.tokens[t];
      positions[row + t] = static_cast<int32_t>(item.cache->length() + static_cast<int64_t>(t));
      table_rows[row + t] = view.table_row;
    }
    const size_t end = row + item.tokens.size();
    for (size_t i = end - static_cast<size_t>(item.num_logits); i < end; ++i) {
      if (planned.graph) {
        planned.logit_of.push_back(static_cast<int32_t>(i));
      } else {
        logit_rows[next_logit++] = static_cast<int32_t>(i);
      }
    }
  }
  for (size_t i = rows; i < padded; ++i) {
    tokens[i] = table_rows[i] = 0;
    positions[i] = -1;
    decode_views[i] = {};
  }
  planned.num_logits = logits;
  OSCAR_RETURN_IF_ERROR(pages_->Flush());
  OSCAR_RETURN_IF_ERROR(tables_->Send());
  OSCAR_RETURN_IF_ERROR(SendInputs(at));
  const Pass placed = PassAt(at, inputs_);
  const int longest = pass.longest_chunk;
  pass = placed;
  pass.longest_chunk = longest;
  pass.rows = static_cast<int>(padded);
  pass.decodes = static_cast<int>(planned.graph ? padded : decodes);
  pass.chunks = static_cast<int>(chunks);
  return planned;
}

Status CudaDecoder::SendInputs(const Inputs& at) {
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(inputs_, staging_, at.bytes, cudaMemcpyHostToDevice, stream_),
                 "sending a step's inputs"));
  return CudaStatus(cudaEventRecord(inputs_sent_, stream_), "recording an event");
}

Status CudaDecoder::Product(const Bf16* weights, const Bf16* x, void* out, int outputs, int inputs,
                            int rows, ProductOutput output, const float* bias) {
  const size_t size = output == ProductOutput::kBf16 || output == ProductOutput::kSiluMul
                          ? sizeof(Bf16)
                          : sizeof(float);
  if (Skinny(rows, inputs)) {
    for (int first = 0; first < rows; first += gpu::kSkinnyRows) {
      gpu::SkinnyArguments args;
      args.weights = weights;
      args.x = x + int64_t{first} * inputs;
      args.out =
          static_cast<std::byte*>(out) + static_cast<size_t>(int64_t{first} * outputs) * size;
      args.bias = bias;
      args.outputs = outputs;
      args.inputs = inputs;
      args.rows = std::min(gpu::kSkinnyRows, rows - first);
      args.output = output;
      args.invariant = options_.batch_invariant;
      OSCAR_RETURN_IF_ERROR(gpu::LaunchSkinny(args, stream_));
    }
    return {};
  }
  if (blas_ == nullptr) {
    return Unimplemented(fmt::format("a product with {} inputs needs cuBLASLt", inputs));
  }
  OSCAR_RETURN_IF_ERROR(blas_->Product(weights, x, out, outputs, inputs, rows, output, stream_));
  if (bias == nullptr) return {};
  return output == ProductOutput::kBf16
             ? gpu::LaunchAddBias(static_cast<Bf16*>(out), bias, rows, outputs, stream_)
             : gpu::LaunchAddBias(static_cast<float*>(out), bias, rows, outputs, stream_);
}

Status CudaDecoder::Attend(const Pass& pass, int layer) {
  const PageShape& open = plan_.cache().open;
  const PageShape& history = plan_.cache().sealer == nullptr ? open : plan_.cache().sealed;
  const gpu::DeviceLayer& weights = weights_.layers[static_cast<size_t>(layer)];
  cuda::CacheView view = tables_->view();
  view.window_pool = pages_->arena() + open.BlockOffset(layer, 0);
  view.history_pool = pages_->arena() + history.BlockOffset(layer, 0);
  const float scale = 1.0f / std::sqrt(static_cast<float>(spec_.head_dim));

  cuda::WriteArguments write;
  write.qkv = qkv_;
  write.qkv_stride = QkvWidth();
  write.positions = pass.positions;
  write.table_rows = pass.table_rows;
  write.cos_sin = weights_.cos_sin;
  write.q_norm = weights.q_norm;
  write.k_norm = weights.k_norm;
  write.norm_epsilon = spec_.norm_eps;
  write.rotation = weights.rotation;
  write.rotation_fragments = weights.rotation_fragments;
  write.rotations = weights.rotations;
  write.q_out = q_;
  write.window_pool = const_cast<std::byte*>(view.window_pool);
  write.cache = view;
  write.tokens = pass.rows;
  const bool small = (pass.rows <= kDecodeWriteRows || options_.batch_invariant) &&
                     gpu::HasDecodeWrite(shape_, weights.rotation);
  OSCAR_RETURN_IF_ERROR(small ? gpu::LaunchDecodeWrite(shape_, write, stream_)
                              : cuda::WriteTokens(shape_, write, stream_));

  for (int first = 0; first < pass.decodes; first += options_.max_sequences) {
    cuda::DecodeArguments args;
    args.cache = view;
    args.sequences = pass.decode_views + first;
    args.q = q_ + int64_t{first} * QWidth();
    args.out = attended_ + int64_t{first} * QWidth();
    args.softmax_scale = scale;
    args.batch = std::min(options_.max_sequences, pass.decodes - first);
    args.workspace = attention_workspace_;
    args.overlap_predecessor = first == 0;
    OSCAR_RETURN_IF_ERROR(decode_->Launch(args, stream_));
  }
  if (pass.chunks == 0) return {};
  cuda::PrefillArguments args;
  args.cache = view;
  args.sequences = pass.chunk_views;
  args.chunks = pass.chunk_rows;
  args.q = q_;
  args.out = attended_;
  args.softmax_scale = scale;
  args.batch = pass.chunks;
  args.max_query_tokens = pass.longest_chunk;
  return prefill_->Launch(args, stream_);
}

Status CudaDecoder::NormedProduct(const float* norm, const Bf16* weights, void* out, int outputs,
                                  int rows, ProductOutput output, const float* bias) {
  const int hidden = spec_.hidden;
  // A norm inside the product rounds otherwise than one before it, so batches would show.
  if (rows <= gpu::kNormedRows && hidden % 32 == 0 && !options_.batch_invariant) {
    gpu::SkinnyArguments args;
    args.weights = weights;
    args.residual = x_;
    args.norm_weight = norm;
    args.norm_epsilon = spec_.norm_eps;
    args.out = out;
    args.bias = bias;
    args.outputs = outputs;
    args.inputs = hidden;
    args.rows = rows;
    args.output = output;
    return gpu::LaunchSkinny(args, stream_);
  }
  OSCAR_RETURN_IF_ERROR(
      gpu::LaunchNorm(x_, norm, spec_.norm_eps, nullptr, normed_, rows, hidden, stream_));
  return Product(weights, normed_, out, outputs, hidden, rows, output, bias);
}

Status CudaDecoder::FeedForward(const gpu::DeviceLayer& layer, int rows) {
  const int hidden = spec_.hidden, middle = spec_.intermediate;
  if (Skinny(rows, hidden)) {
    OSCAR_RETURN_IF_ERROR(NormedProduct(layer.feed_forward_norm, layer.gate_up, product_, middle,
                                        rows, ProductOutput::kSiluMul, nullptr));
  } else {
    OSCAR_RETURN_IF_ERROR(NormedProduct(layer.feed_forward_norm, layer.gate_up, gate_up_,
                                        2 * middle, rows, ProductOutput::kBf16, nullptr));
    OSCAR_RETURN_IF_ERROR(gpu::LaunchSiluMul(gate_up_, product_, rows, middle, stream_));
  }
  return Product(layer.down, product_, x_, hidden, middle, rows, ProductOutput::kAdd, nullptr);
}

Status CudaDecoder::Layers(const Pass& pass, std::span<const ForwardItem> items) {
  const int rows = pass.rows, hidden = spec_.hidden;
  OSCAR_RETURN_IF_ERROR(gpu::LaunchEmbed(pass.tokens, weights_.embedding, x_, rows, hidden,
                                         spec_.vocab_size, stream_));
  for (int i = 0; i < spec_.num_layers; ++i) {
    const gpu::DeviceLayer& layer = weights_.layers[static_cast<size_t>(i)];
    OSCAR_RETURN_IF_ERROR(NormedProduct(layer.attention_norm, layer.qkv, qkv_, QkvWidth(), rows,
                                        ProductOutput::kBf16, layer.qkv_bias));
    if (tap_) OSCAR_RETURN_IF_ERROR(RunTap(i, pass, items));
    OSCAR_RETURN_IF_ERROR(Attend(pass, i));
    OSCAR_RETURN_IF_ERROR(
        Product(layer.o, attended_, x_, hidden, QWidth(), rows, ProductOutput::kAdd, layer.o_bias));
    OSCAR_RETURN_IF_ERROR(FeedForward(layer, rows));
  }
  return {};
}

Status CudaDecoder::Logits(const float* x, const int32_t* sources, int rows) {
  OSCAR_RETURN_IF_ERROR(gpu::LaunchNorm(x, weights_.final_norm, spec_.norm_eps, sources, normed_,
                                        rows, spec_.hidden, stream_));
  return Product(weights_.head, normed_, logits_, spec_.vocab_size, spec_.hidden, rows,
                 ProductOutput::kFloat, nullptr);
}

Status CudaDecoder::RunTap(int layer, const Pass& pass, std::span<const ForwardItem> items) {
  const gpu::DeviceLayer& weights = weights_.layers[static_cast<size_t>(layer)];
  gpu::TapArguments args;
  args.qkv = qkv_;
  args.positions = pass.positions;
  args.cos_sin = weights_.cos_sin;
  args.q_norm = weights.q_norm;
  args.k_norm = weights.k_norm;
  args.epsilon = spec_.norm_eps;
  args.out = tap_memory_.data();
  args.tokens = pass.rows;
  args.heads = spec_.num_heads;
  args.kv_heads = spec_.num_kv_heads;
  args.head_dim = spec_.head_dim;
  OSCAR_RETURN_IF_ERROR(gpu::LaunchTap(args, stream_));
  const auto width = static_cast<size_t>(QkvWidth()), q_width = static_cast<size_t>(QWidth());
  const size_t kv_width = (width - q_width) / 2;
  std::vector<float> host(static_cast<size_t>(pass.rows) * width);
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(host.data(), args.out, host.size() * sizeof(float),
                                 cudaMemcpyDeviceToHost, stream_),
                 "reading the calibration tap"));
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), "reading the calibration tap"));
  std::vector<float> q, k, v;
  size_t decode_row = 0, prompt_row = static_cast<size_t>(pass.decodes);
  for (size_t i = 0; i < items.size(); ++i) {
    size_t& row = items[i].is_prompt ? prompt_row : decode_row;
    q.clear(), k.clear(), v.clear();
    for (size_t t = 0; t < items[i].tokens.size(); ++t, ++row) {
      const float* at = host.data() + row * width;
      q.insert(q.end(), at, at + q_width);
      k.insert(k.end(), at + q_width, at + q_width + kv_width);
      v.insert(v.end(), at + q_width + kv_width, at + width);
    }
    tap_(layer, i, q, k, v);
  }
  return {};
}

Status CudaDecoder::Compute(std::span<const ForwardItem> items, Planned* planned) {
  if (Status status = Prepare(items); !status.ok()) {
    // What was queued must not meet pages that are freed and given out again.
    OSCAR_RETURN_IF_ERROR(pages_->Flush());
    return status;
  }
  OSCAR_ASSIGN_OR_RETURN(*planned, PlanPass(items));
  if (!planned->graph) return Layers(planned->pass, items);
  OSCAR_ASSIGN_OR_RETURN(const cudaGraphExec_t graph, GraphFor(planned->pass.rows));
  return CudaStatus(cudaGraphLaunch(graph, stream_), "launching a step");
}

Status CudaDecoder::Forward(std::span<const ForwardItem> items, std::span<float> logits) {
  if (items.empty()) return {};
  Planned planned;
  OSCAR_RETURN_IF_ERROR(Compute(items, &planned));
  const auto vocab = static_cast<size_t>(spec_.vocab_size);
  OSCAR_CHECK(logits.size() == planned.num_logits * vocab);
  const auto read = [&](size_t row, size_t to, size_t count) {
    return CudaStatus(
        cudaMemcpyAsync(logits.data() + to * vocab, logits_ + row * vocab,
                        count * vocab * sizeof(float), cudaMemcpyDeviceToHost, stream_),
        "reading logits");
  };
  if (planned.graph) {
    // Runs of consecutive rows: mostly one.
    for (size_t i = 0; i < planned.logit_of.size();) {
      size_t end = i + 1;
      while (end < planned.logit_of.size() &&
             planned.logit_of[end] == planned.logit_of[end - 1] + 1) {
        ++end;
      }
      OSCAR_RETURN_IF_ERROR(read(static_cast<size_t>(planned.logit_of[i]), i, end - i));
      i = end;
    }
  } else {
    for (size_t first = 0; first < planned.num_logits; first += static_cast<size_t>(logit_rows_)) {
      const size_t count = std::min(planned.num_logits - first, static_cast<size_t>(logit_rows_));
      OSCAR_RETURN_IF_ERROR(Logits(x_, planned.pass.logit_rows + first, static_cast<int>(count)));
      OSCAR_RETURN_IF_ERROR(read(0, first, count));
    }
  }
  if (planned.num_logits > 0) {
    OSCAR_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), "a step"));
  }
  AdvanceAll(items);
  return {};
}

Status CudaDecoder::ForwardAndDraw(std::span<const ForwardItem> items,
                                   std::span<const TokenDraw> draws, std::span<int32_t> ids) {
  if (items.empty()) return {};
  OSCAR_CHECK(draws.size() <= static_cast<size_t>(logit_rows_) && ids.size() == draws.size());
  Planned planned;
  OSCAR_RETURN_IF_ERROR(Compute(items, &planned));
  OSCAR_CHECK(planned.num_logits == draws.size());
  const auto count = static_cast<int>(draws.size());
  if (count > 0) {
    if (planned.graph) {
      draw_sources_ = planned.logit_of;
    } else {
      OSCAR_RETURN_IF_ERROR(Logits(x_, planned.pass.logit_rows, count));
      draw_sources_.resize(draws.size());
      for (size_t i = 0; i < draws.size(); ++i) draw_sources_[i] = static_cast<int32_t>(i);
    }
    // Small, and pageable: the copies are done when the calls return.
    OSCAR_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(draws_, draws.data(), draws.size_bytes(), cudaMemcpyHostToDevice, stream_),
        "sending draws"));
    OSCAR_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(draw_rows_, draw_sources_.data(), draw_sources_.size() * sizeof(int32_t),
                        cudaMemcpyHostToDevice, stream_),
        "sending draws"));
    OSCAR_RETURN_IF_ERROR(
        gpu::LaunchDraw(logits_, draw_rows_, draws_, ids_, count, spec_.vocab_size, stream_));
    OSCAR_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(ids.data(), ids_, ids.size_bytes(), cudaMemcpyDeviceToHost, stream_),
        "reading tokens"));
    OSCAR_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), "a step"));
  }
  AdvanceAll(items);
  return {};
}

Status CudaDecoder::ReadLogits(size_t row, std::span<float> logits) {
  const auto vocab = static_cast<size_t>(spec_.vocab_size);
  OSCAR_CHECK(row < draw_sources_.size() && logits.size() == vocab);
  OSCAR_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(logits.data(), logits_ + static_cast<size_t>(draw_sources_[row]) * vocab,
                      logits.size_bytes(), cudaMemcpyDeviceToHost, stream_),
      "reading logits"));
  return CudaStatus(cudaStreamSynchronize(stream_), "reading logits");
}

Result<double> CudaDecoder::MeasureReadBandwidth() {
  constexpr int kRepetitions = 5;
  // Weights and pages are one after another far larger than the L2; read the larger.
  const bool pages = memory_.pages > memory_.weights;
  const std::byte* data = pages ? page_memory_.data() : weight_memory_.data();
  const auto bytes = static_cast<int64_t>(
      std::min<uint64_t>(pages ? memory_.pages : memory_.weights, uint64_t{16} << 30));
  cudaEvent_t start = nullptr, end = nullptr;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&start), "creating an event"));
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&end), "creating an event"));
  double best = 0.0;
  Status status;
  for (int i = 0; i <= kRepetitions && status.ok(); ++i) {
    cudaEventRecord(start, stream_);
    status = gpu::LaunchRead(data, bytes, reinterpret_cast<uint32_t*>(ids_), stream_);
    cudaEventRecord(end, stream_);
    if (status.ok()) status = CudaStatus(cudaEventSynchronize(end), "reading device memory");
    float milliseconds = 0.0f;
    cudaEventElapsedTime(&milliseconds, start, end);
    if (i > 0) best = std::max(best, static_cast<double>(bytes) / (1e-3 * milliseconds));
  }
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  OSCAR_RETURN_IF_ERROR(status);
  return best;
}

}  // namespace

Result<CudaDevice> FindCudaDevice() {
  CudaDevice device;
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    return Unexpected(Unavailable(fmt::format(
        "no CUDA device: {}", error != cudaSuccess ? cudaGetErrorString(error) : "none is there")));
  }
  cudaDeviceProp properties{};
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, 0), "the CUDA device"));
  device.name = properties.name;
  device.major = properties.major;
  device.minor = properties.minor;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaDriverGetVersion(&device.driver), "the CUDA driver"));
  if (!gpu::KernelsRunHere()) {
    return Unexpected(Unavailable(
        fmt::format("{} has compute capability {}.{}, which this program was not built for; add it "
                    "to OSCAR_CUDA_ARCHITECTURES",
                    device.name, device.major, device.minor)));
  }
  size_t free = 0, total = 0;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "the CUDA device's memory"));
  device.free_bytes = free;
  device.total_bytes = total;
  return device;
}

Status CheckCudaPlan(const ModelSpec& spec, const KvPlan& plan) {
  const CacheConfig& config = plan.cache();
  if (plan.method().is_simulated() ||
      (config.sealer != nullptr && (plan.rules().empty() || config.sealer->pages_together() > 1))) {
    return Unimplemented(fmt::format(
        "--kv {}: simulated methods run on the CPU alone; use --device cpu", plan.method().name));
  }
  const PageLayout& first = config.sealed.layout(0);
  for (int i = 0; i < spec.num_layers; ++i) {
    if (!(config.sealed.layout(i) == first)) {
      return Unimplemented(
          fmt::format("--kv {}: layers with different pages run on the CPU alone; use --device cpu",
                      plan.method().name));
    }
    if (plan.k(i).kind != plan.k(0).kind) return Unimplemented("layers with different rotations");
  }
  if (config.open.layout(0).order() != CodeOrder::kTensorCore) {
    return InvalidArgument("pages in CPU order cannot be read by the GPU");
  }
  return {};
}

Result<std::unique_ptr<CudaModel>> LoadCudaModel(const ModelSpec& spec, const WeightSource& source,
                                                 KvPlan& plan, ThreadPool& threads,
                                                 const CudaModelOptions& options) {
  auto model = std::make_unique<CudaDecoder>(spec, plan, threads, options);
  OSCAR_RETURN_IF_ERROR(model->Load(source));
  return model;
}

}  // namespace oscar
