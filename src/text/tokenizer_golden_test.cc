// Ids against the reference implementation: goldens by tools/make_text_goldens.py.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "text/detokenizer.h"
#include "text/pretokenizer.h"
#include "text/test_data.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

namespace oscar {
namespace {

using Ids = std::vector<TokenId>;

class TokenizerGoldenTest : public testing::TestWithParam<const char*> {
 protected:
  static const nlohmann::ordered_json& Goldens() {
    static const auto goldens = test::ReadJsonData("tokenizer_goldens.json.xz");
    return goldens;
  }
  void SetUp() override {
    for (const auto& set : Goldens().at("sets")) {
      if (set.at("tokenizer") == GetParam()) set_ = &set;
    }
    ASSERT_NE(set_, nullptr);
    // One load a process: the larger files take a quarter of a second.
    static auto& cache = *new std::map<std::string, std::unique_ptr<Tokenizer>>();
    auto& cached = cache[GetParam()];
    if (cached == nullptr) {
      auto loaded = Tokenizer::FromJson(test::ReadTokenizerJson(GetParam()), GetParam());
      ASSERT_TRUE(loaded.has_value()) << loaded.error().message();
      cached = std::make_unique<Tokenizer>(std::move(loaded).value());
    }
    tokenizer_ = cached.get();
  }
  const nlohmann::ordered_json* set_ = nullptr;
  const Tokenizer* tokenizer_ = nullptr;
};

TEST_P(TokenizerGoldenTest, EncodesAsTheReference) {
  int count = 0;
  for (const auto& item : set_->at("encode")) {
    const auto text = item.at("text").get<std::string>();
    const auto trusted = tokenizer_->Encode(text, {.parse_special = true});
    ASSERT_TRUE(trusted.has_value()) << trusted.error().message();
    EXPECT_EQ(*trusted, item.at("ids").get<Ids>()) << testing::PrintToString(text);
    const auto plain = tokenizer_->Encode(text);
    ASSERT_TRUE(plain.has_value());
    const char* key = item.contains("plain_ids") ? "plain_ids" : "ids";
    EXPECT_EQ(*plain, item.at(key).get<Ids>()) << testing::PrintToString(text);
    if (item.contains("decoded")) {
      EXPECT_EQ(tokenizer_->Decode(*trusted, true), item.at("decoded").get<std::string>());
    }
    ++count;
  }
  EXPECT_GE(count, 150);
}

TEST_P(TokenizerGoldenTest, EncodesTheSameAgainFromTheWordCache) {
  for (const auto& item : set_->at("encode")) {
    const auto text = item.at("text").get<std::string>();
    for (int round = 0; round < 2; ++round) {
      EXPECT_EQ(tokenizer_->Encode(text, {.parse_special = true}).value(),
                item.at("ids").get<Ids>());
    }
  }
}

TEST_P(TokenizerGoldenTest, DecodesAsTheReference) {
  for (const auto& item : set_->at("decode")) {
    const auto ids = item.at("ids").get<Ids>();
    EXPECT_EQ(tokenizer_->Decode(ids, false), item.at("text").get<std::string>());
    EXPECT_EQ(tokenizer_->Decode(ids, true), item.at("skipped").get<std::string>());
    for (const bool skip : {false, true}) {
      Detokenizer stream(*tokenizer_, skip);
      std::string text;
      for (const TokenId id : ids) {
        const std::string piece = stream.Push(id);
        EXPECT_TRUE(IsValidUtf8(piece));
        text += piece;
      }
      text += stream.Finish();
      EXPECT_EQ(text, tokenizer_->Decode(ids, skip));
    }
  }
}

TEST_P(TokenizerGoldenTest, KnowsTheVocabulary) {
  EXPECT_EQ(tokenizer_->vocab_size(), set_->at("vocab_size").get<int>());
  EXPECT_EQ(tokenizer_->Encode("one two", {.parse_special = true, .add_special = true}).value(),
            set_->at("with_special").get<Ids>());
  int found = 0;
  for (TokenId id = 0; id < tokenizer_->vocab_size(); ++id) {
    const std::string_view bytes = tokenizer_->TokenBytes(id);
    if (bytes.empty()) continue;
    ++found;
    // An added token of spaces can have the bytes of a vocabulary entry.
    const auto back = tokenizer_->FindToken(bytes);
    ASSERT_TRUE(back.has_value());
    ASSERT_EQ(tokenizer_->TokenBytes(*back), bytes);
  }
  EXPECT_EQ(found, tokenizer_->vocab_size());
  EXPECT_TRUE(tokenizer_->TokenBytes(-1).empty());
  EXPECT_TRUE(tokenizer_->TokenBytes(tokenizer_->vocab_size()).empty());
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerGoldenTest,
                         testing::Values("demo", "qwen3", "gpt2_small", "gpt2_prefix",
                                         "llama3_small"),
                         [](const auto& tested) { return std::string(tested.param); });

// Code points that a class of the pattern language holds, by splitting all of Unicode with it.
std::vector<bool> PointsOf(const std::string& pattern) {
  auto tree = nlohmann::json::parse(R"({"type":"Sequence","pretokenizers":[
      {"type":"Split","pattern":{"Regex":""},"behavior":"Removed","invert":true},
      {"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]})");
  tree["pretokenizers"][0]["pattern"]["Regex"] = pattern;
  const auto splitter = PreTokenizer::FromJson(tree);
  EXPECT_TRUE(splitter.has_value()) << splitter.error().message();
  std::string text;
  std::vector<size_t> start(0x110000, std::string::npos);
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    start[c] = text.size();
    AppendUtf8(c, &text);
  }
  std::vector<PreTokenizer::Word> words;
  EXPECT_TRUE(splitter->Split(&text, &words).ok());
  std::vector<bool> held(text.size() + 1, false);
  for (const auto& word : words) {
    for (size_t i = word.begin; i < word.end; ++i) held[i] = true;
  }
  std::vector<bool> points(0x110000, false);
  for (char32_t c = 0; c < 0x110000; ++c) {
    points[c] = start[c] != std::string::npos && held[start[c]];
  }
  return points;
}

// The two engines may know different versions of Unicode, so a character that ours holds to be
// unassigned may be a letter or a number for the reference. Nothing else may differ.
TEST(CharacterGoldenTest, ClassesAreThoseOfTheReference) {
  const auto goldens = test::ReadJsonData("character_goldens.json.xz");
  ASSERT_FALSE(goldens.is_null());
  const std::vector<bool> unassigned = PointsOf("\\p{Cn}");
  for (const char* name : {"\\p{L}", "\\p{N}", "\\s"}) {
    std::vector<bool> expected(0x110000, false);
    for (const auto& range : goldens.at(name)) {
      for (int c = range[0]; c <= range[1].get<int>(); ++c) expected[static_cast<size_t>(c)] = true;
    }
    const std::vector<bool> held = PointsOf(name);
    for (size_t c = 0; c < held.size(); ++c) {
      if (held[c] != expected[c] && !unassigned[c]) {
        ADD_FAILURE() << name << " U+" << std::hex << c << (held[c] ? " is held" : " is not held");
      }
    }
  }
}

TEST(CharacterGoldenTest, NfcIsThatOfTheReference) {
  const auto goldens = test::ReadJsonData("character_goldens.json.xz");
  const auto changed = goldens.at("nfc").get<std::map<std::string, std::string>>();
  ASSERT_GT(changed.size(), 1000u);
  int different = 0;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    AppendUtf8(c, &text);
    const std::string original = text;
    const bool touched = NormalizeNfc(&text, nullptr);
    if (touched != (text != original)) ++different;
    const auto it = changed.find(std::to_string(static_cast<uint32_t>(c)));
    if (text != (it == changed.end() ? original : it->second)) {
      ++different;
      ADD_FAILURE() << "U+" << std::hex << static_cast<uint32_t>(c);
    }
  }
  EXPECT_EQ(different, 0);
}

TEST(DemoGoldenTest, AgreesWithTheModelsOwnGoldens) {
  const auto text = ReadFile(std::string(OSCAR_TEST_DATA) + "/golden/golden.json", 1 << 20);
  ASSERT_TRUE(text.has_value()) << text.error().message();
  const auto goldens = ParseOrderedJson(*text, "golden.json").value();
  const auto tokenizer =
      Tokenizer::FromJson(test::ReadTokenizerJson("demo"), "demo tokenizer").value();
  for (const auto& item : goldens.at("texts")) {
    const auto ids = item.at("ids").get<Ids>();
    EXPECT_EQ(tokenizer.Encode(item.at("text").get<std::string>()).value(), ids);
    EXPECT_EQ(tokenizer.Decode(ids, true), item.at("decoded").get<std::string>());
  }
  for (const auto& chat : goldens.at("chats")) {
    const auto prompt = chat.at("prompt").get<std::string>();
    EXPECT_EQ(tokenizer.Encode(prompt, {.parse_special = true}).value(),
              chat.at("prompt_ids").get<Ids>());
    EXPECT_EQ(tokenizer.Decode(chat.at("greedy_ids").get<Ids>(), false),
              chat.at("greedy_text").get<std::string>());
  }
}

}  // namespace
}  // namespace oscar
