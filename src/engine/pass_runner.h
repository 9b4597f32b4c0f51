// PassRunner: passes of a model that end in sampled tokens. Tokens are sampled on the model's
// device where that can be done there; of the other rows the logits are fetched, to sample from
// here. A pass of generated tokens alone may be left running (Model::CanRunAhead), and the next one
// be launched, on the tokens that it will give, before it is waited for. One caller thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "cache/sequence_cache.h"
#include "engine/sampler.h"
#include "model/model.h"
#include "oscar/status.h"

namespace oscar {

class PassRunner {
 public:
  explicit PassRunner(Model& model) : model_(model) {}

  // Runs a pass. `sampling`, one per item or none at all: how the device may sample the token after
  // the item; unset where its logits are needed here, or where it has none. Leaves the pass running
  // where its rows are all generated tokens that the device is sure to decide on: Land ends it. As
  // Model::Forward, an error leaves the caches as they were. `fill_masks`, where given, fills those
  // that `sampling` points to, while the device is at work; it is not called where nothing is
  // sampled there.
  Status Run(std::span<const ForwardItem> items,
             std::span<const std::optional<SampleParams>> sampling = {},
             const Model::BeforeSample& fill_masks = {});
  // A step of a cell that is read by layer, after Run, as one more row of that pass. True when all
  // of the cell has been read: only then the logits of its last token are there, where wanted.
  Result<bool> ContinueCell(CellRead& read, int64_t row_layers, bool wants_logits);

  bool in_flight() const { return !flight_.empty(); }
  // A sequence of the pass in flight that will want the token after the one being sampled.
  struct Ahead {
    size_t row;
    SampleParams sample;
  };
  // Waits for the pass in flight, after launching the next one for the rows `ahead`, in order,
  // where undoing that would leave no trace: then that is in flight, and its caches are a token
  // longer. `fill_masks`, where given, gets the ids of the pass in flight, by row, and fills the
  // masks of `ahead`, while the next one runs.
  using FillMasks = std::function<void(std::span<const int32_t> ids)>;
  Status Land(std::span<const Ahead> ahead, const FillMasks& fill_masks = {});
  // Takes a sequence out of the pass in flight, if it is in it, and undoes that for it.
  void Leave(const SequenceCache& cache);
  bool wanted() const;  // whether any sequence is left in the pass in flight
  Status Drain();       // waits for the pass in flight and undoes all of it

  // Of the pass that ended last, by item: the token that the device sampled, or SampleParams's
  // kNotFinite or kUndecided, or kRecompute.
  int32_t id(size_t row) const { return rows_[row].id; }
  // The row was left undecided and its logits are gone, another pass having been launched since.
  // Its token has been taken out of the cache: it has to be run again, without a sample.
  static constexpr int32_t kRecompute = -3;
  // [num_logits, vocab] of rows that are kUndecided; empty of others.
  std::span<const float> logits(size_t row) const {
    return std::span(logits_).subspan(rows_[row].first, rows_[row].count);
  }
  // The token after the row, from the device or sampled here, never one of `masked`; kNotFinite
  // where the logits are not finite. `allowed`: SampleParams::mask.
  int32_t Sample(size_t row, Sampler& sampler, std::span<const int32_t> masked = {},
                 const uint32_t* allowed = nullptr) const;

 private:
  struct Row {
    int32_t id = SampleParams::kUndecided;
    size_t first = 0, count = 0;  // in logits_
  };
  std::span<float> AddRow(int32_t id, size_t num_logits);
  Status LaunchAhead(std::span<const Ahead> ahead, const Model::BeforeSample& before_sample);
  Status TakeSampled(int32_t id, size_t sampled_row);

  Model& model_;
  std::vector<SequenceCache*> flight_, next_;  // by row; null: has left
  std::vector<Row> rows_;
  std::vector<float> logits_;  // of this pass the first `logits_used_`: it never shrinks, so that
  size_t logits_used_ = 0;     // it is not filled anew for every token
  // Of a pass being launched or collected; members so that a token allocates nothing.
  std::vector<ForwardItem> items_;
  std::vector<int32_t> tokens_, ids_;
  std::vector<SampleParams> sampling_;
};

}  // namespace oscar
