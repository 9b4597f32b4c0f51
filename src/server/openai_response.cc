#include "server/openai_response.h"

#include <fmt/core.h>

#include <cmath>
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

Json ChatLogprobs(const std::vector<LogprobEntry>& entries) {
  Json content = Json::array();
  for (const LogprobEntry& entry : entries) {
    Json top = Json::array();
    for (const LogprobCandidate& candidate : entry.top) {
      top.push_back({{"token", Readable(candidate.bytes)},
                     {"logprob", LogprobNumber(candidate.logprob)},
                     {"bytes", BytesOf(candidate.bytes)}});
    }
    content.push_back({{"token", Readable(entry.bytes)},
                       {"logprob", LogprobNumber(entry.logprob.value_or(0.0f))},
                       {"bytes", BytesOf(entry.bytes)},
                       {"top_logprobs", std::move(top)}});
  }
  return {{"content", std::move(content)}};
}

// Parts of characters are spelled out ("bytes:\xe2\x82"), so that different tokens stay different.
std::string CompletionToken(std::string_view bytes) {
  std::string readable = Readable(bytes);
  if (readable == bytes) return readable;
  std::string out = "bytes:";
  for (const char c : bytes) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return out;
}

Json CompletionLogprobs(const std::vector<LogprobEntry>& entries, int64_t* char_offset) {
  Json tokens = Json::array(), logprobs = Json::array(), top = Json::array(),
       offsets = Json::array();
  for (const LogprobEntry& entry : entries) {
    tokens.push_back(CompletionToken(entry.bytes));
    offsets.push_back(*char_offset);
    if (!entry.hidden) *char_offset += CountCharacters(entry.bytes);
    if (!entry.logprob.has_value()) {
      logprobs.push_back(nullptr);
      top.push_back(nullptr);
      continue;
    }
    logprobs.push_back(LogprobNumber(*entry.logprob));
    Json candidates = Json::object();
    for (const LogprobCandidate& candidate : entry.top) {
      candidates[CompletionToken(candidate.bytes)] = LogprobNumber(candidate.logprob);
    }
    // The token itself is always among them, so there may be one more than was asked for.
    candidates.emplace(CompletionToken(entry.bytes), LogprobNumber(*entry.logprob));
    top.push_back(std::move(candidates));
  }
  return {{"tokens", std::move(tokens)},
          {"token_logprobs", std::move(logprobs)},
          {"top_logprobs", std::move(top)},
          {"text_offset", std::move(offsets)}};
}

Json PromptLogprobs(const std::vector<std::vector<PromptCandidate>>& prompt) {
  Json out = Json::array();
  for (const auto& candidates : prompt) {
    Json item = candidates.empty() ? Json(nullptr) : Json::object();
    for (const PromptCandidate& candidate : candidates) {
      const std::string key = std::to_string(candidate.token);
      if (item.contains(key)) continue;  // the token itself is among the likeliest
      item[key] = {{"logprob", LogprobNumber(candidate.logprob)},
                   {"rank", candidate.rank},
                   {"decoded_token", Readable(candidate.bytes)}};
    }
    out.push_back(std::move(item));
  }
  return out;
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

Json HeadJson(const ResponseHead& head, const char* chat_object) {
  return {{"id", head.id},
          {"object", head.chat ? chat_object : "text_completion"},
          {"created", head.created},
          {"model", head.model},
          {"system_fingerprint", head.fingerprint}};
}

std::string ChunkBody(const ResponseHead& head, Json choice, const std::optional<Usage>& usage) {
  Json chunk = HeadJson(head, "chat.completion.chunk");
  chunk["choices"] = Json::array({std::move(choice)});
  if (usage.has_value()) {
    chunk["usage"] = UsageJson(*usage);
  } else if (head.usage_null) {
    chunk["usage"] = nullptr;
  }
  return Dump(chunk);
}

}  // namespace

std::string ResponseBody(const ResponseHead& head, const std::vector<ChoiceResult>& choices,
                         const Usage& usage) {
  Json body = HeadJson(head, "chat.completion");
  Json list = Json::array();
  for (const ChoiceResult& choice : choices) {
    Json item = {{"index", choice.index}};
    if (head.chat) {
      Json message = {{"role", "assistant"}, {"content", choice.piece.content}};
      if (!choice.piece.reasoning.empty()) message["reasoning_content"] = choice.piece.reasoning;
      item["message"] = std::move(message);
      item["logprobs"] = head.logprobs ? ChatLogprobs(choice.piece.logprobs) : Json(nullptr);
    } else {
      int64_t offset = 0;
      item["text"] = choice.piece.content;
      item["logprobs"] =
          head.logprobs ? CompletionLogprobs(choice.piece.logprobs, &offset) : Json(nullptr);
    }
    item["finish_reason"] = choice.finish.finish_reason;
    item["stop_reason"] = StopReason(choice.finish);
    if (head.return_token_ids) {
      item["prompt_token_ids"] = choice.prompt_token_ids;
      item["token_ids"] = choice.piece.token_ids;
    }
    if (choice.prompt_logprobs.has_value() && !head.chat) {
      item["prompt_logprobs"] = PromptLogprobs(*choice.prompt_logprobs);
    }
    list.push_back(std::move(item));
  }
  body["choices"] = std::move(list);
  // A chat has one prompt, however many choices.
  if (head.chat && !choices.empty() && choices.front().prompt_logprobs.has_value()) {
    body["prompt_logprobs"] = PromptLogprobs(*choices.front().prompt_logprobs);
  }
  body["usage"] = UsageJson(usage);
  return Dump(body);
}

std::string RoleChunk(const ResponseHead& head, int64_t index, const std::optional<Usage>& usage) {
  return ChunkBody(head,
                   {{"index", index},
                    {"delta", {{"role", "assistant"}, {"content", ""}}},
                    {"logprobs", nullptr},
                    {"finish_reason", nullptr}},
                   usage);
}

std::string PieceChunk(const ResponseHead& head, int64_t index, const ChoicePiece& piece,
                       int64_t* char_offset, const std::optional<Usage>& usage) {
  Json choice = {{"index", index}};
  if (head.chat) {
    Json delta = Json::object();
    if (!piece.reasoning.empty()) delta["reasoning_content"] = piece.reasoning;
    if (!piece.content.empty()) delta["content"] = piece.content;
    choice["delta"] = std::move(delta);
    choice["logprobs"] = head.logprobs ? ChatLogprobs(piece.logprobs) : Json(nullptr);
  } else {
    choice["text"] = piece.content;
    choice["logprobs"] =
        head.logprobs ? CompletionLogprobs(piece.logprobs, char_offset) : Json(nullptr);
  }
  choice["finish_reason"] = nullptr;
  if (head.return_token_ids) choice["token_ids"] = piece.token_ids;
  return ChunkBody(head, std::move(choice), usage);
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
  return ChunkBody(head, std::move(choice), usage);
}

std::string UsageChunk(const ResponseHead& head, const Usage& usage) {
  Json chunk = HeadJson(head, "chat.completion.chunk");
  chunk["choices"] = Json::array();
  chunk["usage"] = UsageJson(usage);
  return Dump(chunk);
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
