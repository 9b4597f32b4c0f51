#include "engine/loaded_model.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <numeric>

#include "base/file.h"
#include "base/log.h"
#include "base/progress.h"
#include "io/model_path.h"
#include "rotation/rotation_file.h"
#include "rotation/sensitivity_file.h"
#include "simd/block_writer.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

// Left to the system and to activations when the budget is chosen for the user.
constexpr double kShareOfFree = 0.8, kShareOfFreeOnCuda = 0.97;

uint64_t ReadNumber(const char* path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : 0;  // "max" and missing files read as 0: no limit
}

Status ApplyRopeScaling(const ModelOptions& options, ModelConfig* config) {
  if (options.rope_scaling.empty()) return {};
  OSCAR_ASSIGN_OR_RETURN(config->rope_scaling,
                         ParseRopeScaling(options.rope_scaling, config->max_position_embeddings));
  return {};
}

}  // namespace

uint64_t AvailableMemory() {
  uint64_t available = 0;
  std::ifstream info("/proc/meminfo");
  for (std::string key; info >> key;) {
    uint64_t kib = 0;
    std::string unit;
    if (!(info >> kib)) break;
    std::getline(info, unit);
    if (key == "MemAvailable:") available = kib * 1024;
  }
  const uint64_t limit = ReadNumber("/sys/fs/cgroup/memory.max");
  if (limit > 0) {
    const uint64_t used = ReadNumber("/sys/fs/cgroup/memory.current");
    available = std::min(available, limit > used ? limit - used : 0);
  }
  return available;
}

Result<fs::path> FindDemoModel() {
  std::vector<fs::path> places;
  if (const char* given = std::getenv("OSCAR_DEMO_MODEL")) places.emplace_back(given);
  std::error_code error;
  const fs::path binary = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (const fs::path& root : {binary, binary.parent_path(), binary.parent_path().parent_path()}) {
    places.push_back(root / "models/demo");
    places.push_back(root / "share/oscar/models/demo");
  }
  for (const fs::path& place : places) {
    if (fs::exists(place / "config.json", error)) return place;
  }
  return Unexpected(NotFound(
      "the demo model was not found beside the program; name a model directory with --model"));
}

Result<std::unique_ptr<LoadedModel>> LoadedModel::Plan(const ModelOptions& options) {
  return Plan(options, /*is_dry_run=*/false);
}

Result<std::unique_ptr<LoadedModel>> LoadedModel::DryRun(const ModelOptions& options) {
  return Plan(options, /*is_dry_run=*/true);
}

Result<std::unique_ptr<LoadedModel>> LoadedModel::Plan(const ModelOptions& options,
                                                       bool is_dry_run) {
  std::unique_ptr<LoadedModel> loaded(new LoadedModel);
  OSCAR_ASSIGN_OR_RETURN(loaded->directory_,
                         options.model.empty() ? FindDemoModel() : FindModel(options.model));
  const bool is_file = IsRegularFile(loaded->directory_);
  OSCAR_ASSIGN_OR_RETURN(loaded->config_, is_file ? ReadModelConfigFile(loaded->directory_)
                                                  : ReadModelConfig(loaded->directory_));
  ModelConfig& config = loaded->config_;
  if (is_file && !options.random_weights && !is_dry_run) {
    return Unexpected(InvalidArgument(
        fmt::format("{}: a config alone has no weights; name the model's directory, or add "
                    "--random-weights for speed work",
                    options.model.string())));
  }
  OSCAR_RETURN_IF_ERROR(ApplyRopeScaling(options, &config));
  // A window that no text outgrows is none.
  if (config.sliding_window > 0 && options.max_context > 0 &&
      options.max_context <= config.sliding_window &&
      config.rope_scaling.type == RopeScalingType::kNone) {
    config.max_position_embeddings = std::min(config.max_position_embeddings, options.max_context);
    config.sliding_window = 0;
  }
  Result<ModelSpec> spec = MakeModelSpec(config);
  if (!spec.has_value()) {
    return Unexpected(spec.error().WithContext(loaded->directory_.string()));
  }
  loaded->spec_ = std::move(*spec);
  if (!config.quantization_problem.empty() && !options.random_weights) {
    return Unexpected(Unimplemented(fmt::format(
        "{}: the weights are quantised ({}: {}), which this version cannot read; use the BF16 or "
        "an "
        "FP8 checkpoint",
        loaded->directory_.string(), config.quantization_method, config.quantization_problem)));
  }

  // A stretched RoPE stretches the context it was trained on.
  const RopeScaling& rope = config.rope_scaling;
  int64_t longest = config.max_position_embeddings;
  if (rope.type != RopeScalingType::kNone && rope.original_max_position > 0) {
    longest = std::max(longest, static_cast<int64_t>(
                                    rope.factor * static_cast<double>(rope.original_max_position)));
  }
  if (config.sliding_window > 0 && config.sliding_window < longest) {
    return Unexpected(Unimplemented(fmt::format(
        "{}: config.json: sliding_window: {}: layers that see less than the stretched context of "
        "{} are not supported",
        loaded->directory_.string(), config.sliding_window, longest)));
  }
  loaded->spec_.max_positions = longest;
  loaded->max_context_ = options.max_context > 0 ? options.max_context : longest;
  if (loaded->max_context_ > longest) {
    return Unexpected(InvalidArgument(
        fmt::format("--max-model-len {} is beyond the model's {} positions; stretch them with "
                    "--rope-scaling yarn:FACTOR",
                    options.max_context, longest)));
  }

  KvPlanOptions plan;
  plan.method = options.kv;
  plan.group_dims = options.group_dims;
  plan.sink = options.sink;
  plan.recent = options.recent;
  plan.k_clip = options.k_clip;
  plan.v_clip = options.v_clip;
  plan.prefill_cell = options.prefill_cell;
  plan.token_windows = options.token_windows;
  plan.bits = options.bits;
  OSCAR_RETURN_IF_ERROR(loaded->FindRotation(options, plan));
  loaded->memory_.available_bytes = AvailableMemory();
  OSCAR_RETURN_IF_ERROR(loaded->ChooseDevice(options, plan));
  const Status planned = loaded->PlanMemory(options);
  if (!planned.ok() && !is_dry_run) return Unexpected(planned);
  return loaded;
}

Status LoadedModel::FindRotation(const ModelOptions& options, KvPlanOptions& plan) {
  if (options.rotation == "none") return {};
  OSCAR_ASSIGN_OR_RETURN(const KvMethodInfo info, FindKvMethod(options.kv));
  fs::path place = options.rotation;
  if (place.empty() && info.takes_bits) {
    const fs::path beside = directory_ / kRotationFolderName;
    if (!Exists(beside / kSensitivityFileName)) return {};
    place = beside;
  }
  if (place.empty()) return {};
  const AttentionSpec& attention = spec_.attention();
  const std::string pair = fmt::format("{} for {}", place.string(), directory_.string());
  bool wants_rotation = true;
  if (info.takes_bits && IsDirectory(place) && Exists(place / kSensitivityFileName)) {
    OSCAR_ASSIGN_OR_RETURN(const Sensitivities found, ReadSensitivities(place));
    Result<SensitivityMap> map = MapOf(found, spec_.history_layers(), attention.num_kv_heads);
    if (!map.has_value()) return map.error().WithContext(pair);
    plan.sensitivities = std::move(*map);
    rotation_model_ = found.model_fingerprint;
    sensitivity_path_ = place / kSensitivityFileName;
    // A folder that was named is asked for its rotation; one that was found says which it wants.
    wants_rotation = options.rotation.empty() ? found.rotation == "calibrated" : HasRotation(place);
  }
  if (!wants_rotation) return {};
  OSCAR_ASSIGN_OR_RETURN(plan.rotation, LoadRotation(place));
  const std::string& model = plan.rotation->info.model_fingerprint;
  if (!rotation_model_.empty() && !model.empty() && model != rotation_model_) {
    return InvalidArgument(fmt::format(
        "{}: its rotation was made from the model {}, its sensitivities from {}; calibrate again",
        place.string(), model, rotation_model_));
  }
  if (!model.empty()) rotation_model_ = model;
  return CheckRotationFits(*plan.rotation, spec_.history_layers(), attention.head_dim,
                           attention.num_kv_heads, /*model_fingerprint=*/"",
                           /*unused_ids=*/spec_.kv_layers())
      .WithContext(pair);
}

std::string LoadedModel::DescribeBits() const {
  if (plan_->bit_map().empty()) return "";
  std::string out =
      sensitivity_path_.empty()
          ? std::string(", the same in every head (`oscar calibrate` measures which need more)")
          : fmt::format(" by {}", sensitivity_path_.string());
  out += "; as stored:";
  for (const int64_t thousands : {4, 32, 128}) {
    out += fmt::format("{} {:.2f} at {}K", thousands == 4 ? "" : ",",
                       plan_->StoredBits(thousands * 1024), thousands);
  }
  return out;
}

Status LoadedModel::PlanMemory(const ModelOptions& options) {
  MemoryPlan& memory = memory_;
  const bool is_mxfp4 = HasMxfp4Experts();
  const bool is_fp8 =
      !is_mxfp4 && (options.weights == WeightFormat::kFp8 ||
                    (!config_.quantization_method.empty() && config_.quantization_problem.empty()));
  has_fp8_weights_ = is_fp8;
  using Fp8 = TensorTable::Fp8;
  const Fp8 fp8 = is_mxfp4                   ? Fp8::kMxfp4Experts
                  : !is_fp8                  ? Fp8::kNone
                  : device_ == Device::kCuda ? Fp8::kAll
                                             : Fp8::kExperts;
  memory.weight_bytes = TensorTable(spec_).Bytes(fp8, plan_->rotates_v());
  memory.open_page_bytes = plan_->cache().open.bytes();
  memory.sealed_page_bytes = plan_->cache().sealed.bytes();
  memory.state_bytes = plan_->cache().state.bytes();
  const uint64_t least = memory.open_page_bytes + memory.state_bytes;
  memory.kv_bytes = options.kv_memory;
  if (memory.kv_bytes == 0) {
    const double share = device_ == Device::kCuda ? kShareOfFreeOnCuda : kShareOfFree;
    const double free = share * static_cast<double>(memory.available_bytes) -
                        static_cast<double>(memory.weight_bytes);
    memory.kv_bytes = PageBudget(static_cast<uint64_t>(std::max(free, 0.0)));
  }
  if (memory.kv_bytes < least && options.kv_memory == 0 && device_ == Device::kCuda) {
    return ResourceExhausted(fmt::format(
        "{} has {} free, of which weights take {}: no room for the cache; free some of it, try "
        "--weights fp8, or use --device cpu",
        device_name_, FormatBytes(memory.available_bytes), FormatBytes(memory.weight_bytes)));
  }
  if (memory.kv_bytes < least && options.kv_memory == 0) {
    return ResourceExhausted(fmt::format(
        "weights take {} and {} of memory are free: no room for the cache; free some of "
        "it, or say what the cache gets with --kv-memory",
        FormatBytes(memory.weight_bytes), FormatBytes(memory.available_bytes)));
  }
  if (memory.kv_bytes < least) {
    return ResourceExhausted(fmt::format(
        "the KV cache budget of {} does not hold one page of 64 tokens{} ({}); raise --kv-memory",
        FormatBytes(memory.kv_bytes),
        memory.state_bytes > 0 ? " and a sequence's recurrent state" : "", FormatBytes(least)));
  }
  return {};
}

uint64_t LoadedModel::PageBudget(uint64_t bytes) const {
  return oscar::PageBudget(device_, *plan_, bytes);
}

// Makes the plan in the order of pages that the device reads.
Status LoadedModel::ChooseDevice(const ModelOptions& options, const KvPlanOptions& plan) {
  if (options.token_windows && options.device == Device::kCuda) {
    return InvalidArgument("--device cuda: windows that end at the token need --device cpu")
        .WithParam("device");
  }
  if (options.device != Device::kCpu && !options.token_windows) {
    const Result<DeviceInfo> found = FindDevice(Device::kCuda);
    Status refused = found.has_value() ? Status() : found.error();
    if (found.has_value()) {
      KvPlanOptions ordered = plan;
      ordered.order = OrderOf(Device::kCuda);
      OSCAR_ASSIGN_OR_RETURN(plan_, KvPlan::Make(spec_, ordered, simd::WriteBlocks));
      refused = CheckPlan(Device::kCuda, spec_, *plan_);
      if (refused.ok()) {
        device_ = Device::kCuda;
        device_name_ = found->name;
        memory_.available_bytes = found->free_bytes;
        return {};
      }
    }
    if (options.device == Device::kCuda) {
      const bool none = refused.code() == StatusCode::kNotFound;
      return Status(refused.code(), fmt::format("--device cuda: {}{}", refused.message(),
                                                none ? "; use --device cpu" : ""))
          .WithParam("device");
    }
    if (found.has_value()) {
      LogInfo("running on the CPU: {}", refused.message());
    } else if (refused.code() == StatusCode::kUnavailable) {
      LogWarning("running on the CPU: {}", refused.message());  // there is one, in vain
    }
  }
  OSCAR_ASSIGN_OR_RETURN(plan_, KvPlan::Make(spec_, plan, simd::WriteBlocks));
  return {};
}

Result<std::unique_ptr<LoadedModel>> LoadedModel::Load(const ModelOptions& options) {
  OSCAR_ASSIGN_OR_RETURN(std::unique_ptr<LoadedModel> loaded, Plan(options));
  std::unique_ptr<WeightSource> source;
  if (options.random_weights) {
    source = MakeRandomWeights(options.weights_seed, loaded->HasMxfp4Experts());
    LogWarning("random weights: speed is real, answers mean nothing");
  } else {
    const ModelConfig& config = loaded->config_;
    OSCAR_ASSIGN_OR_RETURN(
        source, OpenCheckpointWeights(loaded->directory_.string(),
                                      {config.fp8_block_rows, config.fp8_block_columns}));
    OSCAR_ASSIGN_OR_RETURN(const bool has_grown, FollowCheckpoint(*source, &loaded->spec_));
    if (has_grown) OSCAR_RETURN_IF_ERROR(loaded->PlanMemory(options));
    // Shapes agree for any model of a family; the weights tell its members apart.
    const std::string fingerprint = fmt::format("{:016x}", source->Fingerprint());
    if (!loaded->rotation_model_.empty() && loaded->rotation_model_ != fingerprint) {
      return Unexpected(InvalidArgument(fmt::format(
          "{}: calibrated on the model {}, but {} is {}; calibrate this one with oscar calibrate",
          options.rotation.string(), loaded->rotation_model_, loaded->directory_.string(),
          fingerprint)));
    }
  }
  if (options.weights == WeightFormat::kFp8 ||
      (options.random_weights && loaded->has_fp8_weights_)) {
    // Random weights are stored as the config says that the checkpoint's are.
    std::optional<Fp8Tiles> blocks;
    if (options.weights != WeightFormat::kFp8 && loaded->config_.quantization_method == "fp8") {
      blocks = {loaded->config_.fp8_block_rows, loaded->config_.fp8_block_columns};
    }
    source = QuantizeWeights(std::move(source), loaded->spec_, blocks);
  }
  loaded->threads_ = std::make_unique<ThreadPool>(options.num_threads);
  BackendOptions backend;
  backend.max_batch_tokens = options.chunk;
  backend.max_sequences = options.max_sequences;
  backend.max_context = loaded->max_context_;
  backend.kv_bytes = options.kv_memory;
  backend.batch_invariant = options.batch_invariant;
  backend.portable = options.portable;
  OSCAR_ASSIGN_OR_RETURN(loaded->model_, LoadModel(loaded->device_, loaded->spec_, *source,
                                                   *loaded->plan_, *loaded->threads_, backend));
  if (PageMemory* pages = loaded->backend().page_memory()) {
    loaded->memory_.kv_bytes = loaded->backend().page_budget();
    loaded->memory_.weight_bytes = loaded->model_->weight_bytes();
    loaded->pool_ = std::make_unique<PagePool>(loaded->memory_.kv_bytes, *pages);
  } else {
    loaded->pool_ =
        std::make_unique<PagePool>(loaded->memory_.kv_bytes, loaded->plan_->host_sealer());
  }
  if (const auto memory = loaded->backend().device_memory()) {
    LogInfo("{}: weights {}, activations and workspaces {}, cache pages {}, {} left free",
            loaded->device_name_, FormatBytes(memory->weights), FormatBytes(memory->activations),
            FormatBytes(memory->pages), FormatBytes(memory->free));
  }
  LogInfo("KV cache: {}{}", loaded->plan_->Describe(), loaded->DescribeBits());
  return loaded;
}

}  // namespace oscar
