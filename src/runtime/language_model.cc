#include "oscar/language_model.h"

#include <optional>
#include <utility>

#include "dialogue/dialogue.h"
#include "engine/generator.h"
#include "engine/loaded_model.h"

namespace oscar {
namespace {

class LoadedLanguageModel : public LanguageModel {
 public:
  LoadedLanguageModel(std::unique_ptr<LoadedModel> loaded, Dialogue dialogue)
      : loaded_(std::move(loaded)),
        dialogue_(std::move(dialogue)),
        generator_(loaded_->model(), loaded_->pool(), loaded_->max_context()) {}

  Result<Completion> Complete(std::string_view prompt, const CompletionOptions& options,
                              const OnText& on_text) override {
    OSCAR_ASSIGN_OR_RETURN(const Prompt encoded, dialogue_.Encode(prompt));
    return Run(encoded, options, on_text);
  }

  Result<Completion> Chat(std::string_view messages_json, const CompletionOptions& options,
                          const OnText& on_text) override {
    OSCAR_ASSIGN_OR_RETURN(const Prompt prompt, dialogue_.RenderJson(messages_json, options));
    return Run(prompt, options, on_text);
  }

  void Cancel() override { generator_.Cancel(); }
  void Reset() override { generator_.Reset(); }

  SamplingOptions default_sampling() const override { return dialogue_.defaults().sampling; }
  int64_t default_max_tokens() const override { return dialogue_.defaults().max_tokens; }
  const std::vector<std::string>& sample_prompts() const override {
    return dialogue_.sample_prompts();
  }
  int64_t max_context() const override { return loaded_->max_context(); }
  CacheReport cache() const override { return Report(generator_.cache().Usage()); }

 private:
  CacheReport Report(const CacheUsage& usage) const {
    CacheReport report;
    report.tokens = static_cast<int64_t>(usage.tokens);
    report.quantized_tokens = static_cast<int64_t>(usage.sealed_pages) * kPageTokens;
    report.bf16_bytes = usage.bf16_bytes;
    report.bytes = usage.bytes;
    report.bits_per_element = usage.bits_per_element;
    report.method = loaded_->kv().Describe();
    return report;
  }

  Result<Completion> Run(const Prompt& prompt, const CompletionOptions& options,
                         const OnText& on_text) {
    OSCAR_ASSIGN_OR_RETURN(AnswerPlan plan, dialogue_.PlanFor(prompt, options));
    GenerateRequest request;
    request.prompt = prompt.tokens;
    request.sampling = std::move(plan.sampling);
    request.max_tokens = plan.max_tokens;
    request.min_tokens = options.min_tokens;
    request.stop_tokens = std::move(plan.stop_tokens);

    Completion completion;
    AnswerAssembler answer(dialogue_.tokenizer(), std::move(plan.format));
    const auto emit = [&](const AnswerPiece& piece) {
      completion.text += piece.content;
      completion.reasoning += piece.reasoning;
      for (const ToolCallDelta& delta : piece.tool_calls) {
        if (delta.index == completion.tool_calls.size()) completion.tool_calls.emplace_back();
        ToolCall& call = completion.tool_calls[delta.index];
        call.id += delta.id;
        call.name += delta.name;
        call.arguments += delta.arguments;
      }
      bool go_on = true;
      if (on_text && !piece.reasoning.empty()) go_on = on_text(piece.reasoning, true);
      if (on_text && !piece.content.empty()) go_on = on_text(piece.content, false) && go_on;
      return go_on;
    };
    OSCAR_ASSIGN_OR_RETURN(const GenerateResult result,
                           generator_.Generate(request, [&](int32_t token) {
                             AnswerPiece piece;
                             const bool is_stopped = answer.OnToken(token, &piece);
                             return emit(piece) && !is_stopped;
                           }));
    AnswerPiece rest;
    answer.OnFinish(result.reason, &rest);
    emit(rest);
    completion.token_ids = result.tokens;
    completion.prompt_tokens = result.prompt_tokens;
    completion.reused_tokens = result.reused_tokens;
    completion.finish_reason = answer.finish_reason();
    completion.stop_string = answer.stop_string();
    completion.stop_token = answer.stop_token();
    completion.status = result.status;
    completion.seed = result.seed;
    completion.prefill_seconds = result.prefill_seconds;
    completion.decode_seconds = result.decode_seconds;
    completion.cache = Report(result.cache);
    return completion;
  }

  std::unique_ptr<LoadedModel> loaded_;
  Dialogue dialogue_;
  Generator generator_;
};

}  // namespace

Result<std::unique_ptr<LanguageModel>> LanguageModel::Load(const ModelOptions& options) {
  // The text side first: whoever lacks a tokenizer learns it before gigabytes of weights are read.
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> plan, LoadedModel::Plan(options));
  OSCAR_ASSIGN_OR_RETURN(Dialogue dialogue, Dialogue::Load(plan->directory(), plan->config()));
  OSCAR_ASSIGN_OR_RETURN(std::unique_ptr<LoadedModel> loaded, LoadedModel::Load(options));
  return std::make_unique<LoadedLanguageModel>(std::move(loaded), std::move(dialogue));
}

}  // namespace oscar
