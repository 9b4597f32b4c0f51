// oscar inspect: what a file or directory holds: model configs, safetensors, torch files,
// rotations; and the keys that a model makes of a prompt.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error_text.h"
#include "base/file.h"
#include "base/progress.h"
#include "cli/command.h"
#include "cli/inspect_keys.h"
#include "cli/model_options.h"
#include "cli/rotation_options.h"
#include "cli/validators.h"
#include "hub/hub.h"
#include "io/hf_config.h"
#include "io/hub_cache.h"
#include "io/safetensors.h"
#include "io/torch_file.h"
#include "rotation/rotation_file.h"
#include "rotation/sensitivity_file.h"
#include "rotation/spectrum.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

struct InspectOptions {
  std::string path;
  bool json = false;
  bool offline = false;
  bool is_snapshot = false;  // of a name: weights may not be here
  int layer = -1;
  std::optional<double> bits;
  InspectKeysOptions keys;  // with --prompt
  std::string only_keys;    // an option of those on the command line
};

ordered_json ConfigToJson(const ModelConfig& config) {
  ordered_json out = {
      {"kind", "model config"},
      {"model_type", config.model_type},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.hidden_size},
      {"intermediate_size", config.intermediate_size},
      {"num_layers", config.num_layers},
      {"num_attention_heads", config.num_attention_heads},
      {"num_kv_heads", config.num_kv_heads},
      {"head_dim", config.head_dim},
      {"rope_theta", config.rope_theta},
      {"rope_scaling", NameOf(config.rope_scaling.type)},
      {"max_position_embeddings", config.max_position_embeddings},
      {"tie_word_embeddings", config.tie_word_embeddings},
      {"torch_dtype", config.torch_dtype},
      {"eos_token_ids", config.eos_token_ids},
  };
  if (!config.quantization_method.empty()) out["quantization"] = config.quantization_method;
  // What one token of context costs: the number people plan memory with.
  const auto layers = static_cast<double>(config.num_layers) -
                      static_cast<double>(config.linear.layers.size());  // those with a KV cache
  const double elements = 2.0 * layers * config.num_kv_heads * config.head_dim;
  out["kv_bytes_per_token_bf16"] = elements * 2;
  out["kv_bytes_per_token_int2"] = elements * (2 + 32.0 / config.head_dim) / 8;
  return out;
}

ordered_json TensorToJson(const StoredTensor& tensor) {
  return {{"name", tensor.name},
          {"dtype", NameOf(tensor.dtype)},
          {"shape", tensor.shape},
          {"bytes", tensor.num_bytes}};
}

// Sizes by element type, in the order of DType.
ordered_json TypesToJson(std::span<const StoredTensor> tensors) {
  std::map<DType, uint64_t> bytes;
  for (const StoredTensor& tensor : tensors) bytes[tensor.dtype] += tensor.num_bytes;
  ordered_json out = ordered_json::object();
  for (const auto& [dtype, count] : bytes) out[std::string(NameOf(dtype))] = count;
  return out;
}

ordered_json TensorsToJson(std::string_view kind, std::span<const StoredTensor> tensors) {
  uint64_t bytes = 0, elements = 0;
  ordered_json list = ordered_json::array();
  for (const StoredTensor& tensor : tensors) {
    bytes += tensor.num_bytes;
    elements += tensor.num_elements();
    list.push_back(TensorToJson(tensor));
  }
  return {{"kind", kind},   {"num_tensors", tensors.size()},          {"elements", elements},
          {"bytes", bytes}, {"bytes_by_dtype", TypesToJson(tensors)}, {"tensors", list}};
}

ordered_json SideToJson(const SideRotation& side, double error) {
  const auto [low, high] = std::minmax_element(side.eigenvalues.begin(), side.eigenvalues.end());
  return {{"matrices", side.num_heads},
          {"orthogonality_error", error},
          {"eigenvalue_min", *low},
          {"eigenvalue_max", *high},
          {"clip", side.clip}};
}

ordered_json RotationToJson(const Rotation& rotation, const OrthogonalityReport& report) {
  ordered_json layers = ordered_json::array();
  for (const auto& [id, layer] : rotation.layers) {
    const auto [k_error, v_error] = report.by_layer.at(id);
    layers.push_back(
        {{"layer", id}, {"k", SideToJson(layer.k, k_error)}, {"v", SideToJson(layer.v, v_error)}});
  }
  ordered_json out = {{"kind", "rotation"}};
  AddStrings(rotation.info, out);
  out["calibration_tokens"] = rotation.info.calibration_tokens;
  out["num_layers"] = rotation.layers.size();
  out["head_dim"] = rotation.head_dim;
  out["max_orthogonality_error"] = report.max_error;
  out["layers"] = std::move(layers);
  return out;
}

void PrintRotation(const Rotation& rotation, const OrthogonalityReport& report, int chosen) {
  fmt::print("rotation: {} layers, head dim {}, K {}, V {}, composition {}\n",
             rotation.layers.size(), rotation.head_dim, Printable(rotation.info.k_objective),
             Printable(rotation.info.v_objective), Printable(rotation.info.composition));
  fmt::print("max |R R^T - I| = {:.2e} (layer {}, {})\n\n", report.max_error, report.layer,
             report.side);
  fmt::print("{:>5} {:>4} {:>4}  {:>9} {:>9}  {:>10} {:>10} {:>10} {:>10}  {:>9} {:>9}\n", "layer",
             "nK", "nV", "errK", "errV", "eigK min", "eigK max", "eigV min", "eigV max", "clipK",
             "clipV");
  for (const auto& [id, layer] : rotation.layers) {
    const auto [k_error, v_error] = report.by_layer.at(id);
    const auto [k_low, k_high] =
        std::minmax_element(layer.k.eigenvalues.begin(), layer.k.eigenvalues.end());
    const auto [v_low, v_high] =
        std::minmax_element(layer.v.eigenvalues.begin(), layer.v.eigenvalues.end());
    fmt::print(
        "{:>5} {:>4} {:>4}  {:>9.2e} {:>9.2e}  {:>10.3g} {:>10.3g} {:>10.3g} {:>10.3g}  {:>9} "
        "{:>9}\n",
        id, layer.k.num_heads, layer.v.num_heads, k_error, v_error, *k_low, *k_high, *v_low,
        *v_high, FormatClips(layer.k), FormatClips(layer.v));
  }
  const int id = chosen >= 0 ? chosen : rotation.layers.begin()->first;
  const LayerRotation& layer = *rotation.Find(id);
  for (const auto& [name, side] : {std::pair{"K", &layer.k}, {"V", &layer.v}}) {
    fmt::print("\neigenvalues of {}, layer {}{} (choose another by --layer)\n{}", name, id,
               side->num_heads > 1 ? ", head 0" : "", SpectrumPlot(side->EigenvaluesOf(0), 64, 8));
  }
}

void PrintTensors(const ordered_json& summary) {
  fmt::print("{}: {} tensors, {} numbers, {}\n", summary["kind"].get<std::string>(),
             summary["num_tensors"].get<size_t>(), summary["elements"].get<uint64_t>(),
             FormatBytes(summary["bytes"].get<uint64_t>()));
  for (const auto& tensor : summary["tensors"]) {
    fmt::print("  {:<8} {:<20} {:>12}  {}\n", tensor["dtype"].get<std::string>(),
               ShapeToString(tensor["shape"].get<std::vector<int64_t>>()),
               FormatBytes(tensor["bytes"].get<uint64_t>()),
               Printable(tensor["name"].get<std::string>()));
  }
}

void PrintFields(const ordered_json& object) {
  for (const auto& [key, value] : object.items()) {
    fmt::print("{:<26} {}\n", key,
               value.is_string() ? Printable(value.get<std::string>()) : value.dump());
  }
}

// A torch value as JSON; tensors become {"dtype", "shape"}.
ordered_json TorchToJson(const TorchValue& value) {
  if (const auto* x = value.AsBool()) return *x;
  if (const auto* x = value.AsInt()) return *x;
  if (const auto* x = value.AsFloat()) return *x;
  if (const auto* x = value.AsString()) return *x;
  if (const auto* x = value.AsTensor()) {
    return {{"tensor", NameOf(x->dtype)}, {"shape", x->shape}, {"bytes", x->data.size()}};
  }
  if (const auto* x = value.AsDict()) {
    ordered_json out = ordered_json::object();
    for (const auto& [key, item] : x->items) {
      const auto* number = std::get_if<int64_t>(&key);
      out[number != nullptr ? std::to_string(*number) : std::get<std::string>(key)] =
          TorchToJson(item);
    }
    return out;
  }
  ordered_json out = ordered_json::array();
  if (const auto* x = value.AsList()) {
    for (const TorchValue& item : *x) out.push_back(TorchToJson(item));
    return out;
  }
  if (const auto* x = value.AsTuple()) {
    for (const TorchValue& item : x->items) out.push_back(TorchToJson(item));
    return out;
  }
  return nullptr;
}

// Of the default groups: what (scale, min) of 128 dims add to a number.
constexpr double kMetaBits = 0.25;

// What two bits cost each head, and the bits that it gets for that. `out` null: prints; else the
// same as JSON.
Status InspectSensitivities(const InspectOptions& options, const fs::path& path,
                            ordered_json* out) {
  OSCAR_ASSIGN_OR_RETURN(const Sensitivities found, ReadSensitivities(path));
  SensitivityMap map;
  std::vector<int> ids;
  for (const auto& [id, heads] : found.layers) {
    if (!map.empty() && heads.size() != map.front().size()) {
      return DataLoss(fmt::format("{}: layers of {} and {} KV heads", path.string(),
                                  map.front().size(), heads.size()));
    }
    ids.push_back(id);
    map.push_back(heads);
  }
  const double wanted = options.bits.value_or(kMinMapBits + kDefaultExtraBits + kMetaBits);
  if (wanted < kMinMapBits + kMetaBits || wanted > kMaxMapBits + kMetaBits) {
    return InvalidArgument(fmt::format("--bits {}: must lie between {} and {}", wanted,
                                       kMinMapBits + kMetaBits, kMaxMapBits + kMetaBits));
  }
  const BitMap bits = ChooseBits(map, wanted - kMetaBits);
  const double reached = MeanCodeBits(bits) + kMetaBits;
  if (out != nullptr) {
    *out = ordered_json::parse(SensitivitiesToJson(found));
    (*out)["kind"] = "sensitivities";
    (*out)["history_bits"] = reached;
    for (size_t layer = 0; layer < bits.size(); ++layer) {
      ordered_json& to = (*out)["bits"][std::to_string(ids[layer])];
      for (const HeadBits& head : bits[layer]) {
        to["k"].push_back(head.k);
        to["v"].push_back(head.v);
      }
    }
    return {};
  }
  fmt::print("sensitivities: {} layers of {} KV heads, {}, {}, {} tokens compared\n", map.size(),
             map.front().size(), found.measure == "kl" ? "KL of answers in nats" : "proxy",
             found.rotation == "calibrated" ? "calibrated rotation" : "Hadamard", found.tokens);
  fmt::print("what 2 bits cost, K/V of each head:\n");
  for (size_t layer = 0; layer < map.size(); ++layer) {
    fmt::print("layer {:>3}  ", ids[layer]);
    for (const HeadSensitivity& head : map[layer]) fmt::print(" {:.5f}/{:.5f}", head.k, head.v);
    fmt::print("\n");
  }
  fmt::print("bits of K/V of each head at {:.4g} history bits (groups of 128):\n{}", reached,
             DrawBits(bits, ids));
  return {};
}

Status RefuseBits(const InspectOptions& options) {
  if (!options.bits.has_value()) return {};
  return InvalidArgument(fmt::format(
      "{}: --bits shows the bits of heads, for which this has no sensitivities", options.path));
}

// `beside`: what else the directory holds, null or for the JSON.
Status InspectRotation(const InspectOptions& options, const ordered_json& beside = {}) {
  // A broken rotation is looked at, not refused; verify is what fails.
  OSCAR_ASSIGN_OR_RETURN(const Rotation rotation,
                         LoadRotation(options.path, std::numeric_limits<double>::infinity()));
  const OrthogonalityReport report = MeasureOrthogonality(rotation);
  if (options.layer >= 0 && rotation.Find(options.layer) == nullptr) {
    return InvalidArgument(fmt::format("{}: there is no layer {}", options.path, options.layer));
  }
  if (options.json) {
    ordered_json out = RotationToJson(rotation, report);
    if (!beside.is_null()) out["sensitivities"] = beside;
    fmt::print("{}\n", out.dump(2, ' ', false, ordered_json::error_handler_t::replace));
  } else {
    PrintRotation(rotation, report, options.layer);
  }
  return {};
}

Status RefuseLayer(const InspectOptions& options) {
  if (options.layer < 0) return {};
  return InvalidArgument(
      fmt::format("{}: --layer chooses a layer of a rotation, which this is not", options.path));
}

Status InspectTensors(const InspectOptions& options, const ordered_json& summary) {
  OSCAR_RETURN_IF_ERROR(RefuseLayer(options));
  if (options.json) {
    fmt::print("{}\n", summary.dump(2));
  } else {
    PrintTensors(summary);
  }
  return {};
}

Status InspectModel(const InspectOptions& options, const fs::path& config_path) {
  OSCAR_RETURN_IF_ERROR(RefuseLayer(options));
  OSCAR_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfigFile(config_path));
  ordered_json out = ConfigToJson(config);
  const fs::path directory = config_path.parent_path();
  const auto is_here = [&] {
    const MissingFile missing = FindMissing(directory, ModelParts::kWeights);
    return missing.name.empty() || missing.unsure;
  };
  const bool has_weights = IsDirectory(options.path) && (!options.is_snapshot || is_here()) &&
                           (Exists(directory / "model.safetensors") ||
                            Exists(directory / "model.safetensors.index.json"));
  if (has_weights) {
    OSCAR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(directory));
    out["weights"] = TensorsToJson("checkpoint", checkpoint.tensors());
  }
  if (options.json) {
    fmt::print("{}\n", out.dump(2));
    return {};
  }
  const ordered_json weights = has_weights ? out["weights"] : ordered_json();
  out.erase("weights");
  PrintFields(out);
  if (has_weights) {
    fmt::print("\n");
    PrintTensors(weights);
  }
  return {};
}

bool LooksLikeRotation(const SafetensorsFile& file) {
  return std::any_of(file.tensors().begin(), file.tensors().end(), [](const StoredTensor& tensor) {
    return tensor.name.starts_with("layers.") && tensor.name.ends_with(".k_rotation");
  });
}

// Keys of a model, which runs for that.
Status RunInspectKeys(InspectOptions& options) {
  if (options.bits.has_value()) {
    return InvalidArgument("--bits: keys are shown before they are quantised; leave it out");
  }
  OSCAR_ASSIGN_OR_RETURN(options.keys.model.model,
                         hub::ObtainModel(options.path, ModelParts::kWeights, options.offline));
  options.keys.model.device = Device::kCpu;
  options.keys.layer = options.layer;
  options.keys.json = options.json;
  return InspectKeys(options.keys);
}

Status RunInspect(InspectOptions options) {
  if (!options.keys.prompt.empty()) return RunInspectKeys(options);
  if (!options.only_keys.empty()) {
    return InvalidArgument(fmt::format(
        "{}: is about the keys of a prompt; name its file with --prompt", options.only_keys));
  }
  if (options.json && options.layer >= 0) {
    return InvalidArgument("--layer: --json has every layer; leave one of them out");
  }
  fs::path path = options.path;
  if (!Exists(
          path)) {  // a name on the hub, perhaps: its config, and its tensors where they are here
    OSCAR_ASSIGN_OR_RETURN(path, hub::ObtainModel(path, ModelParts::kConfig, options.offline));
    options.is_snapshot = true;
    options.path = path.string();
  }
  if (IsDirectory(path)) {
    if (Exists(path / "config.json")) return InspectModel(options, path / "config.json");
    if (!Exists(path / kSensitivityFileName)) {
      OSCAR_RETURN_IF_ERROR(RefuseBits(options));
      return InspectRotation(options);
    }
    ordered_json found;
    if (options.json) OSCAR_RETURN_IF_ERROR(InspectSensitivities(options, path, &found));
    if (HasRotation(path)) OSCAR_RETURN_IF_ERROR(InspectRotation(options, found));
    if (options.json && !HasRotation(path)) fmt::print("{}\n", found.dump(2));
    if (options.json) return {};
    if (HasRotation(path)) fmt::print("\n");
    return InspectSensitivities(options, path, nullptr);
  }
  if (path.filename() == kSensitivityFileName) {
    OSCAR_RETURN_IF_ERROR(RefuseLayer(options));
    ordered_json found;
    OSCAR_RETURN_IF_ERROR(InspectSensitivities(options, path, options.json ? &found : nullptr));
    if (options.json) fmt::print("{}\n", found.dump(2));
    return {};
  }
  OSCAR_RETURN_IF_ERROR(RefuseBits(options));
  if (path.extension() == ".json") return InspectModel(options, path);
  if (path.extension() == ".safetensors") {
    OSCAR_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
    if (LooksLikeRotation(file)) return InspectRotation(options);
    return InspectTensors(options, TensorsToJson("safetensors", file.tensors()));
  }
  if (path.extension() == ".pt" || path.extension() == ".pth") {
    OSCAR_ASSIGN_OR_RETURN(const TorchValue value, ReadTorchFile(path));
    // This file alone, whatever lies beside it; the directory shows a pair as one rotation.
    if (options.layer >= 0) {
      return InvalidArgument(fmt::format(
          "{}: --layer needs a whole rotation: name its directory or a .safetensors file",
          options.path));
    }
    fmt::print("{}\n",
               TorchToJson(value).dump(2, ' ', false, ordered_json::error_handler_t::replace));
    return {};
  }
  return InvalidArgument(fmt::format(
      "{}: not a kind of file that inspect knows (.json, .safetensors, .pt, or a directory)",
      options.path));
}

}  // namespace

void AddInspectCommand(CLI::App& app, RunFunction& run) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand(
      "inspect", "Show what a model directory, config, safetensors, torch or rotation file holds");
  command->add_option("path", options->path, "File, directory, or a name on the Hugging Face hub")
      ->required();
  AddOfflineFlag(*command, options->offline);
  command->add_flag("--json", options->json, "Print JSON");
  command
      ->add_option("--layer", options->layer,
                   "Layer whose eigenvalue spectrum is shown; with --prompt, whose keys are")
      ->check(CLI::Range(0, 1'000'000));
  command->add_option("--bits", options->bits,
                      "History bits of the map of bits per head that is shown; default: oscar+'s");
  const char* const group = "Keys of a prompt";
  command
      ->add_option("--prompt", options->keys.prompt,
                   "Show channel outliers and norms of a model's keys for the text in this file, "
                   "before and after what a cache method does to them (on the CPU)")
      ->check(NotEmpty())
      ->group(group);
  const std::vector<const CLI::Option*> of_keys = {
      command
          ->add_option("--kv", options->keys.model.kv,
                       "The cache method, such as oscar-su, which has token norms")
          ->capture_default_str()
          ->check(NotEmpty())
          ->group(group),
      command
          ->add_option("--rotation", options->keys.model.rotation,
                       "Rotation of methods that take one")
          ->check(NotEmpty())
          ->group(group),
      command
          ->add_option("--head", options->keys.kv_head,
                       "KV head whose keys are shown; default: the one with the largest outlier")
          ->check(CLI::Range(0, 1'000'000))
          ->group(group),
      command
          ->add_option("--out", options->keys.out,
                       "Directory for keys.html, keys.json and the charts as SVG")
          ->check(NotEmpty())
          ->group(group)};
  command->callback([options, of_keys, &run] {
    for (const CLI::Option* option : of_keys) {
      // A variable that is meant for other commands is no mistake here.
      const bool is_variable = std::getenv(option->get_envname().c_str()) != nullptr;
      if (option->count() > 0 && !is_variable) options->only_keys = option->get_name();
    }
    run = [options] { return RunInspect(*options); };
  });
}

}  // namespace oscar::cli
