// Requests of the OpenAI-compatible API: JSON bodies in, plain structs out. Together with
// openai_response, the only place where field names are spelled. Everything is checked here: types,
// ranges, counts, sizes; null is the same as absent; a known field that is not served is refused,
// an unknown one is ignored with a debug line. Pure functions, safe from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/spec.h"
#include "openai/api_error.h"
#include "oscar/options.h"

namespace oscar::server {

struct RequestLimits {
  int max_json_depth = 64;
  // Of the fields that the API knows: a number, true, false or null counts one; a string, list or
  // object, which has its own memory, eight. Some 16 bytes each.
  size_t max_json_values = size_t{1} << 21;
  size_t max_messages = 4096;
  int64_t max_n = 128;        // also of best_of
  int64_t max_choices = 512;  // of all prompts of a request together
  size_t max_stops = 4;
  size_t max_stop_bytes = 256;
  size_t max_bad_words = 256;  // of max_stop_bytes each
  int64_t max_top_logprobs = 20;
  size_t max_logit_bias = 1024;
  size_t max_prompts = 64;
  // Tokens that one answer may name with logprobs or ids, some 250 bytes of memory each; never less
  // than one choice may need in the whole context.
  int64_t max_answer_logprobs = int64_t{1} << 22;
  size_t max_tools = 512;
  // Of the stored conversation that a request continues; as much as a body may have.
  size_t max_conversation_bytes = size_t{16} << 20;
  int vocab_size = 0;
  // What a request that leaves the sampling fields out gets (generation_config.json).
  SamplingOptions defaults;
};

// What the two generation endpoints share.
struct GenerationParams {
  std::string model;         // empty: whatever is served
  SamplingOptions sampling;  // validated; its seed is left unset
  std::optional<int64_t> seed;
  std::optional<int64_t> max_tokens;
  // max_tokens is an upper bound: what the context has no room for is not asked for.
  bool may_cut_max_tokens = false;
  int64_t min_tokens = 0;
  int64_t n = 1;
  int64_t best_of = 0;  // choices of which the n best are returned; 0: n
  int64_t priority = 0;
  std::vector<std::string> bad_words;
  std::vector<int32_t> allowed_token_ids;  // empty: all
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  bool include_stop_str_in_output = false;
  bool skip_special_tokens = true;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage_stats = false;
  // A stream whose end repeats all of it: what it keeps in memory counts as if it were none.
  bool stream_is_kept = false;
  bool logprobs = false;
  int64_t top_logprobs = 0;
  // Scores of the prompt's own tokens beside this many of the likeliest.
  std::optional<int64_t> prompt_logprobs;
  bool return_token_ids = false;
  std::optional<int64_t> truncate_prompt_tokens;  // keep the last ones
  std::string request_id;
  std::string cache_salt;
  // What the answer has to look like; checked, not compiled.
  std::optional<GrammarSpec> constraint;
  std::string constraint_param;  // the field that asked for it, for errors
  int64_t choices() const { return best_of > n ? best_of : n; }
};

struct ChatRequest {
  GenerationParams params;
  // What the template sees; shared because a struct of an incomplete type cannot own it by value.
  std::shared_ptr<const nlohmann::ordered_json> messages;         // a list of objects
  std::shared_ptr<const nlohmann::ordered_json> tools;            // null: none
  std::shared_ptr<const nlohmann::ordered_json> template_kwargs;  // an object, or null
  ToolChoice tool_choice = ToolChoice::kAuto;
  std::string tool_name;  // of kNamed
  bool parallel_tool_calls = true;
  bool add_generation_prompt = true;
  bool continue_final_message = false;
};

struct PromptInput {
  std::string text;
  std::vector<int32_t> tokens;  // used where is_tokens
  bool is_tokens = false;
};

struct CompletionRequest {
  GenerationParams params;
  std::vector<PromptInput> prompts;  // at least one
  bool echo = false;
};

struct TokenizeRequest {
  std::string model;
  PromptInput prompt;
  std::optional<ChatRequest> chat;  // instead of a prompt: what the template makes of messages
  bool add_special_tokens = false;
  bool parse_special = true;
  bool return_token_strings = false;
};

struct DetokenizeRequest {
  std::string model;
  std::vector<int32_t> tokens;
};

ApiResult<ChatRequest> ParseChatRequest(std::string_view body, const RequestLimits& limits);
// How another API calls a field of a chat request.
struct FieldName {
  std::string_view chat, own;
};
// Requests of other APIs are translated into chats, whose fields are checked in this one place.
// Errors call the fields by the names that their client knows.
ApiResult<ChatRequest> ParseTranslatedChat(const nlohmann::ordered_json& chat,
                                           const RequestLimits& limits,
                                           std::span<const FieldName> names);
ApiResult<CompletionRequest> ParseCompletionRequest(std::string_view body,
                                                    const RequestLimits& limits);
ApiResult<TokenizeRequest> ParseTokenizeRequest(std::string_view body, const RequestLimits& limits);
ApiResult<DetokenizeRequest> ParseDetokenizeRequest(std::string_view body,
                                                    const RequestLimits& limits);

}  // namespace oscar::server
