// oscar calibrate: fit rotations and clip ratios to a model.
#include "calibrate/calibrate.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "base/log.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/rotation_options.h"
#include "cli/validators.h"
#include "rotation/rotation_file.h"
#include "rotation/sensitivity_file.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

struct CalibrateArguments {
  ModelArguments model;
  CalibrateOptions options;
  std::string objectives = "qqt_sst";
  std::optional<std::string> composition;
  std::string clip = "fitted";
  std::optional<uint64_t> seed;
  bool shared = false;
  fs::path out;
  std::string sensitivity = "auto", measured_with = "hadamard";
  int64_t sensitivity_tokens = 0;  // 0: in proportion to the fit's
  bool only_sensitivity = false;
  std::vector<const CLI::Option*> of_fit;  // options that only a rotation has a use for
};

// What two bits cost each head, into sensitivity.json.
Status AddSensitivities(const CalibrateArguments& arguments, const CalibrateOptions& options) {
  if (arguments.sensitivity == "none") return {};
  SensitivityRequest request;
  request.model = options.model;
  request.model.k_clip = request.model.v_clip = std::nullopt;
  request.model.rotation = arguments.measured_with == "calibrated" ? arguments.out : "none";
  request.text = options.text;
  // 150,000 for the fit's default of 30,000.
  request.text.tokens = arguments.sensitivity_tokens > 0 ? arguments.sensitivity_tokens
                        : arguments.only_sensitivity     ? kSensitivityTokens
                                                         : options.text.tokens * 5;
  request.measure = arguments.sensitivity == "kl"      ? SensitivityMeasure::kKl
                    : arguments.sensitivity == "proxy" ? SensitivityMeasure::kProxy
                                                       : SensitivityMeasure::kAuto;
  request.show_progress = options.show_progress;
  // An older file would decide the bits of the rotation it is measured with.
  std::error_code error;
  std::filesystem::create_directories(arguments.out, error);
  std::filesystem::remove(arguments.out / kSensitivityFileName, error);
  Result<SensitivityResult> measured = CalibrateSensitivities(request);
  if (!measured.has_value() && measured.error().code() == StatusCode::kOutOfRange &&
      arguments.sensitivity == "auto" && !arguments.only_sensitivity) {
    LogWarning("no sensitivities: {}", measured.error().message());
    return {};
  }
  if (!measured.has_value()) return measured.error();
  const SensitivityResult& result = *measured;
  const Sensitivities& found = result.sensitivities;
  OSCAR_RETURN_IF_ERROR(WriteSensitivities(arguments.out / kSensitivityFileName, found));
  fmt::print("sensitivities of {} layers ({}, {}; {} tokens of {} texts compared)\n",
             found.layers.size(), found.measure == "kl" ? "KL of answers" : "proxy",
             found.rotation == "calibrated" ? "this rotation" : "Hadamard", found.tokens,
             result.num_sequences);
  if (found.measure == "kl") {
    fmt::print("KL to BF16: {:.5f} with all heads at 2 bits, {:.5f} at 4\n", result.kl_at_2,
               result.kl_at_4);
  }
  SensitivityMap map;
  std::vector<int> ids;
  for (const auto& [id, heads] : found.layers) {
    ids.push_back(id);
    map.push_back(heads);
  }
  fmt::print("bits of K/V by KV head at the default:\n{}",
             DrawBits(ChooseBits(map, kMinMapBits + kDefaultExtraBits), ids));
  fmt::print(
      "written to {0}: sensitivity.json; use --rotation {0}, or name the folder rotation "
      "beside the weights\n",
      arguments.out.string());
  return {};
}

Status RunCalibrate(CalibrateArguments& arguments) {
  CalibrateOptions options = arguments.options;
  options.model = arguments.model.options;
  if (arguments.only_sensitivity) {
    if (arguments.sensitivity == "none" || arguments.measured_with == "calibrated") {
      return InvalidArgument(
          "--no-rotation leaves sensitivities under the Hadamard, which --sensitivity none and "
          "--measure-with calibrated exclude; leave one of them out");
    }
    for (const CLI::Option* option : arguments.of_fit) {
      if (option->count() == 0) continue;
      return InvalidArgument(
          fmt::format("{}: is about the rotation, which --no-rotation leaves "
                      "out; leave one of them out",
                      option->get_name()));
    }
    if (arguments.seed.has_value()) options.text.seed = *arguments.seed;
    OSCAR_RETURN_IF_ERROR(arguments.model.Obtain(ModelParts::kWeights));
    options.model.model = arguments.model.options.model;
    return AddSensitivities(arguments, options);
  }
  if (arguments.clip == "fitted" && (options.model.k_clip || options.model.v_clip)) {
    return InvalidArgument(fmt::format(
        "--{}-clip: --clip fitted chooses the ratios on the data; give them with --clip fixed",
        options.model.k_clip ? 'k' : 'v'));
  }
  if (arguments.seed.has_value()) {
    if (!options.text.data.empty()) {
      return InvalidArgument("--seed selects the built-in sample's chats; --data takes its place");
    }
    options.text.seed = *arguments.seed;
  }
  OSCAR_ASSIGN_OR_RETURN(options.fit.objectives, ParseObjectives(arguments.objectives));
  OSCAR_ASSIGN_OR_RETURN(options.fit.composition,
                         ChooseComposition(arguments.composition, options.fit.objectives));
  if (options.fit.objectives.k == Objective::kUresidual ||
      options.fit.objectives.v == Objective::kUresidual) {
    return InvalidArgument(
        fmt::format("--objective {0} starts from a rotation: calibrate with another objective and "
                    "--dump DIR, then oscar rotation fit --dump DIR --objective {0} --reference "
                    "ROTATION",
                    arguments.objectives));
  }
  options.fit.per_head_k = options.fit.per_head_v = !arguments.shared;
  options.fit.fit_clip = arguments.clip == "fitted";
  options.fit.k_clip = options.model.k_clip.value_or(kPublishedKClip);
  options.fit.v_clip = options.model.v_clip.value_or(kPublishedVClip);
  options.group_dims = options.model.group_dims.value_or(0);
  OSCAR_RETURN_IF_ERROR(CheckCalibrationDirectory(options.fit, arguments.out));
  OSCAR_RETURN_IF_ERROR(arguments.model.Obtain(ModelParts::kWeights));
  options.model.model = arguments.model.options.model;
  OSCAR_ASSIGN_OR_RETURN(const Calibration calibration, Calibrate(options));
  OSCAR_RETURN_IF_ERROR(WriteCalibration(calibration, arguments.out));
  fmt::print("{} tokens in {} sequence{}", calibration.num_tokens, calibration.num_sequences,
             calibration.num_sequences == 1 ? "" : "s");
  if (calibration.generated_tokens > 0) {
    fmt::print(" and {} generated", calibration.generated_tokens);
  }
  fmt::print("\n{:>5} {:>9} {:>9}{}\n", "layer", "K clip", "V clip",
             calibration.errors.empty() ? "" : "  relative error of the logits at 2 bits");
  if (!calibration.errors.empty()) {
    fmt::print("{:>5} {:>9} {:>9} ", "", "", "");
    for (const auto& [label, errors] : calibration.errors) fmt::print(" {:>21}", label);
    fmt::print("\n");
  }
  size_t index = 0;
  for (const auto& [id, layer] : calibration.rotation.layers) {
    fmt::print("{:>5} {:>9} {:>9}{}", id, FormatClips(layer.k), FormatClips(layer.v),
               calibration.errors.empty() ? "" : " ");
    for (const auto& [label, errors] : calibration.errors) {
      fmt::print(" {:>21.4f}", index < errors.size() ? errors[index].first : 0.0);
    }
    fmt::print("\n");
    ++index;
  }
  const ZooPaths pair = ZooPairPaths(kZooDirectoryName, calibration.shared.info);
  fmt::print(
      "written to {0}: calibration.html, calibration.json,\n"
      "  rotation.safetensors: {1}; use --rotation {0}\n"
      "  {2}, {3}: one matrix per layer, as published; use --rotation {4}\n",
      arguments.out.string(), arguments.shared ? "one matrix per layer" : "one matrix per KV head",
      pair.k.string(), pair.v.filename().string(), (arguments.out / kZooDirectoryName).string());
  OSCAR_RETURN_IF_ERROR(AddSensitivities(arguments, options));
  const CalibrationVerdict verdict = VerdictOf(calibration);
  fmt::print("{}: {}\n", verdict.finding, verdict.advice);
  if (!verdict.figures.empty()) fmt::print("{}\n", verdict.figures);
  return {};
}

}  // namespace

void AddCalibrateCommand(CLI::App& app, RunFunction& run) {
  auto arguments = std::make_shared<CalibrateArguments>();
  CalibrateOptions& o = arguments->options;
  CLI::App* command = app.add_subcommand(
      "calibrate", "Fit rotations and clip ratios to a model on text, and report on them");
  AddModelOptions(*command, arguments->model);
  // The cache holds BF16, all of it: neither windows nor cells change what is read from it.
  for (const char* name :
       {"--kv", "--rotation", "--bits", "--sink", "--recent", "--prefill-cell"}) {
    command->remove_option(command->get_option(name));
  }
  command->get_option("--group")->description(
      "Dims that share one scale where clips are tried and errors measured: 32, 64, 128 or the "
      "head");
  const auto ratio = NumberThat("between 0 and 1", [](double x) { return x >= 0 && x <= 1; });
  command->get_option("--k-clip")
      ->description("Clip ratio of keys with --clip fixed, 0 is off")
      ->check(ratio);
  command->get_option("--v-clip")
      ->description("Clip ratio of values with --clip fixed, 0 is off")
      ->check(ratio);
  command
      ->add_option("--data", o.text.data,
                   "Text: .txt, or .jsonl with text, prompt or messages per line; a data set by "
                   "name: wikitext=FILE, gpqa=, mmlu=, gsm8k=, math500=, longbench-e=DIR; default: "
                   "a built-in sample of prose and synthetic chats")
      ->check(NotEmpty());
  command->add_option("--tokens", o.text.tokens, "Token budget")
      ->capture_default_str()
      ->check(NumberThat("between 1 and 100000000",
                         [](double x) { return x >= 1 && x <= kMaxCalibrationTokens; }));
  command
      ->add_option("--max-length", o.text.max_sequence,
                   "Longest sequence in tokens; default: 4096, or what the context holds")
      ->check(Positive());
  command->add_option("--generate", o.generate, "Tokens that the model adds to each sequence")
      ->capture_default_str()
      ->check(NonNegative());
  command->add_option("--seed", arguments->seed, "Seed of the built-in sample's chats")
      ->check(NoMinus())
      ->default_str("0");
  command
      ->add_option("--objective", arguments->objectives,
                   "K and V objectives: qqt_sst, qqt_sst_exact, ktk_vtv, hadamard, ...")
      ->capture_default_str();
  command->add_option("--composition", arguments->composition, "r_h_pbr, r_h, br, plain, ...")
      ->default_str("r_h_pbr");
  command->add_flag(
      "--layer-shared", arguments->shared,
      "One matrix per layer in rotation.safetensors, too, instead of one per KV head");
  command
      ->add_option("--clip", arguments->clip,
                   "fitted: by attention-weighted error on the data; fixed: --k-clip and --v-clip, "
                   "or the published .96 and .92")
      ->capture_default_str()
      ->check(CLI::IsMember({"fitted", "fixed"}));
  command->add_option("--dump", o.dump, "Also write the captured Q, K and V there")
      ->check(NotEmpty());
  command
      ->add_option("--sensitivity", arguments->sensitivity,
                   "What 2 bits cost each KV head, for --bits: kl (end to end), proxy (from noise "
                   "and attention), auto (kl for models of few heads) or none")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "kl", "proxy", "none"}));
  command
      ->add_option("--sensitivity-tokens", arguments->sensitivity_tokens,
                   "Token budget of the texts they are measured on; default: 5 times --tokens")
      ->check(NumberThat("between 1 and 100000000",
                         [](double x) { return x >= 1 && x <= kMaxCalibrationTokens; }));
  command
      ->add_option("--measure-with", arguments->measured_with,
                   "The rotation they are measured under: hadamard or calibrated")
      ->capture_default_str()
      ->check(CLI::IsMember({"hadamard", "calibrated"}));
  command->add_flag("--no-rotation", arguments->only_sensitivity,
                    "Measure sensitivities alone: no rotation is fitted");
  for (const char* name : {"--tokens", "--generate", "--objective", "--composition",
                           "--layer-shared", "--clip", "--k-clip", "--v-clip", "--dump"}) {
    arguments->of_fit.push_back(command->get_option(name));
  }
  command
      ->add_option("--out", arguments->out,
                   "Directory for rotation.safetensors, the published form as a .pt pair in zoo/, "
                   "sensitivity.json and the report (calibration.html, .json)")
      ->check(NotEmpty())
      ->required();
  command->callback([arguments, &run] { run = [arguments] { return RunCalibrate(*arguments); }; });
}

}  // namespace oscar::cli
