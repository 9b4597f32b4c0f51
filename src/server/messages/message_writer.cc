#include "messages/message_writer.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "messages/error.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void Event(const char* type, Json members, std::string* out) {
  Json event = {{"type", type}};
  event.update(members);
  *out += fmt::format("event: {}\ndata: {}\n\n", type, Dump(event));
}

// What was found in the cache does not count as input there; nothing is ever paid for writing it.
Json UsageJson(const Usage& usage) {
  return {{"input_tokens", usage.prompt_tokens - usage.cached_tokens},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", usage.cached_tokens},
          {"output_tokens", usage.completion_tokens}};
}

Json MessageJson(const MessageHeader& header, Json content, const Usage& usage) {
  return {{"id", header.id},
          {"type", "message"},
          {"role", "assistant"},
          {"model", header.model},
          {"content", std::move(content)},
          {"stop_reason", nullptr},
          {"stop_sequence", nullptr},
          {"usage", UsageJson(usage)}};
}

bool IsObject(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string::npos && text[first] == '{' && Json::accept(text);
}

Json StopReason(const MessageHeader& header, const FinishInfo& finish) {
  if (finish.finish_reason == "tool_calls") return "tool_use";
  if (finish.finish_reason == "length") {
    return header.context_is_limit ? "model_context_window_exceeded" : "max_tokens";
  }
  return finish.stop_string.has_value() ? "stop_sequence" : "end_turn";
}

Json StopSequence(const FinishInfo& finish) {
  const bool is_stop = finish.finish_reason == "stop" && finish.stop_string.has_value();
  return is_stop ? Json(*finish.stop_string) : Json(nullptr);
}

}  // namespace

std::string_view MessageWriter::ping() const {
  return "event: ping\ndata: {\"type\":\"ping\"}\n\n";
}

void MessageWriter::Open(Block block, std::string* out) {
  Close(out);
  blocks_.push_back(std::move(block));
  open_ = true;
  ++count_;
  if (out == nullptr) return;
  if (blocks_.size() > 1) blocks_.erase(blocks_.begin());
  const Block& opened = blocks_.back();
  Json content;
  switch (opened.kind) {
    case Kind::kThinking:
      content = {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}};
      break;
    case Kind::kText:
      content = {{"type", "text"}, {"text", ""}};
      break;
    case Kind::kToolUse:
      content = {{"type", "tool_use"},
                 {"id", opened.id},
                 {"name", opened.name},
                 {"input", Json::object()}};
      break;
  }
  Event("content_block_start", {{"index", count_ - 1}, {"content_block", std::move(content)}}, out);
}

void MessageWriter::Close(std::string* out) {
  call_.reset();
  if (!std::exchange(open_, false) || out == nullptr) return;
  if (blocks_.back().kind == Kind::kThinking) {
    // Nothing here is signed; clients take the last event of a block of thinking for its end.
    Event("content_block_delta",
          {{"index", count_ - 1}, {"delta", {{"type", "signature_delta"}, {"signature", ""}}}},
          out);
  }
  Event("content_block_stop", {{"index", count_ - 1}}, out);
}

void MessageWriter::Add(std::string_view text, std::string* out) {
  Block& block = blocks_.back();
  if (out == nullptr) {
    block.text += text;
    return;
  }
  Json delta;
  switch (block.kind) {
    case Kind::kThinking:
      delta = {{"type", "thinking_delta"}, {"thinking", text}};
      break;
    case Kind::kText:
      delta = {{"type", "text_delta"}, {"text", text}};
      break;
    case Kind::kToolUse:
      delta = {{"type", "input_json_delta"}, {"partial_json", text}};
      break;
  }
  Event("content_block_delta", {{"index", count_ - 1}, {"delta", std::move(delta)}}, out);
}

void MessageWriter::Take(ChoicePiece piece, std::string* out) {
  const auto is_open = [&](Kind kind) { return open_ && blocks_.back().kind == kind; };
  if (!piece.reasoning.empty()) {
    if (!is_open(Kind::kThinking)) Open({Kind::kThinking, "", "", ""}, out);
    Add(piece.reasoning, out);
  }
  if (!piece.content.empty()) {
    if (!is_open(Kind::kText)) Open({Kind::kText, "", "", ""}, out);
    Add(piece.content, out);
  }
  for (const ToolCallDelta& call : piece.tool_calls) {
    if (!open_ || call_ != call.index) {
      Open({Kind::kToolUse, "", call.id, call.name}, out);
      call_ = call.index;
    }
    if (!call.arguments.empty()) Add(call.arguments, out);
  }
}

std::string MessageWriter::Begin(const Usage& usage, const std::optional<Usage>&) {
  std::string out;
  Event("message_start", {{"message", MessageJson(header_, Json::array(), usage)}}, &out);
  out += ping();
  return out;
}

std::string MessageWriter::Piece(size_t, ChoicePiece piece, const std::optional<Usage>&) {
  std::string out;
  Take(std::move(piece), &out);
  return out;
}

std::string MessageWriter::ChoiceEnd(size_t, const FinishInfo& finish,
                                     const std::optional<Usage>&) {
  std::string out;
  finish_ = finish;
  Close(&out);
  return out;
}

std::string MessageWriter::End(const Usage& usage) {
  std::string out;
  Event(
      "message_delta",
      {{"delta",
        {{"stop_reason", StopReason(header_, finish_)}, {"stop_sequence", StopSequence(finish_)}}},
       {"usage", UsageJson(usage)}},
      &out);
  Event("message_stop", Json::object(), &out);
  return out;
}

std::string MessageWriter::Fail(const ApiError& error) {
  return fmt::format(
      "event: error\ndata: {}\n\n",
      MessagesErrorBody(error.http_status, error.code, error.message, header_.request_id));
}

void MessageWriter::Keep(size_t, ChoicePiece piece) { Take(std::move(piece), nullptr); }

std::string MessageWriter::Whole(std::vector<ChoiceResult> choices, const Usage& usage) {
  const FinishInfo& finish = choices.front().finish;
  std::string content = "[";
  for (const Block& block : blocks_) {
    if (content.size() > 1) content += ',';
    switch (block.kind) {
      case Kind::kThinking:
        content += Dump({{"type", "thinking"}, {"thinking", block.text}, {"signature", ""}});
        break;
      case Kind::kText:
        content += Dump({{"type", "text"}, {"text", block.text}});
        break;
      case Kind::kToolUse:
        // The model's own text, so that its numbers stay what they are.
        content += Dump({{"type", "tool_use"}, {"id", block.id}, {"name", block.name}});
        content.pop_back();
        content += fmt::format(",\"input\":{}}}", IsObject(block.text) ? block.text : "{}");
        break;
    }
  }
  Json message = MessageJson(header_, Json::array(), usage);
  message["stop_reason"] = StopReason(header_, finish);
  message["stop_sequence"] = StopSequence(finish);
  std::string body = Dump(message);
  constexpr std::string_view kEmpty = "\"content\":[]";
  body.replace(body.find(kEmpty), kEmpty.size(), fmt::format("\"content\":{}]", content));
  return body;
}

}  // namespace oscar::server
