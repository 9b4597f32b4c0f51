#include "text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/rng.h"
#include "text/pretokenizer.h"
#include "text/test_data.h"
#include "text/unicode.h"

namespace oscar {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;
using Ids = std::vector<TokenId>;

// All 256 bytes, a few merges, one special token.
json SmallFile() {
  json vocab;
  for (size_t byte = 0; byte < 256; ++byte) {
    std::string symbol;
    AppendUtf8(ByteAlphabet()[byte], &symbol);
    vocab[symbol] = byte;
  }
  vocab["ab"] = 256;
  vocab["abc"] = 257;
  vocab["bc"] = 258;
  vocab["aa"] = 259;
  vocab["aaaa"] = 260;
  return {
      {"version", "1.0"},
      {"added_tokens", {{{"id", 300}, {"content", "<s>"}, {"special", true}}}},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model",
       {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"b c", "a b", "a bc", "a a", "aa aa"}}}}};
}

std::string ErrorOf(const json& file) {
  const auto loaded = Tokenizer::FromJson(file.dump(), "t.json");
  return loaded.has_value() ? "" : loaded.error().message();
}

TEST(TokenizerTest, MergesByRankThenPosition) {
  const auto tokenizer = Tokenizer::FromJson(SmallFile().dump(), "small");
  ASSERT_TRUE(tokenizer.has_value()) << tokenizer.error().message();
  EXPECT_EQ(tokenizer->Encode("abc").value(), (Ids{257}));
  EXPECT_EQ(tokenizer->Encode("ab").value(), (Ids{256}));
  EXPECT_EQ(tokenizer->Encode("aaa").value(), (Ids{259, 'a'}));
  EXPECT_EQ(tokenizer->Encode("aaaaa").value(), (Ids{260, 'a'}));
  EXPECT_EQ(tokenizer->vocab_size(), 301);
  EXPECT_FALSE(tokenizer->IsToken(290));
  EXPECT_TRUE(tokenizer->IsSpecial(300));
}

// The scan for short words and the heap for long ones must agree: cut long words at every length
// around the threshold and compare with a merge loop that knows neither.
TEST(TokenizerTest, LongAndShortWordsMergeAlike) {
  const auto tokenizer =
      Tokenizer::FromJson(test::ReadTokenizerJson("gpt2_small"), "gpt2_small").value();
  const json file = json::parse(test::ReadTokenizerJson("gpt2_small"));
  std::map<std::pair<std::string, std::string>, int> ranks;
  for (const auto& merge : file["model"]["merges"]) {
    const auto text = merge.get<std::string>();
    const size_t space = text.find(' ');
    ranks.emplace(std::pair(text.substr(0, space), text.substr(space + 1)),
                  static_cast<int>(ranks.size()));
  }
  const Philox rng(3, 0);
  for (uint64_t round = 0; round < 200; ++round) {
    const size_t length = 1 + rng.Below(round * 100, 90);
    std::string word;
    std::vector<std::string> symbols;
    for (size_t i = 0; i < length; ++i) {
      word.push_back("etaoinshr"[rng.Below(round * 100 + 1 + i, 9)]);
      symbols.emplace_back(1, word.back());
    }
    for (;;) {
      int best = std::numeric_limits<int>::max();
      size_t at = 0;
      for (size_t i = 0; i + 1 < symbols.size(); ++i) {
        const auto it = ranks.find({symbols[i], symbols[i + 1]});
        if (it != ranks.end() && it->second < best) {
          best = it->second;
          at = i;
        }
      }
      if (best == std::numeric_limits<int>::max()) break;
      symbols[at] += symbols[at + 1];
      symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(at) + 1);
    }
    std::vector<std::string> actual;
    const Ids ids = tokenizer.Encode(word).value();
    for (const TokenId id : ids) {
      actual.emplace_back(tokenizer.TokenBytes(id));
    }
    ASSERT_EQ(actual, symbols) << word;
  }
}

TEST(TokenizerTest, SpecialTokensNeedTrustedBytes) {
  const auto tokenizer = Tokenizer::FromJson(SmallFile().dump(), "small").value();
  const Ids plain = {'<', 's', '>'};
  EXPECT_EQ(tokenizer.Encode("<s>").value(), plain);
  EXPECT_EQ(tokenizer.Encode("<s>", {.parse_special = true}).value(), (Ids{300}));
  const auto encode = [&](std::vector<TextSegment> segments) {
    return tokenizer.Encode(segments).value();
  };
  EXPECT_EQ(encode({{"<s>", true}, {"<s>", false}, {"<s>", true}}), (Ids{300, '<', 's', '>', 300}));
  // Not even half of one may come from the user.
  EXPECT_EQ(encode({{"<", true}, {"s>", false}}), plain);
  EXPECT_EQ(encode({{"<s", false}, {">", true}}), plain);
  EXPECT_EQ(encode({{"<", true}, {"s", true}, {">", true}}), (Ids{300}));
  // Words are cut and merged across the boundary as in one text.
  EXPECT_EQ(encode({{"a", true}, {"b", false}, {"c", true}}), (Ids{257}));
  EXPECT_EQ(encode({}), Ids{});
  EXPECT_EQ(encode({{"<", false}, {"<s>", true}}), (Ids{'<', 300}));
}

// Expected ids are those of the tokenizers library: the search for tokens goes on right behind one
// that strips, so that a token of spaces there is both stripped and found.
TEST(TokenizerTest, FindsTokensInStrippedSpace) {
  json file = SmallFile();
  file["added_tokens"].push_back(
      {{"id", 301}, {"content", "<m>"}, {"lstrip", true}, {"rstrip", true}});
  file["added_tokens"].push_back({{"id", 302}, {"content", "  "}, {"normalized", false}});
  file["added_tokens"][1]["normalized"] = false;
  const auto tokenizer = Tokenizer::FromJson(file.dump(), "small");
  ASSERT_TRUE(tokenizer.has_value()) << tokenizer.error().message();
  EXPECT_EQ(tokenizer->Encode("x<m> y").value(), (Ids{'x', 301, 'y'}));
  EXPECT_EQ(tokenizer->Encode("x<m>  y").value(), (Ids{'x', 301, 302, 'y'}));
  EXPECT_EQ(tokenizer->Encode("x<m>   y").value(), (Ids{'x', 301, 302, ' ', 'y'}));
  EXPECT_EQ(tokenizer->Encode("x<m>  <m>  y").value(), (Ids{'x', 301, 302, 301, 302, 'y'}));
}

TEST(TokenizerTest, TrustSurvivesNormalisation) {
  json file = SmallFile();
  file["normalizer"] = {{"type", "NFC"}};
  file["added_tokens"][0]["normalized"] = true;
  const auto tokenizer = Tokenizer::FromJson(file.dump(), "small").value();
  const std::vector<TextSegment> segments = {
      {"<s>", true}, {"e\xCC\x81<s>e\xCC\x81", false}, {"<s>", true}};
  EXPECT_EQ(tokenizer.Encode(segments).value(),
            (Ids{300, 0xC3, 0xA9, '<', 's', '>', 0xC3, 0xA9, 300}));
}

TEST(TokenizerTest, RefusesByName) {
  const auto changed = [](auto edit) {
    json file = SmallFile();
    edit(file);
    return ErrorOf(file);
  };
  EXPECT_EQ(changed([](json&) {}), "");
  EXPECT_THAT(changed([](json& f) { f["surprise"] = 1; }), HasSubstr("\"surprise\""));
  EXPECT_THAT(changed([](json& f) { f["version"] = "2.0"; }), HasSubstr("2.0"));
  EXPECT_THAT(changed([](json& f) { f["model"]["type"] = "Unigram"; }), HasSubstr("\"Unigram\""));
  EXPECT_THAT(changed([](json& f) { f["model"]["dropout"] = 0.1; }), HasSubstr("\"dropout\""));
  EXPECT_THAT(changed([](json& f) { f["model"]["byte_fallback"] = true; }),
              HasSubstr("byte_fallback"));
  EXPECT_THAT(changed([](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }),
              HasSubstr("\"end_of_word_suffix\""));
  EXPECT_THAT(changed([](json& f) { f["model"]["vocab"].erase("a"); }), HasSubstr("\"a\""));
  EXPECT_THAT(changed([](json& f) { f["model"]["vocab"].erase("z"); }), HasSubstr("byte 0x7A"));
  EXPECT_THAT(changed([](json& f) { f["model"]["vocab"].erase("abc"); }), HasSubstr("merge 2"));
  EXPECT_THAT(changed([](json& f) { f["model"]["vocab"]["q1"] = 256; }), HasSubstr("256"));
  EXPECT_THAT(changed([](json& f) { f["model"]["vocab"]["q1"] = -1; }), HasSubstr("q1"));
  EXPECT_THAT(changed([](json& f) { f["model"]["vocab"]["q1"] = 4000000000; }), HasSubstr("q1"));
  EXPECT_THAT(changed([](json& f) { f["model"]["merges"][0] = "a b c"; }), HasSubstr("merges[0]"));
  EXPECT_THAT(changed([](json& f) {
                f["normalizer"] = {{"type", "NFKC"}};
              }),
              HasSubstr("\"NFKC\""));
  EXPECT_THAT(changed([](json& f) {
                f["pre_tokenizer"] = {{"type", "Metaspace"}};
              }),
              HasSubstr("\"Metaspace\""));
  EXPECT_THAT(changed([](json& f) { f["pre_tokenizer"]["strange"] = 1; }),
              HasSubstr("\"strange\""));
  EXPECT_THAT(changed([](json& f) { f["pre_tokenizer"] = nullptr; }), HasSubstr("pre_tokenizer"));
  EXPECT_THAT(changed([](json& f) { f["decoder"]["type"] = "WordPiece"; }),
              HasSubstr("\"WordPiece\""));
  EXPECT_THAT(changed([](json& f) {
                f["post_processor"] = {{"type", "RobertaProcessing"}};
              }),
              HasSubstr("\"RobertaProcessing\""));
  EXPECT_THAT(changed([](json& f) { f["added_tokens"][0]["id"] = 5; }), HasSubstr("id 5"));
  EXPECT_THAT(changed([](json& f) { f["added_tokens"][0]["odd"] = 5; }), HasSubstr("\"odd\""));
  EXPECT_THAT(Tokenizer::FromJson("{", "broken.json").error().message(), HasSubstr("broken.json"));
  EXPECT_EQ(Tokenizer::Load("/nonexistent/tokenizer.json").error().code(), StatusCode::kNotFound);
}

TEST(TokenizerTest, RefusesInvalidUtf8) {
  const auto tokenizer = Tokenizer::FromJson(SmallFile().dump(), "small").value();
  const auto result = tokenizer.Encode("ab\xC3");
  ASSERT_FALSE(result.has_value());
  EXPECT_THAT(result.error().message(), HasSubstr("byte 2"));
}

TEST(PatternTest, TranslatesOrRefuses) {
  EXPECT_EQ(TranslatePattern(R"(\p{Lu}+|\p{Nd}{1,3})").value(), R"(\p{Lu}+|\p{Nd}{1,3})");
  EXPECT_EQ(TranslatePattern(R"(\s+(?!\S))").value(),
            R"([\t-\r\x{85}\p{Z}]+(?![^\t-\r\x{85}\p{Z}]))");
  EXPECT_EQ(TranslatePattern(R"([^\s\p{Lu}])").value(), R"([^\t-\r\x{85}\p{Z}\p{Lu}])");
  // Properties that PCRE2 may know too few members of are spelled out; the rest of them follows.
  EXPECT_THAT(TranslatePattern(R"(\p{L}+)").value(), StartsWith(R"([\p{L}\x{1C89}-)"));
  EXPECT_THAT(TranslatePattern(R"(\P{N})").value(), StartsWith(R"([^\p{N}\x{10D40}-)"));
  EXPECT_THAT(TranslatePattern(R"([^\p{M}a])").value(), EndsWith(R"(-\x{1E5EF}a])"));
  for (const char* bad :
       {"^a", "a$", "a{1,3}+", "[[:alpha:]]", "[a&&b]", R"(\w)", R"(\b)", R"([\S])", "(?m:a)",
        "(?<n>a)", "(*FAIL)", R"(\p)", "[a", "a\\", R"(\K)"}) {
    EXPECT_FALSE(TranslatePattern(bad).has_value()) << bad;
  }
}

// Letters and numbers of Unicode 15 and 16, as the tokenizers library splits them.
TEST(PatternTest, KnowsNewLettersAndNumbers) {
  json tree = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  const auto splitter = PreTokenizer::FromJson(tree);
  ASSERT_TRUE(splitter.has_value());
  const auto split = [&](std::string text) {
    std::vector<PreTokenizer::Word> words;
    EXPECT_TRUE(splitter->Split(&text, &words).ok());
    std::vector<std::string> out;
    for (const auto& word : words) out.push_back(text.substr(word.begin, word.end - word.begin));
    return out;
  };
  // A new CJK letter (U+31350) and an old one are one word; a Kaktovik digit (U+1D2C0) is a number.
  EXPECT_THAT(split("\U00031350\u6F22!"), ElementsAre("\U00031350\u6F22", "!"));
  EXPECT_THAT(split("a\U0001D2C01!"), ElementsAre("a", "\U0001D2C01", "!"));
}

// Four times the text may cost four times the work, and a logarithm; quadratic work costs sixteen.
// Processor time, so that neither a busy machine nor a sanitizer matters.
TEST(TokenizerTest, AdversarialTextStaysBounded) {
  const auto tokenizer = Tokenizer::FromJson(test::ReadTokenizerJson("demo"), "demo").value();
  const auto seconds = [&](const std::string& text) {
    const std::clock_t start = std::clock();
    const auto ids = tokenizer.Encode(text, {.parse_special = true});
    const double elapsed = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    EXPECT_TRUE(ids.has_value()) << ids.error().message();
    std::string normal = text;
    NormalizeNfc(&normal, nullptr);
    EXPECT_EQ(tokenizer.Decode(*ids, false), normal);
    return elapsed;
  };
  for (const std::string unit : {"a", " ", "\n", "<", "'", " \n", "\xCC\x81\xCC\xA3", "<|im_star",
                                 "ab ", "1", "\xE4\xB8\x80"}) {
    std::string once, four_times;
    while (once.size() < (32 << 10)) once += unit;
    while (four_times.size() < (128 << 10)) four_times += unit;
    EXPECT_LT(seconds(four_times), 8 * seconds(once) + 0.05) << testing::PrintToString(unit);
  }
}

TEST(TokenizerTest, ThreadsShareOneTokenizer) {
  const auto tokenizer =
      Tokenizer::FromJson(test::ReadTokenizerJson("llama3_small"), "llama3_small").value();
  const std::string text =
      "Several threads encode the same words, and different words, at the same time. ";
  const Ids expected = tokenizer.Encode(text).value();
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        if (tokenizer.Encode(text).value() != expected) ++wrong[t];
        (void)tokenizer.Encode("word" + std::to_string(i * 4 + static_cast<int>(t)));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace oscar
