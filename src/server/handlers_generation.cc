// Generation: from a parsed request to a plan, and the endpoints of chats and completions.
#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "base/log.h"
#include "generation/answer_constraint.h"
#include "generation/demanded_call.h"
#include "openai/chat_writer.h"
#include "openai/response.h"
#include "server/api_server.h"
#include "server/generation_run.h"

namespace oscar::server {
namespace {

constexpr int64_t kDefaultCompletionTokens = 16;

uint64_t SeedFromSystem() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// The client's own id, from the header or from the body, else the one sampled for it.
std::string RequestIdOf(const HttpRequest& http, const std::string& sampled,
                        const GenerationParams& params) {
  const std::string* header = FindHeader(http.headers, "X-Request-Id");
  const bool from_header = header != nullptr && *header == sampled;
  return from_header || params.request_id.empty() ? sampled : params.request_id;
}

// Fits the wanted number of tokens to the context; the model's own number or, where it has none,
// all that is left, and at least `min_tokens`, where the request names none. All three numbers are
// in the message.
ApiResult<int64_t> FitTokens(const GenerationParams& params, int64_t fallback, int64_t prompt,
                             int64_t context) {
  const int64_t room = context - prompt;
  const int64_t least = std::max<int64_t>(params.min_tokens, 1);
  const int64_t needed = params.may_cut_max_tokens ? least : params.max_tokens.value_or(least);
  if (needed > room) {
    // Agents know a prompt that must become shorter by these words.
    const std::string why =
        params.may_cut_max_tokens
            ? fmt::format("prompt is too long: {} tokens > {} maximum", prompt, context - least)
            : fmt::format(
                  "the prompt has {} tokens and {} more were asked for, but the context "
                  "holds {}",
                  prompt, needed, context);
    ApiError error = MakeApiError(400, "context_length_exceeded", why);
    if (!params.may_cut_max_tokens) error.param = "max_tokens";
    return tl::unexpected(std::move(error));
  }
  if (params.max_tokens.has_value()) return std::min(*params.max_tokens, room);
  return fallback > 0 ? std::min(std::max(fallback, params.min_tokens), room) : room;
}

// An answer is held in memory until all of it is there, unless it is streamed, and then at least
// what it tells of prompts. Refused before anything is computed.
std::optional<ApiError> CheckAnswerSize(const ServedModel& served, const GenerationParams& params,
                                        const GenerationPlan& plan, int64_t max_tokens) {
  const int64_t of_token =
      (params.logprobs ? 1 + params.top_logprobs : 0) + (params.return_token_ids ? 1 : 0);
  const int64_t of_prompt_token = (plan.echo && params.logprobs ? 1 + params.top_logprobs : 0) +
                                  (params.prompt_logprobs ? 1 + *params.prompt_logprobs : 0) +
                                  (params.return_token_ids ? 1 : 0);
  const int64_t longest = plan.prefill_only ? 0 : max_tokens;
  int64_t of_prompts = 0, of_answers = 0;
  for (const GenerationPrompt& prompt : plan.prompts) {
    const auto length = static_cast<int64_t>(prompt.tokens.size());
    of_prompts += params.choices() * length * of_prompt_token;
    of_answers += params.choices() * longest * of_token;
  }
  const int64_t limit = served.max_answer_logprobs();
  const bool is_kept = !params.stream || params.stream_is_kept;
  if (of_prompts + (is_kept ? of_answers : 0) <= limit) return std::nullopt;
  ApiError error = MakeApiError(
      400, "answer_too_large",
      fmt::format("the answer could name {} tokens with logprobs or ids ({} choices of up to {} "
                  "tokens) and holds {} at most; lower max_tokens, n, the number of prompts or of "
                  "logprobs{}",
                  of_prompts + of_answers,
                  params.choices() * static_cast<int64_t>(plan.prompts.size()), longest, limit,
                  of_prompts <= limit && !params.stream_is_kept ? ", or set stream" : ""));
  error.param = "max_tokens";
  return error;
}

// A word at the start of a line, and after a space, are different tokens: both are ruled out.
Status AddBadWords(const Tokenizer& tokenizer, const std::vector<std::string>& words,
                   TokenRules* rules) {
  for (const std::string& word : words) {
    const std::string bare = word.substr(std::min(word.find_first_not_of(' '), word.size()));
    std::vector<std::string> forms = {bare, " " + bare};
    if (bare.empty()) forms = {word};
    for (const std::string& form : forms) {
      OSCAR_ASSIGN_OR_RETURN(std::vector<int32_t> run,
                             tokenizer.Encode(form, {.parse_special = true}));
      if (!run.empty()) rules->bad_words.push_back(std::move(run));
    }
  }
  return {};
}

// Whether the answer may begin with reasoning: the prompt has opened it, or has left it to a model
// whose template knows of it. A prompt that ends with the closing mark has turned it off.
bool ReasonsFirst(const Dialogue& dialogue, const Prompt& prompt) {
  const AnswerSyntax& syntax = prompt.syntax;
  if (!syntax.reasoning.has_value()) return false;
  if (syntax.starts_in_reasoning) return true;
  std::string_view tail = prompt.segments.empty() ? "" : prompt.segments.back().text;
  while (!tail.empty() && std::isspace(static_cast<unsigned char>(tail.back()))) {
    tail.remove_suffix(1);
  }
  return dialogue.template_reasons() && !tail.ends_with(syntax.reasoning->close);
}

// A call that `tool_choice` demands is a form of the answer like any other.
std::optional<ApiError> Demand(const ServedModel& served, const Prompt& prompt,
                               const GenerationParams& params, GenerationPlan* plan) {
  if (!prompt.demand.has_value()) return std::nullopt;
  if (served.grammars == nullptr) return FromStatus(CheckDemand(prompt.demand), "");
  if (params.constraint.has_value()) {
    return InvalidValue("tool_choice",
                        fmt::format("'tool_choice' demands a call and cannot be combined with '{}'",
                                    params.constraint_param));
  }
  auto spec = DemandGrammar(*prompt.demand, prompt.syntax, served.dialogue->tokenizer());
  if (!spec.has_value()) {
    return InvalidValue("tools", fmt::format("'tools' cannot be demanded by 'tool_choice': {}",
                                             spec.error().message()));
  }
  plan->demand = std::move(*spec);
  return std::nullopt;
}

// Where the form of an answer begins: after this, or at once.
std::optional<ReasoningFormat> BeforeTheForm(const GenerationParams& params,
                                             const GenerationPlan& plan, bool* inside) {
  const AnswerSyntax& syntax = plan.choice.syntax;
  *inside = syntax.starts_in_reasoning;
  if (syntax.harmony && !params.constraint->is_calls()) {
    *inside = true;  // whatever comes before the message to the user
    return ReasoningFormat{"", "<|channel|>final<|message|>"};
  }
  return plan.reasons_first && !syntax.harmony ? syntax.reasoning : std::nullopt;
}

// Compiles what the answer has to look like, or finds it compiled, for every choice to keep to.
std::optional<ApiError> Constrain(const ServedModel& served, const GenerationParams& params,
                                  GenerationPlan* plan) {
  if (served.grammars == nullptr) {
    ApiError error = UnsupportedParameter(
        params.constraint_param,
        fmt::format("'{}' is not supported: this server was built without structured output "
                    "(scripts/setup.sh, then -DOSCAR_XGRAMMAR=ON)",
                    params.constraint_param));
    return error;
  }
  auto grammar = served.grammars->Compile(*params.constraint);
  if (!grammar.has_value()) {
    const Status& status = grammar.error();
    if (status.code() == StatusCode::kInvalidArgument) {
      return InvalidValue(
          params.constraint_param,
          fmt::format("'{}' is refused: {}", params.constraint_param, status.message()));
    }
    return FromStatus(status, plan->request_id);
  }
  bool inside = false;
  const auto reasoning = BeforeTheForm(params, *plan, &inside);
  plan->prototype.make_constraint = [grammar = std::move(*grammar), dialogue = served.dialogue,
                                     reasoning, inside]() -> std::unique_ptr<TokenConstraint> {
    return std::make_unique<AnswerConstraint>(dialogue->tokenizer(), grammar, reasoning, inside,
                                              dialogue->eos_ids());
  };
  return std::nullopt;
}

}  // namespace

HttpResponse ApiServer::Generate(const Context& context, std::string endpoint,
                                 const GenerationParams& given, GenerationPlan plan,
                                 const MakeWriter& make_writer) {
  const ServedModel& served = *context.model;
  GenerationParams params = given;
  const bool chat = plan.chat;
  const std::string request_id = RequestIdOf(context.http, context.request_id, params);
  int64_t longest = 0;
  for (GenerationPrompt& prompt : plan.prompts) {
    if (params.truncate_prompt_tokens.has_value() &&
        static_cast<int64_t>(prompt.tokens.size()) > *params.truncate_prompt_tokens) {
      prompt.tokens.erase(prompt.tokens.begin(),
                          prompt.tokens.end() - *params.truncate_prompt_tokens);
    }
    if (prompt.tokens.empty()) {
      return ErrorResponse(InvalidValue(chat ? "messages" : "prompt", "the prompt has no tokens"));
    }
    longest = std::max(longest, static_cast<int64_t>(prompt.tokens.size()));
    if (plan.echo)
      prompt.echo_text = served.dialogue->tokenizer().Decode(prompt.tokens, /*skip_special=*/false);
  }
  plan.prefill_only = params.max_tokens == 0;
  if (plan.prefill_only) params.max_tokens = 1;
  const auto max_tokens =
      FitTokens(params, chat ? served.dialogue->defaults().max_tokens : kDefaultCompletionTokens,
                longest, served.engine->max_context());
  if (!max_tokens.has_value()) return ErrorResponse(max_tokens.error());
  if (const auto error = CheckAnswerSize(served, params, plan, *max_tokens)) {
    return ErrorResponse(*error);
  }

  plan.request_id = request_id;
  plan.choices_per_prompt = params.choices();
  plan.seed = params.seed.has_value() ? static_cast<uint64_t>(*params.seed) : SeedFromSystem();
  LogDebug("{} seed={}", request_id, plan.seed);
  plan.keep_prompt_logprobs = params.prompt_logprobs.has_value();
  plan.prompt_logprobs = (plan.echo && params.logprobs) || plan.keep_prompt_logprobs;
  plan.top_logprobs = static_cast<size_t>(params.top_logprobs);
  plan.prompt_top_logprobs = static_cast<size_t>(params.prompt_logprobs.value_or(0));
  plan.on_gap = [this](double seconds) { metrics_.inter_token.Observe(seconds); };
  CompletionOptions wanted;
  wanted.sampling = params.sampling;
  wanted.max_tokens = *max_tokens;
  wanted.min_tokens = params.min_tokens;
  wanted.stop = params.stop;
  wanted.stop_token_ids = params.stop_token_ids;
  wanted.ignore_eos = params.ignore_eos;
  wanted.include_stop = params.include_stop_str_in_output;
  auto answer = served.dialogue->Plan(wanted);
  if (!answer.has_value()) return ErrorResponse(FromStatus(answer.error(), request_id));
  answer->format.skip_special = params.skip_special_tokens;
  answer->format.syntax = std::move(plan.choice.syntax);
  static_cast<AnswerFormat&>(plan.choice) = std::move(answer->format);
  plan.choice.logprobs = params.logprobs;
  plan.choice.keep_token_ids = params.return_token_ids;
  EngineRequest& engine = plan.prototype;
  engine.on_event = context.http.wake;
  engine.sampling = std::move(answer->sampling);
  engine.max_tokens = answer->max_tokens;
  engine.may_shorten = !params.max_tokens.has_value() || params.may_cut_max_tokens;
  engine.min_tokens = params.min_tokens;
  engine.stop_tokens = std::move(answer->stop_tokens);
  engine.want_logprobs = params.logprobs || params.choices() > params.n;
  engine.priority = options_.ignore_priority ? 0 : params.priority;
  if (!params.bad_words.empty() || !params.allowed_token_ids.empty()) {
    auto rules = std::make_shared<TokenRules>();
    rules->allowed = params.allowed_token_ids;
    const Status status = AddBadWords(served.dialogue->tokenizer(), params.bad_words, rules.get());
    if (!status.ok()) return ErrorResponse(FromStatus(status, request_id));
    engine.rules = std::move(rules);
  }
  engine.top_logprobs =
      static_cast<int>(std::max(params.top_logprobs, params.prompt_logprobs.value_or(0)));
  engine.cache_salt = params.cache_salt + SaltOf(context.key);
  if (plan.demand.has_value()) {
    params.constraint = std::move(plan.demand);
    params.constraint_param = "tool_choice";
  }
  if (params.constraint.has_value()) {
    // Where both leave no token in common there would be no answer.
    if (engine.rules != nullptr) {
      const char* const name = params.bad_words.empty() ? "allowed_token_ids" : "bad_words";
      return ErrorResponse(InvalidValue(
          name, fmt::format("'{}' cannot be combined with '{}'", name, params.constraint_param)));
    }
    if (auto error = Constrain(served, params, &plan)) {
      metrics_.requests.Add({{"endpoint", endpoint}, {"finish_reason", "refused"}});
      return ErrorResponse(*error);
    }
  }

  auto generation =
      Generation::Start(*served.engine, served.dialogue->tokenizer(), std::move(plan));
  if (!generation.has_value()) {
    metrics_.requests.Add({{"endpoint", endpoint}, {"finish_reason", "refused"}});
    LogInfo("{} {} status={} refused: {}", request_id, endpoint, generation.error().http_status,
            generation.error().message);
    return ErrorResponse(generation.error());
  }
  WriterContext made;
  made.request_id = request_id;
  made.created = static_cast<int64_t>(std::time(nullptr));
  made.model = params.model.empty() ? served.names.front() : params.model;
  made.context_is_limit = params.max_tokens.has_value() && *max_tokens < *params.max_tokens;
  HttpResponse response;
  response.source =
      std::make_unique<GenerationRun>(*this, context, std::move(endpoint), request_id, params,
                                      make_writer(made), std::move(*generation));
  return response;
}

HttpResponse ApiServer::GenerateCompletion(const Context& context, const char* endpoint,
                                           const GenerationParams& params, GenerationPlan plan) {
  ResponseHead head;
  head.chat = plan.chat;
  head.fingerprint = context.model->fingerprint;
  head.usage_null = params.include_usage;
  head.logprobs = params.logprobs;
  head.return_token_ids = params.return_token_ids;
  const size_t choices = plan.prompts.size() * static_cast<size_t>(params.choices());
  return Generate(context, endpoint, params, std::move(plan), [&](const WriterContext& made) {
    head.id = fmt::format("{}-{}", head.chat ? "chatcmpl" : "cmpl", made.request_id);
    head.created = made.created;
    head.model = made.model;
    return std::make_unique<ChatWriter>(std::move(head), choices, params.include_usage);
  });
}

ApiResult<GenerationPlan> ApiServer::PlanChat(const Context& context, const ChatRequest& request) {
  auto chat = TokenizeChat(*context.model, request, context.request_id);
  if (!chat.has_value()) return tl::unexpected(chat.error());
  GenerationPlan plan;
  plan.chat = true;
  plan.prompts.push_back({std::move(chat->tokens), ""});
  if (auto error = Demand(*context.model, *chat, request.params, &plan)) {
    return tl::unexpected(std::move(*error));
  }
  plan.reasons_first = ReasonsFirst(*context.model->dialogue, *chat);
  plan.choice.syntax = std::move(chat->syntax);
  return plan;
}

ApiResult<Prompt> TokenizeChat(const ServedModel& model, const ChatRequest& request,
                               std::string_view request_id) {
  if (!model.dialogue->has_chat()) {
    return tl::unexpected(
        MakeApiError(400, "no_chat_template",
                     fmt::format("this model has no chat template ({}); use /v1/completions",
                                 model.dialogue->no_chat_reason())));
  }
  TemplateInput input;
  input.messages = request.messages.get();
  input.tools = request.tools.get();
  input.template_arguments = request.template_kwargs.get();
  input.add_generation_prompt = request.add_generation_prompt;
  input.continue_final_message = request.continue_final_message;
  auto prompt = model.dialogue->Render(
      input, {request.tool_choice, request.tool_name, request.parallel_tool_calls});
  if (!prompt.has_value()) {
    // What exceeds a budget here will do so again: the client's error, not a moment's.
    const Status& status = prompt.error();
    ApiError error = status.code() == StatusCode::kResourceExhausted
                         ? MakeApiError(400, "template_budget_exceeded", status.message())
                         : FromStatus(status, request_id);
    if (error.http_status == 400 && error.param.empty()) error.param = "messages";
    return tl::unexpected(std::move(error));
  }
  return std::move(*prompt);
}

HttpResponse ApiServer::HandleChat(const Context& context) {
  const ServedModel& served = *context.model;
  auto request = ParseChatRequest(context.http.body, served.limits);
  if (!request.has_value()) return ErrorResponse(request.error());
  if (auto error = CheckModelName(served, request->params.model)) return ErrorResponse(*error);
  auto plan = PlanChat(context, *request);
  if (!plan.has_value()) return ErrorResponse(plan.error());
  return GenerateCompletion(context, "chat", request->params, std::move(*plan));
}

HttpResponse ApiServer::HandleCompletions(const Context& context) {
  const ServedModel& served = *context.model;
  auto request = ParseCompletionRequest(context.http.body, served.limits);
  if (!request.has_value()) return ErrorResponse(request.error());
  if (auto error = CheckModelName(served, request->params.model)) return ErrorResponse(*error);
  GenerationPlan plan;
  plan.echo = request->echo;
  for (PromptInput& input : request->prompts) {
    if (input.is_tokens) {
      plan.prompts.push_back({std::move(input.tokens), ""});
      continue;
    }
    // A raw prompt: whoever writes it writes the special tokens too.
    auto prompt = served.dialogue->Encode(input.text);
    if (!prompt.has_value()) return ErrorResponse(FromStatus(prompt.error(), context.request_id));
    plan.prompts.push_back({std::move(prompt->tokens), ""});
  }
  return GenerateCompletion(context, "completions", request->params, std::move(plan));
}

}  // namespace oscar::server
