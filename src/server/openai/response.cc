#include "openai/response.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "text/detokenizer.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no infinities; this is what clients of other servers know.
constexpr double kMinusInfinity = -9999.0;

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

double LogprobNumber(float logprob) {
  return std::isfinite(logprob) ? static_cast<double>(logprob) : kMinusInfinity;
}

bool IsContinuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

int64_t CountCharacters(std::string_view bytes) {
  int64_t count = 0;
  for (const char c : bytes) count += IsContinuation(c) ? 0 : 1;
  return count;
}

// Valid UTF-8, with U+FFFD for what is not.
std::string Readable(std::string_view bytes) {
  Utf8Stream stream;
  std::string out;
  stream.Push(bytes, &out);
  stream.Finish(&out);
  return out;
}

Json BytesOf(std::string_view bytes) {
  Json out = Json::array();
  for (const char c : bytes) out.push_back(static_cast<unsigned char>(c));
  return out;
}

// An object, or a list, written as it grows: of the many logprobs of an answer, a document would
// take ten times the memory of their text.
class JsonWriter {
 public:
  JsonWriter(char open, std::string* out) : out_(*out) { out_ += open; }
  // What follows is the caller's to write.
  std::string& Key(std::string_view key) {
    Separate();
    out_ += fmt::format("\"{}\":", key);
    return out_;
  }
  void Add(std::string_view key, const Json& value) { Key(key) += Dump(value); }
  void Add(const Json& value) {
    Separate();
    out_ += Dump(value);
  }
  void End(char close) { out_ += close; }

 private:
  void Separate() {
    if (!is_first_) out_ += ',';
    is_first_ = false;
  }

  std::string& out_;
  bool is_first_ = true;
};

void WriteLogprobList(const std::vector<LogprobEntry>& entries, std::string* out) {
  JsonWriter content('[', out);
  for (const LogprobEntry& entry : entries) {
    Json top = Json::array();
    for (const LogprobCandidate& candidate : entry.top) {
      top.push_back({{"token", Readable(candidate.bytes)},
                     {"logprob", LogprobNumber(candidate.logprob)},
                     {"bytes", BytesOf(candidate.bytes)}});
    }
    content.Add({{"token", Readable(entry.bytes)},
                 {"logprob", LogprobNumber(entry.logprob.value_or(0.0f))},
                 {"bytes", BytesOf(entry.bytes)},
                 {"top_logprobs", std::move(top)}});
  }
  content.End(']');
}

void WriteChatLogprobs(const std::vector<LogprobEntry>& entries, std::string* out) {
  JsonWriter object('{', out);
  WriteLogprobList(entries, &object.Key("content"));
  object.End('}');
}

// Parts of characters are spelled out ("bytes:\xe2\x82"), so that different tokens stay different.
std::string CompletionToken(std::string_view bytes) {
  std::string readable = Readable(bytes);
  if (readable == bytes) return readable;
  std::string out = "bytes:";
  for (const char c : bytes) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return out;
}

// The likeliest tokens, and the token itself where it is not among them: there may be one more than
// was asked for.
Json CompletionCandidates(const LogprobEntry& entry) {
  if (!entry.logprob.has_value()) return nullptr;
  Json out = Json::object();
  for (const LogprobCandidate& candidate : entry.top) {
    out[CompletionToken(candidate.bytes)] = LogprobNumber(candidate.logprob);
  }
  out.emplace(CompletionToken(entry.bytes), LogprobNumber(*entry.logprob));
  return out;
}

void WriteCompletionLogprobs(const std::vector<LogprobEntry>& entries, int64_t* char_offset,
                             std::string* out) {
  JsonWriter object('{', out);
  const auto write = [&](const char* key, const auto& value_of) {
    JsonWriter list('[', &object.Key(key));
    for (const LogprobEntry& entry : entries) list.Add(value_of(entry));
    list.End(']');
  };
  write("tokens", [](const LogprobEntry& entry) -> Json { return CompletionToken(entry.bytes); });
  write("token_logprobs", [](const LogprobEntry& entry) {
    return entry.logprob.has_value() ? Json(LogprobNumber(*entry.logprob)) : Json(nullptr);
  });
  write("top_logprobs", CompletionCandidates);
  write("text_offset", [&](const LogprobEntry& entry) -> Json {
    const int64_t offset = *char_offset;
    if (!entry.hidden) *char_offset += CountCharacters(entry.bytes);
    return offset;
  });
  object.End('}');
}

void WriteLogprobs(const ResponseHead& head, const std::vector<LogprobEntry>& entries,
                   int64_t* char_offset, std::string* out) {
  if (!head.logprobs) {
    *out += "null";
  } else if (head.chat) {
    WriteChatLogprobs(entries, out);
  } else {
    WriteCompletionLogprobs(entries, char_offset, out);
  }
}

void WritePromptLogprobs(const std::vector<std::vector<PromptCandidate>>& prompt,
                         std::string* out) {
  JsonWriter list('[', out);
  for (const auto& candidates : prompt) {
    Json item = candidates.empty() ? Json(nullptr) : Json::object();
    for (const PromptCandidate& candidate : candidates) {
      const std::string key = std::to_string(candidate.token);
      if (item.contains(key)) continue;  // the token itself is among the likeliest
      item[key] = {{"logprob", LogprobNumber(candidate.logprob)},
                   {"rank", candidate.rank},
                   {"decoded_token", Readable(candidate.bytes)}};
    }
    list.Add(item);
  }
  list.End(']');
}

Json StopReason(const FinishInfo& finish) {
  if (finish.stop_string.has_value()) return *finish.stop_string;
  if (finish.stop_token.has_value()) return *finish.stop_token;
  return nullptr;
}

Json UsageJson(const Usage& usage) {
  Json out = {{"prompt_tokens", usage.prompt_tokens},
              {"completion_tokens", usage.completion_tokens},
              {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
              {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
  if (usage.reasoning_tokens.has_value()) {
    out["completion_tokens_details"] = {{"reasoning_tokens", *usage.reasoning_tokens}};
  }
  return out;
}

JsonWriter StartBody(const ResponseHead& head, const char* chat_object, std::string* out) {
  JsonWriter body('{', out);
  body.Add("id", head.id);
  body.Add("object", head.chat ? chat_object : "text_completion");
  body.Add("created", head.created);
  body.Add("model", head.model);
  body.Add("system_fingerprint", head.fingerprint);
  return body;
}

std::string ChunkBody(const ResponseHead& head, std::string_view choice,
                      const std::optional<Usage>& usage) {
  std::string out;
  JsonWriter chunk = StartBody(head, "chat.completion.chunk", &out);
  chunk.Key("choices") += fmt::format("[{}]", choice);
  if (usage.has_value()) {
    chunk.Add("usage", UsageJson(*usage));
  } else if (head.usage_null) {
    chunk.Add("usage", nullptr);
  }
  chunk.End('}');
  return out;
}

Json CallJson(const ToolCallDelta& call, std::string_view arguments) {
  return {{"id", call.id},
          {"type", "function"},
          {"function", {{"name", call.name}, {"arguments", arguments}}}};
}

// Whole calls of the parts that they came in.
Json ToolCallsJson(const std::vector<ToolCallDelta>& deltas) {
  Json calls = Json::array();
  for (const ToolCallDelta& delta : deltas) {
    if (delta.index == calls.size()) {
      calls.push_back(CallJson(delta, delta.arguments));
    } else {
      calls[delta.index]["function"]["arguments"].get_ref<std::string&>() += delta.arguments;
    }
  }
  return calls;
}

// A chunk has one part of one call: clients join lists of deltas by "index" chunk by chunk. A call
// begins with its name and no arguments; they follow by themselves.
void AddCallDeltas(const ToolCallDelta& call, std::vector<Json>* deltas) {
  const auto add = [&](Json part) {
    deltas->push_back({{"tool_calls", Json::array({std::move(part)})}});
  };
  if (!call.id.empty()) {
    Json begin = {{"index", call.index}};
    begin.update(CallJson(call, ""));
    add(std::move(begin));
  }
  if (call.arguments.empty()) return;
  add({{"index", call.index}, {"function", {{"arguments", call.arguments}}}});
}

void WriteChoice(const ResponseHead& head, const ChoiceResult& choice, std::string* out) {
  JsonWriter item('{', out);
  item.Add("index", choice.index);
  if (head.chat) {
    const ChoicePiece& piece = choice.piece;
    Json message = {{"role", "assistant"}, {"content", piece.content}};
    if (!piece.reasoning.empty()) message["reasoning_content"] = piece.reasoning;
    if (!piece.tool_calls.empty()) {
      if (piece.content.empty()) message["content"] = nullptr;
      message["tool_calls"] = ToolCallsJson(piece.tool_calls);
    }
    item.Add("message", message);
  } else {
    item.Add("text", choice.piece.content);
  }
  int64_t offset = 0;
  WriteLogprobs(head, choice.piece.logprobs, &offset, &item.Key("logprobs"));
  item.Add("finish_reason", choice.finish.finish_reason);
  item.Add("stop_reason", StopReason(choice.finish));
  if (head.return_token_ids) {
    item.Add("prompt_token_ids", choice.prompt_token_ids);
    item.Add("token_ids", choice.piece.token_ids);
  }
  if (choice.prompt_logprobs.has_value() && !head.chat) {
    WritePromptLogprobs(*choice.prompt_logprobs, &item.Key("prompt_logprobs"));
  }
  item.End('}');
}

}  // namespace

void ChoicePiece::Append(ChoicePiece&& other) {
  content += other.content;
  reasoning += other.reasoning;
  std::ranges::move(other.tool_calls, std::back_inserter(tool_calls));
  std::ranges::move(other.logprobs, std::back_inserter(logprobs));
  std::ranges::move(other.token_ids, std::back_inserter(token_ids));
}

std::string ResponseBody(const ResponseHead& head, const std::vector<ChoiceResult>& choices,
                         const Usage& usage) {
  std::string out;
  JsonWriter body = StartBody(head, "chat.completion", &out);
  body.Key("choices") += '[';
  for (const ChoiceResult& choice : choices) {
    if (&choice != &choices.front()) out += ',';
    WriteChoice(head, choice, &out);
  }
  out += ']';
  // A chat has one prompt, however many choices.
  if (head.chat && !choices.empty() && choices.front().prompt_logprobs.has_value()) {
    WritePromptLogprobs(*choices.front().prompt_logprobs, &body.Key("prompt_logprobs"));
  }
  body.Add("usage", UsageJson(usage));
  body.End('}');
  return out;
}

std::string RoleChunk(const ResponseHead& head, int64_t index, const std::optional<Usage>& usage) {
  return ChunkBody(head,
                   Dump({{"index", index},
                         {"delta", {{"role", "assistant"}, {"content", ""}}},
                         {"logprobs", nullptr},
                         {"finish_reason", nullptr}}),
                   usage);
}

std::vector<std::string> PieceChunks(const ResponseHead& head, int64_t index,
                                     const ChoicePiece& piece, int64_t* char_offset,
                                     const std::optional<Usage>& usage) {
  std::vector<Json> deltas;
  if (!piece.reasoning.empty() || !piece.content.empty() || piece.tool_calls.empty()) {
    Json& delta = deltas.emplace_back(Json::object());
    if (!piece.reasoning.empty()) delta["reasoning_content"] = piece.reasoning;
    if (!piece.content.empty()) delta["content"] = piece.content;
  }
  for (const ToolCallDelta& call : piece.tool_calls) AddCallDeltas(call, &deltas);

  std::vector<std::string> chunks;
  for (const Json& delta : deltas) {
    const bool is_first = chunks.empty();
    std::string out;
    JsonWriter choice('{', &out);
    choice.Add("index", index);
    if (head.chat) {
      choice.Add("delta", delta);
    } else {
      choice.Add("text", piece.content);
    }
    // What is told of tokens stands in the first.
    if (is_first) {
      WriteLogprobs(head, piece.logprobs, char_offset, &choice.Key("logprobs"));
    } else {
      choice.Add("logprobs", nullptr);
    }
    choice.Add("finish_reason", nullptr);
    if (head.return_token_ids) {
      choice.Add("token_ids", is_first ? Json(piece.token_ids) : Json::array());
    }
    choice.End('}');
    chunks.push_back(ChunkBody(head, out, usage));
  }
  return chunks;
}

std::string FinishChunk(const ResponseHead& head, int64_t index, const FinishInfo& finish,
                        const std::optional<Usage>& usage) {
  Json choice = {{"index", index}};
  if (head.chat) {
    choice["delta"] = Json::object();
  } else {
    choice["text"] = "";
  }
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = finish.finish_reason;
  choice["stop_reason"] = StopReason(finish);
  return ChunkBody(head, Dump(choice), usage);
}

std::string UsageChunk(const ResponseHead& head, const Usage& usage) {
  std::string out;
  JsonWriter chunk = StartBody(head, "chat.completion.chunk", &out);
  chunk.Add("choices", Json::array());
  chunk.Add("usage", UsageJson(usage));
  chunk.End('}');
  return out;
}

std::string LogprobList(const std::vector<LogprobEntry>& entries) {
  std::string out;
  WriteLogprobList(entries, &out);
  return out;
}

std::string SseFrame(std::string_view json) { return fmt::format("data: {}\n\n", json); }

namespace {

Json CardJson(const ModelCard& card) {
  return {{"id", card.id},       {"object", "model"}, {"created", card.created},
          {"owned_by", "oscar"}, {"root", card.root}, {"max_model_len", card.max_model_len}};
}

}  // namespace

std::string ModelBody(const ModelCard& card) { return Dump(CardJson(card)); }

std::string ModelListBody(const std::vector<ModelCard>& cards) {
  Json data = Json::array();
  for (const ModelCard& card : cards) data.push_back(CardJson(card));
  return Dump({{"object", "list"}, {"data", std::move(data)}});
}

}  // namespace oscar::server
