#include "responses/response_writer.h"

#include <fmt/core.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "responses/items.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

std::string Text(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string UsageText(const Usage& usage) {
  return Json{
      {"input_tokens", usage.prompt_tokens},
      {"input_tokens_details", {{"cached_tokens", usage.cached_tokens}, {"cache_write_tokens", 0}}},
      {"output_tokens", usage.completion_tokens},
      {"output_tokens_details", {{"reasoning_tokens", usage.reasoning_tokens.value_or(0)}}},
      {"total_tokens", usage.prompt_tokens + usage.completion_tokens}}
      .dump();
}

// The few codes that clients of this API know.
std::string_view CodeOf(const ApiError& error) {
  if (error.code == "context_length_exceeded") return "context_length_exceeded";
  if (error.http_status == 429) return "rate_limit_exceeded";
  return error.http_status < 500 && error.http_status != 408 ? "invalid_prompt" : "server_error";
}

}  // namespace

ResponseWriter::ResponseWriter(ResponseHeader header,
                               std::function<void(std::shared_ptr<StoredResponse>)> keep)
    : header_(std::move(header)), keep_(std::move(keep)) {}

std::string ResponseWriter::Object(const Members& members) {
  std::string out = "{";
  for (const auto& [name, value] : members) {
    if (out.size() > 1) out += ',';
    out += fmt::format("\"{}\":", name);
    out += value;
  }
  return out + "}";
}

void ResponseWriter::Event(std::string_view type, Members members, std::string* out) {
  if (out == nullptr) return;
  members.insert(members.begin(),
                 {{"type", Text(type)}, {"sequence_number", std::to_string(sequence_++)}});
  *out += fmt::format("event: {}\ndata: ", type);
  *out += Object(members);
  *out += "\n\n";
}

void ResponseWriter::ItemEvent(std::string_view type, Members members, std::string* out) {
  if (out == nullptr) return;
  members.insert(members.begin(), {{"item_id", Text(items_.back().id)},
                                   {"output_index", std::to_string(items_.size() - 1)}});
  Event(type, std::move(members), out);
}

void ResponseWriter::ResponseEvent(std::string_view type, std::string body, std::string* out) {
  Event(type, {{"response", std::move(body)}}, out);
}

std::string ResponseWriter::Part(const Item& item, bool empty) const {
  const std::string text = Text(empty ? "" : item.text);
  if (item.kind == Kind::kReasoning)
    return Object({{"type", Text("reasoning_text")}, {"text", text}});
  Members members = {{"type", Text("output_text")}, {"text", text}, {"annotations", "[]"}};
  if (header_.logprobs) {
    members.emplace_back("logprobs", empty ? "[]" : LogprobList(item.logprobs));
  }
  return Object(members);
}

std::string ResponseWriter::ItemText(const Item& item, std::string_view status, bool empty) const {
  Members members = {{"id", Text(item.id)}};
  const std::string content = empty ? "[]" : fmt::format("[{}]", Part(item, false));
  switch (item.kind) {
    case Kind::kReasoning:
      members.insert(members.end(),
                     {{"type", Text("reasoning")}, {"summary", "[]"}, {"content", content}});
      break;
    case Kind::kMessage:
      members.insert(
          members.end(),
          {{"type", Text("message")}, {"role", Text("assistant")}, {"content", content}});
      break;
    case Kind::kCall:
      members.insert(members.end(), {{"type", Text("function_call")},
                                     {"call_id", Text(item.call_id)},
                                     {"name", Text(item.name)},
                                     {"arguments", Text(empty ? "" : item.text)}});
      break;
  }
  members.emplace_back("status", Text(status));
  return Object(members);
}

ResponseWriter::Body ResponseWriter::MakeBody(std::string_view status, const std::string& error,
                                              const std::optional<Usage>& usage) const {
  Body body;
  std::string& out = body.text;
  const bool ended = status == "completed" || status == "incomplete";
  out =
      Object({{"id", Text(header_.id)},
              {"object", Text("response")},
              {"created_at", std::to_string(header_.created_at)},
              {"completed_at", status == "completed" ? std::to_string(std::time(nullptr)) : "null"},
              {"status", Text(status)},
              {"error", error},
              {"incomplete_details",
               status == "incomplete" ? R"({"reason":"max_output_tokens"})" : "null"},
              {"model", Text(header_.model)}});
  out.pop_back();
  out += ",\"output\":";
  body.output_begin = out.size();
  out += '[';
  for (const Item& item : items_) {
    if (!ended && status != "failed") break;
    if (&item != &items_.front()) out += ',';
    out += ItemText(item, item.complete ? "completed" : "incomplete", false);
  }
  out += ']';
  body.output_size = out.size() - body.output_begin;
  out += fmt::format(",\"usage\":{},{}}}", usage.has_value() ? UsageText(*usage) : "null",
                     header_.echo);
  return body;
}

void ResponseWriter::Open(Kind kind, Item item, std::string* out) {
  if (open_) Close(/*complete=*/true, out);
  const char* const prefix = kind == Kind::kReasoning ? "rs"
                             : kind == Kind::kMessage ? "msg"
                                                      : "fc";
  item.kind = kind;
  item.id = OutputItemId(prefix, header_.id, items_.size());
  items_.push_back(std::move(item));
  open_ = true;
  if (out == nullptr) return;
  Event("response.output_item.added",
        {{"output_index", std::to_string(items_.size() - 1)},
         {"item", ItemText(items_.back(), "in_progress", /*empty=*/true)}},
        out);
  if (kind == Kind::kCall) return;
  ItemEvent("response.content_part.added",
            {{"content_index", "0"}, {"part", Part(items_.back(), /*empty=*/true)}}, out);
}

void ResponseWriter::Close(bool complete, std::string* out) {
  Item& item = items_.back();
  item.complete = complete;
  open_ = false;
  call_.reset();
  if (out == nullptr) return;
  switch (item.kind) {
    case Kind::kReasoning:
      ItemEvent("response.reasoning_text.done", {{"content_index", "0"}, {"text", Text(item.text)}},
                out);
      break;
    case Kind::kMessage:
      ItemEvent("response.output_text.done",
                {{"content_index", "0"},
                 {"text", Text(item.text)},
                 {"logprobs", LogprobList(item.logprobs)}},
                out);
      break;
    case Kind::kCall:
      ItemEvent("response.function_call_arguments.done",
                {{"name", Text(item.name)}, {"arguments", Text(item.text)}}, out);
      break;
  }
  if (item.kind != Kind::kCall) {
    ItemEvent("response.content_part.done",
              {{"content_index", "0"}, {"part", Part(item, /*empty=*/false)}}, out);
  }
  Event("response.output_item.done",
        {{"output_index", std::to_string(items_.size() - 1)},
         {"item", ItemText(item, complete ? "completed" : "incomplete", /*empty=*/false)}},
        out);
}

void ResponseWriter::Delta(std::string_view text, std::string_view event, Members more,
                           std::string* out) {
  items_.back().text += text;
  if (out == nullptr) return;
  more.emplace_back("delta", Text(text));
  ItemEvent(event, std::move(more), out);
}

void ResponseWriter::Take(ChoicePiece piece, std::string* out) {
  const auto is_open = [&](Kind kind) { return open_ && items_.back().kind == kind; };
  if (!piece.reasoning.empty()) {
    if (!is_open(Kind::kReasoning)) Open(Kind::kReasoning, {}, out);
    Delta(piece.reasoning, "response.reasoning_text.delta", {{"content_index", "0"}}, out);
  }
  if (!piece.content.empty()) {
    if (!is_open(Kind::kMessage)) Open(Kind::kMessage, {}, out);
    const std::string logprobs =
        out != nullptr && header_.logprobs ? LogprobList(piece.logprobs) : "[]";
    if (header_.logprobs) {
      std::ranges::move(piece.logprobs, std::back_inserter(items_.back().logprobs));
    }
    Delta(piece.content, "response.output_text.delta",
          {{"content_index", "0"}, {"logprobs", logprobs}}, out);
  }
  for (const ToolCallDelta& call : piece.tool_calls) {
    if (!open_ || call_ != call.index) {
      Item item;
      item.call_id = call.id;
      item.name = call.name;
      Open(Kind::kCall, std::move(item), out);
      call_ = call.index;
    }
    if (!call.arguments.empty()) {
      Delta(call.arguments, "response.function_call_arguments.delta", {}, out);
    }
  }
}

void ResponseWriter::Finish(const FinishInfo& finish, std::string* out) {
  cut_ = finish.finish_reason == "length";
  // Clients look for a message in an answer without calls.
  if (items_.empty()) Open(Kind::kMessage, {}, out);
  if (open_) Close(!cut_, out);
}

std::string ResponseWriter::Begin(const Usage&, const std::optional<Usage>&) {
  const std::string body = MakeBody("in_progress", "null", std::nullopt).text;
  std::string out;
  ResponseEvent("response.created", body, &out);
  ResponseEvent("response.in_progress", body, &out);
  return out;
}

std::string ResponseWriter::Piece(size_t, ChoicePiece piece, const std::optional<Usage>&) {
  std::string out;
  Take(std::move(piece), &out);
  return out;
}

std::string ResponseWriter::ChoiceEnd(size_t, const FinishInfo& finish,
                                      const std::optional<Usage>&) {
  std::string out;
  Finish(finish, &out);
  return out;
}

std::string ResponseWriter::Complete(const Usage& usage) {
  Body body = MakeBody(cut_ ? "incomplete" : "completed", "null", usage);
  if (!keep_) return std::move(body.text);
  auto stored = std::make_shared<StoredResponse>();
  stored->id = header_.id;
  stored->body = body.text;
  stored->output_begin = body.output_begin;
  stored->output_size = body.output_size;
  stored->input = header_.input;
  stored->items = header_.input_items + items_.size();
  stored->previous = header_.previous;
  keep_(std::move(stored));
  return std::move(body.text);
}

std::string ResponseWriter::End(const Usage& usage) {
  std::string out;
  ResponseEvent(cut_ ? "response.incomplete" : "response.completed", Complete(usage), &out);
  return out;
}

std::string ResponseWriter::Fail(const ApiError& error) {
  if (!items_.empty() && open_) items_.back().complete = false;
  const std::string failure =
      Object({{"code", Text(CodeOf(error))}, {"message", Text(error.message)}});
  std::string out;
  ResponseEvent("response.failed", MakeBody("failed", failure, std::nullopt).text, &out);
  return out;
}

void ResponseWriter::Keep(size_t, ChoicePiece piece) { Take(std::move(piece), nullptr); }

std::string ResponseWriter::Whole(std::vector<ChoiceResult> choices, const Usage& usage) {
  Finish(choices.front().finish, nullptr);
  return Complete(usage);
}

}  // namespace oscar::server
