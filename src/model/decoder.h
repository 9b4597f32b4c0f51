// Decoder: the forward pass, once, over a backend's operations. What order things come in is
// decided here: layers, recorded steps, cells read layer by layer, passes that are left running,
// and the calibration tap.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "model/model.h"
#include "oscar/status.h"

namespace oscar {

class Decoder final : public Model {
 public:
  // Records the steps of generated tokens where the backend can.
  static Result<std::unique_ptr<Decoder>> Make(std::unique_ptr<Backend> backend);
  ~Decoder() override;

  Backend& backend() { return *backend_; }
  const Backend& backend() const { return *backend_; }

  const ModelSpec& spec() const override { return backend_->spec(); }
  const KvPlan& kv() const override { return backend_->kv(); }
  uint64_t weight_bytes() const override { return backend_->weight_bytes(); }
  uint64_t weight_bytes_per_step() const override { return backend_->weight_bytes_per_step(); }
  uint64_t fingerprint() const override { return backend_->fingerprint(); }
  bool portable() const override { return backend_->portable(); }
  int max_batch_tokens() const override { return backend_->max_batch_tokens(); }
  int max_samples() const override {
    return backend_->CanSample() ? backend_->max_logit_rows() : 0;
  }
  Status SetTap(QkvTap tap) override;
  Status Forward(std::span<const ForwardItem> items, std::span<float> logits) override;
  Status ForwardAndSample(std::span<const ForwardItem> items,
                          std::span<const SampleParams> sampling, std::span<int32_t> ids,
                          const BeforeSample& before_sample = {}) override;
  Status ReadLogits(size_t row, std::span<float> logits) override;
  // What a pass too many does to a state cannot be undone.
  bool CanRunAhead() const override {
    return backend_->CanSample() && spec().linear_attention() == nullptr;
  }
  Status Launch(std::span<const ForwardItem> items, std::span<const SampleParams> sampling,
                const BeforeSample& before_sample = {}) override;
  Status Collect(std::span<int32_t> ids) override;
  bool CanReadByLayer() const override { return backend_->CanReadByLayer(); }
  Result<std::unique_ptr<CellRead>> StartCell(SequenceCache& cache,
                                              std::span<const int32_t> tokens) override;
  Result<bool> ContinueCell(CellRead& read, int64_t row_layers, std::span<float> logits) override;

 private:
  explicit Decoder(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}

  Status Record(int rows);
  // Room for the items; kResourceExhausted only from here.
  Status Prepare(std::span<const ForwardItem> items);
  Status Layer(int index, std::span<const ForwardItem> items);
  Status Layers(std::span<const ForwardItem> items);
  // All layers over the items; true: as a recorded step, whose logits are those of all rows.
  Result<bool> Run(std::span<const ForwardItem> items);
  Status RunAndRead(std::span<const ForwardItem> items, std::span<float> logits);
  Status RunAndSample(std::span<const ForwardItem> items, std::span<const SampleParams> sampling,
                      const BeforeSample& before_sample);
  Status ReportTap(int layer, std::span<const ForwardItem> items);

  std::unique_ptr<Backend> backend_;
  std::map<int, std::unique_ptr<Recording>> steps_;  // by rows
  QkvTap tap_;
  uint64_t launched_ = 0, collected_ = 0;  // passes
  std::vector<int32_t> sampled_rows_;      // of the last pass: row of the logits, by sample
};

}  // namespace oscar
