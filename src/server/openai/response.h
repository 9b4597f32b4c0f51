// Responses of the OpenAI-compatible API: structs in, JSON text out, one function a shape. Text is
// made valid UTF-8 on the way out. Pure functions, safe from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/tool_call.h"

namespace oscar::server {

struct LogprobCandidate {
  std::string bytes;  // exact bytes of the token, perhaps part of a character
  float logprob = 0.0f;
};

struct LogprobEntry {
  std::string bytes;
  std::optional<float> logprob;  // none for the first token of a prompt
  std::vector<LogprobCandidate> top;
  bool hidden = false;  // a special token that the text leaves out
};

// New text of a choice, with what is told of its tokens.
struct ChoicePiece {
  std::string content;
  std::string reasoning;
  std::vector<ToolCallDelta> tool_calls;
  std::vector<LogprobEntry> logprobs;
  std::vector<int32_t> token_ids;
  bool empty() const { return content.empty() && reasoning.empty() && tool_calls.empty(); }
  void Append(ChoicePiece&& other);
};

// What all chunks of one response repeat.
struct ResponseHead {
  bool chat = true;
  std::string id;
  int64_t created = 0;  // unix seconds
  std::string model;
  std::string fingerprint;
  bool usage_null = false;  // stream with include_usage: every chunk has "usage": null
  bool logprobs = false;
  bool return_token_ids = false;
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t completion_tokens = 0;
  std::optional<int64_t> reasoning_tokens;
};

struct FinishInfo {
  std::string finish_reason;
  std::optional<std::string> stop_string;
  std::optional<int32_t> stop_token;
};

// A token of the prompt as the model saw it coming: itself, then the likeliest in its place.
struct PromptCandidate {
  int32_t token = 0;
  float logprob = 0.0f;
  int32_t rank = 0;  // 1: the most likely
  std::string bytes;
};

struct ChoiceResult {
  int64_t index = 0;
  ChoicePiece piece;  // everything; for echo the prompt's text and logprobs come first
  FinishInfo finish;
  std::vector<int32_t> prompt_token_ids;  // where token ids are wanted
  // Where wanted, one a prompt token; the first has none.
  std::optional<std::vector<std::vector<PromptCandidate>>> prompt_logprobs;
};

// The whole answer, not streamed.
std::string ResponseBody(const ResponseHead& head, const std::vector<ChoiceResult>& choices,
                         const Usage& usage);

// Stream chunks. `usage` where the client asked for continuous statistics.
std::string RoleChunk(const ResponseHead& head, int64_t index, const std::optional<Usage>& usage);
// One chunk, and one more per part of a call of a tool. `char_offset` counts characters of the
// choice so far (completions' text_offset) and is advanced.
std::vector<std::string> PieceChunks(const ResponseHead& head, int64_t index,
                                     const ChoicePiece& piece, int64_t* char_offset,
                                     const std::optional<Usage>& usage);
std::string FinishChunk(const ResponseHead& head, int64_t index, const FinishInfo& finish,
                        const std::optional<Usage>& usage);
std::string UsageChunk(const ResponseHead& head, const Usage& usage);

// Logprobs as the JSON list that chats and responses have in common.
std::string LogprobList(const std::vector<LogprobEntry>& entries);

// "data: <json>\n\n".
std::string SseFrame(std::string_view json);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";
inline constexpr std::string_view kSsePing = ": ping\n\n";

struct ModelCard {
  std::string id;
  std::string root;
  int64_t created = 0;
  int64_t max_model_len = 0;
};
std::string ModelBody(const ModelCard& card);
std::string ModelListBody(const std::vector<ModelCard>& cards);

}  // namespace oscar::server
