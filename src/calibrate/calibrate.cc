#include "calibrate/calibrate.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "base/progress.h"
#include "engine/generator.h"
#include "engine/loaded_model.h"
#include "engine/prompt_reader.h"
#include "measure/layer_errors.h"
#include "rotation/dump.h"
#include "rotation/rotation_file.h"
#include "simd/block_writer.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

// One layer's rows of a sequence, where they are wanted together.
struct Rows {
  std::vector<float> q, k, v;
};

class Capture {
 public:
  Capture(LoadedModel& model, const CalibrateOptions& options) : model_(model), options_(options) {
    const ModelSpec& spec = model.spec();
    const AttentionSpec& attention = spec.attention();
    shape_ = {attention.num_heads, attention.num_kv_heads, attention.head_dim};
  }

  // One pass over all sequences.
  Status Pass(const std::vector<std::vector<int32_t>>& sequences, DumpWriter* dump,
              Progress* progress);
  Result<std::map<int, FittedLayer>> Finish();
  Status EndPass() {
    for (auto& [layer, statistics] : layers_) OSCAR_RETURN_IF_ERROR(statistics.EndPass());
    return {};
  }
  const QkvShape& shape() const { return shape_; }

 private:
  Status Add(int layer, const QkvChunk& chunk);
  Status ReadSequence(const std::vector<int32_t>& tokens, Progress* progress);

  LoadedModel& model_;
  const CalibrateOptions& options_;
  QkvShape shape_;
  std::map<int, LayerStatistics> layers_;
  std::vector<Rows> rows_;
  Status status_;  // the tap's first failure
};

Status Capture::Add(int layer, const QkvChunk& chunk) {
  auto found = layers_.find(layer);
  if (found == layers_.end()) {
    found = layers_.try_emplace(layer, layer, shape_, options_.fit).first;
  }
  return found->second.Add(chunk, model_.threads());
}

Status Capture::ReadSequence(const std::vector<int32_t>& tokens, Progress* progress) {
  SequenceCache cache(model_.kv().cache(), model_.pool());
  PromptReader reader(model_.model(), cache, tokens);
  while (!reader.done()) {
    OSCAR_RETURN_IF_ERROR(reader.ReadChunk());
    OSCAR_RETURN_IF_ERROR(status_);
    if (progress != nullptr) progress->Add(reader.chunk().size());
  }
  return {};
}

Status Capture::Pass(const std::vector<std::vector<int32_t>>& sequences, DumpWriter* dump,
                     Progress* progress) {
  // Only exact scores and dumps need a sequence's rows side by side.
  const bool whole = dump != nullptr || options_.fit.objectives.v == Objective::kSstExact;
  const auto num_layers = static_cast<size_t>(model_.spec().num_layers());
  // What layers with a sliding window see stays BF16: they need no rotation.
  const std::vector<int> kv_layers = model_.spec().history_layers();
  const auto kv_width = static_cast<size_t>(shape_.num_kv_heads * shape_.head_dim);
  OSCAR_RETURN_IF_ERROR(
      model_.model().SetTap([&](int layer, size_t, std::span<const float> q,
                                std::span<const float> k, std::span<const float> v) {
        if (!status_.ok() || std::ranges::find(kv_layers, layer) == kv_layers.end()) return;
        if (whole) {
          Rows& rows = rows_[static_cast<size_t>(layer)];
          rows.q.insert(rows.q.end(), q.begin(), q.end());
          rows.k.insert(rows.k.end(), k.begin(), k.end());
          rows.v.insert(rows.v.end(), v.begin(), v.end());
          return;
        }
        const auto count = static_cast<int32_t>(k.size() / kv_width);
        status_ = Add(layer, {count, q, k, v, {&count, 1}});
      }));
  Status status;
  for (size_t i = 0; i < sequences.size() && status.ok(); ++i) {
    rows_.assign(num_layers, {});
    status = ReadSequence(sequences[i], progress);
    const auto count = static_cast<int32_t>(sequences[i].size());
    for (const int layer : kv_layers) {
      if (!whole || !status.ok()) break;
      const Rows& rows = rows_[static_cast<size_t>(layer)];
      const QkvChunk chunk{count, rows.q, rows.k, rows.v, {&count, 1}};
      status = Add(layer, chunk);
      if (status.ok() && dump != nullptr) status = dump->Write(layer, chunk);
    }
  }
  rows_.clear();
  OSCAR_RETURN_IF_ERROR(model_.model().SetTap({}));
  OSCAR_RETURN_IF_ERROR(status);
  return EndPass();
}

Result<std::map<int, FittedLayer>> Capture::Finish() {
  std::map<int, FittedLayer> out;
  for (auto& [layer, statistics] : layers_) out.emplace(layer, statistics.TakeResult());
  return out;
}

// A chat that ends with an answer: its last token, or the one before a line break, stops.
bool IsAnswered(std::span<const int32_t> sequence, std::span<const int32_t> stop_tokens) {
  const auto last = sequence.last(std::min<size_t>(sequence.size(), 2));
  return std::ranges::find_first_of(last, stop_tokens) != last.end();
}

// The model's own continuation of each sequence that has one, so that what it writes is calibrated
// on, too.
Result<int64_t> Extend(LoadedModel& model, int64_t count, bool show_progress,
                       std::vector<std::vector<int32_t>>& sequences) {
  std::optional<Progress> progress;
  if (show_progress) {
    progress.emplace("generating", sequences.size() * static_cast<uint64_t>(count), "tokens");
  }
  const std::vector<int32_t> stop_tokens(model.config().eos_token_ids.begin(),
                                         model.config().eos_token_ids.end());
  int64_t generated = 0;
  for (std::vector<int32_t>& sequence : sequences) {
    if (IsAnswered(sequence, stop_tokens)) {
      if (progress.has_value()) progress->Add(static_cast<uint64_t>(count));
      continue;
    }
    GenerateRequest request;
    request.prompt = sequence;
    request.sampling.temperature = 0;
    request.max_tokens = count;
    request.stop_tokens = stop_tokens;
    Generator generator(model.model(), model.pool(), model.max_context());
    const auto count_token = [&](int32_t) {
      if (progress.has_value()) progress->Add(1);
      return true;
    };
    OSCAR_ASSIGN_OR_RETURN(const GenerateResult result, generator.Generate(request, count_token));
    OSCAR_RETURN_IF_ERROR(result.status);
    sequence.insert(sequence.end(), result.tokens.begin(), result.tokens.end());
    generated += static_cast<int64_t>(result.tokens.size());
    // What a stop token saved is done, too.
    const auto left = static_cast<uint64_t>(count) - result.tokens.size();
    if (progress.has_value()) progress->Add(left);
  }
  return generated;
}

// The fit sees the first `tokens` of a text; errors are measured on what comes after them. Reading
// more and dividing it leaves the fit's sequences as they are without.
std::vector<std::vector<int32_t>> HoldOut(CalibrationText& text, int64_t tokens) {
  std::vector<std::vector<int32_t>> fitted, held_out;
  int64_t count = 0;
  for (std::vector<int32_t>& sequence : text.sequences) {
    const auto room =
        static_cast<size_t>(std::clamp<int64_t>(tokens - count, 0, std::ssize(sequence)));
    count += std::ssize(sequence);
    if (room < sequence.size()) {
      held_out.emplace_back(sequence.begin() + static_cast<std::ptrdiff_t>(room), sequence.end());
      sequence.resize(room);
    }
    if (room > 0) fitted.push_back(std::move(sequence));
  }
  text.num_tokens = std::min(text.num_tokens, tokens);
  text.sequences = std::move(fitted);
  text.answers.clear();
  return held_out;
}

int64_t CountTokens(const std::vector<std::vector<int32_t>>& sequences) {
  int64_t count = 0;
  for (const std::vector<int32_t>& sequence : sequences) count += std::ssize(sequence);
  return count;
}

KvPlanOptions ErrorPlan(const ModelSpec& spec, const std::string& method, int group_dims) {
  KvPlanOptions options;
  options.method = method;
  // Every token counts, but for those that layers with a window see open.
  options.sink = 0;
  options.recent = static_cast<int>(PagesOf(spec.max_window()) * kPageTokens);
  if (group_dims > 0) options.group_dims = group_dims;
  return options;
}

// What errors are measured on: the longest sequence, and where that is short the first others.
std::vector<std::vector<int32_t>> ErrorSequences(
    const std::vector<std::vector<int32_t>>& sequences) {
  const auto longest =
      std::max_element(sequences.begin(), sequences.end(),
                       [](const auto& a, const auto& b) { return a.size() < b.size(); });
  std::vector<std::vector<int32_t>> out = {*longest};
  auto total = static_cast<int64_t>(longest->size());
  for (auto it = sequences.begin(); it != sequences.end() && total < LayerErrorProbe::kMaxTokens;
       ++it) {
    if (it == longest) continue;
    out.push_back(*it);
    total += static_cast<int64_t>(it->size());
  }
  return out;
}

Status MeasureErrors(LoadedModel& model, const std::vector<std::vector<int32_t>>& sequences,
                     int group_dims, Calibration& out) {
  OSCAR_ASSIGN_OR_RETURN(const LayerErrorProbe probe,
                         LayerErrorProbe::Capture(model, ErrorSequences(sequences)));
  const auto measure = [&](const std::string& label, const std::string& method,
                           bool rotated) -> Status {
    KvPlanOptions options = ErrorPlan(model.spec(), method, group_dims);
    if (rotated) options.rotation = out.rotation;
    OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<KvPlan> plan,
                           KvPlan::Make(model.spec(), options, simd::WriteBlocks));
    OSCAR_ASSIGN_OR_RETURN(auto errors, probe.Measure(*plan));
    out.errors.emplace_back(label, std::move(errors));
    return {};
  };
  OSCAR_RETURN_IF_ERROR(measure("before (no rotation)", "naive", false));
  OSCAR_RETURN_IF_ERROR(measure("Hadamard", "quarot", false));
  OSCAR_RETURN_IF_ERROR(measure("oscar, this rotation", "oscar", true));
  OSCAR_RETURN_IF_ERROR(measure("oscar+, Hadamard", "oscar+", false));
  return measure("oscar+, this rotation", "oscar+", true);
}

}  // namespace

Result<Calibration> Calibrate(const CalibrateOptions& options) {
  if (!options.dump.empty()) OSCAR_RETURN_IF_ERROR(DumpWriter::CheckDirectory(options.dump));
  ModelOptions model_options = options.model;
  model_options.kv = "bf16";
  model_options.rotation.clear();
  model_options.group_dims = model_options.sink = model_options.recent = std::nullopt;
  model_options.k_clip = model_options.v_clip = std::nullopt;
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> model,
                         LoadedModel::Load(model_options));
  // A group that pages do not have is better found before the fit than after.
  OSCAR_ASSIGN_OR_RETURN(
      const std::unique_ptr<KvPlan> plan,
      KvPlan::Make(model->spec(), ErrorPlan(model->spec(), "naive", options.group_dims),
                   simd::WriteBlocks));
  OSCAR_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Load(model->directory()));
  Result<ChatTemplate> chat = ChatTemplate::Load(model->directory());
  if (!chat.has_value() && chat.error().code() != StatusCode::kNotFound) {
    return Unexpected(chat.error());
  }
  CalibrationTextOptions text_options = options.text;
  const int64_t room = model->max_context() - options.generate;  // neither is negative
  if (text_options.max_sequence == 0) {
    text_options.max_sequence = std::clamp<int64_t>(room, 1, kDefaultMaxSequence);
  }
  if (text_options.max_sequence > room) {
    return Unexpected(OutOfRange(
        fmt::format("sequences of {} tokens and {} generated ones do not fit the context of {}; "
                    "lower --max-length or --generate",
                    text_options.max_sequence, options.generate, model->max_context())));
  }
  if (text_options.tokens > 0) {  // else the reader says so
    text_options.tokens =
        std::min(text_options.tokens + 2 * LayerErrorProbe::kMaxTokens, kMaxCalibrationTokens);
  }
  OSCAR_ASSIGN_OR_RETURN(
      CalibrationText text,
      ReadCalibrationText(text_options, tokenizer, chat.has_value() ? &*chat : nullptr));
  for (const std::string& warning : text.warnings) LogWarning("{}", warning);
  const std::vector<std::vector<int32_t>> held_out = HoldOut(text, options.text.tokens);
  if (text.num_tokens < options.text.tokens) {
    LogWarning("the data has {} tokens, fewer than the {} asked for", text.num_tokens,
               options.text.tokens);
  }
  if (text.num_tokens < model->spec().attention().head_dim) {
    LogWarning(
        "{} tokens do not span the {} dimensions of a head: the rotation is fitted to chance; give "
        "more with --tokens or --data",
        text.num_tokens, model->spec().attention().head_dim);
  }
  CalibrateOptions fitted = options;
  fitted.fit.also_shared = true;
  fitted.fit.clip.group_dims = plan->method().k.rows.group_dims;
  fitted.fit.model_fingerprint = fmt::format("{:016x}", model->model().fingerprint());
  Capture capture(*model, fitted);
  OSCAR_RETURN_IF_ERROR(CheckFitOptions(fitted.fit, capture.shape()));
  std::optional<DumpWriter> dump;
  if (!options.dump.empty()) {
    OSCAR_ASSIGN_OR_RETURN(dump, DumpWriter::Create(options.dump, capture.shape()));
  }
  Calibration out;
  if (options.generate > 0) {
    OSCAR_ASSIGN_OR_RETURN(out.generated_tokens,
                           Extend(*model, options.generate, options.show_progress, text.sequences));
    if (out.generated_tokens == 0) {
      LogWarning("--generate added nothing: every text ends with a finished answer");
    }
  }
  out.num_sequences = static_cast<int64_t>(text.sequences.size());
  out.num_tokens = text.num_tokens;
  const int passes = LayerStatistics::NumPasses(fitted.fit);
  for (int pass = 0; pass < passes; ++pass) {
    std::optional<Progress> progress;
    if (options.show_progress) {
      const bool tries_clips = fitted.fit.fit_clip && pass == passes - 1;
      progress.emplace(fmt::format("pass {} of {}, {}", pass + 1, passes,
                                   pass == 0     ? "second moments"
                                   : tries_clips ? "clip ratios"
                                                 : "values by attention"),
                       static_cast<uint64_t>(text.num_tokens + out.generated_tokens), "tokens");
    }
    DumpWriter* writer = pass == 0 && dump.has_value() ? &*dump : nullptr;
    OSCAR_RETURN_IF_ERROR(
        capture.Pass(text.sequences, writer, progress.has_value() ? &*progress : nullptr));
  }
  OSCAR_ASSIGN_OR_RETURN(out.layers, capture.Finish());
  OSCAR_ASSIGN_OR_RETURN(out.rotation, AssembleRotation(capture.shape(), fitted.fit, out.layers));
  OSCAR_ASSIGN_OR_RETURN(out.shared,
                         AssembleSharedRotation(capture.shape(), fitted.fit, out.layers));
  if (fitted.fit.fit_clip) out.clip_candidates = fitted.fit.clip.candidates;
  if (out.num_tokens + out.generated_tokens < kPageTokens) {
    LogWarning("errors are measured on pages of {} tokens, which these do not fill: left out",
               kPageTokens);
    return out;
  }
  if (const int64_t count = CountTokens(held_out); count >= kPageTokens) {
    out.held_out_tokens = std::min(count, LayerErrorProbe::kMaxTokens);
  }
  OSCAR_RETURN_IF_ERROR(MeasureErrors(*model, out.held_out_tokens > 0 ? held_out : text.sequences,
                                      options.group_dims, out));
  return out;
}

Result<SensitivityResult> CalibrateSensitivities(const SensitivityRequest& request) {
  SensitivityOptions options;
  options.model = request.model;
  options.show_progress = request.show_progress;
  ModelOptions plain = request.model;
  plain.kv = "bf16";
  plain.rotation.clear();
  plain.group_dims = plain.sink = plain.recent = std::nullopt;
  plain.k_clip = plain.v_clip = std::nullopt;
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> plan, LoadedModel::Plan(plain));
  const ModelSpec& spec = plan->spec();
  const int sides =
      2 * static_cast<int>(spec.history_layers().size()) * spec.attention().num_kv_heads;
  options.use_proxy = request.measure == SensitivityMeasure::kProxy ||
                      (request.measure == SensitivityMeasure::kAuto && sides > kMaxSidesEndToEnd);
  OSCAR_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Load(plan->directory()));
  Result<ChatTemplate> chat = ChatTemplate::Load(plan->directory());
  if (!chat.has_value() && chat.error().code() != StatusCode::kNotFound) {
    return Unexpected(chat.error());
  }
  CalibrationTextOptions text_options = request.text;
  ++text_options.seed;
  if (text_options.max_sequence == 0) {
    text_options.max_sequence = std::min<int64_t>(plan->max_context(), kDefaultMaxSequence);
  }
  OSCAR_ASSIGN_OR_RETURN(
      const CalibrationText text,
      ReadCalibrationText(text_options, tokenizer, chat.has_value() ? &*chat : nullptr));
  for (const std::string& warning : text.warnings) LogWarning("{}", warning);
  return MeasureSensitivities(options, text.sequences, text.answers);
}

Status CheckCalibrationDirectory(const FitOptions& fit, const fs::path& directory) {
  const ZooPaths written = ZooPairPaths(directory / kZooDirectoryName, DescribeFit(fit));
  for (const fs::path& place : {directory, directory / kZooDirectoryName}) {
    if (const Status status = CheckCanWriteBelow(place); !status.ok()) {
      return status.WithContext(fmt::format("--out {}", directory.string()));
    }
    std::error_code error;
    for (fs::directory_iterator it(place, error), end; !error && it != end; it.increment(error)) {
      if (!IsZooFile(it->path()) || it->path() == written.k || it->path() == written.v) continue;
      return InvalidArgument(fmt::format(
          "{}: belongs to another rotation and would lie beside this one; remove it or name "
          "another directory with --out",
          it->path().string()));
    }
  }
  return {};
}

Status WriteCalibration(const Calibration& calibration, const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) {
    return InvalidArgument(
        fmt::format("{}: cannot make the directory: {}", directory.string(), error.message()));
  }
  OSCAR_RETURN_IF_ERROR(WriteRotationFile(directory / kRotationFileName, calibration.rotation));
  OSCAR_ASSIGN_OR_RETURN([[maybe_unused]] const ZooPaths paths,
                         WriteZooPair(directory / kZooDirectoryName, calibration.shared));
  OSCAR_RETURN_IF_ERROR(
      WriteFileAtomically(directory / "calibration.json", CalibrationToJson(calibration)));
  return WriteFileAtomically(directory / "calibration.html", CalibrationToHtml(calibration));
}

}  // namespace oscar
