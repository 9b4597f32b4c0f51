#include <nlohmann/json.hpp>

#include "base/json.h"
#include "toolcall/call_reader.h"

namespace oscar {

bool IsJsonObject(std::string_view text) { return SplitJsonObject(text, "arguments").has_value(); }

bool ReadJsonCall(std::string_view json, const ToolSet& tools, ReadCall* call) {
  const auto members = SplitJsonObject(json, "call");
  if (!members.has_value()) return false;
  std::string_view arguments = "{}";
  const auto text_of = [](std::string_view value) {
    const auto parsed = ParseJson(value, "call");
    return parsed.has_value() && parsed->is_string() ? parsed->get<std::string>() : std::string();
  };
  for (const JsonMember& member : *members) {
    if (member.name == "name") call->name = text_of(member.value);
    if (member.name == "id") call->id = text_of(member.value);
    if (member.name == "arguments" || member.name == "parameters") arguments = member.value;
  }
  if (!tools.Has(call->name)) return false;
  if (arguments == "null") arguments = "{}";
  call->arguments = arguments.starts_with('"') ? text_of(arguments) : std::string(arguments);
  return IsJsonObject(call->arguments);
}

void RawArguments::Add(const ToolSet& tools, std::string_view tool, std::string_view key,
                       std::string_view raw) {
  text_ += text_.empty() ? "{" : ", ";
  text_ += JsonString(key);
  text_ += ": ";
  text_ += tools.ToJson(tool, key, raw);
}

std::string RawArguments::Take() {
  std::string text = text_.empty() ? "{}" : text_ + "}";
  text_.clear();
  return text;
}

}  // namespace oscar
