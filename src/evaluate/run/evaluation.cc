#include "run/evaluation.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "base/file.h"
#include "base/log.h"
#include "base/progress.h"
#include "engine/loaded_model.h"
#include "measure/layer_errors.h"
#include "report/charts.h"
#include "rotation/content_hash.h"
#include "run/eval_items.h"
#include "run/eval_report.h"
#include "run/item_log.h"
#include "run/sequence_runner.h"
#include "run/sweep.h"
#include "scoring/scoring.h"
#include "tasks/prompts.h"
#include "weights/source.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr char kItemsFile[] = "items.jsonl";
// How likely the BF16 cache found tokens at each token of a reference, for KL.
constexpr char kReferenceFile[] = "reference.jsonl";
constexpr char kTextTask[] = "(text)";
constexpr char kLayersTask[] = "(layers)";
constexpr char kSpectraTask[] = "(spectra)";
// Tokens that one group of shared prompts holds in BF16.
constexpr int64_t kSharedTokens = 49152;
constexpr uint64_t kReferenceBytes = uint64_t{256} << 20;
// Of a GPU's memory for all methods' models together, and what each takes beside weights and pages.
constexpr double kCudaShare = 0.85;
constexpr uint64_t kCudaFixedBytes = uint64_t{3} << 29;
// sink + recent + one page of the default windows: below it nothing is quantised.
constexpr int64_t kDefaultRecent = 256, kDefaultWindows = 64 + kDefaultRecent + kPageTokens;
constexpr uint64_t kMaxConfigBytes = uint64_t{1} << 28;
constexpr std::array<int64_t, 5> kContextLengths = {4096, 14336, 32768, 65536, 131072};

// Items as the model sees them.
struct Job {
  const EvalTask* task = nullptr;
  const EvalItem* item = nullptr;
  std::vector<int32_t> prompt, reference;
  int repeat = 0;
  uint64_t hash = 0;
};

struct MethodState {
  const EvalMethod* method = nullptr;
  std::unique_ptr<LoadedModel> model;  // loaded while needed
  bool token_windows = false;
  uint64_t settings = 0;
  MethodScore score;
};

class Evaluator {
 public:
  explicit Evaluator(const EvalOptions& options) : options_(options) {}

  Result<EvalResults> Run();

 private:
  Status Prepare();
  Status PrepareJobs(const LoadedModel& model);
  Status ChooseWindows();
  Status HashSettings();
  Result<uint64_t> HashModel(const LoadedModel& plan) const;
  Status Load(MethodState& state);
  ModelOptions OptionsOf(const MethodState& state, int cell) const;
  // The yardstick.
  ModelOptions PlainOptions(int cell) const {
    static const EvalMethod kPlain{"bf16", "bf16", {}};
    MethodState state;
    state.method = &kPlain;
    state.token_windows = options_.windows == EvalWindows::kTokens;
    return OptionsOf(state, cell);
  }
  std::string SettingsOf(const MethodState& state, const Job& job) const {
    return fmt::format("{:016x}", state.settings ^ job.hash);
  }
  bool IsDone(const MethodState& state, const Job& job) const;
  static bool ScoresReference(const Job& job) {
    return !job.reference.empty() && !job.task->sampling.has_value();
  }
  const ItemRecord* FindDistributions(const Job& job) const {
    return log_of_reference_.Find(SettingsOf(*plain_, job), KeyOf(*plain_, job));
  }
  static ItemKey KeyOf(const MethodState& state, const Job& job) {
    return {state.method->label, job.task->name, job.item->id, job.repeat};
  }
  Status AppendDistributions(const Job& job, std::span<const TokenDistribution> distributions);
  Status RunJobs(MethodState& state, const std::vector<const Job*>& jobs,
                 const std::vector<SharedPrompt>* prompts, Progress* progress);
  Status RunShared(Progress* progress);
  Status RunText(Progress* progress);
  Status RunLayers();
  Status RunSpectra(const std::optional<LayerErrorProbe>& probe,
                    const std::function<Status()>& capture);
  EvalResults Collect() const;
  std::string PrefillText() const;
  std::string WindowsText() const;

  const EvalOptions& options_;
  std::optional<PromptEncoder> encoder_;
  std::vector<int32_t> stop_tokens_;
  std::vector<Job> jobs_;
  std::vector<Job> too_long_;          // for the context: counted as wrong
  std::vector<std::string> warnings_;  // beside the suite's
  std::vector<MethodState> methods_;
  std::vector<std::vector<int32_t>> windows_;
  uint64_t windows_hash_ = 0;
  int num_layers_ = 0;
  uint64_t model_hash_ = 0;
  std::vector<std::vector<double>> spectra_;
  std::string model_name_;
  uint64_t cuda_kv_memory_ = 0;  // pages of each method's model on a GPU; 0: on the CPU
  ItemLog log_, log_of_reference_;
  MethodState* plain_ = nullptr;     // BF16 among the methods; null: not among them
  std::vector<MethodState*> order_;  // it first: others are compared with it
};

ModelOptions Evaluator::OptionsOf(const MethodState& state, int cell) const {
  const EvalMethod& method = *state.method;
  ModelOptions out = options_.model;
  out.token_windows = state.token_windows;
  if (out.kv_memory == 0) out.kv_memory = cuda_kv_memory_;
  out.kv = method.kv;
  out.rotation = method.rotation;
  out.bits = method.bits;
  if (method.sink.has_value()) out.sink = method.sink;
  if (method.recent.has_value()) out.recent = method.recent;
  if (method.group_dims.has_value()) out.group_dims = method.group_dims;
  out.prefill_cell = cell;
  // The yardstick beside methods that these are meant for.
  if (method.kv == "bf16") out.k_clip.reset(), out.v_clip.reset(), out.group_dims.reset();
  return out;
}

Status Evaluator::Load(MethodState& state) {
  if (state.model != nullptr) return {};
  OSCAR_ASSIGN_OR_RETURN(state.model,
                         LoadedModel::Load(OptionsOf(state, options_.model.prefill_cell)));
  return {};
}

Status Evaluator::PrepareJobs(const LoadedModel& model) {
  OSCAR_ASSIGN_OR_RETURN(encoder_, PromptEncoder::Load(model.directory()));
  if (!encoder_->has_template()) {
    LogWarning("the model has no chat template: prompts are given to it as they are");
  }
  stop_tokens_.assign(model.config().eos_token_ids.begin(), model.config().eos_token_ids.end());
  if (stop_tokens_.empty()) {
    return InvalidArgument("the model's config names no end token, which scores depend on");
  }
  const int64_t context = model.max_context();
  for (const EvalTask& task : options_.suite.tasks) {
    std::vector<std::string> too_long;
    for (const EvalItem& item : task.items) {
      Job job;
      job.task = &task;
      job.item = &item;
      if (!item.reference.empty()) {
        OSCAR_ASSIGN_OR_RETURN(
            job.reference, encoder_->tokenizer().Encode(item.reference, {.parse_special = true}));
        job.reference.push_back(stop_tokens_.front());
      }
      const auto longest =
          std::max<int64_t>(item.max_tokens, static_cast<int64_t>(job.reference.size()));
      OSCAR_ASSIGN_OR_RETURN(EncodedPrompt prompt, encoder_->Encode(task, item, longest, context));
      job.prompt = std::move(prompt.tokens);
      job.hash = HashItem(task, item);
      // Cut further than published: another model's context would cut it elsewhere.
      if (prompt.kept > 0 && prompt.kept < task.max_input)
        job.hash = HashText(prompt.text, job.hash);
      const bool fits = static_cast<int64_t>(job.prompt.size()) + longest <= context;
      if (!fits) {
        too_long.push_back(
            fmt::format("{} ({} tokens and {} of output)", item.id, job.prompt.size(), longest));
      }
      for (job.repeat = 0; job.repeat < task.repeats; ++job.repeat) {
        (fits ? jobs_ : too_long_).push_back(job);
      }
    }
    if (too_long.empty()) continue;
    warnings_.push_back(fmt::format(
        "{}: {} of {} items do not fit the context of {} and count as wrong; lower --max-tokens, "
        "stretch the context with --rope-scaling or leave the task out: {}",
        task.name, too_long.size(), task.items.size(), context, ListSome(too_long)));
    LogWarning("{}", warnings_.back());
  }
  if (jobs_.empty() && !too_long_.empty()) {
    return OutOfRange("no item fits the model's context; " + warnings_.front());
  }
  return {};
}

// Says where windows end when that is not what a method's paper has.
Status Evaluator::ChooseWindows() {
  const int cell = options_.model.prefill_cell;
  const bool as_generated = options_.prefill == EvalPrefill::kMethod && cell == kPageTokens;
  std::string widened, simulated;
  for (MethodState& state : methods_) {
    state.token_windows = options_.windows == EvalWindows::kTokens;
    if (state.token_windows) continue;
    OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> plan,
                           LoadedModel::Plan(OptionsOf(state, cell)));
    const KvMethod& method = plan->kv().method();
    const bool exact = !method.is_quantized;
    if (exact || method.recent_tokens >= kDefaultRecent) continue;
    // A device has pages only, and portable runs are the same on all of them.
    if (options_.windows == EvalWindows::kAuto && as_generated && !options_.model.portable &&
        plan->device() == Device::kCpu) {
      state.token_windows = true;
      // Refused for windows shorter than the tokens that are quantised together.
      state.token_windows = LoadedModel::Plan(OptionsOf(state, cell)).has_value();
    }
    std::string& list = state.token_windows ? simulated : widened;
    list += (list.empty() ? "" : ", ") + state.method->label;
  }
  if (!simulated.empty()) {
    LogInfo(
        "{}: the BF16 window ends at the token, as published (simulated); --windows pages measures "
        "it as stored, with up to {} tokens more",
        simulated, kPageTokens - 1);
  }
  if (!widened.empty()) {
    LogInfo(
        "{}: whole pages are quantised, so up to {} tokens more than the published window stay "
        "BF16; --windows tokens, on the CPU, measures the published form",
        widened, kPageTokens - 1);
  }
  return {};
}

// Weights, as they are computed with, and how text becomes tokens.
Result<uint64_t> Evaluator::HashModel(const LoadedModel& plan) const {
  const ModelOptions& m = options_.model;
  uint64_t hash = m.weights_seed + 1;
  if (!m.random_weights) {
    OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<WeightSource> weights,
                           OpenCheckpointWeights(plan.directory().string()));
    hash = weights->Fingerprint();
  }
  for (const char* name :
       {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}) {
    const Result<std::string> file = ReadFile(plan.directory() / name, kMaxConfigBytes);
    if (file.has_value()) hash = HashText(*file, hash);
  }
  return m.weights == WeightFormat::kCheckpoint ? hash : HashText("fp8", hash);
}

// Everything that decides a score by its content, never by where it lies.
Status Evaluator::HashSettings() {
  const ModelOptions& m = options_.model;
  for (MethodState& state : methods_) {
    const ModelOptions own = OptionsOf(state, options_.model.prefill_cell);
    OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> plan, LoadedModel::Plan(own));
    if (model_hash_ == 0) {
      OSCAR_ASSIGN_OR_RETURN(model_hash_, HashModel(*plan));
    }
    uint64_t rotation_hash = 0;
    if (plan->kv().uses_calibrated_rotation()) {
      ContentHash hash;
      for (int slot = 0; slot < plan->spec().num_kv_layers(); ++slot) {
        for (const SideTransform* side : {&plan->kv().k(slot), &plan->kv().v(slot)}) {
          hash.Add(side->matrices);
        }
        for (const BlockRules& rules : plan->kv().rules()[static_cast<size_t>(slot)]) {
          hash.Add(std::vector<float>{rules.k_clip_ratio, rules.v_clip_ratio});
        }
      }
      rotation_hash = hash.Digest();
    }
    if (plan->device() == Device::kCuda && m.kv_memory == 0) {
      // With shared prompts all methods are loaded at once, beside the one that reads them.
      const size_t at_once =
          options_.prefill == EvalPrefill::kMethod ? 1 : options_.methods.size() + 1;
      const double share = kCudaShare * static_cast<double>(plan->memory().available_bytes) /
                           static_cast<double>(at_once);
      const auto fixed = static_cast<double>(plan->memory().weight_bytes + kCudaFixedBytes);
      if (share <= fixed) {
        return ResourceExhausted(
            at_once == 1
                ? fmt::format("the model does not fit {}; use --device cpu", plan->device_name())
                : fmt::format("{} methods do not fit {} together; name fewer, or use --device cpu",
                              options_.methods.size(), plan->device_name()));
      }
      const uint64_t budget = plan->PageBudget(static_cast<uint64_t>(share - fixed));
      cuda_kv_memory_ = cuda_kv_memory_ == 0 ? budget : std::min(cuda_kv_memory_, budget);
    }
    std::string text =
        fmt::format("4|{:x}|{}|{:x}|{}|{}|{}|{}|{}|{}|{}|{}|{}", model_hash_, plan->kv().Describe(),
                    rotation_hash, own.group_dims.value_or(-1), own.sink.value_or(-1),
                    own.recent.value_or(-1), m.k_clip.value_or(-1), m.v_clip.value_or(-1),
                    options_.prefill == EvalPrefill::kExact
                        ? std::string("exact")
                        : fmt::format("{}{}", m.prefill_cell,
                                      options_.prefill == EvalPrefill::kCell ? " shared" : ""),
                    m.rope_scaling, options_.want_answers, options_.seed);
    if (!plan->kv().bit_map().empty()) {
      text += "|" + DrawBits(plan->kv().bit_map(), plan->spec().history_layers());
    }
    // Portable scores are the same on every device: a run may go on on another.
    text += m.portable ? "|portable" : plan->device() == Device::kCuda ? "|cuda" : "";
    state.settings = HashText(text, 0);
    state.score.label = state.method->label;
    state.score.base = state.method->base;
    state.score.swept = state.method->swept;
    state.score.description = plan->kv().Describe();
    state.score.simulated = plan->kv().token_window() > 0;
    state.score.history_bits = plan->kv().HistoryBits();
    for (int64_t length : kContextLengths) {
      state.score.stored_bits[length] = plan->kv().StoredBits(length);
    }
  }
  return {};
}

Status Evaluator::Prepare() {
  std::error_code error;
  fs::create_directories(options_.out, error);
  if (error) {
    return Unavailable(
        fmt::format("{}: cannot be made: {}", options_.out.string(), error.message()));
  }
  for (const EvalMethod& method : options_.methods) {
    methods_.emplace_back();
    methods_.back().method = &method;
  }
  for (MethodState& state : methods_) {
    if (plain_ == nullptr && state.method->kv == "bf16") plain_ = &state;
    order_.push_back(&state);
  }
  std::ranges::stable_partition(order_, [&](const MethodState* state) { return state == plain_; });
  OSCAR_RETURN_IF_ERROR(ChooseWindows());
  OSCAR_RETURN_IF_ERROR(HashSettings());
  ModelOptions plain = PlainOptions(options_.model.prefill_cell);
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> plan, LoadedModel::Plan(plain));
  model_name_ = plan->directory().filename().string();
  num_layers_ = static_cast<int>(plan->spec().history_layers().size());
  OSCAR_RETURN_IF_ERROR(PrepareJobs(*plan));
  if (!options_.prose.empty()) {
    OSCAR_ASSIGN_OR_RETURN(
        windows_, ReadProseWindows(options_.prose, encoder_->tokenizer(), options_.prose_windows,
                                   options_.prose_tokens));
    for (const auto& window : windows_) {
      windows_hash_ =
          XXH3_64bits_withSeed(window.data(), window.size() * sizeof(int32_t), windows_hash_);
    }
  }
  OSCAR_RETURN_IF_ERROR(log_of_reference_.Open(options_.out / kReferenceFile));
  return log_.Open(options_.out / kItemsFile);
}

bool Evaluator::IsDone(const MethodState& state, const Job& job) const {
  const ItemRecord* record = log_.Find(SettingsOf(state, job), KeyOf(state, job));
  if (record == nullptr) return false;
  if (plain_ == nullptr || !ScoresReference(job)) return true;
  // One that was measured when BF16 was not among the methods has no KL.
  return &state == plain_ ? FindDistributions(job) != nullptr
                          : record->reference.has_value() && record->reference->kl.has_value();
}

Status Evaluator::AppendDistributions(const Job& job,
                                      std::span<const TokenDistribution> distributions) {
  ItemRecord record;
  record.settings = SettingsOf(*plain_, job);
  std::tie(record.method, record.task, record.id, record.repeat) = KeyOf(*plain_, job);
  record.output = EncodeDistributions(distributions);
  return log_of_reference_.Append(std::move(record));
}

Status Evaluator::RunJobs(MethodState& state, const std::vector<const Job*>& jobs,
                          const std::vector<SharedPrompt>* prompts, Progress* progress) {
  std::vector<SequenceTask> tasks;
  std::vector<const Job*> owners;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Job& job = *jobs[i];
    if (IsDone(state, job)) continue;
    SequenceTask task;
    task.prompt = job.prompt;
    task.reference = job.reference;
    task.max_tokens = job.item->max_tokens;
    task.stop_at_mismatch = !options_.want_answers;
    if (job.task->sampling.has_value()) {
      task.sampling = job.task->sampling;
      task.sampling->seed =
          HashText(job.item->id, options_.seed + static_cast<uint64_t>(job.repeat));
    }
    if (prompts != nullptr) task.shared = &(*prompts)[i];
    task.score_reference = ScoresReference(job);
    if (task.score_reference && plain_ != nullptr) {
      task.keep_distributions = &state == plain_;
      if (!task.keep_distributions) task.baseline = &FindDistributions(job)->output;
    }
    tasks.push_back(std::move(task));
    owners.push_back(&job);
  }
  if (tasks.empty()) return {};
  OSCAR_RETURN_IF_ERROR(Load(state));
  SequenceRunner runner(*state.model, stop_tokens_);
  return runner.Run(tasks, [&](size_t index, const SequenceOutcome& outcome) -> Status {
    const Job& job = *owners[index];
    ItemRecord record;
    record.settings = SettingsOf(state, job);
    record.method = state.method->label;
    record.task = job.task->name;
    record.id = job.item->id;
    record.repeat = job.repeat;
    if (!job.reference.empty()) record.strict = outcome.strict;
    record.first_wrong = outcome.first_wrong;
    record.margins = outcome.margins;
    record.reference = outcome.reference;
    if (!outcome.distributions.empty()) {
      record.reference->kl = 0.0;  // to itself
      OSCAR_RETURN_IF_ERROR(AppendDistributions(job, outcome.distributions));
    }
    record.prompt_tokens = static_cast<int64_t>(job.prompt.size());
    record.output_tokens = static_cast<int64_t>(outcome.output.size());
    record.bits = state.model->kv().StoredBits(std::max<int64_t>(outcome.tokens, 1));
    record.cache_bytes =
        state.score.simulated ? state.model->kv().StoredBytes(outcome.tokens) : outcome.cache_bytes;
    if (options_.want_answers) {
      const std::string text = encoder_->tokenizer().Decode(outcome.output, /*skip_special=*/true);
      OSCAR_ASSIGN_OR_RETURN(record.answer, ScoreOutput(job.task->scorer, *job.item, text));
      record.bucket = job.item->bucket;
      record.output = ReadAnswer(job.task->scorer, text).substr(0, kMaxOutputChars);
    }
    if (progress != nullptr) progress->Add(1);
    return log_.Append(std::move(record));
  });
}

// Groups of items outside, methods inside: every prompt is read once.
Status Evaluator::RunShared(Progress* progress) {
  MethodState plain;
  const EvalMethod plain_method{"bf16", "bf16", {}};
  plain.method = &plain_method;
  std::vector<const Job*> group;
  int64_t tokens = 0;
  const auto run_group = [&]() -> Status {
    if (group.empty()) return {};
    OSCAR_RETURN_IF_ERROR(Load(plain));
    std::vector<std::vector<int32_t>> prompts;
    prompts.reserve(group.size());
    for (const Job* job : group) prompts.push_back(job->prompt);
    SequenceRunner reader(*plain.model, stop_tokens_);
    const int64_t most =
        options_.prefill == EvalPrefill::kCell ? options_.model.prefill_cell : int64_t{1} << 40;
    OSCAR_ASSIGN_OR_RETURN(const std::vector<SharedPrompt> shared,
                           reader.ReadPrompts(prompts, most));
    for (MethodState* state : order_) {
      OSCAR_RETURN_IF_ERROR(RunJobs(*state, group, &shared, progress));
    }
    group.clear();
    tokens = 0;
    return {};
  };
  for (const Job& job : jobs_) {
    if (std::all_of(methods_.begin(), methods_.end(),
                    [&](const MethodState& state) { return IsDone(state, job); })) {
      continue;
    }
    const auto length = static_cast<int64_t>(job.prompt.size());
    if (!group.empty() && tokens + length > kSharedTokens) OSCAR_RETURN_IF_ERROR(run_group());
    group.push_back(&job);
    tokens += length;
  }
  return run_group();
}

Status Evaluator::RunText(Progress* progress) {
  if (windows_.empty()) return {};
  const auto settings_of = [&](const MethodState& state) {
    return fmt::format("{:016x}", HashText("text", state.settings ^ windows_hash_));
  };
  std::vector<MethodState*> missing;
  for (MethodState& state : methods_) {
    const ItemRecord* record =
        log_.Find(settings_of(state), {state.method->label, kTextTask, "prose", 0});
    if (record == nullptr) {
      missing.push_back(&state);
      continue;
    }
    state.score.text.emplace();
    TextMetrics& text = *state.score.text;
    std::sscanf(record->output.c_str(), "%lf %lf %lf %lf %ld %ld", &text.nll, &text.perplexity,
                &text.kl, &text.top1, &text.tokens, &text.compared);
  }
  if (missing.empty()) return {};
  const auto on_tokens = [&](int64_t) {};
  ReferenceLogits reference;
  {
    OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> model,
                           LoadedModel::Load(PlainOptions(64)));
    reference.stride =
        ReferenceStride(static_cast<int64_t>(windows_.size()) * options_.prose_tokens,
                        model->spec().vocab_size, kReferenceBytes);
    OSCAR_ASSIGN_OR_RETURN([[maybe_unused]] const TextMetrics text,
                           MeasureText(*model, windows_, &reference, /*fill=*/true, on_tokens));
  }
  for (MethodState* state : missing) {
    OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> model,
                           LoadedModel::Load(OptionsOf(*state, 64)));
    OSCAR_ASSIGN_OR_RETURN(const TextMetrics text,
                           MeasureText(*model, windows_, &reference, /*fill=*/false, on_tokens));
    state->score.text = text;
    ItemRecord record;
    record.settings = settings_of(*state);
    record.method = state->method->label;
    record.task = kTextTask;
    record.id = "prose";
    record.output = fmt::format("{:.17g} {:.17g} {:.17g} {:.17g} {} {}", text.nll, text.perplexity,
                                text.kl, text.top1, text.tokens, text.compared);
    OSCAR_RETURN_IF_ERROR(log_.Append(std::move(record)));
    if (progress != nullptr) progress->Add(1);
  }
  return {};
}

std::string Evaluator::PrefillText() const {
  if (options_.prefill == EvalPrefill::kExact) {
    return "exact, one BF16 prefill of each prompt shared by all methods";
  }
  if (options_.prefill == EvalPrefill::kCell) {
    return fmt::format(
        "cell {}: the first cell of a prompt is read once in BF16 and shared by all methods",
        options_.model.prefill_cell);
  }
  return fmt::format("each method's own, cell {}", options_.model.prefill_cell);
}

std::string Evaluator::WindowsText() const {
  std::string tokens;
  size_t count = 0;
  for (const MethodState& state : methods_) {
    if (!state.token_windows) continue;
    tokens += (count++ == 0 ? "" : ", ") + state.method->label;
  }
  if (count == 0) return "end at pages";
  return count == methods_.size() ? "end at the token"
                                  : fmt::format("end at the token for {}; at pages else", tokens);
}

EvalResults Evaluator::Collect() const {
  EvalResults out;
  out.model = model_name_;
  out.prefill = PrefillText();
  out.warnings = options_.suite.warnings;
  out.warnings.insert(out.warnings.end(), warnings_.begin(), warnings_.end());
  out.spectra = spectra_;
  out.sweep = options_.sweep;
  out.settings = {{"seed", std::to_string(options_.seed)},
                  {"decoding", DescribeSampling(options_.suite)},
                  {"windows", WindowsText()},
                  {"text", windows_.empty() ? std::string("none")
                                            : fmt::format("{} windows of {} tokens, cell 64",
                                                          windows_.size(), options_.prose_tokens)}};
  const ModelOptions& m = options_.model;
  std::string weights = m.random_weights ? fmt::format("random, seed {}", m.weights_seed) : "";
  if (m.weights == WeightFormat::kFp8) weights += weights.empty() ? "fp8" : ", fp8";
  if (!weights.empty()) out.settings.emplace_back("weights", std::move(weights));
  if (m.portable) out.settings.emplace_back("arithmetic", "portable, the same on every device");
  for (const EvalTask& task : options_.suite.tasks) {
    std::vector<int64_t> lengths;
    for (const Job& job : jobs_) {
      if (job.task != &task) continue;
      lengths.push_back(static_cast<int64_t>(job.prompt.size() + job.reference.size()));
    }
    if (lengths.empty()) continue;
    std::nth_element(lengths.begin(),
                     lengths.begin() + static_cast<std::ptrdiff_t>(lengths.size() / 2),
                     lengths.end());
    if (lengths[lengths.size() / 2] < kDefaultWindows) out.short_tasks.push_back(task.name);
  }
  using RecordsByTask = std::map<std::string, std::vector<const ItemRecord*>>;
  std::vector<RecordsByTask> records_of(methods_.size());
  const RecordsByTask* plain = nullptr;
  std::vector<ItemRecord> failed;  // the same of every method
  for (const Job& job : too_long_) {
    failed.push_back(FailedRecord(*job.task, *job.item, job.repeat));
    if (!job.reference.empty()) failed.back().strict = false;
    if (!options_.want_answers) failed.back().answer.reset();
  }
  for (size_t i = 0; i < methods_.size(); ++i) {
    const MethodState& state = methods_[i];
    MethodScore score = state.score;
    RecordsByTask& records = records_of[i];
    for (const Job& job : jobs_) {
      const ItemRecord* record = log_.Find(SettingsOf(state, job), KeyOf(state, job));
      if (record != nullptr) records[job.task->name].push_back(record);
    }
    for (size_t j = 0; j < failed.size(); ++j) {
      records[too_long_[j].task->name].push_back(&failed[j]);
    }
    for (const auto& [name, list] : records) score.tasks[name] = ScoreTask(list);
    if (&state == plain_) plain = &records;
    out.methods.push_back(std::move(score));
  }
  for (size_t i = 0; plain != nullptr && i < methods_.size(); ++i) {
    if (&records_of[i] == plain) continue;
    out.methods[i].paired = PairWith(*plain, records_of[i], out.short_tasks);
  }
  return out;
}

// One record a layer: the spectra belong to the model, not to a method.
Status Evaluator::RunSpectra(const std::optional<LayerErrorProbe>& probe,
                             const std::function<Status()>& capture) {
  const std::string settings =
      fmt::format("{:016x}", HashText("spectra", model_hash_ ^ windows_hash_));
  const auto key = [](size_t layer) {
    return ItemKey{"(model)", kSpectraTask, std::to_string(layer), 0};
  };
  for (size_t layer = 0;; ++layer) {
    const ItemRecord* record = log_.Find(settings, key(layer));
    if (record == nullptr) break;
    std::vector<double>& values = spectra_.emplace_back();
    const char* at = record->output.c_str();
    double value = 0;
    for (int used = 0; std::sscanf(at, "%lf%n", &value, &used) == 1; at += used) {
      values.push_back(value);
    }
  }
  if (std::cmp_equal(spectra_.size(), num_layers_)) return {};  // fewer: stopped in the middle
  OSCAR_RETURN_IF_ERROR(capture());
  OSCAR_ASSIGN_OR_RETURN(spectra_, probe->QuerySpectra());
  for (size_t layer = 0; layer < spectra_.size(); ++layer) {
    ItemRecord record;
    record.settings = settings;
    std::tie(record.method, record.task, record.id, record.repeat) = key(layer);
    for (double& value : spectra_[layer]) {
      const std::string text = fmt::format("{:.6g}", value);
      record.output += (record.output.empty() ? "" : " ") + text;
      value = std::strtod(text.c_str(), nullptr);  // what the next run will read
    }
    OSCAR_RETURN_IF_ERROR(log_.Append(std::move(record)));
  }
  return {};
}

Status Evaluator::RunLayers() {
  if (windows_.empty()) return {};
  const auto settings_of = [&](const MethodState& state) {
    return fmt::format("{:016x}", HashText("layers", state.settings ^ windows_hash_));
  };
  std::optional<LayerErrorProbe> probe;
  const auto capture = [&]() -> Status {
    if (probe.has_value()) return {};
    OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> model,
                           LoadedModel::Load(PlainOptions(64)));
    OSCAR_ASSIGN_OR_RETURN(probe, LayerErrorProbe::Capture(*model, std::span(windows_).first(1)));
    return {};
  };
  OSCAR_RETURN_IF_ERROR(RunSpectra(probe, capture));
  for (MethodState& state : methods_) {
    const ItemRecord* record =
        log_.Find(settings_of(state), {state.method->label, kLayersTask, "prose", 0});
    if (record != nullptr) {
      const char* at = record->output.c_str();
      double k = 0, v = 0;
      for (int used = 0; std::sscanf(at, "%lf %lf%n", &k, &v, &used) == 2; at += used) {
        state.score.layer_errors.emplace_back(k, v);
      }
      continue;
    }
    OSCAR_RETURN_IF_ERROR(capture());
    // Measured on the host, in its order of pages.
    ModelOptions on_host = OptionsOf(state, 64);
    on_host.device = Device::kCpu;
    on_host.kv_memory = 0;
    OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> plan, LoadedModel::Plan(on_host));
    OSCAR_ASSIGN_OR_RETURN(state.score.layer_errors, probe->Measure(plan->kv()));
    ItemRecord line;
    line.settings = settings_of(state);
    line.method = state.method->label;
    line.task = kLayersTask;
    line.id = "prose";
    for (const auto& [k, v] : state.score.layer_errors) {
      line.output += fmt::format("{}{:.9g} {:.9g}", line.output.empty() ? "" : " ", k, v);
    }
    OSCAR_RETURN_IF_ERROR(log_.Append(std::move(line)));
  }
  return {};
}

Result<EvalResults> Evaluator::Run() {
  OSCAR_RETURN_IF_ERROR(Prepare());
  uint64_t missing = 0;
  for (const MethodState& state : methods_) {
    for (const Job& job : jobs_) missing += IsDone(state, job) ? 0 : 1;
  }
  const uint64_t total = methods_.size() * jobs_.size();
  if (missing < total) {
    LogInfo("{} of {} items were measured before and are not repeated", total - missing, total);
  }
  std::optional<Progress> progress;
  if (options_.show_progress) {
    progress.emplace("evaluating", missing + (windows_.empty() ? 0 : methods_.size()), "items");
  }
  Progress* bar = progress.has_value() ? &*progress : nullptr;
  OSCAR_RETURN_IF_ERROR(RunText(bar));
  OSCAR_RETURN_IF_ERROR(RunLayers());
  if (options_.prefill != EvalPrefill::kMethod) {
    OSCAR_RETURN_IF_ERROR(RunShared(bar));
  } else {
    std::vector<const Job*> all;
    for (const Job& job : jobs_) all.push_back(&job);
    for (MethodState* state : order_) {
      OSCAR_RETURN_IF_ERROR(RunJobs(*state, all, nullptr, bar));
      state->model.reset();
    }
  }
  return Collect();
}

}  // namespace

Result<std::vector<EvalMethod>> ParseMethods(const std::vector<std::string>& names,
                                             const fs::path& rotation,
                                             const std::vector<double>& bits) {
  std::vector<EvalMethod> out;
  std::set<std::string> seen;
  for (const std::string& name : names) {
    const size_t at = name.find('@');
    EvalMethod method{name, name.substr(0, at), {}};
    const size_t colon = method.kv.find(':');
    const std::string own_bits = colon == std::string::npos ? "" : method.kv.substr(colon + 1);
    OSCAR_ASSIGN_OR_RETURN(const KvMethodInfo info, FindKvMethod(method.kv));
    if (info.takes_bits && bits.size() == 1) method.bits = bits.front();
    // Bits, or switches, which belong to the name.
    if (colon != std::string::npos && info.switches.empty()) {
      method.kv.resize(colon);
      double value = 0;
      const char* const end = own_bits.data() + own_bits.size();
      const auto [stop, error] = std::from_chars(own_bits.data(), end, value);
      if (error != std::errc() || stop != end || own_bits.empty()) {
        return Unexpected(InvalidArgument(
            fmt::format("--kv {}: what follows the colon must be bits, as in oscar+:2.5", name)));
      }
      method.bits = value;
    }
    const std::string own = at == std::string::npos ? "" : name.substr(at + 1);
    if (own.empty() && at != std::string::npos) {
      return Unexpected(InvalidArgument(
          fmt::format("--kv {}: names no rotation after the @; give a directory or none", name)));
    }
    if (!own.empty()) {
      if (own != "none" || info.takes_rotation) method.rotation = own;
    } else if (own.empty() && info.takes_rotation) {
      method.rotation = rotation;
    }
    std::vector<EvalMethod> variants;
    if (info.takes_bits && !method.bits.has_value()) {
      for (const double value : bits) {
        variants.push_back(method);
        variants.back().bits = value;
        variants.back().label =
            fmt::format("{}:{}{}", method.kv, value, name.substr(std::min(at, name.size())));
      }
    }
    if (variants.empty()) variants.push_back(std::move(method));
    for (EvalMethod& variant : variants) {
      if (!seen.insert(variant.label).second) {
        return Unexpected(InvalidArgument(fmt::format("--kv names {} twice", variant.label)));
      }
      out.push_back(std::move(variant));
    }
  }
  if (out.empty()) return Unexpected(InvalidArgument("--kv names no method"));
  return out;
}

Result<EvalResults> Evaluate(const EvalOptions& options) { return Evaluator(options).Run(); }

Status WriteResults(const EvalResults& results, const fs::path& directory) {
  OSCAR_RETURN_IF_ERROR(WriteFileAtomically(directory / "results.json", ResultsToJson(results)));
  OSCAR_RETURN_IF_ERROR(WriteFileAtomically(directory / "results.csv", ResultsToCsv(results)));
  for (const auto& [name, chart] : SweepCharts(results)) {
    OSCAR_RETURN_IF_ERROR(WriteFileAtomically(directory / name, StandaloneChart(chart)));
  }
  return WriteFileAtomically(directory / "report.html", RenderEvalReport(results));
}

}  // namespace oscar
