// Dialogue: the text side of a model directory, the same for every door (the server, `oscar
// generate`, `oscar chat`, the library): a conversation or raw text becomes token ids, and what a
// caller leaves open becomes the model's defaults. AnswerAssembler makes text of the answer.
// Immutable after loading; share one between threads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dialogue/answer.h"
#include "io/hf_config.h"
#include "oscar/options.h"
#include "oscar/status.h"
#include "text/chat.h"
#include "text/tokenizer.h"
#include "toolcall/call_frame.h"
#include "toolcall/format.h"

namespace oscar {

// What a caller who leaves it open gets.
struct AnswerDefaults {
  SamplingOptions sampling;
  int64_t max_tokens = 0;  // 0: the rest of the context
};
// One rule for every door: the model samples, with what its generation_config.json suggests and at
// temperature 1 where that says nothing, unless it says "do_sample": false. Transformers takes a
// missing do_sample for false; OpenAI's API, vLLM and llama.cpp sample, and a model must not answer
// otherwise in the terminal than behind the API that most of its users see.
AnswerDefaults DefaultsOf(const ModelConfig& config);

// A prompt as the engine takes it.
struct Prompt {
  std::vector<int32_t> tokens;
  std::vector<TextSegment> segments;  // the rendered conversation; empty of raw text
  // How the answer will be written. Nothing is set for raw text: its answer is all content.
  AnswerSyntax syntax;
  std::optional<DemandedCall> demand;
};

// What a conversation may do with the tools of its TemplateInput.
struct ToolUse {
  ToolChoice choice = ToolChoice::kAuto;
  std::string name;      // of kNamed
  bool parallel = true;  // else the answer ends with its first call
};

// Everything an engine and an AnswerAssembler need beside the prompt.
struct AnswerPlan {
  SamplingOptions sampling;
  int64_t max_tokens = 0;            // 0: the rest of the context
  bool limit_is_default = false;     // the caller set none: less will do where memory is short
  std::vector<int32_t> stop_tokens;  // the request's and the model's
  AnswerFormat format;
  std::optional<DemandedCall> demand;
};

// Whether an answer can be made to begin with that call: a mask over tokens has to do it (the
// server's DemandGrammar).
Status CheckDemand(const std::optional<DemandedCall>& demand);

struct DialogueOptions {
  std::filesystem::path chat_template;  // a Jinja file instead of the model's own; empty: none
  bool use_generation_config = true;
  // How answers are read; unset: as the chat template teaches the model to write them.
  std::optional<CallFormat> call_format = std::nullopt;
  std::optional<ReasoningKind> reasoning = std::nullopt;
};

class Dialogue {
 public:
  // `model` is a model directory, or the config.json in one.
  static Result<Dialogue> Load(const std::filesystem::path& model, const ModelConfig& config,
                               const DialogueOptions& options = {});
  // From parts. Without a template conversations are refused with `no_chat_reason`.
  Dialogue(Tokenizer tokenizer, std::optional<ChatTemplate> chat, std::string no_chat_reason,
           AnswerDefaults defaults, std::vector<int32_t> eos_ids);

  // A conversation through the chat template. Text in messages never becomes a special token.
  // Errors of the request carry the name of the field at fault (Status::param).
  Result<Prompt> Render(const TemplateInput& input, const ToolUse& use = {}) const;
  // The same from JSON text: messages as in OpenAI's API, and what of the options is about them
  // (template_arguments, tools).
  Result<Prompt> RenderJson(std::string_view messages, const CompletionOptions& options) const;
  // Raw text to continue. Special tokens in it are recognised: it is the caller's own.
  Result<Prompt> Encode(std::string_view text) const;

  // Options checked and joined with the model's defaults. How the answer is written comes from the
  // prompt, and with PlanFor it is there.
  Result<AnswerPlan> Plan(const CompletionOptions& options) const;
  Result<AnswerPlan> PlanFor(const Prompt& prompt, const CompletionOptions& options) const;

  const Tokenizer& tokenizer() const { return tokenizer_; }
  bool has_chat() const { return chat_.has_value(); }
  // Whether the chat template writes the marks of reasoning, so that the model can be expected to
  // reason where the prompt has not opened or closed it.
  bool template_reasons() const {
    const auto tags = TagsOf(reasoning_);
    return tags.has_value() && chat_.has_value() && chat_->Mentions(tags->open);
  }
  CallFormat call_format() const { return call_format_; }
  ReasoningKind reasoning() const { return reasoning_; }
  const std::string& no_chat_reason() const { return no_chat_reason_; }
  const AnswerDefaults& defaults() const { return defaults_; }
  const std::vector<int32_t>& eos_ids() const { return eos_ids_; }
  // What sample_prompts.json of the directory suggests to newcomers: a list of strings.
  const std::vector<std::string>& sample_prompts() const { return sample_prompts_; }

 private:
  Tokenizer tokenizer_;
  std::optional<ChatTemplate> chat_;
  std::string no_chat_reason_;
  CallFormat call_format_ = CallFormat::kNone;
  ReasoningKind reasoning_ = ReasoningKind::kNone;
  bool guesses_reasoning_ = true;  // nobody has said how it is marked
  AnswerDefaults defaults_;
  std::vector<int32_t> eos_ids_;
  std::vector<std::string> sample_prompts_;
};

}  // namespace oscar
