#include "text/tool_history.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace oscar {
namespace {

using nlohmann::ordered_json;

constexpr size_t kShortId = 9;

bool IsLetterOrDigit(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

void ShortenId(ordered_json* owner, const char* key) {
  const auto it = owner->find(key);
  if (it == owner->end() || !it->is_string()) return;
  const auto& id = it->get_ref<const std::string&>();
  if (id.size() == kShortId && std::ranges::all_of(id, IsLetterOrDigit)) return;
  constexpr std::string_view kDigits =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a: the same in every process, for cached prefixes
  for (const char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  std::string out;
  for (size_t i = 0; i < kShortId; ++i) {
    out += kDigits[hash % kDigits.size()];
    hash /= kDigits.size();
  }
  *it = std::move(out);
}

bool HasCalls(const ordered_json& message) {
  const auto calls = message.find("tool_calls");
  return calls != message.end() && calls->is_array() && !calls->empty();
}

std::string TextOf(const ordered_json& message, const char* key) {
  const auto it = message.find(key);
  return it != message.end() && it->is_string() ? it->get<std::string>() : std::string();
}

void MoveReasoning(ordered_json* message) {
  std::string thinking = TextOf(*message, "thinking");
  if (thinking.empty()) thinking = TextOf(*message, "reasoning_content");
  if (thinking.empty()) return;
  const std::string content = TextOf(*message, "content");
  if (HasCalls(*message) && !content.empty()) {
    thinking += "\n" + content;
    (*message)["content"] = "";
  }
  (*message)["thinking"] = std::move(thinking);
}

ordered_json SplitCalls(const ordered_json& messages) {
  ordered_json out = ordered_json::array();
  for (size_t i = 0; i < messages.size();) {
    const ordered_json& message = messages[i++];
    if (!HasCalls(message) || message["tool_calls"].size() == 1) {
      out.push_back(message);
      continue;
    }
    size_t end = i;
    while (end < messages.size() && messages[end]["role"] == "tool") ++end;
    const ordered_json& calls = message["tool_calls"];
    for (size_t k = 0; k < calls.size(); ++k) {
      ordered_json one = message;
      if (k > 0) {  // what was said comes before the first
        one["content"] = "";
        for (const char* key : {"reasoning", "reasoning_content", "thinking"}) one.erase(key);
      }
      one["tool_calls"] = ordered_json::array({calls[k]});
      out.push_back(std::move(one));
      // Its results: by id, or by place where there are none.
      const bool is_last = k + 1 == calls.size();
      for (size_t j = i; j < end; ++j) {
        const std::string id = TextOf(messages[j], "tool_call_id");
        size_t owner = std::min(j - i, calls.size() - 1);
        bool is_known = id.empty();
        for (size_t c = 0; c < calls.size() && !id.empty() && !is_known; ++c) {
          if (TextOf(calls[c], "id") != id) continue;
          owner = c;
          is_known = true;
        }
        if (is_known ? owner == k : is_last) out.push_back(messages[j]);
      }
    }
    i = end;
  }
  return out;
}

}  // namespace

void AdaptToolHistory(const ToolHistoryStyle& style, ordered_json* messages) {
  if (style.single_calls) *messages = SplitCalls(*messages);
  for (ordered_json& message : *messages) {
    if (style.thinking && message["role"] == "assistant") MoveReasoning(&message);
    if (style.short_ids) ShortenId(&message, "tool_call_id");
    if (!HasCalls(message)) continue;
    for (ordered_json& call : message["tool_calls"]) {
      if (style.short_ids) ShortenId(&call, "id");
      if (!style.text_arguments) continue;
      ordered_json& function = call.contains("function") ? call["function"] : call;
      ordered_json& arguments = function["arguments"];
      if (!arguments.is_string()) {
        arguments = arguments.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
      }
    }
  }
}

}  // namespace oscar
