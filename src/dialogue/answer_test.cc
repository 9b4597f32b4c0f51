#include "dialogue/answer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

namespace oscar {
namespace {

namespace fs = std::filesystem;

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

const Tokenizer& Demo() {
  static const Tokenizer tokenizer = [] {
    auto loaded = Tokenizer::Load(OSCAR_DEMO_MODEL);
    EXPECT_TRUE(loaded.has_value()) << loaded.error().ToString();
    return std::move(*loaded);
  }();
  return tokenizer;
}

// Everything an answer gives when it is `text`, one byte per token, and then ends by `reason`.
struct Told {
  AnswerPiece piece;
  FinishReason reason;
  std::optional<std::string> stop_string;
  int64_t reasoning_tokens;
};

Told Tell(const std::string& text, const AnswerFormat& format, FinishReason reason) {
  AnswerAssembler answer(Demo(), format);
  Told told;
  for (const char c : text) {
    if (answer.OnToken(*Demo().FindToken(std::string(1, c)), &told.piece)) break;
  }
  answer.OnFinish(reason, &told.piece);
  told.reason = answer.finish_reason();
  told.stop_string = answer.stop_string();
  told.reasoning_tokens = answer.reasoning_tokens().value_or(-1);
  return told;
}

TEST(AnswerAssembler, SplitsReasoning) {
  AnswerFormat format;
  format.syntax.reasoning.emplace();
  Told told = Tell("<think>\nhm\n</think>\n\n42", format, FinishReason::kStop);
  EXPECT_EQ(told.piece.reasoning, "hm");
  EXPECT_EQ(told.piece.content, "42");
  EXPECT_EQ(told.piece.tokens, 23u);
  EXPECT_GT(told.reasoning_tokens, 2);
  // Without a format, or where the tag comes later, it is content.
  told = Tell("<think>hm</think>42", {}, FinishReason::kStop);
  EXPECT_EQ(told.piece.content, "<think>hm</think>42");
  EXPECT_EQ(told.reasoning_tokens, -1);
  EXPECT_EQ(Tell("a <think>b</think>", format, FinishReason::kStop).piece.content,
            "a <think>b</think>");
  format.syntax.starts_in_reasoning = true;
  told = Tell("hm</think>42", format, FinishReason::kStop);
  EXPECT_EQ(told.piece.reasoning, "hm");
  EXPECT_EQ(told.piece.content, "42");
}

TEST(AnswerAssembler, ReasoningCutByTheLimitIsReasoning) {
  AnswerFormat format;
  format.syntax.reasoning.emplace();
  const Told told = Tell("<think>let me see</thi", format, FinishReason::kLength);
  EXPECT_EQ(told.piece.reasoning, "let me see</thi");
  EXPECT_EQ(told.piece.content, "");
  EXPECT_EQ(told.reason, FinishReason::kLength);
}

TEST(AnswerAssembler, StopStringsCountInReasoningTooAndWinOverTheReason) {
  AnswerFormat format;
  format.syntax.reasoning.emplace();
  format.stop = {"see"};
  Told told = Tell("<think>let me see</think>", format, FinishReason::kCancelled);
  EXPECT_EQ(told.piece.reasoning, "let me");
  EXPECT_EQ(told.reason, FinishReason::kStop);
  EXPECT_EQ(told.stop_string, "see");
  format.include_stop = true;
  told = Tell("<think>let me see</think>", format, FinishReason::kLength);
  EXPECT_EQ(told.piece.reasoning, "let me see");
}

AnswerFormat WithCalls(CallFormat calls) {
  AnswerFormat format;
  format.syntax.calls = calls;
  format.syntax.tools = std::make_shared<const ToolSet>(
      nlohmann::ordered_json::parse(R"([{"type": "function", "function": {"name": "f"}}])"));
  return format;
}
constexpr const char* kHermesCall = "<tool_call>{\"name\": \"f\"}</tool_call>";

TEST(AnswerAssembler, CallsEndAnAnswer) {
  const AnswerFormat format = WithCalls(CallFormat::kHermes);
  Told told = Tell(std::string("ok\n") + kHermesCall, format, FinishReason::kStop);
  EXPECT_EQ(told.piece.content, "ok");
  ASSERT_EQ(told.piece.tool_calls.size(), 1u);
  EXPECT_EQ(told.piece.tool_calls[0].name, "f");
  EXPECT_EQ(told.reason, FinishReason::kToolCalls);
  EXPECT_EQ(told.piece.tokens, 3 + std::string(kHermesCall).size());
  // An answer that a limit has cut says so.
  EXPECT_EQ(Tell(kHermesCall, format, FinishReason::kLength).reason, FinishReason::kLength);
  told = Tell("<tool_call>{\"name\": \"g\"}</tool_call>", format, FinishReason::kStop);
  EXPECT_EQ(told.piece.content, "<tool_call>{\"name\": \"g\"}</tool_call>");
  EXPECT_EQ(told.reason, FinishReason::kStop);
}

TEST(AnswerAssembler, OneCallIsEnoughWhereNoMoreAreWanted) {
  AnswerFormat format = WithCalls(CallFormat::kHermes);
  format.syntax.parallel_calls = false;
  const Told told = Tell(std::string(kHermesCall) + kHermesCall, format, FinishReason::kCancelled);
  EXPECT_EQ(told.piece.tool_calls.size(), 1u);
  EXPECT_EQ(told.reason, FinishReason::kToolCalls);
  EXPECT_EQ(told.piece.tokens, std::string(kHermesCall).size());
}

TEST(AnswerAssembler, StopStringsAndCalls) {
  AnswerFormat format = WithCalls(CallFormat::kHermes);
  format.stop = {"name"};  // cuts a call: it is text
  Told told = Tell(kHermesCall, format, FinishReason::kStop);
  EXPECT_EQ(told.piece.content, "<tool_call>{\"");
  EXPECT_TRUE(told.piece.tool_calls.empty());
  EXPECT_EQ(told.reason, FinishReason::kStop);
  format.stop = {"STOP"};  // behind a call: the call waits for its result all the same
  told = Tell(std::string(kHermesCall) + " and STOP", format, FinishReason::kStop);
  EXPECT_EQ(told.piece.content, "and ");
  EXPECT_EQ(told.piece.tool_calls.size(), 1u);
  EXPECT_EQ(told.reason, FinishReason::kToolCalls);
  EXPECT_EQ(told.stop_string, "STOP");
}

TEST(AnswerAssembler, SpecialTokensThatMarkCallsAreRead) {
  // The demo model's vocabulary, in which one special token is called as Mistral's marker is.
  std::ifstream file(fs::path(OSCAR_DEMO_MODEL) / "tokenizer.json");
  nlohmann::json json = nlohmann::json::parse(file);
  for (auto& token : json["added_tokens"]) {
    if (token["content"] == "<|im_start|>") token["content"] = "[TOOL_CALLS]";
  }
  auto& vocabulary = json["model"]["vocab"];
  if (vocabulary.contains("<|im_start|>")) {
    vocabulary["[TOOL_CALLS]"] = vocabulary["<|im_start|>"];
    vocabulary.erase("<|im_start|>");
  }
  const auto tokenizer = Tokenizer::FromJson(json.dump(), "patched");
  ASSERT_TRUE(tokenizer.has_value()) << tokenizer.error().ToString();
  const int32_t marker = *tokenizer->FindToken("[TOOL_CALLS]");
  ASSERT_TRUE(tokenizer->IsSpecial(marker));
  const auto read = [&](const AnswerFormat& format, const std::string& text) {
    AnswerAssembler answer(*tokenizer, format);
    AnswerPiece piece;
    answer.OnToken(marker, &piece);
    for (const char c : text) answer.OnToken(*tokenizer->FindToken(std::string(1, c)), &piece);
    answer.OnFinish(FinishReason::kStop, &piece);
    EXPECT_EQ(piece.tokens, text.size() + 1);
    return piece;
  };
  const AnswerPiece call = read(WithCalls(CallFormat::kMistral), "f[ARGS]{}");
  EXPECT_EQ(call.content, "");
  EXPECT_EQ(call.tool_calls.size(), 1u);
  // Broken, it is text to the last token; without calls it is hidden as ever.
  EXPECT_EQ(read(WithCalls(CallFormat::kMistral), "g[ARGS]{}").content, "[TOOL_CALLS]g[ARGS]{}");
  EXPECT_EQ(read({}, "g[ARGS]{}").content, "g[ARGS]{}");
}

}  // namespace
}  // namespace oscar
