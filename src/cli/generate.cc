// oscar generate: one prompt or conversation in, one answer out.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "base/progress.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/report.h"
#include "cli/validators.h"
#include "oscar/language_model.h"

namespace oscar::cli {
namespace {

using nlohmann::ordered_json;

constexpr uint64_t kMaxPromptBytes = uint64_t{256} << 20;

struct GenerateOptions {
  ModelArguments model;
  SamplingArguments sampling;
  std::string prompt, messages, template_arguments;
  int64_t max_tokens = 0;
  bool json = false, stats = false;
};

ordered_json ToJson(const Completion& completion) {
  ordered_json out = {
      {"text", completion.text},
      {"token_ids", completion.token_ids},
      {"prompt_tokens", completion.prompt_tokens},
      {"completion_tokens", completion.token_ids.size()},
      {"finish_reason", NameOf(completion.finish_reason)},
      {"seed", completion.seed},
      {"cache", CacheToJson(completion.cache)},
      {"seconds", {{"prefill", completion.prefill_seconds}, {"decode", completion.decode_seconds}}},
  };
  if (!completion.reasoning.empty()) out["reasoning"] = completion.reasoning;
  return out;
}

Status RunGenerate(const GenerateOptions& options) {
  std::string messages;
  if (!options.messages.empty()) {
    OSCAR_ASSIGN_OR_RETURN(messages, ReadFile(options.messages, kMaxPromptBytes));
    // Before the weights are read, and by the file's name.
    OSCAR_ASSIGN_OR_RETURN(const nlohmann::json list, ParseJson(messages, options.messages));
    if (!list.is_array()) {
      return InvalidArgument(
          fmt::format("{}: must be a JSON list of {{role, content}}", options.messages));
    }
  }
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LanguageModel> model,
                         LanguageModel::Load(options.model.options));
  CompletionOptions completion_options;
  completion_options.sampling = options.sampling.Apply(model->default_sampling());
  completion_options.max_tokens = options.max_tokens;
  completion_options.template_arguments = options.template_arguments;
  // Text streams as it comes, what the model thinks first to stderr; JSON is printed whole.
  bool thought = false;
  const auto print = [&thought](std::string_view piece, bool is_reasoning) {
    if (thought && !is_reasoning) std::fputc('\n', stderr);
    thought = is_reasoning;
    std::FILE* const stream = is_reasoning ? stderr : stdout;
    std::fwrite(piece.data(), 1, piece.size(), stream);
    std::fflush(stream);
    return true;
  };
  const LanguageModel::OnText on_text = options.json ? LanguageModel::OnText() : print;
  OSCAR_ASSIGN_OR_RETURN(const Completion completion,
                         options.messages.empty()
                             ? model->Complete(options.prompt, completion_options, on_text)
                             : model->Chat(messages, completion_options, on_text));
  if (options.json) {
    fmt::print("{}\n",
               ToJson(completion).dump(2, ' ', false, ordered_json::error_handler_t::replace));
  } else {
    fmt::print("\n");
  }
  std::fflush(stdout);
  if (options.stats) fmt::print(stderr, "{}\n", StatsLine(completion));
  return {};
}

}  // namespace

void AddGenerateCommand(CLI::App& app, RunFunction& run) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "Answer one prompt or conversation and stop");
  CLI::Option* prompt = command->add_option("--prompt", options->prompt,
                                            "Raw text to go on from; special tokens in it count");
  CLI::Option* messages = command->add_option(
      "--messages", options->messages,
      "JSON file with a list of {role, content}, rendered by the model's chat template");
  prompt->excludes(messages);
  messages->excludes(prompt);
  command
      ->add_option("--template-arguments", options->template_arguments,
                   "JSON object of variables for the chat template, such as "
                   "'{\"enable_thinking\": false}'")
      ->needs(messages);
  command->add_option("--max-tokens", options->max_tokens, "Most tokens to draw; 0 is no limit")
      ->capture_default_str()
      ->check(NonNegative());
  command->add_flag("--json", options->json, "Print JSON (docs/cli-json.md)");
  command->add_flag("--stats", options->stats, "Say afterwards what the cache holds and saved");
  AddModelOptions(*command, options->model);
  AddSamplingOptions(*command, options->sampling);
  command->callback([options, prompt, messages, &run] {
    if (prompt->count() + messages->count() == 0) {
      throw CLI::RequiredError("--prompt or --messages");
    }
    run = [options] { return RunGenerate(*options); };
  });
}

}  // namespace oscar::cli
