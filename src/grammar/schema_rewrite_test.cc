#include "grammar/schema_rewrite.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "grammar/string_formats.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;

void Check(const char* schema, const char* expected) {
  Json json = Json::parse(schema);
  RewriteSchema(&json);
  EXPECT_EQ(json, Json::parse(expected)) << schema << "\n" << json;
}

TEST(SchemaRewrite, NamesTheTypesThatKeywordsSpeakOf) {
  Check(R"({"minLength": 500})", R"({"minLength": 500, "type": "string"})");
  Check(R"({"minimum": 1, "items": {}})",
        R"({"minimum": 1, "items": {}, "type": ["array", "number"]})");
  Check(R"({"properties": {"a": {"maximum": 2}}})",
        R"({"properties": {"a": {"maximum": 2, "type": "number"}}, "type": "object"})");
  for (const char* same :
       {"{}", "true", R"({"description": "x"})", R"({"enum": [1]})",
        R"({"$ref": "#", "$defs": {}})", R"({"type": "integer", "minimum": 3})"}) {
    Check(same, same);
  }
}

TEST(SchemaRewrite, ListsWhatIsRequired) {
  Check(R"({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]})",
        R"({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]})");
  Check(R"({"type": "object", "required": ["b"], "additionalProperties": {"type": "null"}})",
        R"({"type": "object", "required": ["b"], "additionalProperties": {"type": "null"},
            "properties": {"b": {"type": "null"}}})");
}

TEST(SchemaRewrite, SaysLengthsAsPatterns) {
  Check(R"({"type": "string", "minLength": 2, "maxLength": 120})",
        R"({"type": "string", "pattern": "^[^\\x00-\\x1f]{2,120}$"})");
  Check(R"({"type": ["null", "string"], "minLength": 3})",
        R"({"type": ["null", "string"], "pattern": "^[^\\x00-\\x1f]{3,}$"})");
  Check(R"({"items": {"anyOf": [{"type": "string", "maxLength": 1}]}, "type": "array"})",
        R"({"items": {"anyOf": [{"type": "string", "pattern": "^[^\\x00-\\x1f]{0,1}$"}]},
            "type": "array"})");
  for (const char* same : {R"({"type": "string", "maxLength": 121})",
                           R"({"type": "string", "minLength": 5, "maxLength": 4})",
                           R"({"type": "string", "minLength": 0})",
                           R"({"type": "string", "pattern": "a", "maxLength": 4})",
                           R"({"type": "string", "format": "ipv6"})",
                           R"({"const": {"type": "string", "maxLength": 4}})"}) {
    Check(same, same);
  }
}

TEST(SchemaRewrite, SaysFormatsAsPatterns) {
  Check(
      R"({"type": "string", "format": "relative-json-pointer"})",
      (R"({"type": "string", "pattern": "^()" + *FormatPattern("relative-json-pointer") + R"()$"})")
          .c_str());
  Check(R"({"format": "iri-reference"})", R"({"format": "uri-reference", "type": "string"})");
  // A note: lengths hold as without it.
  Check(R"({"type": "string", "format": "password", "maxLength": 9})",
        R"({"type": "string", "pattern": "^[^\\x00-\\x1f]{0,9}$"})");
  Check(R"({"type": "integer", "format": "int64"})", R"({"type": "integer", "format": "int64"})");
}

TEST(SchemaRewrite, StringsOfALengthHoldNoEnds) {
  Json json = Json::parse(R"({"type": "array", "items": {"type": "string", "maxLength": 3}})");
  RewriteSchema(&json, "<");
  EXPECT_EQ(json["items"]["pattern"], "^[^\\x00-\\x1f<]{0,3}$");
}

TEST(SchemaRewrite, PatternsAreSaidInPlainWords) {
  const auto rewritten = [](const char* pattern) { return RewritePattern(pattern); };
  EXPECT_EQ(rewritten("a[é-日]🦉\\d"), "a[\\u{E9}-\\u{65E5}]\\u{1F989}\\d");
  EXPECT_EQ(rewritten("(-[0-9]{1,3})?"), "(-[0-9]{1,3}){0,1}");
  EXPECT_EQ(rewritten("a?b+?c*?d??e{2}?"), "a{0,1}b+c*d{0,1}e{2}");
  EXPECT_EQ(rewritten("(?:a)?(?:b?)"), "(?:a){0,1}(?:b{0,1})");
  EXPECT_EQ(rewritten("[?]?[^?\\]?]?\\??"), "[?]{0,1}[^?\\]?]{0,1}\\?{0,1}");
  EXPECT_EQ(rewritten("[]a]?[^]]"), "[\\]a]{0,1}[^\\]]");
  EXPECT_EQ(rewritten("é?"), "\\u{E9}{0,1}");
  EXPECT_EQ(rewritten("\\é?[\\é]"), "\\u{E9}{0,1}[\\u{E9}]");
  EXPECT_EQ(rewritten("\\"), "\\");
  Check(R"({"type": "string", "pattern": "é"})", R"({"type": "string", "pattern": "\\u{E9}"})");
  Check(R"({"type": "object", "patternProperties": {"^a?": {"minLength": 500}}})",
        R"({"type": "object", "patternProperties":
            {"^a{0,1}": {"minLength": 500, "type": "string"}}})");
}

TEST(SchemaRewrite, OtherNamesStandBesidePlainOnesOnly) {
  for (const char* name : {"é", "a\\\"b", "a\\\\b", "a\\n"}) {
    const std::string schema = std::string(R"({"type": "object", "properties": {")") + name +
                               R"(": {}}, "additionalProperties": )";
    Check((schema + "true}").c_str(), (schema + "false}").c_str());
  }
  const char* plain =
      R"({"type": "object", "properties": {"a b": {}}, "additionalProperties": {"type": "null"}})";
  Check(plain, plain);
}

}  // namespace
}  // namespace oscar
