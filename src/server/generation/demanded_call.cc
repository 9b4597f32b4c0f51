#include "generation/demanded_call.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/json.h"
#include "generation/tag_arguments.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

// Before a call harmony may reason, in a message by itself.
constexpr std::string_view kHarmonyThought = "<|channel|>analysis<|message|>";
constexpr std::string_view kHarmonyNext = "<|end|><|start|>assistant";

Json Sequence(Json elements) {
  if (elements.size() == 1) return std::move(elements[0]);
  return {{"type", "sequence"}, {"elements", std::move(elements)}};
}

// Writes the parts of calls as formats of structural tags.
class Writer {
 public:
  Writer(const AnswerSyntax& syntax, const Tokenizer& tokenizer)
      : syntax_(syntax), tokenizer_(tokenizer) {}

  void AddText(std::string_view text, Json* elements) const;
  Result<Json> Call(std::string_view tool) const;

 private:
  void AddObject(std::string_view tool, Json* elements) const;
  Status AddTags(std::string_view tool, const ArgumentTags& tags, Json* elements) const;

  const AnswerSyntax& syntax_;
  const Tokenizer& tokenizer_;
};

// Appends the text, with its control tokens as tokens.
void Writer::AddText(std::string_view text, Json* elements) const {
  while (!text.empty()) {
    size_t first = text.size();
    const AddedToken* found = nullptr;
    for (const AddedToken& token : tokenizer_.added_tokens()) {
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

void Writer::AddObject(std::string_view tool, Json* elements) const {
  const Json* schema = syntax_.tools->Schema(tool);
  elements->push_back(
      {{"type", "json_schema"},
       {"json_schema",
        schema != nullptr ? *schema : Json{{"type", "object"}, {"properties", Json::object()}}},
       {"max_whitespace_cnt", kMaxJsonWhitespace}});
}

Status Writer::AddTags(std::string_view tool, const ArgumentTags& tags, Json* elements) const {
  OSCAR_ASSIGN_OR_RETURN(const std::vector<TagArgument> arguments,
                         TagArguments(*syntax_.tools, tool, tags));
  for (const TagArgument& argument : arguments) {
    Json parts = Json::array();
    AddText(std::string(tags.open) + argument.name + std::string(tags.after_key), &parts);
    parts.push_back(argument.value);
    AddText(tags.close, &parts);
    Json one = Sequence(std::move(parts));
    if (!argument.required) one = {{"type", "optional"}, {"content", std::move(one)}};
    elements->push_back(std::move(one));
  }
  return {};
}

Result<Json> Writer::Call(std::string_view tool) const {
  if (const Json* schema = syntax_.tools->Schema(tool); schema != nullptr) {
    OSCAR_RETURN_IF_ERROR(CheckGrammarSpec({GrammarSpec::Kind::kJsonSchema, schema->dump(), {}}));
  }
  const CallFrame frame = FrameOf(syntax_.calls, tool);
  Json elements = Json::array();
  AddText(frame.begin, &elements);
  if (frame.tags.has_value()) {
    OSCAR_RETURN_IF_ERROR(AddTags(tool, *frame.tags, &elements));
  } else {
    AddObject(tool, &elements);
  }
  AddText(frame.end, &elements);
  return Sequence(std::move(elements));
}

}  // namespace

Result<GrammarSpec> DemandGrammar(const DemandedCall& demand, const AnswerSyntax& syntax,
                                  const Tokenizer& tokenizer) {
  if (demand.tools.empty() || !syntax.has_calls()) {
    return Unexpected(InvalidArgument("there is no tool to call"));
  }
  const Writer writer(syntax, tokenizer);
  Json calls = Json::array();
  for (const std::string& tool : demand.tools) {
    OSCAR_ASSIGN_OR_RETURN(Json call, writer.Call(tool));
    calls.push_back(std::move(call));
  }
  const Json one =
      calls.size() == 1 ? Json(calls[0]) : Json{{"type", "or"}, {"elements", std::move(calls)}};
  Json answer = Json::array();
  if (syntax.harmony && syntax.reasoning.has_value()) {
    Json thought = Json::array();
    writer.AddText(kHarmonyThought, &thought);
    thought.push_back({{"type", "any_text"}});
    writer.AddText(kHarmonyNext, &thought);
    answer.push_back({{"type", "optional"}, {"content", Sequence(std::move(thought))}});
  }
  const CallList list = ListOf(syntax.calls);
  writer.AddText(list.begin, &answer);
  answer.push_back(one);
  if (demand.several) {
    Json next = Json::array();
    writer.AddText(list.between, &next);
    next.push_back(one);
    answer.push_back({{"type", "star"}, {"content", Sequence(std::move(next))}});
  }
  writer.AddText(list.end, &answer);
  GrammarSpec spec;
  spec.kind = FrameOf(syntax.calls, "").tags.has_value() ? GrammarSpec::Kind::kTextCalls
                                                         : GrammarSpec::Kind::kJsonCalls;
  spec.text = Json{{"type", "structural_tag"}, {"format", Sequence(std::move(answer))}}.dump();
  return spec;
}

}  // namespace oscar::server
