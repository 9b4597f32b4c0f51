// oscar zoo: whole directories of rotations: what is there, whether it is sound and fits a model,
// and all of it in another format.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error_text.h"
#include "base/log.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/validators.h"
#include "engine/loaded_model.h"
#include "hub/hub.h"
#include "rotation/rotation_file.h"
#include "weights/source.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr size_t kMaxEntries = 10000;

// A directory that holds a rotation.
struct Entry {
  fs::path path;
  std::string name;  // relative to where the search began
  bool has_ours = false, has_pair = false;
  std::string Format() const {
    return has_ours && has_pair ? "safetensors, pt" : has_ours ? "safetensors" : "pt";
  }
};

Result<std::vector<Entry>> FindRotations(const fs::path& root) {
  std::error_code error;
  if (!fs::is_directory(root, error)) {
    return Unexpected(NotFound(fmt::format("{}: not a directory", root.string())));
  }
  std::set<fs::path> directories = {root};
  for (fs::recursive_directory_iterator
           at(root, fs::directory_options::skip_permission_denied, error),
       end;
       at != end; at.increment(error)) {
    if (error) break;
    if (directories.size() > kMaxEntries) {  // what was not looked at must not pass for sound
      return Unexpected(
          OutOfRange(fmt::format("{}: has more than {} directories below it; name one of them",
                                 root.string(), kMaxEntries)));
    }
    if (at->is_directory(error)) directories.insert(at->path());
  }
  if (error) {
    return Unexpected(Unavailable(
        fmt::format("{}: cannot be listed to its end: {}", root.string(), error.message())));
  }
  std::vector<Entry> out;
  for (const fs::path& directory : directories) {
    Entry entry;
    entry.path = directory;
    entry.name = fs::relative(directory, root, error).string();
    entry.has_ours = fs::exists(directory / kRotationFileName, error);
    for (const auto& file : fs::directory_iterator(directory, error)) {
      entry.has_pair = entry.has_pair || IsZooFile(file.path());
    }
    if (entry.has_ours || entry.has_pair) out.push_back(std::move(entry));
  }
  if (out.empty()) {
    return Unexpected(NotFound(
        fmt::format("{}: holds no rotation ({} or a k_*.pt, v_*.pt pair), nor do its directories",
                    root.string(), kRotationFileName)));
  }
  return out;
}

Result<Rotation> ReadPair(const fs::path& directory) {
  OSCAR_ASSIGN_OR_RETURN(const ZooPaths pair, FindZooPair(directory));
  return ReadZooPair(pair, std::numeric_limits<double>::infinity());
}

int Heads(const Rotation& rotation) {
  int heads = 1;
  for (const auto& [layer, sides] : rotation.layers) {
    heads = std::max({heads, sides.k.num_heads, sides.v.num_heads});
  }
  return heads;
}

std::string OrDash(const std::string& text) { return text.empty() ? "-" : Printable(text); }

Json EntryJson(const Entry& entry, const Rotation& rotation, double error) {
  Json out = {{"name", entry.name},
              {"format", entry.Format()},
              {"layers", rotation.layers.size()},
              {"head_dim", rotation.head_dim},
              {"matrices_a_layer", Heads(rotation)}};
  AddStrings(rotation.info, out);
  out["max_orthogonality_error"] = error;
  return out;
}

// What a rotation must fit.
struct Target {
  std::vector<int> layers;
  int head_dim = 0, kv_heads = 0;
  std::string fingerprint;
};

Result<Target> ReadTarget(const fs::path& model) {
  ModelOptions options;
  options.model = model;
  options.kv = "bf16";
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> plan, LoadedModel::Plan(options));
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<WeightSource> weights,
                         OpenCheckpointWeights(plan->directory().string()));
  Target out;
  out.layers = plan->spec().history_layers();
  out.head_dim = plan->spec().attention().head_dim;
  out.kv_heads = plan->spec().attention().num_kv_heads;
  out.fingerprint = fmt::format("{:016x}", weights->Fingerprint());
  return out;
}

struct ListCommand {
  fs::path root;
  fs::path model;
  double tolerance = kOrthogonalityTolerance;
  bool json = false;
};

// Reads every rotation; `verify` makes a bad one the command's failure.
Status RunList(const ListCommand& command, bool verify) {
  OSCAR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, FindRotations(command.root));
  std::optional<Target> target;
  if (!command.model.empty()) {
    OSCAR_ASSIGN_OR_RETURN(target, ReadTarget(command.model));
  }
  Json rows = Json::array();
  size_t bad = 0, width = 4;
  for (const Entry& entry : entries) width = std::max(width, entry.name.size());
  if (!command.json) {
    fmt::print("{:<{}}  {:<15} {:>6} {:>4} {:>8} {:<10} {:<9} {:<16} {:>9}  {}\n", "name", width,
               "format", "layers", "D", "matrices", "objective", "compose", "model", "error",
               "verdict");
  }
  for (const Entry& entry : entries) {
    const Result<Rotation> rotation =
        LoadRotation(entry.path, std::numeric_limits<double>::infinity());
    Status verdict;
    double error = std::numeric_limits<double>::quiet_NaN();
    if (!rotation.has_value()) {
      verdict = rotation.error();
    } else {
      error = MeasureOrthogonality(*rotation).max_error;
      const auto check = [&](const Rotation& form) {
        Status status = ValidateRotation(form, command.tolerance);
        if (!status.ok() || !target.has_value()) return status;
        return CheckRotationFits(form, target->layers, target->head_dim, target->kv_heads,
                                 target->fingerprint);
      };
      verdict = check(*rotation);
      if (verdict.ok() && entry.has_ours && entry.has_pair) {  // loading took the first alone
        const Result<Rotation> pair = ReadPair(entry.path);
        verdict = pair.has_value() ? check(*pair) : pair.error();
        if (pair.has_value() && !verdict.ok()) verdict = verdict.WithContext("the .pt pair");
      }
    }
    bad += verdict.ok() ? 0 : 1;
    if (command.json) {
      Json row = rotation.has_value() ? EntryJson(entry, *rotation, error)
                                      : Json{{"name", entry.name}, {"format", entry.Format()}};
      row["ok"] = verdict.ok();
      if (!verdict.ok()) row["problem"] = verdict.message();
      rows.push_back(std::move(row));
      continue;
    }
    if (!rotation.has_value()) {
      fmt::print("{:<{}}  {:<15} {}\n", Printable(entry.name), width, entry.Format(),
                 verdict.message());
      continue;
    }
    const RotationInfo& info = rotation->info;
    fmt::print("{:<{}}  {:<15} {:>6} {:>4} {:>8} {:<10} {:<9} {:<16} {:>9.2g}  {}\n",
               Printable(entry.name), width, entry.Format(), rotation->layers.size(),
               rotation->head_dim, Heads(*rotation),
               OrDash(info.k_objective) + "," + OrDash(info.v_objective), OrDash(info.composition),
               OrDash(info.model_fingerprint), error, verdict.ok() ? "ok" : verdict.message());
  }
  if (command.json) {
    fmt::print("{}\n", Json{{"rotations", rows}, {"bad", bad}}.dump(
                           2, ' ', false, Json::error_handler_t::replace));
  }
  if (verify && bad > 0) {
    return DataLoss(
        fmt::format("{}: {} of {} rotations {}", command.root.string(), bad, entries.size(),
                    target.has_value() ? "are broken or do not fit the model" : "are broken"));
  }
  return {};
}

struct ZooConvertCommand {
  fs::path root;
  fs::path out;
  std::string to = "safetensors";
};

Status RunZooConvert(const ZooConvertCommand& command) {
  OSCAR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, FindRotations(command.root));
  const auto has_pair = [&](const fs::path& path) {
    return std::any_of(entries.begin(), entries.end(),
                       [&](const Entry& entry) { return entry.path == path && entry.has_pair; });
  };
  size_t failed = 0;
  for (const Entry& entry : entries) {
    const fs::path target = entry.name == "." ? command.out : command.out / entry.name;
    // Whether it was written: what a .pt pair cannot hold may lie there as a pair already.
    const auto convert = [&]() -> Result<bool> {
      OSCAR_ASSIGN_OR_RETURN(const Rotation rotation, LoadRotation(entry.path));
      if (command.to == "pt") {
        if (Heads(rotation) > 1 && has_pair(entry.path / kZooDirectoryName)) return false;
        OSCAR_ASSIGN_OR_RETURN([[maybe_unused]] const ZooPaths paths,
                               WriteZooPair(target, rotation));
        if (rotation.info.clip_source != "published") {
          LogWarning("{}: clip ratios ({}) are not part of a .pt pair and were left out",
                     entry.name, rotation.info.clip_source);
        }
        return true;
      }
      std::error_code error;
      fs::create_directories(target, error);
      if (error) {
        return Unexpected(InvalidArgument(
            fmt::format("{}: cannot make the directory: {}", target.string(), error.message())));
      }
      OSCAR_RETURN_IF_ERROR(WriteRotationFile(target / kRotationFileName, rotation));
      return true;
    };
    const Result<bool> written = convert();
    if (!written.has_value()) {
      ++failed;
      LogWarning("{}: not converted: {}", entry.name, written.error().message());
    } else if (*written) {
      fmt::print("{} -> {}\n", Printable(entry.name), target.string());
    } else {
      fmt::print("{}: one matrix per KV head, left out; {}/ below it holds its pair\n",
                 Printable(entry.name), kZooDirectoryName);
    }
  }
  if (failed > 0) {
    return InvalidArgument(
        fmt::format("{} of {} rotations were not converted", failed, entries.size()));
  }
  return {};
}

// Where the published rotations lie.
constexpr char kFaceZoo[] = "Zhongzhu/OSCAR-RotationZoo";
constexpr char kScopeZoo[] = "togethercomputer/OSCAR-RotationZoo";

struct PullCommand {
  std::vector<std::string> folders;
  std::string from = "huggingface";
  std::string repository;  // empty: the published one
  bool offline = false;
};

Status RunPull(const PullCommand& command) {
  const bool is_face = command.from == "huggingface";
  std::string given = command.repository;
  if (given.empty()) given = is_face ? kFaceZoo : kScopeZoo;
  const auto name = ParseHubName(given);
  if (!name.has_value()) {
    return InvalidArgument(fmt::format("--repo {}: not ORG/NAME or ORG/NAME@REVISION", given));
  }
  OSCAR_ASSIGN_OR_RETURN(hub::HubOptions options,
                         hub::HubOptions::FromEnvironment(is_face ? hub::HubKind::kHuggingFace
                                                                  : hub::HubKind::kModelScope));
  options.offline = options.offline || command.offline;
  std::vector<std::string> folders = command.folders;
  if (folders.empty()) folders.emplace_back();
  for (std::string& folder : folders) {
    while (folder.ends_with('/')) folder.pop_back();
    if (!folder.empty() && !IsSafeRelativePath(folder)) {
      return InvalidArgument(fmt::format("{}: not a folder of {}", folder, given));
    }
    OSCAR_ASSIGN_OR_RETURN(const fs::path snapshot, hub::PullRotations(*name, folder, options));
    const fs::path root = folder.empty() ? snapshot : snapshot / folder;
    OSCAR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, FindRotations(root));
    for (const Entry& entry : entries) fmt::print("{}\n", entry.path.string());
  }
  return {};
}

}  // namespace

void AddZooCommand(CLI::App& app, RunFunction& run) {
  CLI::App* zoo =
      app.add_subcommand("zoo", "Download, list, verify and convert directories of rotations");
  zoo->require_subcommand(1);
  for (const bool verify : {false, true}) {
    auto options = std::make_shared<ListCommand>();
    CLI::App* command = zoo->add_subcommand(
        verify ? "verify" : "list",
        verify ? "The same as list, and fail (exit code 1) where one is broken or does not fit"
               : "Show every rotation below a directory, and what is wrong with it");
    command->add_option("directory", options->root, "Where to look, with all below")->required();
    command
        ->add_option("--model", options->model,
                     "Also check that each fits this model: layers, head dimension, weights")
        ->check(NotEmpty());
    command->add_option("--tolerance", options->tolerance, "Largest max |R R^T - I| that passes")
        ->capture_default_str()
        ->check(NonNegative());
    command->add_flag("--json", options->json, "Print JSON");
    command->callback(
        [options, verify, &run] { run = [options, verify] { return RunList(*options, verify); }; });
  }
  {
    auto options = std::make_shared<PullCommand>();
    CLI::App* command =
        zoo->add_subcommand("pull", "Download published rotations and print their folders");
    command->add_option("folder", options->folders,
                        "Folder of the repository, such as Qwen3-8B (repeatable); default: all");
    command->add_option("--from", options->from, "huggingface or modelscope")
        ->capture_default_str()
        ->check(CLI::IsMember({"huggingface", "modelscope"}));
    command
        ->add_option("--repo", options->repository,
                     fmt::format("ORG/NAME, perhaps with @REVISION; default: {}, or {} on "
                                 "ModelScope",
                                 kFaceZoo, kScopeZoo))
        ->check(NotEmpty());
    AddOfflineFlag(*command, options->offline);
    command->callback([options, &run] { run = [options] { return RunPull(*options); }; });
  }
  auto options = std::make_shared<ZooConvertCommand>();
  CLI::App* command =
      zoo->add_subcommand("convert", "Write every rotation below a directory in one format");
  command->add_option("directory", options->root, "Where to look, with all below")->required();
  command->add_option("out", options->out, "Directory for the results, with the same names")
      ->check(NotEmpty())
      ->required();
  command->add_option("--to", options->to, "safetensors or pt")
      ->capture_default_str()
      ->check(CLI::IsMember({"safetensors", "pt"}));
  command->callback([options, &run] { run = [options] { return RunZooConvert(*options); }; });
}

}  // namespace oscar::cli
