// oscar rotation: make, convert, combine and check rotations.
#include "rotation/rotation.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error_text.h"
#include "base/log.h"
#include "base/progress.h"
#include "base/thread_pool.h"
#include "cli/command.h"
#include "cli/rotation_options.h"
#include "cli/validators.h"
#include "rotation/dump.h"
#include "rotation/recipe.h"
#include "rotation/rotation_file.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// A path that ends in .safetensors is the file; anything else the directory that holds it.
Result<fs::path> WriteOurs(const fs::path& out, const Rotation& rotation) {
  fs::path path = out;
  if (out.extension() != ".safetensors") path /= kRotationFileName;
  std::error_code error;
  if (path.has_parent_path()) fs::create_directories(path.parent_path(), error);
  if (error) {
    return Unexpected(InvalidArgument(fmt::format("{}: cannot make the directory: {}",
                                                  path.parent_path().string(), error.message())));
  }
  OSCAR_RETURN_IF_ERROR(WriteRotationFile(path, rotation));
  return path;
}

struct Range {
  float min = std::numeric_limits<float>::infinity();
  float max = -std::numeric_limits<float>::infinity();
  void Add(std::span<const float> values) {
    for (const float x : values) {
      min = std::min(min, x);
      max = std::max(max, x);
    }
  }
};

Json SideJson(const SideRotation& side, double error) {
  Range eigenvalues;
  eigenvalues.Add(side.eigenvalues);
  // JSON has no infinity; a matrix that is not finite has no measurable error.
  return {{"matrices", side.num_heads},
          {"max_orthogonality_error", std::isfinite(error) ? Json(error) : Json(nullptr)},
          {"eigenvalue_min", eigenvalues.min},
          {"eigenvalue_max", eigenvalues.max},
          {"clip", side.clip}};
}

Json RotationJson(const Rotation& rotation, const OrthogonalityReport& report) {
  Json layers = Json::array();
  for (const auto& [layer, sides] : rotation.layers) {
    const auto& [k_error, v_error] = report.by_layer.at(layer);
    layers.push_back(
        {{"layer", layer}, {"k", SideJson(sides.k, k_error)}, {"v", SideJson(sides.v, v_error)}});
  }
  Json out = {{"layers", rotation.layers.size()}, {"head_dim", rotation.head_dim}};
  AddStrings(rotation.info, out);
  out["calibration_tokens"] = rotation.info.calibration_tokens;
  out["max_orthogonality_error"] =
      std::isfinite(report.max_error) ? Json(report.max_error) : Json(nullptr);
  out["by_layer"] = std::move(layers);
  return out;
}

std::string OrUnknown(const std::string& text) {
  return text.empty() ? "not known" : Printable(text);
}

// Layers, dimension, provenance and the largest error: a few lines on stdout.
void PrintSummary(const Rotation& rotation, const OrthogonalityReport& report) {
  const RotationInfo& info = rotation.info;
  int heads = 1;
  for (const auto& [layer, sides] : rotation.layers) {
    heads = std::max({heads, sides.k.num_heads, sides.v.num_heads});
  }
  fmt::print(
      "layers          {} ({} to {}), {}\n", rotation.layers.size(), rotation.layers.begin()->first,
      rotation.layers.rbegin()->first,
      heads == 1 ? std::string("one matrix each") : fmt::format("up to {} matrices each", heads));
  fmt::print("head dimension  {}\n", rotation.head_dim);
  fmt::print("objective       K {}, V {}\n", OrUnknown(info.k_objective),
             OrUnknown(info.v_objective));
  fmt::print("composition     {}\n", OrUnknown(info.composition));
  fmt::print("clip            {}\n", OrUnknown(info.clip_source));
  fmt::print("model           {}\n", OrUnknown(info.model_fingerprint));
  fmt::print("calibration     {}", OrUnknown(info.calibration_hash));
  if (info.calibration_tokens > 0) fmt::print(", {} tokens", info.calibration_tokens);
  fmt::print("\nmax |R R^T - I| {:.3g} (layer {} {}, head {})\n", report.max_error, report.layer,
             report.side, report.head);
}

// "0-35", "3,7,11", "0-3,8"
Result<std::vector<int>> ParseLayers(const std::string& text) {
  std::vector<int> layers;
  const auto fail = [&] {
    return Unexpected(InvalidArgument(fmt::format(
        "--layers '{}': give layer ids and ranges separated by commas, e.g. 0-35 or 3,7,11",
        text)));
  };
  const char* at = text.data();
  const char* end = at + text.size();
  const auto number = [&](int& value) {
    const auto [stop, error] = std::from_chars(at, end, value);
    if (error != std::errc() || value < 0 || value > 1'000'000) return false;
    at = stop;
    return true;
  };
  while (true) {
    int first = 0;
    if (!number(first)) return fail();
    int last = first;
    if (at != end && *at == '-') {
      ++at;
      if (!number(last) || last < first) return fail();
    }
    if (static_cast<size_t>(last - first) + layers.size() >= kMaxRotationLayers) {
      return Unexpected(InvalidArgument(
          fmt::format("--layers '{}': more than {} layers", text, kMaxRotationLayers)));
    }
    for (int layer = first; layer <= last; ++layer) layers.push_back(layer);
    if (at == end) break;
    if (*at++ != ',') return fail();
  }
  std::sort(layers.begin(), layers.end());
  if (std::adjacent_find(layers.begin(), layers.end()) != layers.end()) {
    return Unexpected(InvalidArgument(fmt::format("--layers '{}': a layer is named twice", text)));
  }
  return layers;
}

struct FitCommand {
  std::string dump;
  std::string out;
  std::string objective = "qqt_sst";
  std::optional<std::string> composition;
  std::string per_head;  // sides: "", "k", "v" or "kv"
  bool fit_clip = false;
  int clip_bits = 2;
  int group = 0;
  float k_clip = kPublishedKClip;
  float v_clip = kPublishedVClip;
  std::vector<int> skip_chunks;
  std::string reference;
  std::string fingerprint;
  int threads = 0;
  bool json = false;
};

Status RunFit(const FitCommand& command) {
  FitOptions options;
  OSCAR_ASSIGN_OR_RETURN(options.objectives, ParseObjectives(command.objective));
  OSCAR_ASSIGN_OR_RETURN(options.composition,
                         ChooseComposition(command.composition, options.objectives));
  options.per_head_k = command.per_head == "k" || command.per_head == "kv";
  options.per_head_v = command.per_head == "v" || command.per_head == "kv";
  options.k_clip = command.k_clip;
  options.v_clip = command.v_clip;
  options.fit_clip = command.fit_clip;
  options.clip.bits = command.clip_bits;
  options.clip.group_dims = command.group;
  options.model_fingerprint = command.fingerprint;
  Rotation reference;
  if (!command.reference.empty()) {
    if (command.objective.find("uresidual") == std::string::npos) {
      return InvalidArgument(
          fmt::format("--reference is what uresidual starts from; --objective {} takes none",
                      command.objective));
    }
    OSCAR_ASSIGN_OR_RETURN(reference, LoadRotation(command.reference));
    options.reference = &reference;
  }
  OSCAR_ASSIGN_OR_RETURN(const DumpReader reader,
                         DumpReader::Open(command.dump, command.skip_chunks));
  ThreadPool pool(command.threads);
  Rotation rotation;
  {
    Progress progress("fitting", DumpSteps(reader, options), "chunks");
    OSCAR_ASSIGN_OR_RETURN(rotation, FitDump(reader, options, pool, &progress));
  }
  OSCAR_ASSIGN_OR_RETURN(const fs::path path, WriteOurs(command.out, rotation));
  const OrthogonalityReport report = MeasureOrthogonality(rotation);
  if (command.json) {
    Json out = RotationJson(rotation, report);
    out["path"] = path.string();
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
    return {};
  }
  PrintSummary(rotation, report);
  if (options.fit_clip) {
    Range k, v;
    for (const auto& [layer, sides] : rotation.layers) {
      k.Add(sides.k.clip);
      v.Add(sides.v.clip);
    }
    fmt::print("fitted ratios   K {:.2f} to {:.2f}, V {:.2f} to {:.2f}\n", k.min, k.max, v.min,
               v.max);
  }
  LogInfo("wrote {}", path.string());
  return {};
}

struct ConvertCommand {
  std::string in;
  std::string out;
  std::string to;
  std::string fingerprint;
  std::optional<float> k_clip;
  std::optional<float> v_clip;
};

Status RunConvert(const ConvertCommand& command) {
  OSCAR_ASSIGN_OR_RETURN(Rotation rotation, LoadRotation(command.in));
  const fs::path in = command.in;
  std::error_code error;
  const bool from_ours =
      in.extension() == ".safetensors" || fs::exists(in / kRotationFileName, error);
  const bool to_pt = command.to.empty()
                         ? from_ours && fs::path(command.out).extension() != ".safetensors"
                         : command.to == "pt";
  if (!command.fingerprint.empty()) rotation.info.model_fingerprint = command.fingerprint;
  for (auto& [layer, sides] : rotation.layers) {
    if (command.k_clip) std::fill(sides.k.clip.begin(), sides.k.clip.end(), *command.k_clip);
    if (command.v_clip) std::fill(sides.v.clip.begin(), sides.v.clip.end(), *command.v_clip);
  }
  if (command.k_clip || command.v_clip) rotation.info.clip_source = "given";
  if (to_pt) {
    if (fs::path(command.out).extension() == ".safetensors") {
      return InvalidArgument(
          fmt::format("{}: a .pt pair is two files; give a directory", command.out));
    }
    OSCAR_ASSIGN_OR_RETURN(const ZooPaths paths, WriteZooPair(command.out, rotation));
    PrintSummary(rotation, MeasureOrthogonality(rotation));
    if (rotation.info.clip_source != "published") {
      LogWarning("clip ratios ({}) are not part of a .pt pair and were left out",
                 rotation.info.clip_source);
    }
    LogInfo("wrote {} and {}", paths.k.string(), paths.v.filename().string());
    return {};
  }
  OSCAR_ASSIGN_OR_RETURN(const fs::path path, WriteOurs(command.out, rotation));
  PrintSummary(rotation, MeasureOrthogonality(rotation));
  LogInfo("wrote {}", path.string());
  return {};
}

struct ComposeCommand {
  std::vector<std::string> inputs;
  std::string out;
  std::string objective;
  std::string layers;
  int head_dim = 0;
};

Status RunCompose(const ComposeCommand& command) {
  Rotation rotation;
  if (!command.inputs.empty()) {
    if (command.inputs.size() != 2 || !command.objective.empty() || !command.layers.empty() ||
        command.head_dim != 0) {
      return InvalidArgument(
          "compose takes two rotations to multiply, or --objective, --layers and --head-dim");
    }
    OSCAR_ASSIGN_OR_RETURN(const Rotation first, LoadRotation(command.inputs[0]));
    OSCAR_ASSIGN_OR_RETURN(const Rotation second, LoadRotation(command.inputs[1]));
    OSCAR_ASSIGN_OR_RETURN(rotation, MultiplyRotations(first, second));
  } else {
    if (command.objective.empty() || command.layers.empty() || command.head_dim == 0) {
      return InvalidArgument(
          "compose takes two rotations to multiply, or --objective, --layers and --head-dim");
    }
    OSCAR_ASSIGN_OR_RETURN(const std::vector<int> layers, ParseLayers(command.layers));
    OSCAR_ASSIGN_OR_RETURN(rotation,
                           MakeDataFreeRotation(command.objective, layers, command.head_dim));
  }
  OSCAR_ASSIGN_OR_RETURN(const fs::path path, WriteOurs(command.out, rotation));
  PrintSummary(rotation, MeasureOrthogonality(rotation));
  LogInfo("wrote {}", path.string());
  return {};
}

struct VerifyCommand {
  std::string path;
  double tolerance = kOrthogonalityTolerance;
  bool json = false;
};

Status RunVerify(const VerifyCommand& command) {
  OSCAR_ASSIGN_OR_RETURN(const Rotation rotation,
                         LoadRotation(command.path, std::numeric_limits<double>::infinity()));
  const OrthogonalityReport report = MeasureOrthogonality(rotation);
  const Status verdict = ValidateRotation(rotation, command.tolerance);
  if (command.json) {
    Json out = RotationJson(rotation, report);
    out["tolerance"] = command.tolerance;
    out["ok"] = verdict.ok();
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    PrintSummary(rotation, report);
    fmt::print("\n{:>5} {:>4} {:>3} {:>15} {:>11} {:>11} {:>11}\n", "layer", "side", "n",
               "max |R R^T - I|", "eigen min", "eigen max", "clip");
    for (const auto& [layer, sides] : rotation.layers) {
      for (const bool is_k : {true, false}) {
        const SideRotation& side = is_k ? sides.k : sides.v;
        Range eigenvalues;
        eigenvalues.Add(side.eigenvalues);
        const auto& errors = report.by_layer.at(layer);
        fmt::print("{:>5} {:>4} {:>3} {:>15.3g} {:>11.4g} {:>11.4g} {:>11}\n", layer,
                   is_k ? 'K' : 'V', side.num_heads, is_k ? errors.first : errors.second,
                   eigenvalues.min, eigenvalues.max, FormatClips(side));
      }
    }
  }
  if (!verdict.ok()) return verdict.WithContext(command.path);
  return {};
}

}  // namespace

void AddRotationCommand(CLI::App& app, RunFunction& run) {
  CLI::App* rotation = app.add_subcommand("rotation", "Fit, convert, combine and check rotations");
  rotation->require_subcommand(1);

  {
    auto options = std::make_shared<FitCommand>();
    CLI::App* command = rotation->add_subcommand("fit", "Fit a rotation to a dump of Q, K and V");
    command->add_option("--dump", options->dump, "Directory with layer_<i>/{q,k,v,seq_lens}")
        ->check(NotEmpty())
        ->required();
    command->add_option("--out", options->out, "Directory for rotation.safetensors")
        ->check(NotEmpty())
        ->required();
    command
        ->add_option("--objective", options->objective,
                     "K's and V's objective: {qqt,ktk,uresidual,hadamard,identity}_"
                     "{sst,sst_exact,vtv,uresidual,hadamard,identity}")
        ->capture_default_str();
    command
        ->add_option("--composition", options->composition,
                     "plain, pbr, br, br_h128, r_h, h_pbr, h_r_pbr, h_pbr_r or r_h_pbr")
        ->default_str("r_h_pbr");
    command
        ->add_flag("--per-head{kv}", options->per_head,
                   "One matrix per KV head, not one per layer; --per-head=k or =v for one side")
        ->check(CLI::IsMember({"k", "v", "kv"}));
    CLI::Option* fit_clip =
        command->add_flag("--fit-clip", options->fit_clip, "Choose clip ratios on the data");
    command->add_option("--clip-bits", options->clip_bits, "Bits that --fit-clip quantises with")
        ->capture_default_str()
        ->needs(fit_clip);
    command
        ->add_option("--group", options->group,
                     "Dims per scale group that --fit-clip quantises with; 0: the whole row")
        ->capture_default_str()
        ->needs(fit_clip);
    command->add_option("--k-clip", options->k_clip, "K clip ratio without --fit-clip; 0: off")
        ->capture_default_str()
        ->excludes(fit_clip);
    command->add_option("--v-clip", options->v_clip, "V clip ratio without --fit-clip; 0: off")
        ->capture_default_str()
        ->excludes(fit_clip);
    command->add_option("--skip-chunk", options->skip_chunks,
                        "Chunk to leave out (0: the warm-up of published dumps); repeatable");
    command->add_option("--reference", options->reference, "Rotation that uresidual starts from")
        ->check(NotEmpty());
    command->add_option("--fingerprint", options->fingerprint,
                        "Fingerprint of the model that was captured");
    command->add_option("--threads", options->threads, "Threads; 0: one per core")
        ->capture_default_str()
        ->check(CLI::Range(0, 1024));
    command->add_flag("--json", options->json, "Print JSON");
    command->callback([options, &run] { run = [options] { return RunFit(*options); }; });
  }
  {
    auto options = std::make_shared<ConvertCommand>();
    CLI::App* command =
        rotation->add_subcommand("convert", "Convert a .pt pair to rotation.safetensors or back");
    command->add_option("in", options->in, "Directory or file")->required();
    command->add_option("out", options->out, "Directory, or a .safetensors file")
        ->check(NotEmpty())
        ->required();
    command->add_option("--to", options->to, "Format to write; default: the other one")
        ->check(CLI::IsMember({"safetensors", "pt"}));
    command->add_option("--fingerprint", options->fingerprint, "Name the model it belongs to");
    command->add_option("--k-clip", options->k_clip, "Set the K clip ratio; 0: off");
    command->add_option("--v-clip", options->v_clip, "Set the V clip ratio; 0: off");
    command->callback([options, &run] { run = [options] { return RunConvert(*options); }; });
  }
  {
    auto options = std::make_shared<ComposeCommand>();
    CLI::App* command = rotation->add_subcommand(
        "compose", "Make a data-free rotation, or multiply two (the first is applied first)");
    command->add_option("inputs", options->inputs, "Two rotations to multiply")->expected(0, 2);
    command->add_option("--out", options->out, "Directory for rotation.safetensors")
        ->check(NotEmpty())
        ->required();
    command->add_option("--objective", options->objective, "hadamard or identity")
        ->check(CLI::IsMember({"hadamard", "identity"}));
    command->add_option("--layers", options->layers, "Layer ids, e.g. 0-35 or 3,7,11");
    command->add_option("--head-dim", options->head_dim, "Head dimension");
    command->callback([options, &run] { run = [options] { return RunCompose(*options); }; });
  }
  {
    auto options = std::make_shared<VerifyCommand>();
    CLI::App* command = rotation->add_subcommand(
        "verify", "Show and check a rotation; exits with 1 where it is not one");
    command->add_option("path", options->path, "Directory or file")->required();
    command->add_option("--tolerance", options->tolerance, "Largest max |R R^T - I| that passes")
        ->capture_default_str()
        ->check(NonNegative());
    command->add_flag("--json", options->json, "Print JSON");
    command->callback([options, &run] { run = [options] { return RunVerify(*options); }; });
  }
}

}  // namespace oscar::cli
