#include "generation/choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "generation/stop_matcher.h"

namespace oscar::server {
namespace {

// The specification: cut at the match that ends first, of those the longest.
std::pair<std::string, bool> Cut(const std::string& text, const std::vector<std::string>& stops) {
  size_t best_end = std::string::npos, best_start = 0;
  for (const std::string& stop : stops) {
    const size_t at = text.find(stop);
    if (at == std::string::npos) continue;
    const size_t end = at + stop.size();
    if (end < best_end || (end == best_end && at < best_start)) {
      best_end = end;
      best_start = at;
    }
  }
  if (best_end == std::string::npos) return {text, false};
  return {text.substr(0, best_start), true};
}

TEST(StopMatcher, AgreesWithASearchHoweverTheTextIsCut) {
  std::mt19937 random(7);
  int matches = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops(1 + random() % 4);
    for (std::string& stop : stops) {
      for (size_t n = 1 + random() % 4; stop.size() < n;) stop += "abc"[random() % 3];
    }
    std::string text;
    for (size_t n = random() % 40; text.size() < n;) text += "abc"[random() % 3];
    const auto [expected, stopped] = Cut(text, stops);
    StopMatcher matcher(stops, false);
    std::string out;
    bool matched = false;
    for (size_t at = 0; at < text.size() && !matched;) {
      const size_t size = 1 + random() % 5;
      matched = matcher.Push(std::string_view(text).substr(at, size), true, &out);
      at += size;
      // Nothing that a stop string takes back may be out.
      ASSERT_TRUE(expected.starts_with(out)) << text;
    }
    if (!matched) matcher.Finish(&out);
    ASSERT_EQ(out, expected) << text;
    ASSERT_EQ(matched, stopped) << text;
    matches += matched;
  }
  EXPECT_GT(matches, 500);
}

TEST(StopMatcher, HoldsNoMoreThanItMust) {
  StopMatcher matcher({"</end>"}, false);
  std::string out;
  EXPECT_FALSE(matcher.Push("hello <", true, &out));
  EXPECT_EQ(out, "hello ");
  EXPECT_FALSE(matcher.Push("b", true, &out));
  EXPECT_EQ(out, "hello <b");
}

TEST(StopMatcher, IncludeAndArming) {
  StopMatcher keeps({"ab"}, true);
  std::string out;
  EXPECT_TRUE(keeps.Push("xaby", true, &out));
  EXPECT_EQ(out, "xab");
  StopMatcher late({"ab"}, false);
  out.clear();
  EXPECT_FALSE(late.Push("ab a", false, &out));
  EXPECT_TRUE(late.Push("b", true, &out));
  EXPECT_EQ(out, "ab ");
}

// A tokenizer whose tokens are the bytes 0..255 and a few words, made by hand.
const Tokenizer& Demo() {
  static const Tokenizer tokenizer = [] {
    auto loaded = Tokenizer::Load(OSCAR_DEMO_MODEL);
    EXPECT_TRUE(loaded.has_value()) << loaded.error().ToString();
    return std::move(*loaded);
  }();
  return tokenizer;
}

struct Fed {
  std::string text;
  std::vector<std::string> pieces;
  std::vector<std::string> logprob_tokens;
  ChoiceAssembler assembler;
};

Fed Feed(const std::string& text, ChoiceOptions options, bool bytewise = false) {
  options.logprobs = true;
  Fed run{"", {}, {}, ChoiceAssembler(Demo(), options)};
  std::vector<int32_t> ids;
  if (bytewise) {
    for (const char c : text) ids.push_back(*Demo().FindToken(std::string(1, c)));
  } else {
    ids = *Demo().Encode(text);
  }
  bool stopped = false;
  const auto take = [&](ChoicePiece& piece) {
    run.text += piece.content;
    if (!piece.content.empty()) run.pieces.push_back(piece.content);
    for (const LogprobEntry& entry : piece.logprobs) run.logprob_tokens.push_back(entry.bytes);
  };
  for (const int32_t id : ids) {
    ChoicePiece piece;
    GeneratedToken token;
    token.token = id;
    stopped = run.assembler.OnToken(token, &piece);
    take(piece);
    if (stopped) break;
  }
  if (!stopped) {
    ChoicePiece piece;
    run.assembler.OnFinish(FinishReason::kLength, &piece);
    take(piece);
  }
  return run;
}

std::string Join(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& part : parts) out += part;
  return out;
}

TEST(ChoiceAssembler, NeverHalfACharacterAndLogprobsCoverTheText) {
  const std::string text = "héllo 世界 🙂 done";
  const Fed run = Feed(text, {}, /*bytewise=*/true);
  EXPECT_EQ(run.text, text);
  for (const std::string& piece : run.pieces) {
    EXPECT_TRUE(Demo().Encode(piece).has_value()) << "not UTF-8: " << piece;
  }
  EXPECT_EQ(Join(run.logprob_tokens), text);
  EXPECT_EQ(run.assembler.finish_reason(), "length");
  EXPECT_EQ(run.assembler.num_tokens(), static_cast<int64_t>(text.size()));
}

TEST(ChoiceAssembler, StopsAcrossTokensAndCharacters) {
  ChoiceOptions options;
  options.stop = {"界 🙂"};
  const Fed run = Feed("héllo 世界 🙂 done", options, /*bytewise=*/true);
  EXPECT_EQ(run.text, "héllo 世");
  EXPECT_EQ(run.assembler.finish_reason(), "stop");
  EXPECT_EQ(run.assembler.stop_string(), "界 🙂");
  EXPECT_EQ(Join(run.logprob_tokens), "héllo 世");
}

TEST(ChoiceAssembler, StopAtPositionZeroAndHeldTextComesOutAtTheEnd) {
  ChoiceOptions options;
  options.stop = {"Once"};
  const Fed run = Feed("Once upon", options);
  EXPECT_EQ(run.text, "");
  EXPECT_TRUE(run.logprob_tokens.empty());
  options.stop = {"upon a time"};
  EXPECT_EQ(Feed("Once upon a", options).text, "Once upon a");
}

TEST(ChoiceAssembler, MinTokensHoldsStopStringsOff) {
  ChoiceOptions options;
  options.stop = {"a"};
  options.min_tokens = 3;
  const Fed run = Feed("aaaaaa", options, /*bytewise=*/true);
  EXPECT_EQ(run.text, "aaa");
  EXPECT_EQ(run.assembler.num_tokens(), 4);
}

TEST(ChoiceAssembler, StopTokensAreCountedAndNotShown) {
  const int32_t eos = *Demo().FindToken("<|im_end|>");
  for (const bool by_request : {false, true}) {
    ChoiceOptions options;
    (by_request ? options.stop_token_ids : options.eos_ids) = {eos};
    ChoiceAssembler assembler(Demo(), options);
    ChoicePiece piece;
    GeneratedToken token;
    token.token = *Demo().FindToken("a");
    EXPECT_FALSE(assembler.OnToken(token, &piece));
    token.token = eos;
    EXPECT_FALSE(assembler.OnToken(token, &piece));
    assembler.OnFinish(FinishReason::kStop, &piece);
    EXPECT_EQ(piece.content, "a");
    EXPECT_EQ(assembler.num_tokens(), 2);
    EXPECT_EQ(assembler.finish_reason(), "stop");
    EXPECT_EQ(assembler.stop_token().has_value(), by_request);
  }
}

}  // namespace
}  // namespace oscar::server
