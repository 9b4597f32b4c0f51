// SentencePiece-style tokenizers against the reference implementation: goldens by
// tools/make_sentencepiece_goldens.py.
#include "text/sentence_piece.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "text/detokenizer.h"
#include "text/test_data.h"
#include "text/tokenizer.h"

namespace oscar {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Ids = std::vector<TokenId>;

const json& Goldens() {
  static const json goldens = json::parse(test::ReadTextData("sentencepiece_goldens.json.xz"));
  return goldens;
}

json FileOf(const json& form) {
  return {{"version", "1.0"},
          {"added_tokens", form.at("added_tokens")},
          {"normalizer", form.at("normalizer")},
          {"pre_tokenizer", form.at("pre_tokenizer")},
          {"post_processor", nullptr},
          {"decoder", form.at("decoder")},
          {"model", Goldens().at("model")}};
}

TEST(SentencePiece, EncodesAndDecodesAsTheReference) {
  size_t forms = 0;
  for (const json& form : Goldens().at("forms")) {
    const std::string name = form.at("name");
    const auto tokenizer = Tokenizer::FromJson(FileOf(form).dump(), name);
    ASSERT_TRUE(tokenizer.has_value()) << tokenizer.error().message();
    for (const json& item : form.at("items")) {
      const std::string text = item.at("text");
      const Ids expected = item.at("ids").get<Ids>();
      const auto ids = tokenizer->Encode(text, {.parse_special = true});
      ASSERT_TRUE(ids.has_value()) << ids.error().message();
      EXPECT_EQ(*ids, expected) << name << ": " << testing::PrintToString(text);
      EXPECT_EQ(tokenizer->Decode(expected, true), item.at("decoded").get<std::string>()) << name;
      EXPECT_EQ(tokenizer->Decode(expected, false), item.at("decoded_all").get<std::string>())
          << name;
      // A stream has the leading space, and no other difference.
      Detokenizer stream(*tokenizer, true);
      std::string streamed;
      for (const TokenId id : expected) streamed += stream.Push(id);
      streamed += stream.Finish();
      const std::string decoded = tokenizer->Decode(expected, true);
      EXPECT_TRUE(streamed == decoded || streamed == " " + decoded) << name << ": " << text;
    }
    ++forms;
  }
  EXPECT_EQ(forms, 8u);
}

// Special tokens are found in trusted bytes alone, whatever spaces were put before them.
TEST(SentencePiece, TrustKeepsItsPlace) {
  for (const json& form : Goldens().at("forms")) {
    const auto tokenizer = Tokenizer::FromJson(FileOf(form).dump(), "form");
    const TokenId begin = *tokenizer->FindToken("<s>");
    const std::vector<TextSegment> segments = {
        {"<s>", true}, {"a \xE2\x96\x81 <s> b", false}, {"<s>", true}};
    const Ids ids = *tokenizer->Encode(segments);
    EXPECT_EQ(std::count(ids.begin(), ids.end(), begin), 2) << form.at("name");
    EXPECT_EQ(ids.front(), begin);
    EXPECT_EQ(ids.back(), begin);
  }
}

TEST(SentencePiece, RefusesByName) {
  const auto changed = [](auto edit) {
    json file = FileOf(Goldens().at("forms")[0]);
    edit(file);
    const auto tokenizer = Tokenizer::FromJson(file.dump(), "file");
    return tokenizer.has_value() ? std::string() : std::string(tokenizer.error().message());
  };
  EXPECT_EQ(changed([](json&) {}), "");
  EXPECT_THAT(changed([](json& f) { f["model"]["vocab"].erase("<0x41>"); }), HasSubstr("<0x41>"));
  EXPECT_THAT(changed([](json& f) { f["normalizer"] = {{"type", "NFKC"}}; }), HasSubstr("NFKC"));
  EXPECT_THAT(changed([](json& f) { f["normalizer"] = nullptr; }), HasSubstr("Metaspace"));
  EXPECT_THAT(changed([](json& f) {
                f["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "_"}};
                f["normalizer"] = nullptr;
              }),
              HasSubstr("U+2581"));
  EXPECT_THAT(changed([](json& f) {
                f["pre_tokenizer"] = {{"type", "Whitespace"}};
              }),
              HasSubstr("Metaspace"));
  EXPECT_THAT(changed([](json& f) {
                f["decoder"] = {{"type", "ByteLevel"}};
              }),
              HasSubstr("ByteLevel"));
  EXPECT_THAT(changed([](json& f) { f["decoder"]["decoders"].erase(1); }),
              HasSubstr("ByteFallback"));
  EXPECT_THAT(changed([](json& f) { f["decoder"]["decoders"][3]["stop"] = 1; }),
              HasSubstr("Strip"));
}

}  // namespace
}  // namespace oscar
