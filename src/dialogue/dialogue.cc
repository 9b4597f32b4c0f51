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

// Channels mark both, so their parser reads both or is not used.
Status CheckParsers(CallFormat calls, ReasoningKind reasoning) {
  const bool is_tagged = reasoning == ReasoningKind::kThink || reasoning == ReasoningKind::kMistral;
  const bool has_other = calls != CallFormat::kNone && calls != CallFormat::kHarmony;
  if ((calls == CallFormat::kHarmony && is_tagged) ||
      (reasoning == ReasoningKind::kHarmony && has_other)) {
    return InvalidArgument(fmt::format(
        "tool parser {} and reasoning parser {} exclude each other: harmony goes with harmony or "
        "none",
        NameOf(calls), NameOf(reasoning)));
  }
  return {};
}

Status CheckChoice(const ToolUse& use, const ToolSet* tools, CallFormat format) {
  constexpr const char* kField = "tool_choice";
  if (tools == nullptr || tools->empty()) return BadOption(kField, "asks for a call without tools");
  if (use.choice == ToolChoice::kNamed && !tools->Has(use.name)) {
    return BadOption(kField, "names none of the tools");
  }
  if (format == CallFormat::kNone) {
    return BadOption(kField,
                     "asks for a call, but the model has no known format for calls; name one with "
                     "--tool-parser");
  }
  return {};
}

// Harmony's template joins descriptions without asking whether there are any.
nlohmann::ordered_json WithDescriptions(nlohmann::ordered_json tools) {
  for (nlohmann::ordered_json& tool : tools) {
    nlohmann::ordered_json& description = tool["function"]["description"];
    if (description.is_null()) description = "";
  }
  return tools;
}

}  // namespace

Status CheckDemand(const std::optional<DemandedCall>& demand) {
  if (!demand.has_value()) return {};
  return BadOption("tool_choice", "asks for a call, and this build cannot make a model write one");
}

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
      call_format_(DetectCallFormat(chat_.has_value() ? &*chat_ : nullptr, tokenizer_)),
      reasoning_(DetectReasoningKind(chat_.has_value() ? &*chat_ : nullptr, tokenizer_)),
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
  if (options.call_format.has_value()) dialogue.call_format_ = *options.call_format;
  if (options.reasoning.has_value()) {
    dialogue.reasoning_ = *options.reasoning;
    dialogue.guesses_reasoning_ = false;
  }
  OSCAR_RETURN_IF_ERROR(CheckParsers(dialogue.call_format_, dialogue.reasoning_));
  OSCAR_ASSIGN_OR_RETURN(dialogue.sample_prompts_,
                         ReadSamplePrompts(folder / "sample_prompts.json"));
  return dialogue;
}

Result<Prompt> Dialogue::Render(const TemplateInput& given, const ToolUse& use) const {
  if (!chat_.has_value()) {
    return Unexpected(InvalidArgument(no_chat_reason_).WithParam("messages"));
  }
  TemplateInput input = given;
  std::shared_ptr<const ToolSet> tools;
  if (input.tools != nullptr) {
    OSCAR_RETURN_IF_ERROR(CheckTools(*input.tools));
    tools = std::make_shared<const ToolSet>(*input.tools);
  }
  const bool is_demanded = use.choice == ToolChoice::kRequired || use.choice == ToolChoice::kNamed;
  if (is_demanded) OSCAR_RETURN_IF_ERROR(CheckChoice(use, tools.get(), call_format_));
  if (use.choice == ToolChoice::kNone || tools == nullptr || tools->empty()) {
    tools = nullptr;
    input.tools = nullptr;
  }
  nlohmann::ordered_json described;
  if (input.tools != nullptr && call_format_ == CallFormat::kHarmony) {
    described = WithDescriptions(*input.tools);
    input.tools = &described;
  }
  OSCAR_ASSIGN_OR_RETURN(ChatPrompt rendered, chat_->Render(input));
  Prompt prompt;
  OSCAR_ASSIGN_OR_RETURN(prompt.tokens, tokenizer_.Encode(rendered.segments));
  AnswerSyntax& syntax = prompt.syntax;
  syntax.reasoning = TagsOf(reasoning_);
  syntax.harmony = reasoning_ == ReasoningKind::kHarmony || call_format_ == CallFormat::kHarmony;
  if (reasoning_ == ReasoningKind::kHarmony) syntax.reasoning.emplace();
  if (reasoning_ == ReasoningKind::kNone && guesses_reasoning_ &&
      rendered.EndsWith(ReasoningFormat{}.open)) {
    syntax.reasoning.emplace();
  }
  syntax.starts_in_reasoning =
      !syntax.harmony && syntax.reasoning.has_value() && rendered.EndsWith(syntax.reasoning->open);
  if (call_format_ != CallFormat::kNone) {
    syntax.calls = call_format_;
    syntax.tools = tools;
    syntax.parallel_calls = use.parallel;
  }
  if (is_demanded) {
    prompt.demand.emplace();
    prompt.demand->tools =
        use.choice == ToolChoice::kNamed ? std::vector{use.name} : tools->Names();
    prompt.demand->several = use.parallel && use.choice == ToolChoice::kRequired;
  }
  prompt.segments = std::move(rendered.segments);
  return prompt;
}

Result<Prompt> Dialogue::RenderJson(std::string_view messages,
                                    const CompletionOptions& options) const {
  // A template would show a number that 64 bits do not hold as another one.
  const auto parse = [](std::string_view text, const char* name) -> Result<nlohmann::ordered_json> {
    OSCAR_ASSIGN_OR_RETURN(nlohmann::ordered_json json, ParseOrderedJson(text, name));
    OSCAR_RETURN_IF_ERROR(CheckIntegersFit(text, name));
    return json;
  };
  OSCAR_ASSIGN_OR_RETURN(const nlohmann::ordered_json list, parse(messages, "messages"));
  nlohmann::ordered_json arguments, tools;
  TemplateInput input;
  input.messages = &list;
  if (!options.template_arguments.empty()) {
    OSCAR_ASSIGN_OR_RETURN(arguments, parse(options.template_arguments, "template arguments"));
    input.template_arguments = &arguments;
  }
  if (!options.tools.empty()) {
    OSCAR_ASSIGN_OR_RETURN(tools, parse(options.tools, "tools"));
    input.tools = &tools;
  }
  return Render(input, {options.tool_choice, options.tool_name, options.parallel_tool_calls});
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
  OSCAR_RETURN_IF_ERROR(CheckDemand(prompt.demand));
  plan.format.syntax = prompt.syntax;
  plan.demand = prompt.demand;
  return plan;
}

}  // namespace oscar
