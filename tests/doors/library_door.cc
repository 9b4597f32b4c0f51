// The library as one of the doors of test_doors.py: one request in JSON on standard input, what
// LanguageModel and Engine answer to it in JSON on standard output.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "oscar/engine.h"
#include "oscar/language_model.h"

namespace {

using nlohmann::json;

json ToJson(const std::string& text, const std::string& reasoning, const std::vector<int32_t>& ids,
            oscar::FinishReason reason, const std::optional<std::string>& stop_string,
            const std::optional<int32_t>& stop_token) {
  json stop_reason;
  if (stop_string.has_value()) stop_reason = *stop_string;
  if (stop_token.has_value()) stop_reason = *stop_token;
  return {{"content", text},
          {"reasoning", reasoning},
          {"ids", ids},
          {"finish_reason", oscar::NameOf(reason)},
          {"stop_reason", stop_reason}};
}

template <typename T>
T Unwrap(oscar::Result<T> result) {
  if (result.has_value()) return std::move(*result);
  std::cerr << result.error().message() << '\n';
  std::exit(1);
}

}  // namespace

int main() {
  const json request = json::parse(std::cin);
  oscar::ModelOptions model;
  model.model = request["model"].get<std::string>();
  model.kv_memory = uint64_t{256} << 20;
  oscar::CompletionOptions options;
  if (request.contains("max_tokens")) options.max_tokens = request["max_tokens"].get<int64_t>();
  options.stop = request.value("stop", std::vector<std::string>{});
  options.stop_token_ids = request.value("stop_token_ids", std::vector<int32_t>{});
  const bool is_chat = request.contains("messages");
  const std::string prompt =
      is_chat ? request["messages"].dump() : request["prompt"].get<std::string>();
  const auto sampling = [&](oscar::SamplingOptions defaults) {
    defaults.temperature = request.value("temperature", defaults.temperature);
    if (request.contains("seed")) defaults.seed = request["seed"].get<uint64_t>();
    return defaults;
  };

  json out;
  {
    const auto language_model = Unwrap(oscar::LanguageModel::Load(model));
    options.sampling = sampling(language_model->default_sampling());
    const oscar::Completion answer = Unwrap(is_chat ? language_model->Chat(prompt, options)
                                                    : language_model->Complete(prompt, options));
    out["language_model"] = ToJson(answer.text, answer.reasoning, answer.token_ids,
                                   answer.finish_reason, answer.stop_string, answer.stop_token);
  }
  const auto engine = Unwrap(oscar::Engine::Load({.model = model}));
  const auto answer =
      Unwrap(is_chat ? engine->Chat(prompt, options) : engine->Complete(prompt, options));
  std::string content, reasoning;
  std::vector<int32_t> ids;
  oscar::AnswerEvent event;
  while (!event.is_last()) {
    event = answer->Next(std::chrono::seconds(10));
    content += event.content;
    reasoning += event.reasoning;
    ids.insert(ids.end(), event.token_ids.begin(), event.token_ids.end());
  }
  out["engine"] =
      ToJson(content, reasoning, ids, event.finish_reason, event.stop_string, event.stop_token);
  std::cout << out.dump() << '\n';
}
