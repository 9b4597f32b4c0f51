// OpenAI's Responses API.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>

#include "base/json.h"
#include "base/log.h"
#include "responses/request.h"
#include "responses/response_writer.h"
#include "server/api_server.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kResponses = "/responses/";
constexpr std::string_view kInputItems = "/input_items";

// Nobody who was not told one can name it.
std::string NewResponseId() {
  std::random_device device;
  std::string id = "resp_";
  for (int i = 0; i < 4; ++i) id += fmt::format("{:08x}", device());
  return id;
}

std::string_view IdOf(const HttpRequest& http) {
  const size_t at = http.path.find(kResponses);
  return std::string_view(http.path).substr(at + kResponses.size());
}

ApiError NoResponse(std::string_view id) {
  ApiError error = MakeApiError(
      404, "response_not_found",
      fmt::format("there is no stored response {}",
                  Json(id.substr(0, 64)).dump(-1, ' ', true, Json::error_handler_t::replace)));
  error.param = "response_id";
  return error;
}

// Value of a parameter of the query, as sent; empty where there is none.
std::string_view QueryValue(std::string_view query, std::string_view name) {
  while (!query.empty()) {
    const std::string_view one = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), one.size() + 1));
    if (one.size() > name.size() && one.starts_with(name) && one[name.size()] == '=') {
      return one.substr(name.size() + 1);
    }
  }
  return {};
}

// One page of the items that a response answered.
ApiResult<Json> InputPage(const StoredResponse& response, std::string_view query) {
  size_t limit = 20;
  if (const std::string_view text = QueryValue(query, "limit"); !text.empty()) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), limit);
    if (error != std::errc() || end != text.data() + text.size() || limit < 1 || limit > 100) {
      return tl::unexpected(InvalidValue("limit", "'limit' must be an integer between 1 and 100"));
    }
  }
  const std::string_view order = QueryValue(query, "order");
  if (!order.empty() && order != "asc" && order != "desc") {
    return tl::unexpected(InvalidValue("order", "'order' must be asc or desc"));
  }
  auto items = ParseOrderedJson(response.input, "stored items");
  if (!items.has_value()) return tl::unexpected(FromStatus(items.error(), response.id));
  if (order != "asc") std::reverse(items->begin(), items->end());
  auto from = items->begin();
  if (const std::string_view after = QueryValue(query, "after"); !after.empty()) {
    from = std::find_if(items->begin(), items->end(),
                        [&](const Json& item) { return item.at("id") == after; });
    if (from == items->end()) {
      return tl::unexpected(InvalidValue("after", "'after' names none of the items"));
    }
    ++from;
  }
  const auto left = static_cast<size_t>(items->end() - from);
  const auto to = from + static_cast<std::ptrdiff_t>(std::min(limit, left));
  Json data = Json::array();
  for (auto item = from; item != to; ++item) data.push_back(std::move(*item));
  const auto id_of = [&](bool first) {
    return data.empty() ? Json(nullptr) : (first ? data.front() : data.back()).at("id");
  };
  return Json{{"object", "list"},
              {"first_id", id_of(true)},
              {"last_id", id_of(false)},
              {"has_more", to != items->end()},
              {"data", data}};
}

// An answer that takes a while to make: on a worker, not where bytes are moved.
class LargeAnswer final : public AnswerSource {
 public:
  explicit LargeAnswer(std::function<HttpResponse()> make) : make_(std::move(make)) {}
  Step Next(Peer peer) override {
    Step step;
    if (peer == Peer::kGone || make_ == nullptr) {
      step.done = true;
    } else {
      step.compose = std::exchange(make_, nullptr);
    }
    return step;
  }

 private:
  std::function<HttpResponse()> make_;
};

HttpResponse JsonResponse(const Json& json) {
  HttpResponse response;
  response.body = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return response;
}

}  // namespace

// The plan of the longest end of the conversation, whole turns of it, that leaves room for an
// answer.
ApiResult<GenerationPlan> ApiServer::PlanTruncated(const Context& context,
                                                   const ChatRequest& chat) {
  const int64_t length = context.model->engine->max_context();
  const int64_t room =
      std::clamp<int64_t>(chat.params.max_tokens.value_or(length / 4), 1, length / 2);
  const auto fits = [&](const GenerationPlan& plan) {
    return static_cast<int64_t>(plan.prompts.front().tokens.size()) + room <= length;
  };
  auto plan = PlanChat(context, chat);
  if (!plan.has_value() || fits(*plan)) return plan;
  // The last turn always stays.
  size_t low = 1, high = CountTurns(chat);
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    auto shorter = PlanChat(context, WithoutTurns(chat, middle));
    if (!shorter.has_value()) return shorter;
    if (fits(*shorter)) {
      plan = std::move(shorter);
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return plan;
}

HttpResponse ApiServer::HandleResponses(const Context& context) {
  const std::string id = NewResponseId();
  auto request = ParseResponsesRequest(
      context.http.body, context.model->limits, id,
      [&](std::string_view wanted) { return responses_.Find(context.key.hash, wanted); });
  if (!request.has_value()) return ErrorResponse(request.error());
  const GenerationParams& params = request->chat.params;
  if (auto error = CheckModelName(*context.model, params.model)) return ErrorResponse(*error);
  auto plan =
      request->truncate ? PlanTruncated(context, request->chat) : PlanChat(context, request->chat);
  if (!plan.has_value()) return ErrorResponse(plan.error());
  std::function<void(std::shared_ptr<StoredResponse>)> keep;
  if (request->store && responses_.max_bytes() > 0 && responses_.max_count() > 0) {
    keep = [this, owner = context.key.hash](std::shared_ptr<StoredResponse> response) {
      const std::string stored = response->id;
      if (responses_.Put(owner, std::move(response))) return;
      LogWarning("{} is not stored: its conversation has more bytes than --response-store", stored);
    };
  }
  return Generate(context, "responses", params, std::move(*plan), [&](const WriterContext& made) {
    ResponseHeader header;
    header.id = id;
    header.created_at = made.created;
    header.model = made.model;
    header.logprobs = params.logprobs;
    header.echo = std::move(request->echo);
    header.input = std::move(request->input);
    header.input_items = request->input_items;
    header.previous = std::move(request->previous);
    return std::make_unique<ResponseWriter>(std::move(header), std::move(keep));
  });
}

HttpResponse ApiServer::HandleInputTokens(const Context& context) {
  const auto request = ParseResponsesRequest(
      context.http.body, context.model->limits, NewResponseId(),
      [&](std::string_view wanted) { return responses_.Find(context.key.hash, wanted); });
  if (!request.has_value()) return ErrorResponse(request.error());
  if (auto error = CheckModelName(*context.model, request->chat.params.model)) {
    return ErrorResponse(*error);
  }
  const auto prompt = TokenizeChat(*context.model, request->chat, context.request_id);
  if (!prompt.has_value()) return ErrorResponse(prompt.error());
  return JsonResponse(
      {{"object", "response.input_tokens"}, {"input_tokens", prompt->tokens.size()}});
}

HttpResponse ApiServer::HandleStoredResponse(const Context& context) {
  std::string_view id = IdOf(context.http);
  const bool items = id.ends_with(kInputItems);
  if (items) id.remove_suffix(kInputItems.size());
  const auto stored = responses_.Find(context.key.hash, id);
  if (stored == nullptr) return ErrorResponse(NoResponse(id));
  if (items) {
    HttpResponse large;
    large.source = std::make_unique<LargeAnswer>(
        [stored, query = context.http.query, request_id = context.request_id] {
          const auto page = InputPage(*stored, query);
          HttpResponse made = page.has_value() ? JsonResponse(*page) : ErrorResponse(page.error());
          made.headers.emplace_back("X-Request-Id", request_id);
          return made;
        });
    return large;
  }
  if (QueryValue(context.http.query, "stream") == "true") {
    return ErrorResponse(UnsupportedParameter(
        "stream",
        "'stream' is not supported here: only background responses can be streamed "
        "again, and there are none"));
  }
  HttpResponse response;
  response.body = stored->body;
  return response;
}

HttpResponse ApiServer::HandleDeleteResponse(const Context& context) {
  const std::string_view id = IdOf(context.http);
  if (!responses_.Remove(context.key.hash, id)) return ErrorResponse(NoResponse(id));
  return JsonResponse({{"id", id}, {"object", "response"}, {"deleted", true}});
}

}  // namespace oscar::server
