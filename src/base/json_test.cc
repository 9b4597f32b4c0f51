#include "base/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace oscar {
namespace {

TEST(Json, ParsesAndKeepsOrder) {
  auto parsed = ParseOrderedJson(R"({"b": 1, "a": [true, null]})", "test");
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(parsed->dump(), R"({"b":1,"a":[true,null]})");
}

TEST(Json, ErrorsNameSourceAndByte) {
  auto bad = ParseJson(R"({"a": })", "config.json");
  ASSERT_FALSE(bad.has_value());
  EXPECT_EQ(bad.error().code(), StatusCode::kDataLoss);
  EXPECT_NE(bad.error().message().find("config.json: invalid JSON at byte 7"), std::string::npos)
      << bad.error().message();
  EXPECT_FALSE(ParseJson("", "x").has_value());
  EXPECT_FALSE(ParseJson("{} trailing", "x").has_value());
  const std::string_view zero("{}\0 trailing", 12);
  EXPECT_FALSE(ParseJson(zero, "x").has_value());
  EXPECT_FALSE(SplitJsonObject(zero, "x").has_value());
  EXPECT_FALSE(ParseJson("\"\xff\"", "x").has_value());
}

// The parser quotes what it read last, which may be long and may hold any byte.
TEST(Json, ErrorsAreOneShortPrintableLine) {
  for (const std::string& text :
       {std::string("[[\x7f"), std::string("\"\xc3("), "\"" + std::string(100000, 'x'),
        "{\"" + std::string(100000, 'x') + "\n\":", std::string("[1e999]"),
        std::string("\x1b[2J")}) {
    for (const auto& error : {ParseJson(text, "f").error(), ParseStrictJson(text, "f").error(),
                              ParseOrderedJson(text, "f").error()}) {
      EXPECT_LT(error.message().size(), 2000u);
      for (const char c : error.message()) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << error.message();
    }
  }
}

TEST(Json, DepthIsBounded) {
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  auto bad = ParseJson(deep, "body");
  ASSERT_FALSE(bad.has_value());
  EXPECT_NE(bad.error().message().find("deeper than 64"), std::string::npos);
  // Brackets inside strings do not count.
  EXPECT_TRUE(ParseJson("\"" + std::string(100, '[') + "\\\"" + std::string(100, '{') + "\"", "s")
                  .has_value());
}

TEST(Json, StrictRefusesDuplicateKeysAtAnyLevel) {
  EXPECT_TRUE(ParseStrictJson(R"({"a": {"a": 1}, "b": [{"a": 1}, {"a": 2}]})", "x").has_value());
  for (const char* text : {R"({"k\n": 1, "b": 2, "k\n": 1})", R"([{"b": {"k\n": 1, "k\n": 2}}])"}) {
    auto bad = ParseStrictJson(text, "index.json");
    ASSERT_FALSE(bad.has_value()) << text;
    EXPECT_EQ(bad.error().message(), R"(index.json: duplicate key 'k\x0a')");
  }
}

TEST(Json, OrderedObjectsAreBounded) {
  // Quadratic insertion: without the bound this body takes minutes.
  const auto object = [](size_t members) {
    std::string text = "[{";
    for (size_t i = 0; i < members; ++i) text += (i ? ",\"" : "\"") + std::to_string(i) + ":\":{}";
    return text + "}]";
  };
  EXPECT_TRUE(ParseOrderedJson(object(kMaxOrderedKeys), "body").has_value());
  const auto wide = ParseOrderedJson(object(500'000), "body");
  ASSERT_FALSE(wide.has_value());
  EXPECT_EQ(wide.error().code(), StatusCode::kDataLoss);
}

TEST(Json, ObjectsAreSplitWithoutBuildingThem) {
  const std::string text =
      " { \"a\" :1, \"b\\n\":[ {\"x\": \"]},\\\"\"} ,2 ] , \"\":\"s\", \"a\": {} } ";
  const auto members = SplitJsonObject(text, "body");
  ASSERT_TRUE(members.has_value()) << members.error().ToString();
  std::string seen;
  for (const JsonMember& member : *members) {
    seen += member.name + "=" + std::string(member.value) + "|";
  }
  EXPECT_EQ(seen, "a=1|b\n=[ {\"x\": \"]},\\\"\"} ,2 ]|=\"s\"|a={}|");
  EXPECT_TRUE(SplitJsonObject("{}", "body")->empty());
  EXPECT_EQ(SplitJsonObject("[{}]", "body").error().code(), StatusCode::kInvalidArgument);
  for (const char* bad : {"", "{", "{\"a\"}", "{\"a\":1,}", "{} {}", "{\"a\": nul}"}) {
    EXPECT_EQ(SplitJsonObject(bad, "body").error().message(),
              ParseOrderedJson(bad, "body").error().message())
        << bad;
  }
  EXPECT_FALSE(SplitJsonObject("{\"a\":1e999}", "body").has_value());
  EXPECT_FALSE(SplitJsonObject("{\"a\":" + std::string(70, '[') + std::string(70, ']') + "}", "b"));
}

TEST(Json, CostCountsWhatHasMemoryOfItsOwn) {
  EXPECT_EQ(JsonCost("[1, -2.5e3,true , null]"), 8u + 4);
  EXPECT_EQ(JsonCost("{\"a,b\": [[], {}]}"), 8u * 5);
}

TEST(Json, IntegersBeyond64BitsAreFound) {
  for (const char* fits :
       {"18446744073709551615", "-9223372036854775808", "[1, -1, 0]", "1e300", "1.5e+30",
        "123456789012345678901234.5", "{\"99999999999999999999999\": \"\\\"99999999999999999999\"}",
        "", "x"}) {
    EXPECT_TRUE(CheckIntegersFit(fits, "f").ok()) << fits;
  }
  for (const char* large : {"18446744073709551616", "-9223372036854775809",
                            "[\"a\", {\"b\": "
                            "123456789012345678901234}]"}) {
    EXPECT_FALSE(CheckIntegersFit(large, "f").ok()) << large;
  }
  EXPECT_EQ(CheckIntegersFit("[1, 18446744073709551616]", "body").message(),
            "body: the integer at byte 4 does not fit 64 bits");
}

}  // namespace
}  // namespace oscar
