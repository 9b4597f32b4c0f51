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
#include "cli/interrupt.h"
#include "cli/model_options.h"
#include "cli/report.h"
#include "cli/validators.h"
#include "oscar/language_model.h"
#include "text/chat.h"
#include "toolcall/tool_set.h"

namespace oscar::cli {
namespace {

using nlohmann::ordered_json;

constexpr uint64_t kMaxPromptBytes = uint64_t{256} << 20;

struct GenerateOptions {
  ModelArguments model;
  AnswerArguments answer;
  std::string prompt, messages, tools;
  bool json = false, stats = false;
};

ordered_json CallJson(const ToolCall& call) {
  return {{"id", call.id}, {"name", call.name}, {"arguments", call.arguments}};
}

ordered_json ToJson(const Completion& completion) {
  ordered_json out = {{"text", completion.text}};
  out.update(AnswerToJson(completion));
  out["prompt_tokens"] = completion.prompt_tokens;
  out["completion_tokens"] = completion.token_ids.size();
  out["cache"] = CacheToJson(completion.cache);
  out["seconds"] = {{"prefill", completion.prefill_seconds}, {"decode", completion.decode_seconds}};
  if (!completion.reasoning.empty()) out["reasoning"] = completion.reasoning;
  for (const ToolCall& call : completion.tool_calls) out["tool_calls"].push_back(CallJson(call));
  if (!completion.status.ok()) out["error"] = completion.status.message();
  return out;
}

Status RunGenerate(GenerateOptions& options) {
  OSCAR_RETURN_IF_ERROR(options.model.Check());
  OSCAR_RETURN_IF_ERROR(options.answer.Check());
  std::string messages;
  if (!options.messages.empty()) {
    OSCAR_ASSIGN_OR_RETURN(messages, ReadInput(options.messages, kMaxPromptBytes));
    // Before the weights are read, and by the file's name.
    OSCAR_ASSIGN_OR_RETURN(const ordered_json list, ParseOrderedJson(messages, options.messages));
    const auto normalized = NormalizeMessages(list);
    if (!normalized.has_value()) return normalized.error().WithContext(options.messages);
  }
  std::string tools;
  if (!options.tools.empty()) {
    OSCAR_ASSIGN_OR_RETURN(tools, ReadInput(options.tools, kMaxPromptBytes));
    OSCAR_ASSIGN_OR_RETURN(const ordered_json list, ParseOrderedJson(tools, options.tools));
    const Status status = CheckTools(list);
    if (!status.ok()) return status.WithContext(options.tools);
  }
  OSCAR_RETURN_IF_ERROR(options.model.Obtain(ModelParts::kWeights));
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LanguageModel> model,
                         LanguageModel::Load(options.model.options));
  CompletionOptions completion_options = options.answer.Apply(model->default_sampling());
  completion_options.tools = tools;
  // Text streams as it comes, what the model thinks first to stderr; JSON is printed whole.
  bool thought = false;
  const auto on_text = [&](std::string_view piece, bool is_reasoning) {
    if (options.json) return !InterruptScope::Pending();
    if (thought && !is_reasoning) std::fputc('\n', stderr);
    thought = is_reasoning;
    std::FILE* const stream = is_reasoning ? stderr : stdout;
    std::fwrite(piece.data(), 1, piece.size(), stream);
    std::fflush(stream);
    return !InterruptScope::Pending();
  };
  const InterruptScope interrupts(InterruptScope::Mode::kOnce);
  InterruptScope::SetAnswering(model.get());
  OSCAR_ASSIGN_OR_RETURN(const Completion completion,
                         options.messages.empty()
                             ? model->Complete(options.prompt, completion_options, on_text)
                             : model->Chat(messages, completion_options, on_text));
  if (thought) std::fputc('\n', stderr);
  if (options.json) {
    fmt::print("{}\n",
               ToJson(completion).dump(2, ' ', false, ordered_json::error_handler_t::replace));
  } else {
    for (const ToolCall& call : completion.tool_calls) {
      fmt::print("{}\n",
                 CallJson(call).dump(-1, ' ', false, ordered_json::error_handler_t::replace));
    }
    if (completion.tool_calls.empty()) fmt::print("\n");
  }
  std::fflush(stdout);
  if (options.stats) fmt::print(stderr, "{}\n", StatsLine(completion));
  if (completion.finish_reason == FinishReason::kCancelled) {
    return {StatusCode::kCancelled, "interrupted"};
  }
  return completion.status;
}

}  // namespace

void AddGenerateCommand(CLI::App& app, RunFunction& run) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "Answer one prompt or conversation and stop");
  CLI::Option* prompt = command->add_option("-p,--prompt", options->prompt,
                                            "Raw text to continue; special tokens in it count");
  CLI::Option* messages = command->add_option(
      "--messages", options->messages,
      "JSON file or pipe with a list of {role, content}, rendered by the model's chat template");
  messages->check(NotEmpty());
  command
      ->add_option("--tools", options->tools,
                   "JSON file or pipe with the tools that the model may call, as in OpenAI's API")
      ->check(NotEmpty())
      ->needs(messages);
  prompt->excludes(messages);
  messages->excludes(prompt);
  command->add_flag("--json", options->json, "Print JSON (docs/cli-json.md)");
  command->add_flag("--stats", options->stats, "Say afterwards what the cache holds and saved");
  AddModelOptions(*command, options->model);
  AddAnswerOptions(*command, options->answer);
  command->get_option("--template-arguments")->needs(messages);
  command->callback([options, prompt, messages, &run] {
    if (prompt->count() + messages->count() == 0) {
      throw CLI::RequiredError("--prompt or --messages");
    }
    run = [options] { return RunGenerate(*options); };
  });
}

}  // namespace oscar::cli
