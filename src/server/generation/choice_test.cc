#include "generation/choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace oscar::server {
namespace {

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
