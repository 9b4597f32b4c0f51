// oscar pull: a model from the Hugging Face hub into the hub's local cache.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/validators.h"
#include "hub/hub.h"
#include "io/model_path.h"

namespace oscar::cli {
namespace {

struct PullOptions {
  std::vector<std::string> names;
  bool no_weights = false, offline = false, json = false;
};

Status RunPull(const PullOptions& options) {
  std::vector<HubName> names;
  for (const std::string& text : options.names) {
    const auto name = ParseHubName(text);
    if (!name.has_value()) {
      return InvalidArgument(
          fmt::format("{}: not a name on the hub; give ORG/NAME or ORG/NAME@REVISION", text));
    }
    names.push_back(*name);
  }
  OSCAR_ASSIGN_OR_RETURN(hub::HubOptions hub, hub::HubOptions::FromEnvironment());
  hub.offline = hub.offline || options.offline;
  for (size_t i = 0; i < names.size(); ++i) {
    OSCAR_ASSIGN_OR_RETURN(
        const std::filesystem::path directory,
        hub::PullModel(names[i], options.no_weights ? ModelParts::kText : ModelParts::kWeights,
                       hub));
    // What is no model says so now rather than when it is loaded.
    if (const auto found = FindModel(directory); !found.has_value()) return found.error();
    if (options.json) {
      const nlohmann::ordered_json out = {{"name", names[i].repository},
                                          {"commit", directory.filename().string()},
                                          {"directory", directory.string()}};
      fmt::print("{}\n", out.dump());
    } else {
      fmt::print("{}\n", directory.string());
    }
  }
  return {};
}

}  // namespace

void AddPullCommand(CLI::App& app, RunFunction& run) {
  auto options = std::make_shared<PullOptions>();
  CLI::App* command = app.add_subcommand(
      "pull", "Download models from the Hugging Face hub and print where they lie");
  command
      ->add_option("name", options->names,
                   "ORG/NAME such as Qwen/Qwen3-8B, perhaps with @REVISION: a branch, tag or "
                   "commit (repeatable)")
      ->required()
      ->check(NotEmpty());
  command->add_flag("--no-weights", options->no_weights, "Config, tokenizer and template alone");
  AddOfflineFlag(*command, options->offline);
  command->add_flag("--json", options->json, "Print a JSON object per line");
  command->callback([options, &run] { run = [options] { return RunPull(*options); }; });
}

}  // namespace oscar::cli
