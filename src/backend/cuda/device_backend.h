// DeviceBackend: what the forms of the CUDA backend share: the device's memory, the plan of a pass,
// sampling and recorded steps. How rows are multiplied, written and attended to is theirs:
// CudaBackend (tensor cores, cuda_backend.cc) and PortableBackend (the CPU's order of sums,
// portable/portable_backend.cc).
//
// Owns the pages' memory: pool and sequences must go before it. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/device_info.h"
#include "cuda/attention/cache_view.h"
#include "cuda/attention/decode_attention.h"
#include "cuda/device/device_buffer.h"
#include "cuda/device_weights.h"
#include "cuda/experts/routing.h"
#include "cuda/kv/device_pages.h"
#include "cuda/kv/page_tables.h"
#include "cuda/linear_attention/linear_attention.h"
#include "cuda/pass_plan.h"
#include "oscar/status.h"

namespace oscar::cuda {

// Rows whose gates and ups are computed at once: they are fp32 and the largest of the activations.
inline constexpr int kFeedForwardRows = 2048;

class DeviceBackend : public Backend {
 public:
  DeviceBackend(const ModelSpec& spec, const KvPlan& plan, ThreadPool& threads,
                const BackendOptions& options)
      : Backend(spec, plan, threads), attention_(spec_.attention()), options_(options) {}
  ~DeviceBackend() override;

  Status Load(const WeightSource& source);

  uint64_t weight_bytes() const override { return weights_.matrix_bytes; }
  uint64_t weight_bytes_per_step() const override { return weights_.bytes_per_step; }
  // Waits for the device.
  ExpertTraffic expert_traffic() const override;
  uint64_t fingerprint() const override { return fingerprint_; }
  bool portable() const override { return options_.portable; }
  int max_batch_tokens() const override { return options_.max_batch_tokens; }
  int64_t max_positions() const override { return positions_; }

  PageMemory* page_memory() override { return pages_.get(); }
  uint64_t page_budget() const override { return pages_->budget(); }
  std::optional<DeviceMemory> device_memory() const override;
  Status Admit(SequenceCache& cache) override;
  Status FlushPages() override { return pages_->Flush(); }
  Result<uint64_t> Saturated() override { return pages_->Saturated(); }
  Result<double> MeasureReadBandwidth() override;

  Status BeginPass(std::span<const ForwardItem> items, int padded) override;
  Status Embed() override;
  Status Logits(int first, int count, float* out) override;
  int max_logit_rows() const override { return logit_rows_; }
  Status Synchronize() override;

  bool CanSample() const override { return true; }
  Status Sample(int flight, std::span<const SampleParams> sampling,
                std::span<const int32_t> rows) override;
  Status Await(int flight, std::span<int32_t> ids) override;
  Status ReadLogits(int row, int count, float* out) override;

  Status BeginRecording() override;
  Result<std::unique_ptr<Recording>> EndRecording() override;
  Status Replay(const Recording& recording) override;

 protected:
  // What a form needs beside the members below: kernels, then activations for `rows` rows of a pass
  // and `logit_rows` of logits, then what wants both.
  virtual Status CreateKernels() = 0;
  virtual void CarveActivations(DeviceCarver& carver, size_t rows, size_t logit_rows) = 0;
  virtual Status FinishLoading() { return {}; }
  // Final norm and head of rows `sources` of the stream (null: the first ones), to logits_.
  virtual Status NormAndHead(const int32_t* sources, int rows) = 0;

  const DeviceLayer& layer(int index) const { return weights_.layers[static_cast<size_t>(index)]; }
  // Where a layer's blocks lie.
  CacheView ViewOf(int slot) const;
  // Layers whose heads differ in bits have kernels apart from those whose heads are alike.
  bool IsMixed(int slot) const { return !heads_[static_cast<size_t>(slot)].empty(); }
  // So have those whose keys are not rows.
  bool IsForm(int slot) const { return is_form_[static_cast<size_t>(slot)]; }
  std::span<const HeadBlock> HeadsOf(int slot) const { return heads_[static_cast<size_t>(slot)]; }
  // Layers with a sliding window, whose sealed pages hold nothing of them, have theirs, too.
  bool IsWindowed(int slot) const { return !plan_.cache().sealed.Holds(slot); }
  const DecodeAttention& DecodeOf(int slot) const {
    return IsWindowed(slot) ? *windowed_decode_
           : IsForm(slot)   ? *form_decode_
           : IsMixed(slot)  ? *mixed_decode_
                            : *decode_;
  }
  // Widths of rows of kQkv and kAttended, attention's and linear attention's.
  size_t MixerInputs() const;
  size_t MixerOutputs() const;
  // Of a layer's states, but for who takes part: StateArguments::states, chunks and batch.
  StateArguments StatesOf(int index, int slot) const;
  // Floats of the device to the host.
  Status Fetch(float* to, const float* from, size_t count, const char* what) const;

  const AttentionSpec attention_;
  BackendOptions options_;
  Stream stream_ = nullptr;
  AttentionShape shape_;           // of layers that see all tokens
  AttentionShape windowed_shape_;  // of those with a sliding window, where there are any
  AttentionShape form_shape_;      // of those whose keys are not rows, where there are any
  DeviceWeights weights_;
  Pass pass_;
  int logit_rows_ = 0;
  // In work_memory_.
  float* x_ = nullptr;        // [rows, hidden]
  float* qkv_ = nullptr;      // [rows, MixerInputs()]
  float* gate_up_ = nullptr;  // [gate_up_size_]: at most kFeedForwardRows of 2 intermediate
  size_t gate_up_size_ = 0;
  float* head_factors_ = nullptr;  // [rows, 2], where q and k are normed over all heads
  // Where a layer has experts: of its rows' choices, and what experts make of rows, by place.
  Routing routing_;
  float* router_logits_ = nullptr;         // [rows, experts]
  float* expert_outputs_ = nullptr;        // [expert_pairs_, hidden]
  ExpertCounts* expert_counts_ = nullptr;  // [layers]
  int32_t* expert_arrivals_ = nullptr;      // ArrivalCounters
  size_t expert_pairs_ = 0;                // rows times choices
  float* logits_ = nullptr;                // [logit_rows_, vocab]
  Bf16* weight_scratch_ = nullptr;         // [weights_.largest_fp8]
  void* attention_workspace_ = nullptr;
  void* blas_workspace_ = nullptr;
  // None: no layer is like that.
  std::optional<DecodeAttention> decode_, mixed_decode_, windowed_decode_, form_decode_;
  std::vector<bool> is_form_;             // [slots]
  std::vector<HeadBlocks> heads_;         // [slots]; empty: alike
  std::vector<HeadBlocks> mixed_layers_;  // those of heads_ that are not empty

 private:
  // A pass that was launched, from its end on the device to Await.
  struct Flight {
    int32_t* ids = nullptr;            // pinned, [logit_rows_]
    SampleParams* sampling = nullptr;  // pinned, [logit_rows_]
    int32_t* sample_rows = nullptr;    // pinned, [logit_rows_]
    uint32_t* masks = nullptr;         // pinned, [logit_rows_, mask_words()]
    void* done = nullptr;              // event
    size_t count = 0;
  };

  size_t mask_words() const { return (static_cast<size_t>(spec_.vocab_size) + 31) / 32; }
  void CarveWork(DeviceCarver& carver);
  void CarveExperts(DeviceCarver& carver, size_t rows);
  size_t AttentionWorkspace() const;
  Status TakeMemory(const WeightSource& source);

  DeviceInfo device_;
  DeviceMemory memory_;
  uint64_t fingerprint_ = 0;
  int64_t positions_ = 0;
  PageTables::Shape table_shape_;
  DeviceBuffer<std::byte> weight_memory_, work_memory_, page_memory_;
  std::unique_ptr<DevicePages> pages_;
  std::unique_ptr<PageTables> tables_;
  std::unique_ptr<PassPlanner> planner_;
  Flight flights_[kFlights];
  std::byte* inputs_ = nullptr;
  int32_t* ids_ = nullptr;                // [logit_rows_]
  SampleParams* sampling_ = nullptr;      // [logit_rows_]
  int32_t* sample_rows_ = nullptr;        // [logit_rows_]
  uint32_t* masks_ = nullptr;             // [logit_rows_, mask_words()]
  TableUpdate* table_updates_ = nullptr;  // [PageTables::kStaged]
  int32_t* table_memory_ = nullptr;
};

std::unique_ptr<DeviceBackend> NewPortableBackend(const ModelSpec& spec, const KvPlan& plan,
                                                  ThreadPool& threads,
                                                  const BackendOptions& options);

}  // namespace oscar::cuda
