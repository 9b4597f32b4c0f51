// oscar calibrate: fit rotations and clip ratios to a model.
#include "calibrate/calibrate.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/validators.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

struct CalibrateArguments {
  ModelArguments model;
  CalibrateOptions options;
  std::string objectives = "qqt_sst";
  std::string composition = "r_h_pbr";
  std::string clip = "fitted";
  bool shared = false;
  fs::path out;
};

Status RunCalibrate(const CalibrateArguments& arguments) {
  CalibrateOptions options = arguments.options;
  options.model = arguments.model.options;
  OSCAR_ASSIGN_OR_RETURN(options.fit.objectives, ParseObjectives(arguments.objectives));
  OSCAR_ASSIGN_OR_RETURN(options.fit.composition, ParseComposition(arguments.composition));
  options.fit.per_head_k = options.fit.per_head_v = !arguments.shared;
  options.fit.fit_clip = arguments.clip == "fitted";
  options.fit.k_clip = options.model.k_clip.value_or(kPublishedKClip);
  options.fit.v_clip = options.model.v_clip.value_or(kPublishedVClip);
  OSCAR_ASSIGN_OR_RETURN(const Calibration calibration, Calibrate(options));
  OSCAR_RETURN_IF_ERROR(WriteCalibration(calibration, arguments.out));
  fmt::print("{} tokens in {} sequences", calibration.num_tokens, calibration.num_sequences);
  if (calibration.generated_tokens > 0) {
    fmt::print(" and {} generated", calibration.generated_tokens);
  }
  fmt::print("\n{:>5} {:>7} {:>7}  relative error of the logits at 2 bits\n", "layer", "K clip",
             "V clip");
  fmt::print("{:>5} {:>7} {:>7} ", "", "", "");
  for (const auto& [label, errors] : calibration.errors) fmt::print(" {:>21}", label);
  fmt::print("\n");
  size_t index = 0;
  for (const auto& [id, layer] : calibration.rotation.layers) {
    fmt::print("{:>5} {:>7.2f} {:>7.2f} ", id, layer.k.ClipOf(0), layer.v.ClipOf(0));
    for (const auto& [label, errors] : calibration.errors) {
      fmt::print(" {:>21.4f}", index < errors.size() ? errors[index].first : 0.0);
    }
    fmt::print("\n");
    ++index;
  }
  fmt::print("written to {}: rotation.safetensors, calibration.json, calibration.html{}\n",
             arguments.out.string(), arguments.shared ? ", k_*.pt and v_*.pt" : "");
  return {};
}

}  // namespace

void AddCalibrateCommand(CLI::App& app, RunFunction& run) {
  auto arguments = std::make_shared<CalibrateArguments>();
  CalibrateOptions& o = arguments->options;
  CLI::App* command = app.add_subcommand(
      "calibrate", "Fit rotations and clip ratios to a model on text, and report on them");
  AddModelOptions(*command, arguments->model);
  command->remove_option(command->get_option("--kv"));
  command->remove_option(command->get_option("--rotation"));
  command->add_option("--data", o.text.data,
                      "Text: .txt, or .jsonl with text, prompt or messages a line; default: a "
                      "built-in sample of prose and synthetic chats");
  command->add_option("--tokens", o.text.tokens, "Token budget")
      ->capture_default_str()
      ->check(Positive());
  command->add_option("--max-length", o.text.max_sequence, "Longest sequence in tokens")
      ->capture_default_str()
      ->check(Positive());
  command->add_option("--generate", o.generate, "Tokens that the model adds to each sequence")
      ->capture_default_str()
      ->check(NonNegative());
  command->add_option("--seed", o.text.seed, "Seed of the synthetic chats")->capture_default_str();
  command
      ->add_option("--objective", arguments->objectives,
                   "K and V objectives: qqt_sst, qqt_sst_exact, ktk_vtv, hadamard, ...")
      ->capture_default_str();
  command->add_option("--composition", arguments->composition, "r_h_pbr, r_h, br, plain, ...")
      ->capture_default_str();
  command->add_flag("--layer-shared", arguments->shared,
                    "One matrix a layer in place of one a KV head; also writes a .pt pair");
  command
      ->add_option("--clip", arguments->clip,
                   "fitted: by attention-weighted error on the data; fixed: --k-clip and --v-clip, "
                   "or the published .96 and .92")
      ->capture_default_str()
      ->check(CLI::IsMember({"fitted", "fixed"}));
  command->add_option("--dump", o.dump, "Also write the captured Q, K and V there");
  command->add_option("--out", arguments->out, "Directory for the rotation and the report")
      ->required();
  command->callback([arguments, &run] { run = [arguments] { return RunCalibrate(*arguments); }; });
}

}  // namespace oscar::cli
