// Calls every function that include/oscar declares, through the installed library: what is declared
// must link. install_test.sh compares the symbols that this program takes from the library with
// those that the library exports, so a new one cannot be forgotten here.
#include <oscar/engine.h>
#include <oscar/language_model.h>
#include <oscar/options.h>
#include <oscar/status.h>
#include <oscar/version.h>

#include <chrono>
#include <iostream>
#include <string>

namespace {

int failures = 0;
void Expect(bool ok, const char* what) {
  if (ok) return;
  ++failures;
  std::cerr << "every_symbol: " << what << '\n';
}

oscar::Status Propagate(const oscar::Status& status) {
  OSCAR_RETURN_IF_ERROR(status);
  return {};
}

oscar::Result<int> Add(oscar::Result<int> a) {
  OSCAR_ASSIGN_OR_RETURN(const int value, a);
  return value + 1;
}

void CheckValues() {
  using oscar::StatusCode;
  const oscar::Status status = oscar::NotFound("no such file").WithContext("model.bin");
  Expect(status.message() == "model.bin: no such file", "WithContext");
  Expect(status.ToString().find("no such file") != std::string::npos, "ToString");
  Expect(oscar::InfoOf(StatusCode::kNotFound).http_status == 404, "InfoOf");
  Expect(oscar::Status(status).WithParam("model").param() == "model", "WithParam");
  Expect(!Propagate(status).ok() && Propagate({}).ok(), "OSCAR_RETURN_IF_ERROR");
  Expect(Add(1).value() == 2 && !Add(oscar::Unexpected(status)).has_value(),
         "OSCAR_ASSIGN_OR_RETURN");
  for (const oscar::Status& made :
       {oscar::InvalidArgument("x"), oscar::OutOfRange("x"), oscar::ResourceExhausted("x"),
        oscar::Unavailable("x"), oscar::Unimplemented("x"), oscar::DataLoss("x"),
        oscar::Internal("x")}) {
    Expect(!made.ok(), "constructors of statuses");
  }
  Expect(oscar::NameOf(oscar::Device::kCuda) == "cuda", "NameOf(Device)");
  Expect(oscar::NameOf(oscar::FinishReason::kLength) == "length", "NameOf(FinishReason)");
  Expect(oscar::SamplingOptions{}.Validate(10).ok(), "Validate");
  Expect(std::string(oscar::kVersion).find('.') != std::string::npos, "kVersion");
}

void CheckLanguageModel(const oscar::ModelOptions& options, const std::string& messages) {
  const auto model = oscar::LanguageModel::Load(options);
  Expect(model.has_value(), "LanguageModel::Load");
  if (!model.has_value()) return;
  oscar::LanguageModel& m = **model;
  const auto answer = m.Chat(messages, {});
  Expect(answer.has_value() && answer->text == "139 169 205 599 702 972", "LanguageModel::Chat");
  m.Reset();
  m.Cancel();
  oscar::CompletionOptions few;
  few.max_tokens = 3;
  const auto raw = m.Complete("Once", few);
  Expect(raw.has_value() && raw->token_ids.size() == 3, "LanguageModel::Complete");
  Expect(m.default_sampling().temperature == 0.0f && m.default_max_tokens() == 1024, "defaults");
  Expect(m.sample_prompts().size() == 3 && m.max_context() > 0 && m.cache().tokens > 0, "getters");
}

void CheckEngine(const oscar::ModelOptions& options, const std::string& messages) {
  oscar::EngineOptions wanted;
  wanted.model = options;
  const auto engine = oscar::Engine::Load(wanted);
  Expect(engine.has_value(), "Engine::Load");
  if (!engine.has_value()) return;
  oscar::Engine& e = **engine;
  const auto drain = [](oscar::Answer& answer) {
    std::string text;
    while (true) {
      const oscar::AnswerEvent event = answer.Next(std::chrono::seconds(10));
      text += event.content;
      if (event.is_last()) return std::pair(text, event.finish_reason);
    }
  };
  const auto chat = e.Chat(messages, {});
  Expect(chat.has_value() && drain(**chat).first == "139 169 205 599 702 972", "Engine::Chat");
  Expect((*chat)->usage().completion_tokens > 3 && (*chat)->seed() != 0, "usage, seed");
  Expect((*chat)->Next(std::chrono::milliseconds(0)).is_last(), "Next after the end");
  const auto endless = e.Complete("Once upon a time", {});
  Expect(endless.has_value(), "Engine::Complete");
  (*endless)->Cancel();
  Expect(drain(**endless).second == oscar::FinishReason::kCancelled, "Answer::Cancel");
  Expect(e.report().generated_tokens > 0 && e.health().ok() && e.max_context() > 0, "report");
  Expect(e.default_sampling().temperature == 0.0f && e.default_max_tokens() == 1024, "defaults");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  oscar::ModelOptions options;
  options.model = argv[1];
  const std::string messages =
      R"([{"role": "user", "content": "Sort these numbers: 599 972 169 139 702 205"}])";
  CheckValues();
  CheckLanguageModel(options, messages);
  CheckEngine(options, messages);
  return failures == 0 ? 0 : 1;
}
