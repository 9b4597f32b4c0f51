// Whatever a client sends, the parsers of /v1/responses and /v1/messages either refuse it with a
// complete error or return values within the limits that the handlers rely on.
#include <memory>
#include <nlohmann/json.hpp>

#include "fuzz_util.h"
#include "messages/error.h"
#include "messages/request.h"
#include "responses/request.h"

namespace {

using namespace oscar::server;

void CheckRefusal(const ApiError& error) {
  OSCAR_CHECK(error.http_status == 400 || error.http_status == 404, "{}", error.message);
  OSCAR_CHECK(!error.code.empty() && !error.message.empty());
  OSCAR_CHECK(error.message.size() < 4000, "{}", error.message);
  HttpResponse response = ErrorResponse(error);
  OSCAR_CHECK(nlohmann::json::accept(response.body), "{}", response.body);
  ToMessagesError("id", &response);
  OSCAR_CHECK(nlohmann::json::parse(response.body).at("type") == "error");
}

void CheckChat(const ChatRequest& chat, const RequestLimits& limits) {
  const GenerationParams& params = chat.params;
  OSCAR_CHECK(params.sampling.Validate(limits.vocab_size).ok());
  OSCAR_CHECK(params.n == 1);
  OSCAR_CHECK(params.top_logprobs >= 0 && params.top_logprobs <= limits.max_top_logprobs);
  OSCAR_CHECK(params.stop.size() <= limits.max_stops);
  OSCAR_CHECK(chat.messages->is_array() && !chat.messages->empty());
  OSCAR_CHECK(chat.messages->size() <= limits.max_messages);
  for (const auto& message : *chat.messages) {
    OSCAR_CHECK(message.at("role").is_string());
    const auto& content = message.at("content");
    OSCAR_CHECK(content.is_string() || content.is_array());
    if (!content.is_array()) continue;
    for (const auto& part : content) OSCAR_CHECK(part.at("text").is_string());
  }
  if (chat.tools == nullptr) return;
  for (const auto& tool : *chat.tools) OSCAR_CHECK(tool.at("function").at("name").is_string());
}

// A conversation that requests may continue, and whose items they may refer to.
std::shared_ptr<const StoredResponse> Stored() {
  auto stored = std::make_shared<StoredResponse>();
  stored->id = "resp_aa";
  stored->input =
      R"([{"type":"message","id":"msg_aa_i0","role":"user",
           "content":[{"type":"input_text","text":"q"}]}])";
  stored->body =
      R"([{"type":"function_call","id":"fc_aa_0","call_id":"c","name":"f","arguments":"{}"}])";
  stored->output_size = stored->body.size();
  stored->items = 2;
  return stored;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::shared_ptr<const StoredResponse> stored = Stored();
  const std::string_view body = oscar::FuzzText(data, size);
  RequestLimits limits;
  limits.vocab_size = 1000;
  const auto responses = ParseResponsesRequest(body, limits, "resp_bb", [](std::string_view id) {
    return id == stored->id ? stored : nullptr;
  });
  if (responses.has_value()) {
    CheckChat(responses->chat, limits);
    const auto items = nlohmann::json::parse(responses->input);
    OSCAR_CHECK(items.is_array() && items.size() == responses->input_items);
    for (const auto& item : items) OSCAR_CHECK(item.at("id").is_string());
    OSCAR_CHECK(nlohmann::json::accept("{" + responses->echo + "}"), "{}", responses->echo);
  } else {
    CheckRefusal(responses.error());
  }
  for (const auto& parse : {ParseMessagesRequest, ParseCountTokensRequest}) {
    if (const auto request = parse(body, limits); request.has_value()) {
      CheckChat(*request, limits);
    } else {
      CheckRefusal(request.error());
    }
  }
  return 0;
}
