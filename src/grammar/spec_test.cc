#include "grammar/spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace oscar {
namespace {

using Kind = GrammarSpec::Kind;
using testing::HasSubstr;

Status Schema(const std::string& text) { return CheckGrammarSpec({Kind::kJsonSchema, text, {}}); }

TEST(GrammarSpec, TakesOrdinarySchemas) {
  for (const char* text :
       {"{}", R"({"type": "object", "properties": {"a": {"type": ["string", "null"]}}})",
        R"({"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}})",
        R"({"anyOf": [{"type": "null"}, {"enum": [1, "a", null]}], "description": "either"})",
        R"({"type": "string", "enum": ["a", "b"]})", R"({"const": {"a": [1]}})",
        R"({"type": "number", "const": 3})", R"({"type": "array", "uniqueItems": false})"}) {
    EXPECT_TRUE(Schema(text).ok()) << text << ": " << Schema(text).message();
  }
}

// What a mask would not keep to is refused, with its name and place, rather than ignored.
TEST(GrammarSpec, RefusesWhatItWouldIgnore) {
  const struct {
    const char* text;
    const char* place;
    const char* name;
  } cases[] = {
      {R"({"not": {}})", "/", "'not'"},
      {R"({"properties": {"x": {"items": {"uniqueItems": true}}}})", "/properties/x/items",
       "'uniqueItems'"},
      {R"({"$defs": {"q": {"if": {}}}})", "/$defs/q", "'if'"},
      {R"({"anyOf": [{}], "minLength": 3})", "/", "'minLength'"},
      {R"({"$ref": "#/$defs/a", "required": ["b"]})", "/", "'required'"},
      {R"({"anyOf": [{}], "type": "object"})", "/", "'type'"},
      {R"({"allOf": [{"type": "object"}, {"required": ["a"]}]})", "/", "'allOf'"},
      {R"({"items": {"$ref": "https://example.org/s.json"}})", "/items", "'$ref'"},
      {R"({"type": "string", "enum": ["a", 1]})", "/", "'enum'"},
      {R"({"type": "integer", "const": "x"})", "/", "'const'"},
      {R"({"additionalProperties": {"contains": {}}})", "/additionalProperties", "'contains'"},
      {R"({"type": "string", "format": "date", "pattern": "^2"})", "/", "'pattern'"},
      {R"({"items": {"format": "iri", "maxLength": 9}})", "/items", "'maxLength'"},
      {R"({"anyOf": []})", "/", "'anyOf'"},
      {R"({"properties": {"a": 5}})", "/properties/a", "object"},
  };
  for (const auto& c : cases) {
    const Status status = Schema(c.text);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << c.text;
    EXPECT_THAT(status.message(), HasSubstr(std::string("at ") + c.place + " ")) << c.text;
    EXPECT_THAT(status.message(), HasSubstr(c.name)) << c.text;
  }
}

TEST(GrammarSpec, RefusesWhatIsNoSchema) {
  for (const char* text : {"", "[]", "5", "{", "nul", "\"a\"", "{\"a\": \xff}"}) {
    EXPECT_EQ(Schema(text).code(), StatusCode::kInvalidArgument) << text;
  }
}

TEST(GrammarSpec, BoundsSizeAndDepth) {
  std::string deep;
  for (int i = 0; i < 1000; ++i) deep += R"({"items":)";
  EXPECT_EQ(Schema(deep + "{}" + std::string(1000, '}')).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Schema(std::string(kMaxGrammarBytes + 1, ' ')).code(), StatusCode::kInvalidArgument);
  const auto check = [](Kind kind, std::string text) {
    return CheckGrammarSpec({kind, std::move(text), {}}).code();
  };
  EXPECT_EQ(check(Kind::kRegex, std::string(kMaxRegexBytes, 'a')), StatusCode::kOk);
  EXPECT_EQ(check(Kind::kRegex, std::string(kMaxRegexBytes + 1, 'a')),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(check(Kind::kRegex, std::string(100, '(') + std::string(100, ')')),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(check(Kind::kRegex, std::string(100, '(') + "a"), StatusCode::kInvalidArgument);
  EXPECT_EQ(check(Kind::kRegex, R"(\(\(\()" + std::string(50, '(') + std::string(50, ')')),
            StatusCode::kOk);
  EXPECT_EQ(check(Kind::kRegex, ""), StatusCode::kInvalidArgument);
  EXPECT_EQ(check(Kind::kGrammar, std::string("root ::= \"a\0\"", 13)),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckGrammarSpec({Kind::kChoice, "", {}}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckGrammarSpec({Kind::kChoice, "", {"a", ""}}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(
      CheckGrammarSpec({Kind::kChoice, "", std::vector<std::string>(kMaxChoices + 1, "a")}).code(),
      StatusCode::kInvalidArgument);
}

TEST(GrammarSpec, KeysTellSpecsApart) {
  EXPECT_NE((GrammarSpec{Kind::kChoice, "", {"ab", "c"}}).Key(),
            (GrammarSpec{Kind::kChoice, "", {"a", "bc"}}).Key());
  EXPECT_NE((GrammarSpec{Kind::kRegex, "a", {}}).Key(),
            (GrammarSpec{Kind::kGrammar, "a", {}}).Key());
}

TEST(GrammarSpec, WritesChoicesAsAGrammar) {
  EXPECT_EQ(ChoiceGrammar({"a \"b\"", "c\\", "d\n"}), R"(root ::= "a \"b\"" | "c\\" | "d\x0A")");
}

}  // namespace
}  // namespace oscar
