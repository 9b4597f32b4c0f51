#include "cuda/device_backend.h"

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/progress.h"
#include "cuda/attention/head_blocks.h"
#include "cuda/cuda_backend.h"
#include "cuda/device/cuda_status.h"
#include "cuda/gemm/blas.h"
#include "cuda/sample/sample_kernels.h"
#include "cuda/step_kernels.h"

namespace oscar::cuda {
namespace {

// Left to the driver, to code and to graphs when the page arena takes the rest.
constexpr uint64_t kReserve = uint64_t{1} << 30;
constexpr int kMinLogitRows = 64;
constexpr int kDefaultBatchTokens = 4096;
constexpr int kLeastTileRows = 8;  // of experts

// A layer whose keys are not rows, or -1. All of them have one layout: methods that have them give
// every head the same bits.
int FormSlot(const PageLayout& page) {
  for (int slot = 0; slot < page.num_layers(); ++slot) {
    if (page.Holds(slot) && !page.block(slot, 0).is_rows()) return slot;
  }
  return -1;
}

// Of the layers whose heads are alike, which is one kind: the plan's methods give layers different
// ones by a bit map alone, and then only those of 2 bits count as alike.
AttentionShape ShapeOf(const AttentionSpec& attention, const KvPlan& plan) {
  AttentionShape shape;
  const PageLayout& page = plan.cache().sealed;
  int slot = 0;
  while (!page.Holds(slot)) ++slot;
  const BlockLayout& sealed = page.block(slot, 0);
  // Beside keys that are not rows there are layers in BF16 alone.
  const bool plain = !plan.cache().seals() || FormSlot(page) >= 0;
  shape.history_kind = plain               ? BlockKind::kBf16
                       : page.is_uniform() ? sealed.kind()
                                           : BlockKind::kInt2;
  shape.head_dim = attention.head_dim;
  shape.group_dims =
      shape.history_kind == BlockKind::kBf16 ? attention.head_dim : sealed.group_dims();
  shape.num_q_heads = attention.num_heads;
  shape.num_kv_heads = attention.num_kv_heads;
  shape.has_sinks = attention.has_sinks;
  return shape;
}

// A captured CUDA graph.
class Graph : public Recording {
 public:
  explicit Graph(cudaGraphExec_t graph) : graph_(graph) {}
  ~Graph() override { cudaGraphExecDestroy(graph_); }
  cudaGraphExec_t get() const { return graph_; }

 private:
  cudaGraphExec_t graph_;
};

}  // namespace

DeviceBackend::~DeviceBackend() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  planner_.reset();
  tables_.reset();
  pages_.reset();
  for (Flight& flight : flights_) {
    cudaFreeHost(flight.ids);
    cudaFreeHost(flight.sampling);
    cudaFreeHost(flight.sample_rows);
    cudaFreeHost(flight.masks);
    if (flight.done != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(flight.done));
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void DeviceBackend::CarveWork(DeviceCarver& carver) {
  const auto rows = static_cast<size_t>(options_.max_batch_tokens);
  const auto logit_rows = static_cast<size_t>(logit_rows_);
  const auto qkv_width = static_cast<size_t>(attention_.qkv_width());
  const auto middle = static_cast<size_t>(spec_.max_intermediate());
  x_ = carver.Take<float>(rows * static_cast<size_t>(spec_.hidden));
  qkv_ = carver.Take<float>(rows * MixerInputs());
  // The calibration tap uses it too, a few rows at a time.
  gate_up_size_ = std::max(std::min<size_t>(rows, kFeedForwardRows) * 2 * middle, qkv_width);
  gate_up_ = carver.Take<float>(gate_up_size_);
  if (attention_.qk_norm == QkNorm::kAllHeads) head_factors_ = carver.Take<float>(rows * 2);
  CarveExperts(carver, rows);
  CarveActivations(carver, rows, logit_rows);
  logits_ = carver.Take<float>(logit_rows * static_cast<size_t>(spec_.vocab_size));
  inputs_ = carver.Take<std::byte>(PassPlanner::InputBytes(options_.max_batch_tokens));
  ids_ = carver.Take<int32_t>(logit_rows);
  sampling_ = carver.Take<SampleParams>(logit_rows);
  sample_rows_ = carver.Take<int32_t>(logit_rows);
  masks_ = carver.Take<uint32_t>(logit_rows * mask_words());
  attention_workspace_ = carver.Take<std::byte>(AttentionWorkspace());
  blas_workspace_ = carver.Take<std::byte>(Blas::kWorkspaceBytes);
  weight_scratch_ = carver.Take<Bf16>(weights_.largest_fp8);
  table_memory_ = carver.Take<int32_t>(table_shape_.bytes() / sizeof(int32_t));
  table_updates_ = carver.Take<TableUpdate>(PageTables::kStaged);
}

void DeviceBackend::CarveExperts(DeviceCarver& carver, size_t rows) {
  size_t most = 0, choices = 0, tiles = 0;
  for (const LayerSpec& layer : spec_.layers) {
    const ExpertsSpec* experts = layer.experts();
    if (experts == nullptr) continue;
    most = std::max(most, static_cast<size_t>(experts->num_experts));
    choices = std::max(choices, static_cast<size_t>(experts->experts_per_token));
    tiles = std::max(
        tiles, static_cast<size_t>(MaxTiles(static_cast<int>(rows) * experts->experts_per_token,
                                            experts->num_experts, kLeastTileRows)));
  }
  if (most == 0) return;
  expert_pairs_ = rows * choices;
  router_logits_ = carver.Take<float>(rows * most);
  routing_.experts = carver.Take<int32_t>(expert_pairs_);
  routing_.weights = carver.Take<float>(expert_pairs_);
  routing_.places = carver.Take<int32_t>(expert_pairs_);
  routing_.rows = carver.Take<int32_t>(expert_pairs_);
  routing_.tiles = carver.Take<ExpertTile>(tiles);
  routing_.num_tiles = carver.Take<int32_t>(1);
  expert_outputs_ = carver.Take<float>(expert_pairs_ * static_cast<size_t>(spec_.hidden));
  expert_counts_ = carver.Take<ExpertCounts>(spec_.layers.size());
  expert_arrivals_ = carver.Take<int32_t>(static_cast<size_t>(ArrivalCounters(spec_.hidden)));
}

size_t DeviceBackend::MixerInputs() const {
  const LinearAttentionSpec* linear = spec_.linear_attention();
  return static_cast<size_t>(
      std::max(attention_.qkv_width(), linear != nullptr ? linear->input_width() : 0));
}

size_t DeviceBackend::MixerOutputs() const {
  const LinearAttentionSpec* linear = spec_.linear_attention();
  return static_cast<size_t>(
      std::max(attention_.q_width(), linear != nullptr ? linear->value_width() : 0));
}

StateArguments DeviceBackend::StatesOf(int index, int slot) const {
  StateArguments args;
  args.spec = *spec_.layer(index).linear_attention();
  args.weights = layer(index).state;
  args.norm_epsilon = spec_.norm_eps;
  args.inputs = qkv_;
  args.arena = pages_->arena();
  args.place_bytes = DevicePages::kUnit;
  args.layer_offset = static_cast<int64_t>(slot) * static_cast<int64_t>(args.spec.state_bytes());
  return args;
}

ExpertTraffic DeviceBackend::expert_traffic() const {
  ExpertTraffic traffic;
  if (expert_counts_ == nullptr) return traffic;
  std::vector<ExpertCounts> counts(spec_.layers.size());
  const cudaError_t read = cudaStreamSynchronize(stream_);
  if (read != cudaSuccess ||
      cudaMemcpy(counts.data(), expert_counts_, counts.size() * sizeof(ExpertCounts),
                 cudaMemcpyDeviceToHost) != cudaSuccess) {
    return traffic;  // what failed is told by the pass
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    traffic.layers += counts[i].runs;
    traffic.experts += counts[i].touched;
    traffic.bytes += counts[i].touched * weights_.layers[i].experts.bytes_each;
  }
  return traffic;
}

size_t DeviceBackend::AttentionWorkspace() const {
  size_t bytes = 0;
  for (const auto& decode : {decode_, mixed_decode_, windowed_decode_, form_decode_}) {
    if (decode.has_value()) bytes = std::max(bytes, decode->workspace_bytes());
  }
  return bytes;
}

Status DeviceBackend::TakeMemory(const WeightSource& source) {
  const CacheConfig& config = plan_.cache();
  const PageArena::Sizes sizes = DevicePages::SizesOf(config);
  DeviceCarver count_weights(nullptr), count_work(nullptr);
  OSCAR_ASSIGN_OR_RETURN(
      weights_, CarveWeights(spec_, plan_, source, positions_, options_.portable, count_weights));
  CarveWork(count_work);
  const uint64_t work = count_work.used(), scratch = DevicePages::ScratchBytes(config);
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
  const uint64_t least = config.open.bytes() + config.state.bytes();
  if (arena > room || sizes.BudgetOf(arena) < least) {
    return ResourceExhausted(fmt::format(
        "{} has {} free; weights take {}, activations and workspaces {}, {} stay in reserve, and "
        "the cache wants {}: lower --kv-memory, --max-model-len or --chunk, or use --device cpu",
        device_.name, FormatBytes(free), FormatBytes(memory_.weights),
        FormatBytes(memory_.activations), FormatBytes(kReserve),
        FormatBytes(std::max<uint64_t>(arena, least))));
  }
  memory_.pages = arena;
  OSCAR_ASSIGN_OR_RETURN(weight_memory_, DeviceBuffer<std::byte>::Allocate(memory_.weights));
  OSCAR_ASSIGN_OR_RETURN(work_memory_, DeviceBuffer<std::byte>::Allocate(work));
  OSCAR_ASSIGN_OR_RETURN(page_memory_, DeviceBuffer<std::byte>::Allocate(arena + scratch));
  DeviceCarver carve_weights(weight_memory_.data()), carve_work(work_memory_.data());
  OSCAR_ASSIGN_OR_RETURN(
      weights_, CarveWeights(spec_, plan_, source, positions_, options_.portable, carve_weights));
  CarveWork(carve_work);
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(attention_workspace_, 0, AttentionWorkspace(), stream_),
                 "clearing the attention workspace"));
  if (expert_counts_ != nullptr) {
    OSCAR_RETURN_IF_ERROR(CudaStatus(
        cudaMemsetAsync(expert_counts_, 0, spec_.layers.size() * sizeof(ExpertCounts), stream_),
        "clearing the counts of experts"));
    OSCAR_RETURN_IF_ERROR(CudaStatus(
        cudaMemsetAsync(expert_arrivals_, 0,
                        static_cast<size_t>(ArrivalCounters(spec_.hidden)) * sizeof(int32_t),
                        stream_),
        "clearing the counts of experts"));
  }
  OSCAR_ASSIGN_OR_RETURN(pages_, DevicePages::Create(config, shape_, plan_, page_memory_.data(),
                                                     arena, page_memory_.data() + arena, stream_));
  OSCAR_ASSIGN_OR_RETURN(tables_, PageTables::Create(config, table_shape_, table_memory_,
                                                     table_updates_, *pages_, stream_));
  OSCAR_ASSIGN_OR_RETURN(planner_, PassPlanner::Create(options_.max_batch_tokens, *tables_, *pages_,
                                                       inputs_, stream_));
  const auto pinned = [&](auto** to, size_t per_row = 1) {
    void* memory = nullptr;
    Status status = CudaStatus(
        cudaMallocHost(&memory, static_cast<size_t>(logit_rows_) * per_row * sizeof(**to)),
        "pinned memory");
    *to = static_cast<std::remove_reference_t<decltype(*to)>>(memory);
    return status;
  };
  for (Flight& flight : flights_) {
    OSCAR_RETURN_IF_ERROR(pinned(&flight.ids));
    OSCAR_RETURN_IF_ERROR(pinned(&flight.sampling));
    OSCAR_RETURN_IF_ERROR(pinned(&flight.sample_rows));
    OSCAR_RETURN_IF_ERROR(pinned(&flight.masks, mask_words()));
    cudaEvent_t done = nullptr;
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "creating an event"));
    flight.done = done;
  }
  return {};
}

Status DeviceBackend::Load(const WeightSource& source) {
  OSCAR_ASSIGN_OR_RETURN(device_, FindCudaDevice());
  OSCAR_RETURN_IF_ERROR(CheckCudaPlan(spec_, plan_));
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"));
  OSCAR_RETURN_IF_ERROR(CheckTensors(source, TensorTable(spec_)));
  fingerprint_ = source.Fingerprint();
  shape_ = ShapeOf(attention_, plan_);
  const CacheConfig& config = plan_.cache();
  positions_ = options_.max_context > 0 ? options_.max_context : spec_.max_positions;
  // Tables hold whatever may run; steps of more than the largest recorded one take extra launches.
  const int table_rows = std::max(256, 2 * options_.max_sequences);
  options_.max_sequences = StepRows(options_.max_sequences);
  options_.max_batch_tokens =
      std::clamp(options_.max_batch_tokens > 0 ? options_.max_batch_tokens : kDefaultBatchTokens,
                 options_.max_sequences, 1 << 16);
  logit_rows_ = std::max(options_.max_sequences, kMinLogitRows);
  // A step that generates holds at most this much in BF16: see SequenceCache::SealForGeneration.
  const int window =
      !config.seals() ? 2 * kPageTokens : config.sink + config.recent + 2 * kPageTokens;
  const PageLayout& sealed = config.sealed;
  bool has_uniform = false;
  for (int slot = 0; slot < sealed.num_layers(); ++slot) {
    const bool is_form = config.seals() && sealed.Holds(slot) && !sealed.block(slot, 0).is_rows();
    is_form_.push_back(is_form);
    if (is_form || IsWindowed(slot)) {
      heads_.emplace_back();
      continue;
    }
    const bool alike = !config.seals() || (IsUniformLayer(sealed, slot) &&
                                           sealed.block(slot, 0).kind() == shape_.history_kind);
    heads_.push_back(alike ? HeadBlocks() : HeadBlocksOf(sealed, slot));
    if (!alike) mixed_layers_.push_back(heads_.back());
    has_uniform = has_uniform || alike;
  }
  if (has_uniform) {
    OSCAR_ASSIGN_OR_RETURN(decode_,
                           DecodeAttention::Create(shape_, options_.max_sequences, window));
  }
  if (!mixed_layers_.empty()) {
    OSCAR_ASSIGN_OR_RETURN(mixed_decode_, DecodeAttention::Create(shape_, options_.max_sequences,
                                                                  window, mixed_layers_));
  }
  if (config.window > 0) {
    windowed_shape_ = shape_;
    windowed_shape_.history_kind = BlockKind::kBf16;
    windowed_shape_.group_dims = shape_.head_dim;
    windowed_shape_.sliding_window = static_cast<int>(config.window);
    OSCAR_ASSIGN_OR_RETURN(windowed_decode_,
                           DecodeAttention::Create(windowed_shape_, options_.max_sequences,
                                                   windowed_shape_.sliding_window));
  }
  if (const int slot = config.seals() ? FormSlot(sealed) : -1; slot >= 0) {
    form_shape_ = shape_;
    form_shape_.form = FormBlocks{sealed.block(slot, 0)};
    if (sealed.has_norms(slot)) {
      form_shape_.form->norm_offset =
          static_cast<uint32_t>(sealed.NormOffset(slot) - sealed.BlockOffset(slot, 0));
    }
    OSCAR_ASSIGN_OR_RETURN(form_decode_,
                           DecodeAttention::Create(form_shape_, options_.max_sequences, window));
  }
  OSCAR_RETURN_IF_ERROR(CreateKernels());
  table_shape_ = PageTables::ShapeFor(config, table_rows, positions_, options_.max_batch_tokens);
  OSCAR_RETURN_IF_ERROR(TakeMemory(source));
  OSCAR_RETURN_IF_ERROR(LoadWeights(spec_, plan_, source, positions_, options_.portable,
                                    weight_scratch_, stream_, weights_));
  return FinishLoading();
}

std::optional<DeviceMemory> DeviceBackend::device_memory() const {
  DeviceMemory memory = memory_;
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) memory.free = free;
  return memory;
}

Status DeviceBackend::Admit(SequenceCache& cache) {
  // Attention wants the history in one piece.
  return cache.attachment() == nullptr ? cache.SealGaps(threads_) : Status();
}

Status DeviceBackend::BeginPass(std::span<const ForwardItem> items, int padded) {
  OSCAR_ASSIGN_OR_RETURN(pass_,
                         items.empty() ? planner_->Padding(padded) : planner_->Plan(items, padded));
  return {};
}

Status DeviceBackend::Embed() {
  return LaunchEmbed(pass_.tokens, ids_, logit_rows_, weights_.embedding.weights, x_, pass_.rows,
                     spec_.hidden, spec_.vocab_size, stream_);
}

CacheView DeviceBackend::ViewOf(int slot) const {
  const PageLayout& open = plan_.cache().open;
  const PageLayout& history = plan_.cache().seals() ? plan_.cache().sealed : open;
  CacheView view = tables_->view();
  view.window_pool = pages_->arena() + open.BlockOffset(slot, 0);
  view.history_pool = pages_->arena() + history.BlockOffset(slot, 0);
  return view;
}

Status DeviceBackend::Fetch(float* to, const float* from, size_t count, const char* what) const {
  return CudaStatus(
      cudaMemcpyAsync(to, from, count * sizeof(float), cudaMemcpyDeviceToHost, stream_), what);
}

Status DeviceBackend::Logits(int first, int count, float* out) {
  OSCAR_RETURN_IF_ERROR(
      NormAndHead(pass_.logit_rows == nullptr ? nullptr : pass_.logit_rows + first, count));
  return out == nullptr ? Status() : ReadLogits(0, count, out);
}

Status DeviceBackend::ReadLogits(int row, int count, float* out) {
  const auto vocab = static_cast<size_t>(spec_.vocab_size);
  return Fetch(out, logits_ + static_cast<size_t>(row) * vocab, static_cast<size_t>(count) * vocab,
               "reading logits");
}

Status DeviceBackend::Synchronize() { return CudaStatus(cudaStreamSynchronize(stream_), "a step"); }

Status DeviceBackend::Sample(int flight_index, std::span<const SampleParams> sampling,
                             std::span<const int32_t> rows) {
  Flight& flight = flights_[flight_index];
  flight.count = sampling.size();
  if (!sampling.empty()) {
    std::ranges::copy(sampling, flight.sampling);
    std::ranges::copy(rows, flight.sample_rows);
    // Masked rows come one after another, whichever rows they are.
    size_t masked = 0;
    for (size_t i = 0; i < sampling.size(); ++i) {
      if (sampling[i].mask == nullptr) continue;
      const size_t at = masked++ * mask_words();
      std::copy_n(sampling[i].mask, mask_words(), flight.masks + at);
      flight.sampling[i].mask = masks_ + at;
    }
    if (masked > 0) {
      OSCAR_RETURN_IF_ERROR(
          CudaStatus(cudaMemcpyAsync(masks_, flight.masks, masked * mask_words() * sizeof(uint32_t),
                                     cudaMemcpyHostToDevice, stream_),
                     "sending masks"));
    }
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(sampling_, flight.sampling, sampling.size_bytes(),
                                   cudaMemcpyHostToDevice, stream_),
                   "sending sampling"));
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(sample_rows_, flight.sample_rows, flight.count * sizeof(int32_t),
                                   cudaMemcpyHostToDevice, stream_),
                   "sending sampling"));
    OSCAR_RETURN_IF_ERROR(LaunchSample(logits_, sample_rows_, sampling_, ids_,
                                       static_cast<int>(sampling.size()), spec_.vocab_size,
                                       stream_));
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(flight.ids, ids_, flight.count * sizeof(int32_t),
                                   cudaMemcpyDeviceToHost, stream_),
                   "reading tokens"));
  }
  return CudaStatus(cudaEventRecord(static_cast<cudaEvent_t>(flight.done), stream_),
                    "recording an event");
}

Status DeviceBackend::Await(int flight_index, std::span<int32_t> ids) {
  const Flight& flight = flights_[flight_index];
  OSCAR_CHECK(ids.size() == flight.count);
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaEventSynchronize(static_cast<cudaEvent_t>(flight.done)), "a step"));
  std::copy_n(flight.ids, flight.count, ids.begin());
  return {};
}

Status DeviceBackend::BeginRecording() {
  return CudaStatus(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
                    "capturing a step");
}

Result<std::unique_ptr<Recording>> DeviceBackend::EndRecording() {
  cudaGraph_t graph = nullptr;
  Status status = CudaStatus(cudaStreamEndCapture(stream_, &graph), "capturing a step");
  cudaGraphExec_t executable = nullptr;
  if (status.ok()) {
    status = CudaStatus(cudaGraphInstantiate(&executable, graph, 0), "instantiating a step");
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  OSCAR_RETURN_IF_ERROR(status);
  return std::make_unique<Graph>(executable);
}

Status DeviceBackend::Replay(const Recording& recording) {
  return CudaStatus(cudaGraphLaunch(static_cast<const Graph&>(recording).get(), stream_),
                    "launching a step");
}

Result<double> DeviceBackend::MeasureReadBandwidth() {
  constexpr int kRepetitions = 5;
  // Both exceed the L2; read the larger.
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
    status = LaunchRead(data, bytes, reinterpret_cast<uint32_t*>(ids_), stream_);
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

}  // namespace oscar::cuda
