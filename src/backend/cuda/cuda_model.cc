// The decoder on one CUDA device: fp32 residual stream, BF16 or FP8 weights, fp32 sums; attention
// straight from the pages. Numbers are rounded to BF16 where they enter a product or the cache and
// nowhere else, the places where the CPU's BF16 paths round them: norms, scaled queries, keys,
// values, attention's outputs, gated products.
#include "cuda/cuda_model.h"

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
#include "cuda/attention/decode_attention.h"
#include "cuda/attention/prefill_attention.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device/device_buffer.h"
#include "cuda/device_weights.h"
#include "cuda/gemm/products.h"
#include "cuda/kv/device_pages.h"
#include "cuda/kv/kv_write.h"
#include "cuda/kv/page_tables.h"
#include "cuda/kv/token_write.h"
#include "cuda/pass_plan.h"
#include "cuda/portable/portable_pass.h"
#include "cuda/sample/sample_kernels.h"
#include "cuda/step_kernels.h"
#include "model/forward_items.h"

namespace oscar {
namespace {

using cuda::CudaStatus;
using cuda::DeviceBuffer;
using cuda::Pass;
using cuda::PlannedPass;
using cuda::ProductOutput;

// Left to the driver, to code and to graphs when the page arena takes the rest.
constexpr uint64_t kReserve = uint64_t{1} << 30;
constexpr int kMinLogitRows = 64;
// Rows whose gates and ups are computed at once: they are fp32 and the largest of the activations.
constexpr int kFeedForwardRows = 2048;

// Queries carry the softmax's scale and log2(e) before they are rounded, as on the CPU.
float QueryScale(int head_dim) {
  return static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(head_dim)));
}
// What is left of the scale for kernels that multiply by it and by log2(e) themselves.
constexpr float kScaledQuerySoftmax = 0.69314718f;
static_assert(kScaledQuerySoftmax * 1.4426950408889634f == 1.0f);

cuda::AttentionShape ShapeOf(const ModelSpec& spec, const KvPlan& plan) {
  cuda::AttentionShape shape;
  const BlockLayout& sealed = plan.cache().sealed.block(0);
  const bool plain = plan.cache().sealer == nullptr;
  shape.history_kind = plain ? BlockKind::kBf16 : sealed.kind();
  shape.head_dim = spec.head_dim;
  shape.group_dims = shape.history_kind == BlockKind::kBf16 ? spec.head_dim : sealed.group_dims();
  shape.num_q_heads = spec.num_heads;
  shape.num_kv_heads = spec.num_kv_heads;
  return shape;
}

// To callers kResourceExhausted is a lack of cache pages, which they know how to cure. A device
// that runs out of memory in a pass, although nothing is taken after loading, has failed.
Status DeviceFailure(Status status) {
  if (status.code() != StatusCode::kResourceExhausted) return status;
  return Internal(status.message());
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
  bool portable() const override { return options_.portable; }
  int max_batch_tokens() const override { return options_.max_batch_tokens; }
  int max_draws() const override { return logit_rows_; }
  Status SetTap(QkvTap tap) override;
  Status Forward(std::span<const ForwardItem> items, std::span<float> logits) override;
  Status ForwardAndDraw(std::span<const ForwardItem> items, std::span<const TokenDraw> draws,
                        std::span<int32_t> ids) override;
  Status ReadLogits(size_t row, std::span<float> logits) override;
  bool CanRunAhead() const override { return true; }
  Status Launch(std::span<const ForwardItem> items, std::span<const TokenDraw> draws) override;
  Status Collect(std::span<int32_t> ids) override;

  PageMemory& pages() override { return *pages_; }
  uint64_t page_budget() const override { return pages_->budget(); }
  const CudaMemoryPlan& memory() const override { return memory_; }
  const CudaDevice& device() const override { return device_; }
  Result<uint64_t> Saturated() override { return pages_->Saturated(); }
  void SetPool(const PagePool& pool) override { pool_ = &pool; }
  Result<double> MeasureReadBandwidth() override;

 private:
  // A pass that was launched, from its end on the device to Collect.
  struct Flight {
    int32_t* ids = nullptr;        // pinned, [logit_rows_]
    TokenDraw* draws = nullptr;    // pinned, [logit_rows_]
    int32_t* draw_rows = nullptr;  // pinned, [logit_rows_]
    cudaEvent_t done = nullptr;
    size_t count = 0;
  };
  static constexpr uint64_t kFlights = 2;

  int QkvWidth() const { return (spec_.num_heads + 2 * spec_.num_kv_heads) * spec_.head_dim; }
  int QWidth() const { return spec_.num_heads * spec_.head_dim; }
  void CarveWork(cuda::DeviceCarver& carver);
  Status TakeMemory(const WeightSource& source);
  Status Warm();

  // Room for the items; kResourceExhausted only from here.
  Status Prepare(std::span<const ForwardItem> items);
  Status ForwardPrepared(std::span<const ForwardItem> items, std::span<float> logits);
  Status LaunchPrepared(std::span<const ForwardItem> items, std::span<const TokenDraw> draws);
  Status Compute(std::span<const ForwardItem> items, PlannedPass* planned);
  Status Layers(const Pass& pass, std::span<const ForwardItem> items);
  cuda::CacheView ViewOf(int layer) const;
  Status Attend(const Pass& pass, int layer);
  Status Project(const cuda::DeviceLayer& layer, int rows);
  Status FeedForward(const cuda::DeviceLayer& layer, int rows);
  Status Logits(const float* x, const int32_t* sources, int rows);
  Status RunTap(int layer, const Pass& pass, std::span<const ForwardItem> items);
  Result<cudaGraphExec_t> GraphFor(int bucket);
  cuda::NormedInput Normed(const float* norm, int first_row = 0) const {
    return {x_ + int64_t{first_row} * spec_.hidden, norm, spec_.norm_eps, normed_};
  }

  const ModelSpec spec_;
  KvPlan& plan_;
  ThreadPool& threads_;
  CudaModelOptions options_;
  CudaDevice device_;
  CudaMemoryPlan memory_;
  const PagePool* pool_ = nullptr;
  uint64_t fingerprint_ = 0;
  int64_t positions_ = 0;
  int logit_rows_ = 0;
  QkvTap tap_;

  cudaStream_t stream_ = nullptr;
  DeviceBuffer<std::byte> weight_memory_, work_memory_, page_memory_;
  cuda::DeviceWeights weights_;
  cuda::AttentionShape shape_;
  std::optional<cuda::DecodeAttention> decode_;
  std::optional<cuda::PrefillAttention> prefill_;
  cuda::PageTables::Shape table_shape_;
  std::unique_ptr<cuda::Products> products_;
  std::unique_ptr<cuda::PortablePass> portable_;  // null: products_ and attention do it
  std::unique_ptr<cuda::DevicePages> pages_;
  std::unique_ptr<cuda::PageTables> tables_;
  std::unique_ptr<cuda::PassPlanner> planner_;
  std::map<int, cudaGraphExec_t> graphs_;
  Flight flights_[kFlights];
  uint64_t launched_ = 0, collected_ = 0;  // passes

  // In work_memory_.
  float* x_ = nullptr;        // [rows, hidden]
  Bf16* normed_ = nullptr;    // [rows, hidden]
  float* qkv_ = nullptr;      // [rows, qkv]
  Bf16* q_ = nullptr;         // [rows, q]
  Bf16* attended_ = nullptr;  // [rows, q]
  float* gate_up_ = nullptr;  // [gate_up_size_]: at most kFeedForwardRows of 2 intermediate
  Bf16* product_ = nullptr;   // [rows, intermediate]
  float* logits_ = nullptr;   // [logit_rows_, vocab]
  std::byte* inputs_ = nullptr;
  int32_t* ids_ = nullptr;        // [logit_rows_]
  TokenDraw* draws_ = nullptr;    // [logit_rows_]
  int32_t* draw_rows_ = nullptr;  // [logit_rows_]
  void* attention_workspace_ = nullptr;
  void* blas_workspace_ = nullptr;
  cuda::TableUpdate* table_updates_ = nullptr;  // [PageTables::kStaged]
  Bf16* weight_scratch_ = nullptr;              // [weights_.largest_fp8]
  int32_t* table_memory_ = nullptr;
  size_t gate_up_size_ = 0;
  std::vector<int32_t> draw_sources_;  // of the last pass: row of the logits, by draw
};

CudaDecoder::~CudaDecoder() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  for (auto& [bucket, graph] : graphs_) cudaGraphExecDestroy(graph);
  products_.reset();
  planner_.reset();
  tables_.reset();
  pages_.reset();
  for (Flight& flight : flights_) {
    cudaFreeHost(flight.ids);
    cudaFreeHost(flight.draws);
    cudaFreeHost(flight.draw_rows);
    if (flight.done != nullptr) cudaEventDestroy(flight.done);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void CudaDecoder::CarveWork(cuda::DeviceCarver& carver) {
  const auto rows = static_cast<size_t>(options_.max_batch_tokens);
  const auto logit_rows = static_cast<size_t>(logit_rows_);
  const auto hidden = static_cast<size_t>(spec_.hidden);
  const auto middle = static_cast<size_t>(spec_.intermediate);
  x_ = carver.Take<float>(rows * hidden);
  qkv_ = carver.Take<float>(rows * static_cast<size_t>(QkvWidth()));
  // The calibration tap uses it too, a few rows at a time.
  gate_up_size_ = std::max(std::min<size_t>(rows, kFeedForwardRows) * 2 * middle,
                           static_cast<size_t>(QkvWidth()));
  gate_up_ = carver.Take<float>(gate_up_size_);
  if (portable_ != nullptr) {
    portable_->Carve(carver, rows, logit_rows);
    portable_->Use(qkv_, gate_up_, kFeedForwardRows);
  } else {
    normed_ = carver.Take<Bf16>(std::max(rows, logit_rows) * hidden);
    q_ = carver.Take<Bf16>(rows * static_cast<size_t>(QWidth()));
    attended_ = carver.Take<Bf16>(rows * static_cast<size_t>(QWidth()));
    product_ = carver.Take<Bf16>(rows * middle);
  }
  logits_ = carver.Take<float>(logit_rows * static_cast<size_t>(spec_.vocab_size));
  inputs_ = carver.Take<std::byte>(cuda::PassPlanner::InputBytes(options_.max_batch_tokens));
  ids_ = carver.Take<int32_t>(logit_rows);
  draws_ = carver.Take<TokenDraw>(logit_rows);
  draw_rows_ = carver.Take<int32_t>(logit_rows);
  attention_workspace_ = carver.Take<std::byte>(decode_->workspace_bytes());
  blas_workspace_ = carver.Take<std::byte>(cuda::Blas::kWorkspaceBytes);
  weight_scratch_ = carver.Take<Bf16>(weights_.largest_fp8);
  table_memory_ = carver.Take<int32_t>(table_shape_.bytes() / sizeof(int32_t));
  table_updates_ = carver.Take<cuda::TableUpdate>(cuda::PageTables::kStaged);
}

Status CudaDecoder::TakeMemory(const WeightSource& source) {
  const CacheConfig& config = plan_.cache();
  const PageArena::Sizes sizes = cuda::DevicePages::SizesOf(config);
  cuda::DeviceCarver count_weights(nullptr), count_work(nullptr);
  OSCAR_ASSIGN_OR_RETURN(weights_, cuda::CarveWeights(spec_, plan_, source, positions_,
                                                      options_.portable, count_weights));
  CarveWork(count_work);
  const uint64_t work = count_work.used(), scratch = cuda::DevicePages::ScratchBytes(config);
  memory_.weights = count_weights.used();
  memory_.activations = work + scratch;
  size_t free = 0, total = 0;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "reading the device's memory"));
  const uint64_t fixed = memory_.weights + memory_.activations + kReserve;
  uint64_t arena = sizes.ArenaBytes(options_.kv_bytes);
  const uint64_t room = free > fixed ? free - fixed : 0;
  if (options_.kv_bytes == 0) {
    arena = sizes.ArenaBytes(sizes.BudgetOf(room));
  }
  if (arena > room || sizes.BudgetOf(arena) < config.open.bytes()) {
    return ResourceExhausted(fmt::format(
        "{} has {} free; weights take {}, activations and workspaces {}, {} stay in reserve, and "
        "the cache wants {}: lower --kv-memory, --max-model-len or --chunk, or use --device cpu",
        device_.name, FormatBytes(free), FormatBytes(memory_.weights),
        FormatBytes(memory_.activations), FormatBytes(kReserve),
        FormatBytes(std::max<uint64_t>(arena, config.open.bytes()))));
  }
  memory_.pages = arena;
  OSCAR_ASSIGN_OR_RETURN(weight_memory_, DeviceBuffer<std::byte>::Allocate(memory_.weights));
  OSCAR_ASSIGN_OR_RETURN(work_memory_, DeviceBuffer<std::byte>::Allocate(work));
  OSCAR_ASSIGN_OR_RETURN(page_memory_, DeviceBuffer<std::byte>::Allocate(arena + scratch));
  cuda::DeviceCarver carve_weights(weight_memory_.data()), carve_work(work_memory_.data());
  OSCAR_ASSIGN_OR_RETURN(weights_, cuda::CarveWeights(spec_, plan_, source, positions_,
                                                      options_.portable, carve_weights));
  CarveWork(carve_work);
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(attention_workspace_, 0, decode_->workspace_bytes(), stream_),
                 "clearing the attention workspace"));
  OSCAR_ASSIGN_OR_RETURN(
      pages_, cuda::DevicePages::Create(config, shape_, plan_, page_memory_.data(), arena,
                                        page_memory_.data() + arena, stream_));
  OSCAR_ASSIGN_OR_RETURN(tables_, cuda::PageTables::Create(config, table_shape_, table_memory_,
                                                           table_updates_, *pages_, stream_));
  if (config.sealer != nullptr) {
    plan_.ReplaceSealer(std::make_unique<cuda::DeviceSealer>(*pages_));
  }
  OSCAR_ASSIGN_OR_RETURN(planner_, cuda::PassPlanner::Create(options_.max_batch_tokens, *tables_,
                                                             *pages_, inputs_, stream_));
  const auto pinned = [&](auto** to) {
    void* memory = nullptr;
    Status status = CudaStatus(
        cudaMallocHost(&memory, static_cast<size_t>(logit_rows_) * sizeof(**to)), "pinned memory");
    *to = static_cast<std::remove_reference_t<decltype(*to)>>(memory);
    return status;
  };
  for (Flight& flight : flights_) {
    OSCAR_RETURN_IF_ERROR(pinned(&flight.ids));
    OSCAR_RETURN_IF_ERROR(pinned(&flight.draws));
    OSCAR_RETURN_IF_ERROR(pinned(&flight.draw_rows));
    OSCAR_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&flight.done, cudaEventDisableTiming),
                                     "creating an event"));
  }
  return {};
}

Status CudaDecoder::Load(const WeightSource& source) {
  OSCAR_ASSIGN_OR_RETURN(device_, FindCudaDevice());
  OSCAR_RETURN_IF_ERROR(CheckCudaPlan(spec_, plan_));
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"));
  fingerprint_ = source.Fingerprint();
  shape_ = ShapeOf(spec_, plan_);
  const CacheConfig& config = plan_.cache();
  positions_ = options_.max_context > 0 ? options_.max_context : spec_.max_positions;
  // Tables hold whatever may run; steps of more than the largest graph take extra launches.
  const int table_rows = std::max(256, 2 * options_.max_sequences);
  options_.max_sequences = cuda::BucketFor(options_.max_sequences);
  options_.max_batch_tokens =
      std::clamp(options_.max_batch_tokens, options_.max_sequences, 1 << 16);
  logit_rows_ = std::max(options_.max_sequences, kMinLogitRows);
  // A step that generates holds at most this much in BF16: see SequenceCache::SealForGeneration.
  const int window =
      config.sealer == nullptr ? 2 * kPageTokens : config.sink + config.recent + 2 * kPageTokens;
  OSCAR_ASSIGN_OR_RETURN(decode_,
                         cuda::DecodeAttention::Create(shape_, options_.max_sequences, window));
  OSCAR_ASSIGN_OR_RETURN(prefill_, cuda::PrefillAttention::Create(shape_));
  if (options_.portable) {
    OSCAR_ASSIGN_OR_RETURN(portable_, cuda::PortablePass::Create(spec_, plan_, shape_, stream_));
  }
  table_shape_ =
      cuda::PageTables::ShapeFor(config, table_rows, positions_, options_.max_batch_tokens);
  OSCAR_RETURN_IF_ERROR(TakeMemory(source));
  OSCAR_RETURN_IF_ERROR(
      cuda::LoadWeights(spec_, plan_, source, positions_, weight_scratch_, stream_, weights_));
  std::unique_ptr<cuda::Blas> blas;
  if (!options_.batch_invariant && !options_.portable) {
    auto loaded = cuda::Blas::Load(blas_workspace_);
    if (loaded.has_value()) {
      blas = std::move(*loaded);
    } else {
      LogWarning("{}: prompts and batches beyond {} rows will be slow", loaded.error().message(),
                 cuda::kSkinnyRows);
    }
  }
  products_ =
      std::make_unique<cuda::Products>(std::move(blas), weight_scratch_, options_.batch_invariant);
  OSCAR_RETURN_IF_ERROR(Warm());
  size_t free = 0, total = 0;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "reading the device's memory"));
  memory_.free = free;
  return {};
}

// Every graph is captured, and what it launches loaded, before the first request. The kernels of
// prompts and seals are loaded by the driver when they are first used, within kReserve.
Status CudaDecoder::Warm() {
  if (portable_ != nullptr) return {};  // its steps are launched one by one
  for (const int bucket : cuda::kBuckets) {
    if (bucket > options_.max_sequences) break;
    OSCAR_ASSIGN_OR_RETURN([[maybe_unused]] const auto graph, GraphFor(bucket));
  }
  return CudaStatus(cudaStreamSynchronize(stream_), "the first step");
}

Result<cudaGraphExec_t> CudaDecoder::GraphFor(int bucket) {
  const auto found = graphs_.find(bucket);
  if (found != graphs_.end()) return found->second;
  OSCAR_ASSIGN_OR_RETURN(const Pass pass, planner_->Padding(bucket));
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
  if (tap) OSCAR_RETURN_IF_ERROR(CheckTapPlan(plan_, spec_.num_layers));
  tap_ = std::move(tap);
  return {};
}

Status CudaDecoder::Prepare(std::span<const ForwardItem> items) {
  CheckItems(items, options_.max_batch_tokens);
  const auto make_room = [&]() -> Status {
    for (const ForwardItem& item : items) {
      SequenceCache& cache = *item.cache;
      const int64_t end = cache.length() + static_cast<int64_t>(item.tokens.size());
      if (end > positions_) {
        return OutOfRange(fmt::format("position {} is beyond the {} that the device was set up for",
                                      end - 1, positions_));
      }
      if (cache.attachment() == nullptr) OSCAR_RETURN_IF_ERROR(cache.SealGaps(threads_));
    }
    return MakeRoom(items, threads_);
  };
  Status status = make_room();
  // What was queued must not meet pages that are freed and given out again.
  if (!status.ok()) OSCAR_RETURN_IF_ERROR(DeviceFailure(pages_->Flush()));
  return status;
}

cuda::CacheView CudaDecoder::ViewOf(int layer) const {
  const PageLayout& open = plan_.cache().open;
  const PageLayout& history = plan_.cache().sealer == nullptr ? open : plan_.cache().sealed;
  cuda::CacheView view = tables_->view();
  view.window_pool = pages_->arena() + open.BlockOffset(layer, 0);
  view.history_pool = pages_->arena() + history.BlockOffset(layer, 0);
  return view;
}

Status CudaDecoder::Attend(const Pass& pass, int layer) {
  const cuda::DeviceLayer& weights = weights_.layers[static_cast<size_t>(layer)];
  const cuda::CacheView view = ViewOf(layer);
  cuda::WriteArguments write;
  write.qkv = qkv_;
  write.qkv_stride = QkvWidth();
  write.positions = pass.positions;
  write.table_rows = pass.table_rows;
  write.cos_sin = weights_.cos_sin;
  write.q_norm = weights.q_norm;
  write.k_norm = weights.k_norm;
  write.norm_epsilon = spec_.norm_eps;
  write.q_scale = QueryScale(spec_.head_dim);
  write.rotation = weights.rotation;
  write.rotation_fragments = weights.rotation_fragments;
  write.rotations = weights.rotations;
  write.q_out = q_;
  write.window_pool = const_cast<std::byte*>(view.window_pool);
  write.cache = view;
  write.tokens = pass.rows;
  OSCAR_RETURN_IF_ERROR(cuda::HasTokenWrite(shape_, weights.rotation)
                            ? cuda::LaunchTokenWrite(shape_, write, stream_)
                            : cuda::WriteTokens(shape_, write, stream_));

  for (int first = 0; first < pass.decodes; first += options_.max_sequences) {
    cuda::DecodeArguments args;
    args.cache = view;
    args.sequences = pass.decode_views + first;
    args.q = q_ + int64_t{first} * QWidth();
    args.out = attended_ + int64_t{first} * QWidth();
    args.softmax_scale = kScaledQuerySoftmax;
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
  args.softmax_scale = kScaledQuerySoftmax;
  args.batch = pass.chunks;
  args.max_query_tokens = pass.longest_chunk;
  return prefill_->Launch(args, stream_);
}

Status CudaDecoder::Project(const cuda::DeviceLayer& layer, int rows) {
  const cuda::NormedInput x = Normed(layer.attention_norm);
  OSCAR_RETURN_IF_ERROR(products_->OfNormed(layer.qkv, x, qkv_, QkvWidth(), rows,
                                            ProductOutput::kFloat, layer.qkv_bias, stream_));
  if (layer.v.outputs == 0) return {};
  const int first = layer.qkv.outputs;
  return products_->OfNormed(layer.v, x, qkv_ + first, QkvWidth(), rows, ProductOutput::kFloat,
                             layer.qkv_bias == nullptr ? nullptr : layer.qkv_bias + first, stream_);
}

Status CudaDecoder::FeedForward(const cuda::DeviceLayer& layer, int rows) {
  const int middle = spec_.intermediate;
  if (products_->TakesSiluMul(layer.gate_up, rows)) {
    OSCAR_RETURN_IF_ERROR(products_->OfNormed(layer.gate_up, Normed(layer.feed_forward_norm),
                                              product_, middle, rows, ProductOutput::kSiluMul,
                                              nullptr, stream_));
  } else {
    OSCAR_ASSIGN_OR_RETURN(const cuda::DeviceMatrix gate_up,
                           products_->Expanded(layer.gate_up, rows, stream_));
    for (int first = 0; first < rows; first += kFeedForwardRows) {
      const int count = std::min(kFeedForwardRows, rows - first);
      OSCAR_RETURN_IF_ERROR(products_->OfNormed(gate_up, Normed(layer.feed_forward_norm, first),
                                                gate_up_, 2 * middle, count, ProductOutput::kFloat,
                                                nullptr, stream_));
      OSCAR_RETURN_IF_ERROR(cuda::LaunchSiluMul(gate_up_, product_ + int64_t{first} * middle, count,
                                                middle, stream_));
    }
  }
  return products_->Of(layer.down, product_, x_, spec_.hidden, rows, ProductOutput::kAdd, nullptr,
                       stream_);
}

Status CudaDecoder::Layers(const Pass& pass, std::span<const ForwardItem> items) {
  const int rows = pass.rows, hidden = spec_.hidden;
  OSCAR_RETURN_IF_ERROR(cuda::LaunchEmbed(pass.tokens, ids_, logit_rows_,
                                          weights_.embedding.weights, x_, rows, hidden,
                                          spec_.vocab_size, stream_));
  for (int i = 0; i < spec_.num_layers; ++i) {
    const cuda::DeviceLayer& layer = weights_.layers[static_cast<size_t>(i)];
    if (portable_ != nullptr) {
      OSCAR_RETURN_IF_ERROR(portable_->Project(layer, weights_.cos_sin, pass, x_));
      if (tap_) OSCAR_RETURN_IF_ERROR(RunTap(i, pass, items));
      OSCAR_RETURN_IF_ERROR(portable_->Finish(layer, ViewOf(i), i, pass, x_));
      continue;
    }
    OSCAR_RETURN_IF_ERROR(Project(layer, rows));
    if (tap_) OSCAR_RETURN_IF_ERROR(RunTap(i, pass, items));
    OSCAR_RETURN_IF_ERROR(Attend(pass, i));
    OSCAR_RETURN_IF_ERROR(products_->Of(layer.o, attended_, x_, hidden, rows, ProductOutput::kAdd,
                                        layer.o_bias, stream_));
    OSCAR_RETURN_IF_ERROR(FeedForward(layer, rows));
  }
  return {};
}

Status CudaDecoder::Logits(const float* x, const int32_t* sources, int rows) {
  if (portable_ != nullptr) return portable_->Logits(weights_, x, sources, rows, logits_);
  OSCAR_RETURN_IF_ERROR(cuda::LaunchNorm(x, weights_.final_norm, spec_.norm_eps, sources, normed_,
                                         rows, spec_.hidden, stream_));
  return products_->Of(weights_.head, normed_, logits_, spec_.vocab_size, rows,
                       ProductOutput::kFloat, nullptr, stream_);
}

Status CudaDecoder::RunTap(int layer, const Pass& pass, std::span<const ForwardItem> items) {
  const cuda::DeviceLayer& weights = weights_.layers[static_cast<size_t>(layer)];
  const auto width = static_cast<size_t>(QkvWidth()), q_width = static_cast<size_t>(QWidth());
  const size_t kv_width = (width - q_width) / 2;
  std::vector<float> host(static_cast<size_t>(pass.rows) * width);
  cuda::TapArguments args;
  args.cos_sin = weights_.cos_sin;
  args.q_norm = weights.q_norm;
  args.k_norm = weights.k_norm;
  args.epsilon = spec_.norm_eps;
  args.out = gate_up_;
  args.heads = spec_.num_heads;
  args.kv_heads = spec_.num_kv_heads;
  args.head_dim = spec_.head_dim;
  const auto at_once = static_cast<int>(std::min<size_t>(gate_up_size_ / width, 1 << 16));
  for (int first = 0; first < pass.rows; first += at_once) {
    const auto at = static_cast<size_t>(first) * width;
    args.qkv = qkv_ + at;
    args.positions = pass.positions + first;
    args.tokens = std::min(at_once, pass.rows - first);
    // A portable pass has turned its q and k in place.
    if (portable_ == nullptr) OSCAR_RETURN_IF_ERROR(cuda::LaunchTap(args, stream_));
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(host.data() + at, portable_ == nullptr ? args.out : args.qkv,
                                   static_cast<size_t>(args.tokens) * width * sizeof(float),
                                   cudaMemcpyDeviceToHost, stream_),
                   "reading the calibration tap"));
  }
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

Status CudaDecoder::Compute(std::span<const ForwardItem> items, PlannedPass* planned) {
  const int largest_bucket = tap_ || portable_ != nullptr ? 0 : options_.max_sequences;
  OSCAR_ASSIGN_OR_RETURN(
      *planned, planner_->Plan(items, largest_bucket, pool_ != nullptr ? pool_->moves() : 0));
  if (!planned->captured) return Layers(planned->pass, items);
  OSCAR_ASSIGN_OR_RETURN(const cudaGraphExec_t graph, GraphFor(planned->pass.rows));
  return CudaStatus(cudaGraphLaunch(graph, stream_), "launching a step");
}

Status CudaDecoder::Forward(std::span<const ForwardItem> items, std::span<float> logits) {
  if (items.empty()) return {};
  OSCAR_CHECK(launched_ == collected_, "a pass while another is under way");
  OSCAR_RETURN_IF_ERROR(Prepare(items));
  OSCAR_RETURN_IF_ERROR(DeviceFailure(ForwardPrepared(items, logits)));
  AdvanceAll(items);
  return {};
}

Status CudaDecoder::ForwardPrepared(std::span<const ForwardItem> items, std::span<float> logits) {
  PlannedPass planned;
  OSCAR_RETURN_IF_ERROR(Compute(items, &planned));
  const auto vocab = static_cast<size_t>(spec_.vocab_size);
  OSCAR_CHECK(logits.size() == planned.num_logits * vocab);
  const auto read = [&](size_t row, size_t to, size_t count) {
    return CudaStatus(
        cudaMemcpyAsync(logits.data() + to * vocab, logits_ + row * vocab,
                        count * vocab * sizeof(float), cudaMemcpyDeviceToHost, stream_),
        "reading logits");
  };
  if (planned.captured) {
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
  if (planned.num_logits == 0) return {};
  return CudaStatus(cudaStreamSynchronize(stream_), "a step");
}

Status CudaDecoder::ForwardAndDraw(std::span<const ForwardItem> items,
                                   std::span<const TokenDraw> draws, std::span<int32_t> ids) {
  if (items.empty()) return {};
  OSCAR_CHECK(launched_ == collected_, "a pass while another is under way");
  OSCAR_RETURN_IF_ERROR(Launch(items, draws));
  return Collect(ids);
}

Status CudaDecoder::Launch(std::span<const ForwardItem> items, std::span<const TokenDraw> draws) {
  OSCAR_CHECK(launched_ - collected_ < kFlights &&
              draws.size() <= static_cast<size_t>(logit_rows_));
  OSCAR_RETURN_IF_ERROR(Prepare(items));
  OSCAR_RETURN_IF_ERROR(DeviceFailure(LaunchPrepared(items, draws)));
  ++launched_;
  AdvanceAll(items);
  return {};
}

Status CudaDecoder::LaunchPrepared(std::span<const ForwardItem> items,
                                   std::span<const TokenDraw> draws) {
  PlannedPass planned;
  OSCAR_RETURN_IF_ERROR(Compute(items, &planned));
  OSCAR_CHECK(planned.num_logits == draws.size());
  const auto count = static_cast<int>(draws.size());
  Flight& flight = flights_[launched_ % kFlights];
  flight.count = draws.size();
  if (count > 0) {
    if (planned.captured) {
      draw_sources_ = planned.logit_of;
    } else {
      OSCAR_RETURN_IF_ERROR(Logits(x_, planned.pass.logit_rows, count));
      draw_sources_.resize(draws.size());
      for (size_t i = 0; i < draws.size(); ++i) draw_sources_[i] = static_cast<int32_t>(i);
    }
    std::ranges::copy(draws, flight.draws);
    std::ranges::copy(draw_sources_, flight.draw_rows);
    OSCAR_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(draws_, flight.draws, draws.size_bytes(), cudaMemcpyHostToDevice, stream_),
        "sending draws"));
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(draw_rows_, flight.draw_rows, flight.count * sizeof(int32_t),
                                   cudaMemcpyHostToDevice, stream_),
                   "sending draws"));
    OSCAR_RETURN_IF_ERROR(
        cuda::LaunchDraw(logits_, draw_rows_, draws_, ids_, count, spec_.vocab_size, stream_));
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(flight.ids, ids_, flight.count * sizeof(int32_t),
                                   cudaMemcpyDeviceToHost, stream_),
                   "reading tokens"));
  }
  return CudaStatus(cudaEventRecord(flight.done, stream_), "recording an event");
}

Status CudaDecoder::Collect(std::span<int32_t> ids) {
  OSCAR_CHECK(collected_ < launched_);
  const Flight& flight = flights_[collected_++ % kFlights];
  OSCAR_CHECK(ids.size() == flight.count);
  OSCAR_RETURN_IF_ERROR(DeviceFailure(CudaStatus(cudaEventSynchronize(flight.done), "a step")));
  std::copy_n(flight.ids, flight.count, ids.begin());
  return {};
}

Status CudaDecoder::ReadLogits(size_t row, std::span<float> logits) {
  const auto vocab = static_cast<size_t>(spec_.vocab_size);
  OSCAR_CHECK(row < draw_sources_.size() && logits.size() == vocab);
  const Status asked = CudaStatus(
      cudaMemcpyAsync(logits.data(), logits_ + static_cast<size_t>(draw_sources_[row]) * vocab,
                      logits.size_bytes(), cudaMemcpyDeviceToHost, stream_),
      "reading logits");
  OSCAR_RETURN_IF_ERROR(DeviceFailure(asked));
  return DeviceFailure(CudaStatus(cudaStreamSynchronize(stream_), "reading logits"));
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
    status = cuda::LaunchRead(data, bytes, reinterpret_cast<uint32_t*>(ids_), stream_);
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

Result<std::unique_ptr<CudaModel>> LoadCudaModel(const ModelSpec& spec, const WeightSource& source,
                                                 KvPlan& plan, ThreadPool& threads,
                                                 const CudaModelOptions& options) {
  auto model = std::make_unique<CudaDecoder>(spec, plan, threads, options);
  OSCAR_RETURN_IF_ERROR(model->Load(source));
  return model;
}

}  // namespace oscar
