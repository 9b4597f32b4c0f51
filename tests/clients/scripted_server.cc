// A server whose model follows a script, for tests of clients from outside: the demo model's
// tokenizer, Qwen3's chat template, and an engine that says what the conversation asks for. Prints
// its port and ends when its input does.
//
//   "weather in CITY" with tools   thinks, says a word and calls get_weather
//   "weather in A and B"           calls it twice
//   a result of a tool             says it
//   anything else                  says hello
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/log.h"
#include "dialogue/dialogue.h"
#include "http/http_server.h"
#include "server/api_server.h"
#include "server/fake_engine.h"

namespace oscar::server {
namespace {

std::string Between(std::string_view text, std::string_view open, std::string_view close) {
  const size_t begin = text.rfind(open);
  if (begin == std::string_view::npos) return "";
  const std::string_view rest = text.substr(begin + open.size());
  const size_t end = rest.find(close);
  return end == std::string_view::npos ? "" : std::string(rest.substr(0, end));
}

std::string Call(std::string_view city) {
  return "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"" +
         std::string(city) + "\"}}\n</tool_call>";
}

std::string AnswerTo(std::string_view prompt) {
  const std::string user = Between(prompt, "<|im_start|>user\n", "<|im_end|>");
  if (user.find("<tool_response>") != std::string::npos) {
    return "The tool says: " + Between(user, "<tool_response>\n", "\n</tool_response>");
  }
  const size_t at = user.find("weather in ");
  if (at == std::string::npos || prompt.find("<tools>") == std::string_view::npos) {
    return "Hello! You said: " + user;
  }
  const std::string cities = user.substr(at + 11);
  const size_t both = cities.find(" and ");
  if (both == std::string::npos) {
    return "<think>\nI should look.\n</think>\n\nLet me look.\n" + Call(cities);
  }
  return Call(cities.substr(0, both)) + "\n" + Call(cities.substr(both + 5));
}

int Run(const char* model, const char* chat_template) {
  SetLogLevel(LogLevel::kWarning);
  auto tokenizer = Tokenizer::Load(model);
  const auto source = ReadFile(chat_template, 1 << 20);
  if (!tokenizer.has_value() || !source.has_value()) return 1;
  TokenizerConfig config;
  config.chat_templates = {{"default", *source}};
  auto chat = ChatTemplate::Create(config);
  if (!chat.has_value()) return 1;
  const int32_t eos = *tokenizer->FindToken("<|im_end|>");
  const Dialogue dialogue(std::move(*tokenizer), std::move(*chat), "", {}, {eos});
  FakeEngine engine(
      [&](const EngineRequest& request) {
        const Tokenizer& words = dialogue.tokenizer();
        FakeEngine::Script script;
        script.tokens = *words.Encode(AnswerTo(words.Decode(request.prompt, false)));
        script.cached_tokens = 2;
        return script;
      },
      /*context=*/1 << 20);
  auto served = std::make_shared<ServedModel>();
  served->names = {"scripted"};
  served->root = "scripted";
  served->engine = &engine;
  served->dialogue = &dialogue;
  served->limits.vocab_size = dialogue.tokenizer().vocab_size();
  served->fingerprint = "fp_scripted";
  ApiOptions options;
  options.response_store_bytes = uint64_t{8} << 20;
  ApiServer api(std::move(options));
  HttpOptions http_options;
  http_options.port = 0;
  auto http = HttpServer::Bind(http_options);
  if (!http.has_value()) return 1;
  (*http)->Start(api);
  api.SetModel(std::move(served));
  std::printf("%d\n", (*http)->port());
  std::fflush(stdout);
  std::cin.ignore(1 << 20, '\x01');  // until the end
  api.Abort();
  (*http)->Stop(std::chrono::seconds(5));
  return 0;
}

}  // namespace
}  // namespace oscar::server

int main(int argc, char** argv) { return argc == 3 ? oscar::server::Run(argv[1], argv[2]) : 2; }
