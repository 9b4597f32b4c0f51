#include "dialogue/dialogue.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/file.h"
#include "base/json.h"
#include "text/tokenizer_config.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxTemplateBytes = uint64_t{1} << 20;
// Suggestions are shown as a list and as buttons: a few short ones.
constexpr uint64_t kMaxSampleFileBytes = uint64_t{64} << 10;
constexpr size_t kMaxSamplePrompts = 8;

Result<std::vector<std::string>> ReadSamplePrompts(const fs::path& path) {
  std::vector<std::string> prompts;
  if (!Exists(path)) return prompts;
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxSampleFileBytes));
  OSCAR_ASSIGN_OR_RETURN(const nlohmann::json json, ParseJson(text, path.string()));
  if (!json.is_array() || json.size() > kMaxSamplePrompts) {
    return Unexpected(DataLoss(
        fmt::format("{}: must be a list of at most {} strings", path.string(), kMaxSamplePrompts)));
  }
  for (const nlohmann::json& prompt : json) {
    if (!prompt.is_string() || prompt.get_ref<const std::string&>().empty()) {
      return Unexpected(
          DataLoss(fmt::format("{}: must hold strings that are not empty", path.string())));
    }
    prompts.push_back(prompt.get<std::string>());
  }
  return prompts;
}

Status BadOption(const char* name, const std::string& why) {
  return InvalidArgument(fmt::format("{} {}", name, why)).WithParam(name);
}

}  // namespace

AnswerDefaults DefaultsOf(const ModelConfig& config) {
  AnswerDefaults defaults;
  defaults.max_tokens = config.max_new_tokens.value_or(0);
  SamplingOptions& sampling = defaults.sampling;
  if (!config.do_sample.value_or(true)) {
    sampling.temperature = 0.0f;
    return defaults;
  }
  sampling.temperature = static_cast<float>(config.temperature.value_or(1.0));
  sampling.top_p = static_cast<float>(config.top_p.value_or(1.0));
  sampling.top_k = config.top_k.value_or(0);
  sampling.min_p = static_cast<float>(config.min_p.value_or(0.0));
  sampling.repetition_penalty = static_cast<float>(config.repetition_penalty.value_or(1.0));
  return defaults;
}

Dialogue::Dialogue(Tokenizer tokenizer, std::optional<ChatTemplate> chat,
                   std::string no_chat_reason, AnswerDefaults defaults,
                   std::vector<int32_t> eos_ids)
    : tokenizer_(std::move(tokenizer)),
      chat_(std::move(chat)),
      no_chat_reason_(std::move(no_chat_reason)),
      reasoning_(DetectReasoning(chat_.has_value() ? &*chat_ : nullptr, tokenizer_)),
      defaults_(std::move(defaults)),
      eos_ids_(std::move(eos_ids)) {}

Result<Dialogue> Dialogue::Load(const fs::path& model, const ModelConfig& config,
                                const DialogueOptions& options) {
  const fs::path folder = IsRegularFile(model) ? model.parent_path() : model;
  OSCAR_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Load(folder));
  std::optional<ChatTemplate> chat;
  std::string no_chat_reason;
  OSCAR_ASSIGN_OR_RETURN(TokenizerConfig texts, LoadTokenizerConfig(folder));
  const bool is_given = !options.chat_template.empty();
  if (is_given) {
    OSCAR_ASSIGN_OR_RETURN(std::string source, ReadFile(options.chat_template, kMaxTemplateBytes));
    texts.chat_templates = {{"default", std::move(source)}};
  }
  auto created = ChatTemplate::Create(texts);
  if (created.has_value()) {
    chat.emplace(std::move(*created));
  } else if (is_given) {
    return Unexpected(created.error().WithContext(options.chat_template.string()));
  } else {  // raw text needs no template
    no_chat_reason = created.error().WithContext(folder.string()).message();
  }
  Dialogue dialogue(std::move(tokenizer), std::move(chat), std::move(no_chat_reason),
                    options.use_generation_config ? DefaultsOf(config) : AnswerDefaults{},
                    config.eos_token_ids);
  OSCAR_ASSIGN_OR_RETURN(dialogue.sample_prompts_,
                         ReadSamplePrompts(folder / "sample_prompts.json"));
  return dialogue;
}

Result<Prompt> Dialogue::Render(const TemplateInput& input) const {
  if (!chat_.has_value()) {
    return Unexpected(InvalidArgument(no_chat_reason_).WithParam("messages"));
  }
  OSCAR_ASSIGN_OR_RETURN(ChatPrompt rendered, chat_->Render(input));
  Prompt prompt;
  OSCAR_ASSIGN_OR_RETURN(prompt.tokens, tokenizer_.Encode(rendered.segments));
  prompt.segments = std::move(rendered.segments);
  prompt.reasoning = reasoning_;
  prompt.opens_reasoning = rendered.opens_reasoning;
  if (prompt.opens_reasoning && !reasoning_.has_value()) prompt.reasoning.emplace();
  return prompt;
}

Result<Prompt> Dialogue::RenderJson(std::string_view messages,
                                    std::string_view template_arguments) const {
  OSCAR_ASSIGN_OR_RETURN(const nlohmann::ordered_json list, ParseOrderedJson(messages, "messages"));
  // A template would show a number that 64 bits do not hold as another one.
  OSCAR_RETURN_IF_ERROR(CheckIntegersFit(messages, "messages"));
  nlohmann::ordered_json arguments;
  TemplateInput input;
  input.messages = &list;
  if (!template_arguments.empty()) {
    constexpr const char* kName = "template arguments";
    OSCAR_ASSIGN_OR_RETURN(arguments, ParseOrderedJson(template_arguments, kName));
    OSCAR_RETURN_IF_ERROR(CheckIntegersFit(template_arguments, kName));
    input.template_arguments = &arguments;
  }
  return Render(input);
}

Result<Prompt> Dialogue::Encode(std::string_view text) const {
  Prompt prompt;
  OSCAR_ASSIGN_OR_RETURN(prompt.tokens,
                         tokenizer_.Encode(text, {.parse_special = true, .add_special = true}));
  return prompt;
}

Result<AnswerPlan> Dialogue::Plan(const CompletionOptions& options) const {
  if (options.max_tokens.value_or(0) < 0) {
    return Unexpected(BadOption("max_tokens", "must not be negative"));
  }
  if (options.min_tokens < 0 ||
      (options.max_tokens.value_or(0) > 0 && options.min_tokens > *options.max_tokens)) {
    return Unexpected(BadOption("min_tokens", "must be between 0 and max_tokens"));
  }
  if (std::ranges::any_of(options.stop, [](const std::string& stop) { return stop.empty(); })) {
    return Unexpected(BadOption("stop", "must not hold empty strings"));
  }
  AnswerPlan plan;
  plan.sampling = options.sampling.value_or(defaults_.sampling);
  plan.limit_is_default = !options.max_tokens.has_value();
  plan.max_tokens = options.max_tokens.value_or(
      defaults_.max_tokens > 0 ? std::max(defaults_.max_tokens, options.min_tokens) : 0);
  plan.stop_tokens = options.stop_token_ids;
  if (!options.ignore_eos) {
    plan.stop_tokens.insert(plan.stop_tokens.end(), eos_ids_.begin(), eos_ids_.end());
    plan.format.eos_ids = eos_ids_;
  }
  plan.format.stop = options.stop;
  plan.format.stop_token_ids = options.stop_token_ids;
  plan.format.include_stop = options.include_stop;
  plan.format.min_tokens = options.min_tokens;
  return plan;
}

Result<AnswerPlan> Dialogue::PlanFor(const Prompt& prompt, const CompletionOptions& options) const {
  OSCAR_ASSIGN_OR_RETURN(AnswerPlan plan, Plan(options));
  plan.format.reasoning = prompt.reasoning;
  plan.format.starts_in_reasoning = prompt.opens_reasoning;
  return plan;
}

}  // namespace oscar
