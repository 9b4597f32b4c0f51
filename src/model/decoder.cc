#include "model/decoder.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"

namespace oscar {
namespace {

// To callers kResourceExhausted is a lack of cache pages, which they know how to cure. A device
// that runs out of memory in a pass, although nothing is taken after loading, has failed.
Status DeviceFailure(Status status) {
  if (status.code() != StatusCode::kResourceExhausted) return status;
  return Internal(status.message());
}

// Which rows of a recorded step's logits the items want: they are generated tokens, one each.
std::vector<int32_t> WantedRows(std::span<const ForwardItem> items) {
  std::vector<int32_t> rows;
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].num_logits > 0) rows.push_back(static_cast<int32_t>(i));
  }
  return rows;
}

struct DecoderCellRead : CellRead {
  std::unique_ptr<LayeredAppend> append;
  std::unique_ptr<CellStream> stream;
  int slot = 0;
  int layer = 0;
  int64_t row = 0;  // the next one in this layer

  int64_t num_tokens() const override { return append->num_tokens(); }
  uint64_t bytes() const override { return append->bytes(); }
};

}  // namespace

Result<std::unique_ptr<Decoder>> Decoder::Make(std::unique_ptr<Backend> backend) {
  std::unique_ptr<Decoder> decoder(new Decoder(std::move(backend)));
  // Every step is recorded, and what it launches loaded, before the first request.
  for (const int bucket : kStepRows) {
    if (bucket > decoder->backend_->max_recorded_rows()) break;
    OSCAR_RETURN_IF_ERROR(decoder->Record(bucket));
  }
  OSCAR_RETURN_IF_ERROR(decoder->backend_->Synchronize());
  return decoder;
}

Decoder::~Decoder() {
  [[maybe_unused]] const Status ignored = backend_->Synchronize();
  steps_.clear();
}

Status Decoder::Record(int rows) {
  OSCAR_RETURN_IF_ERROR(backend_->BeginPass({}, rows));
  const auto step = [&]() -> Status {
    OSCAR_RETURN_IF_ERROR(Layers({}));
    return backend_->Logits(0, rows, nullptr);
  };
  // Once for real, so that code is loaded and algorithms are chosen.
  OSCAR_RETURN_IF_ERROR(step());
  OSCAR_RETURN_IF_ERROR(backend_->Synchronize());
  OSCAR_RETURN_IF_ERROR(backend_->BeginRecording());
  const Status launched = step();
  Result<std::unique_ptr<Recording>> recording = backend_->EndRecording();
  OSCAR_RETURN_IF_ERROR(launched);
  if (!recording.has_value()) return recording.error();
  steps_.emplace(rows, std::move(*recording));
  return {};
}

Status Decoder::SetTap(QkvTap tap) {
  for (int slot = 0; tap && slot < spec().num_kv_layers(); ++slot) {
    if (kv().v(slot).kind != RotationKind::kNone) {
      return InvalidArgument(
          "calibration needs a cache method that leaves values unrotated, such as bf16");
    }
  }
  tap_ = std::move(tap);
  return {};
}

Status Decoder::Prepare(std::span<const ForwardItem> items) {
  CheckItems(items, max_batch_tokens());
  const auto make_room = [&]() -> Status {
    for (const ForwardItem& item : items) {
      const int64_t end = item.cache->length() + static_cast<int64_t>(item.tokens.size());
      if (end > backend_->max_positions()) {
        return OutOfRange(fmt::format("position {} is beyond the {} that the device was set up for",
                                      end - 1, backend_->max_positions()));
      }
      OSCAR_RETURN_IF_ERROR(backend_->Admit(*item.cache));
    }
    return SealAndReserve(items, backend_->threads());
  };
  Status status = make_room();
  // What was queued must not meet pages that are freed and given out again.
  if (!status.ok()) OSCAR_RETURN_IF_ERROR(DeviceFailure(backend_->FlushPages()));
  return status;
}

// The pass over one layer, for every model and device.
Status Decoder::Layer(int index, std::span<const ForwardItem> items) {
  const LayerSpec& layer = spec().layer(index);
  const auto linear = [&](LayerMatrix matrix, Activation input, std::optional<Role> norm,
                          Activation output) {
    return backend_->Linear({index, matrix, input, norm, output});
  };
  using enum Activation;
  if (layer.attention() != nullptr) {
    OSCAR_RETURN_IF_ERROR(linear(LayerMatrix::kQkv, kStream, Role::kAttentionNorm, kQkv));
    if (tap_) OSCAR_RETURN_IF_ERROR(ReportTap(index, items));
    OSCAR_RETURN_IF_ERROR(backend_->WriteKv(index, layer.kv_slot));
    OSCAR_RETURN_IF_ERROR(backend_->Attend(index, layer.kv_slot));
    OSCAR_RETURN_IF_ERROR(linear(LayerMatrix::kO, kAttended, std::nullopt, kStream));
  }
  if (const LinearAttentionSpec* mixer = layer.linear_attention()) {
    OSCAR_RETURN_IF_ERROR(
        linear(mixer->grouped_inputs ? LayerMatrix::kStateInGrouped : LayerMatrix::kStateIn,
               kStream, Role::kAttentionNorm, kQkv));
    OSCAR_RETURN_IF_ERROR(backend_->AdvanceState(index, layer.state_slot));
    OSCAR_RETURN_IF_ERROR(linear(LayerMatrix::kStateOut, kAttended, std::nullopt, kStream));
  }
  const ExpertsSpec* experts = layer.experts();
  if (experts == nullptr) {
    OSCAR_RETURN_IF_ERROR(linear(LayerMatrix::kGateUp, kStream, Role::kFeedForwardNorm, kGated));
    return linear(LayerMatrix::kDown, kGated, std::nullopt, kStream);
  }
  if (experts->shared_intermediate == 0) return backend_->Experts(index);
  // The shared part reads the stream before the routed experts add to it.
  OSCAR_RETURN_IF_ERROR(
      linear(LayerMatrix::kSharedGateUp, kStream, Role::kFeedForwardNorm, kGated));
  OSCAR_RETURN_IF_ERROR(backend_->Experts(index));
  return linear(LayerMatrix::kSharedDown, kGated, std::nullopt, kStream);
}

Status Decoder::Layers(std::span<const ForwardItem> items) {
  OSCAR_RETURN_IF_ERROR(backend_->Embed());
  for (int i = 0; i < spec().num_layers(); ++i) OSCAR_RETURN_IF_ERROR(Layer(i, items));
  return {};
}

Status Decoder::ReportTap(int layer, std::span<const ForwardItem> items) {
  const BatchRows rows(items);
  const AttentionSpec& attention = *spec().layer(layer).attention();
  const auto width = static_cast<size_t>(attention.qkv_width());
  const auto q_width = static_cast<size_t>(attention.q_width());
  const auto kv_width = static_cast<size_t>(attention.kv_width());
  std::vector<float> all(static_cast<size_t>(rows.rows) * width), q, k, v;
  OSCAR_RETURN_IF_ERROR(backend_->ReadQkv(layer, all));
  for (size_t i = 0; i < items.size(); ++i) {
    q.clear(), k.clear(), v.clear();
    const float* row = all.data() + static_cast<size_t>(rows.first[i]) * width;
    for (size_t t = 0; t < items[i].tokens.size(); ++t, row += width) {
      q.insert(q.end(), row, row + q_width);
      k.insert(k.end(), row + q_width, row + q_width + kv_width);
      v.insert(v.end(), row + q_width + kv_width, row + q_width + 2 * kv_width);
    }
    tap_(layer, i, q, k, v);
  }
  return {};
}

Result<bool> Decoder::Run(std::span<const ForwardItem> items) {
  const BatchRows rows(items);
  const bool has_prompts = rows.rows > rows.decodes;
  const int bucket = StepRows(rows.rows);
  const bool recorded = !has_prompts && !tap_ && rows.rows <= bucket && steps_.contains(bucket);
  OSCAR_RETURN_IF_ERROR(backend_->BeginPass(items, recorded ? bucket : 0));
  OSCAR_RETURN_IF_ERROR(recorded ? backend_->Replay(*steps_.at(bucket)) : Layers(items));
  return recorded;
}

Status Decoder::Forward(std::span<const ForwardItem> items, std::span<float> logits) {
  if (items.empty()) return {};
  OSCAR_CHECK(launched_ == collected_, "a pass while another is under way");
  OSCAR_RETURN_IF_ERROR(Prepare(items));
  OSCAR_RETURN_IF_ERROR(DeviceFailure(RunAndRead(items, logits)));
  AdvanceAll(items);
  return {};
}

Status Decoder::RunAndRead(std::span<const ForwardItem> items, std::span<float> logits) {
  const auto vocab = static_cast<size_t>(spec().vocab_size);
  const int wanted = BatchRows(items).logits;
  OSCAR_CHECK(logits.size() == static_cast<size_t>(wanted) * vocab);
  OSCAR_ASSIGN_OR_RETURN(const bool recorded, Run(items));
  if (wanted == 0) return {};
  if (recorded) {
    // Runs of consecutive rows: mostly one.
    const std::vector<int32_t> rows = WantedRows(items);
    for (size_t i = 0; i < rows.size();) {
      size_t end = i + 1;
      while (end < rows.size() && rows[end] == rows[end - 1] + 1) ++end;
      OSCAR_RETURN_IF_ERROR(
          backend_->ReadLogits(rows[i], static_cast<int>(end - i), logits.data() + i * vocab));
      i = end;
    }
  } else {
    for (int first = 0; first < wanted; first += backend_->max_logit_rows()) {
      const int count = std::min(wanted - first, backend_->max_logit_rows());
      OSCAR_RETURN_IF_ERROR(
          backend_->Logits(first, count, logits.data() + static_cast<size_t>(first) * vocab));
    }
  }
  return backend_->Synchronize();
}

Status Decoder::ForwardAndSample(std::span<const ForwardItem> items,
                                 std::span<const SampleParams> sampling, std::span<int32_t> ids,
                                 const BeforeSample& before_sample) {
  if (items.empty()) return {};
  OSCAR_CHECK(launched_ == collected_, "a pass while another is under way");
  OSCAR_RETURN_IF_ERROR(Launch(items, sampling, before_sample));
  return Collect(ids);
}

Status Decoder::Launch(std::span<const ForwardItem> items, std::span<const SampleParams> sampling,
                       const BeforeSample& before_sample) {
  OSCAR_CHECK(launched_ - collected_ < Backend::kFlights &&
              sampling.size() <= static_cast<size_t>(max_samples()));
  OSCAR_RETURN_IF_ERROR(Prepare(items));
  OSCAR_RETURN_IF_ERROR(DeviceFailure(RunAndSample(items, sampling, before_sample)));
  ++launched_;
  AdvanceAll(items);
  return {};
}

Status Decoder::RunAndSample(std::span<const ForwardItem> items,
                             std::span<const SampleParams> sampling,
                             const BeforeSample& before_sample) {
  OSCAR_CHECK(static_cast<size_t>(BatchRows(items).logits) == sampling.size());
  OSCAR_ASSIGN_OR_RETURN(const bool recorded, Run(items));
  if (recorded) {
    sampled_rows_ = WantedRows(items);
  } else {
    sampled_rows_.resize(sampling.size());
    for (size_t i = 0; i < sampling.size(); ++i) sampled_rows_[i] = static_cast<int32_t>(i);
    if (!sampling.empty()) {
      OSCAR_RETURN_IF_ERROR(backend_->Logits(0, static_cast<int>(sampling.size()), nullptr));
    }
  }
  const auto flight = static_cast<int>(launched_ % Backend::kFlights);
  if (before_sample) OSCAR_RETURN_IF_ERROR(before_sample());
  return backend_->Sample(flight, sampling, sampled_rows_);
}

Status Decoder::Collect(std::span<int32_t> ids) {
  OSCAR_CHECK(collected_ < launched_);
  const auto flight = static_cast<int>(collected_++ % Backend::kFlights);
  return DeviceFailure(backend_->Await(flight, ids));
}

Status Decoder::ReadLogits(size_t row, std::span<float> logits) {
  OSCAR_CHECK(row < sampled_rows_.size() &&
              logits.size() == static_cast<size_t>(spec().vocab_size));
  OSCAR_RETURN_IF_ERROR(DeviceFailure(backend_->ReadLogits(sampled_rows_[row], 1, logits.data())));
  return DeviceFailure(backend_->Synchronize());
}

Result<std::unique_ptr<CellRead>> Decoder::StartCell(SequenceCache& cache,
                                                     std::span<const int32_t> tokens) {
  OSCAR_CHECK(!tap_, "calibration reads prompts chunk by chunk");
  auto read = std::make_unique<DecoderCellRead>();
  OSCAR_ASSIGN_OR_RETURN(
      read->append,
      LayeredAppend::Begin(cache, static_cast<int64_t>(tokens.size()), backend_->threads()));
  OSCAR_ASSIGN_OR_RETURN(read->stream, backend_->EmbedCell(tokens));
  return std::unique_ptr<CellRead>(std::move(read));
}

Result<bool> Decoder::ContinueCell(CellRead& cell, int64_t row_layers, std::span<float> logits) {
  auto& read = dynamic_cast<DecoderCellRead&>(cell);
  const int64_t num_rows = read.num_tokens();
  const int num_layers = spec().num_layers();
  while (row_layers > 0 && read.layer < num_layers) {
    const int64_t count = std::min<int64_t>({num_rows - read.row, max_batch_tokens(), row_layers});
    OSCAR_RETURN_IF_ERROR(backend_->BeginCellRows(*read.stream, *read.append, read.row, count));
    OSCAR_RETURN_IF_ERROR(Layer(read.layer, {}));
    row_layers -= count;
    read.row += count;
    if (read.row < num_rows) continue;
    read.row = 0;
    if (spec().layer(read.layer++).kv_slot < 0) continue;
    read.append->SealLayer(backend_->threads());
    if (++read.slot < spec().num_kv_layers()) read.append->SetLayer(read.slot);
  }
  if (read.layer < num_layers) return false;
  if (!logits.empty()) {
    OSCAR_RETURN_IF_ERROR(backend_->BeginCellRows(*read.stream, *read.append, num_rows - 1, 1));
    OSCAR_RETURN_IF_ERROR(backend_->Logits(0, 1, logits.data()));
    OSCAR_RETURN_IF_ERROR(backend_->Synchronize());
  }
  read.append->Commit();
  return true;
}

}  // namespace oscar
