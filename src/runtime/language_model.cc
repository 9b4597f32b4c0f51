#include "oscar/language_model.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/file.h"
#include "base/json.h"
#include "engine/generator.h"
#include "engine/loaded_model.h"
#include "text/chat.h"
#include "text/detokenizer.h"
#include "text/reasoning.h"
#include "text/tokenizer.h"

namespace oscar {
namespace {

class LoadedLanguageModel : public LanguageModel {
 public:
  LoadedLanguageModel(std::unique_ptr<LoadedModel> loaded, Tokenizer tokenizer,
                      std::optional<ChatTemplate> chat)
      : loaded_(std::move(loaded)),
        tokenizer_(std::move(tokenizer)),
        chat_(std::move(chat)),
        reasoning_(DetectReasoning(chat_.has_value() ? &*chat_ : nullptr, tokenizer_)),
        generator_(loaded_->model(), loaded_->pool(), loaded_->max_context()) {}

  Result<Completion> Complete(std::string_view prompt, const CompletionOptions& options,
                              const OnText& on_text) override {
    OSCAR_ASSIGN_OR_RETURN(std::vector<TokenId> tokens,
                           tokenizer_.Encode(prompt, {.parse_special = true, .add_special = true}));
    return Run(std::move(tokens), options, on_text, std::nullopt, false);
  }

  Result<Completion> Chat(std::string_view messages_json, const CompletionOptions& options,
                          const OnText& on_text) override {
    if (!chat_.has_value()) {
      return Unexpected(InvalidArgument(fmt::format(
          "{}: the model has no chat template; use a raw prompt", loaded_->directory().string())));
    }
    OSCAR_ASSIGN_OR_RETURN(const nlohmann::ordered_json messages,
                           ParseOrderedJson(messages_json, "messages"));
    OSCAR_RETURN_IF_ERROR(CheckIntegersFit(messages_json, "messages"));
    nlohmann::ordered_json arguments;
    TemplateInput input;
    input.messages = &messages;
    if (!options.template_arguments.empty()) {
      OSCAR_ASSIGN_OR_RETURN(arguments,
                             ParseOrderedJson(options.template_arguments, "template arguments"));
      OSCAR_RETURN_IF_ERROR(CheckIntegersFit(options.template_arguments, "template arguments"));
      input.template_arguments = &arguments;
    }
    OSCAR_ASSIGN_OR_RETURN(const ChatPrompt prompt, chat_->Render(input));
    OSCAR_ASSIGN_OR_RETURN(std::vector<TokenId> tokens, tokenizer_.Encode(prompt.segments));
    return Run(std::move(tokens), options, on_text, reasoning_, prompt.opens_reasoning);
  }

  void Cancel() override { generator_.Cancel(); }
  void Reset() override { generator_.Reset(); }

  SamplingOptions default_sampling() const override {
    const ModelConfig& config = loaded_->config();
    SamplingOptions sampling;
    sampling.temperature = 0.0f;
    if (config.do_sample.value_or(false)) {
      sampling.temperature = static_cast<float>(config.temperature.value_or(1.0));
      sampling.top_p = static_cast<float>(config.top_p.value_or(1.0));
      sampling.top_k = config.top_k.value_or(0);
      sampling.min_p = static_cast<float>(config.min_p.value_or(0.0));
      sampling.repetition_penalty = static_cast<float>(config.repetition_penalty.value_or(1.0));
    }
    return sampling;
  }

  int64_t max_context() const override { return loaded_->max_context(); }

  CacheReport cache() const override { return Report(generator_.cache().Usage()); }

 private:
  CacheReport Report(const CacheUsage& usage) const {
    const KvPlan& kv = loaded_->kv();
    CacheReport report;
    report.tokens = static_cast<int64_t>(usage.tokens);
    report.bf16_bytes = usage.bf16_bytes;
    report.bytes = usage.bytes;
    report.bits_per_element = usage.bits_per_element;
    report.simulated = kv.method().is_simulated();
    if (report.simulated && report.tokens > 0) {
      report.bytes = kv.StoredBytes(report.tokens);
      report.bits_per_element = kv.StoredBits(report.tokens);
    }
    report.method = kv.Describe();
    return report;
  }

  Result<Completion> Run(std::vector<TokenId> prompt, const CompletionOptions& options,
                         const OnText& on_text, const std::optional<ReasoningFormat>& format,
                         bool opens_reasoning) {
    GenerateRequest request;
    request.prompt.assign(prompt.begin(), prompt.end());
    request.sampling = options.sampling;
    request.max_tokens = options.max_tokens;
    request.stop_tokens = loaded_->spec().stop_tokens;

    Completion completion;
    Detokenizer detokenizer(tokenizer_, /*skip_special=*/true);
    std::optional<ReasoningSplitter> splitter;
    if (format.has_value()) splitter.emplace(*format, opens_reasoning);
    const auto emit = [&](const std::string& content, const std::string& reasoning) {
      completion.text += content;
      completion.reasoning += reasoning;
      bool go_on = true;
      if (on_text && !reasoning.empty()) go_on = on_text(reasoning, true);
      if (on_text && !content.empty()) go_on = on_text(content, false) && go_on;
      return go_on;
    };
    const auto push = [&](const std::string& text) {
      if (!splitter.has_value()) return emit(text, "");
      const ReasoningSplitter::Output piece = splitter->Push(text);
      return emit(piece.content, piece.reasoning);
    };
    const auto is_stop = [&](int32_t token) {
      return std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) !=
             request.stop_tokens.end();
    };
    OSCAR_ASSIGN_OR_RETURN(const GenerateResult result,
                           generator_.Generate(request, [&](int32_t token) {
                             return is_stop(token) || push(detokenizer.Push(token));
                           }));
    push(detokenizer.Finish());
    if (splitter.has_value()) {
      const ReasoningSplitter::Output rest = splitter->Finish();
      emit(rest.content, rest.reasoning);
    }
    completion.token_ids = result.tokens;
    completion.prompt_tokens = result.prompt_tokens;
    completion.reused_tokens = result.reused_tokens;
    completion.finish_reason = result.reason;
    completion.status = result.status;
    completion.seed = result.seed;
    completion.prefill_seconds = result.prefill_seconds;
    completion.decode_seconds = result.decode_seconds;
    completion.cache = Report(result.cache);
    return completion;
  }

  std::unique_ptr<LoadedModel> loaded_;
  Tokenizer tokenizer_;
  std::optional<ChatTemplate> chat_;
  std::optional<ReasoningFormat> reasoning_;
  Generator generator_;
};

}  // namespace

Result<std::unique_ptr<LanguageModel>> LanguageModel::Load(const ModelOptions& options) {
  // The text side first: whoever lacks a tokenizer learns it before gigabytes of weights are read.
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> plan, LoadedModel::Plan(options));
  // A config file alone (random weights) has its tokenizer beside it, or none at all.
  std::filesystem::path folder = plan->directory();
  if (IsRegularFile(folder)) folder = folder.parent_path();
  OSCAR_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Load(folder));
  std::optional<ChatTemplate> chat;
  Result<ChatTemplate> found = ChatTemplate::Load(folder);
  if (found.has_value()) {
    chat.emplace(std::move(*found));
  } else if (found.error().code() != StatusCode::kNotFound) {
    return Unexpected(found.error());
  }
  OSCAR_ASSIGN_OR_RETURN(std::unique_ptr<LoadedModel> loaded, LoadedModel::Load(options));
  return std::make_unique<LoadedLanguageModel>(std::move(loaded), std::move(tokenizer),
                                               std::move(chat));
}

}  // namespace oscar
