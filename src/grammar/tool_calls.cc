#include "grammar/tool_calls.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/json.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;

const char* StyleOf(ArgumentSpelling spelling) {
  switch (spelling) {
    case ArgumentSpelling::kJson:
      return "json";
    case ArgumentSpelling::kQwenXml:
      return "qwen_xml";
    case ArgumentSpelling::kGlmXml:
      return "glm_xml";
    case ArgumentSpelling::kMiniMaxXml:
      return "minimax_xml";
  }
  return "json";
}

// Appends the text, with its control tokens as tokens.
void AddText(std::string_view text, const Tokenizer& tokenizer, Json* elements) {
  while (!text.empty()) {
    size_t first = text.size();
    const AddedToken* found = nullptr;
    for (const AddedToken& token : tokenizer.added_tokens()) {
      if (!token.special || token.content.empty()) continue;
      const size_t at = text.find(token.content);
      // Of two that begin at one place, the longer one.
      if (at < first ||
          (at == first && found != nullptr && token.content.size() > found->content.size())) {
        first = at;
        found = &token;
      }
    }
    if (first > 0) {
      elements->push_back({{"type", "const_string"}, {"value", text.substr(0, first)}});
    }
    if (found == nullptr) return;
    elements->push_back({{"type", "token"}, {"token", found->id}});
    text.remove_prefix(first + found->content.size());
  }
}

Json Sequence(Json elements) {
  if (elements.size() == 1) return std::move(elements[0]);
  return {{"type", "sequence"}, {"elements", std::move(elements)}};
}

}  // namespace

Result<GrammarSpec> ToolCallGrammar(std::span<const CallGrammar> calls, std::string_view separator,
                                    bool several, const Tokenizer& tokenizer) {
  if (calls.empty()) return Unexpected(InvalidArgument("there is no tool to call"));
  Json options = Json::array();
  for (const CallGrammar& call : calls) {
    Json schema = {{"type", "object"}, {"properties", Json::object()}};
    if (!call.schema.empty()) {
      OSCAR_RETURN_IF_ERROR(CheckGrammarSpec({GrammarSpec::Kind::kJsonSchema, call.schema, {}}));
      OSCAR_ASSIGN_OR_RETURN(schema, ParseOrderedJson(call.schema, "schema", kMaxSchemaDepth));
    }
    Json elements = Json::array();
    AddText(call.begin, tokenizer, &elements);
    elements.push_back({{"type", "json_schema"},
                        {"json_schema", std::move(schema)},
                        {"style", StyleOf(call.spelling)}});
    AddText(call.end, tokenizer, &elements);
    options.push_back(Sequence(std::move(elements)));
  }
  Json one = options.size() == 1 ? Json(options[0])
                                 : Json{{"type", "or"}, {"elements", std::move(options)}};
  Json format = one;
  if (several) {
    Json next = Json::array();
    AddText(separator, tokenizer, &next);
    next.push_back(std::move(one));
    Json elements = Json::array();
    elements.push_back(std::move(format));
    elements.push_back({{"type", "star"}, {"content", Sequence(std::move(next))}});
    format = Sequence(std::move(elements));
  }
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kTags;
  spec.text = Json{{"type", "structural_tag"}, {"format", std::move(format)}}.dump();
  return spec;
}

}  // namespace oscar
