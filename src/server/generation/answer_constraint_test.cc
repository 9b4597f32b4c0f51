// Where a form begins: at once, or after reasoning.
#include "generation/answer_constraint.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace oscar::server {
namespace {

class AnswerConstraintTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!GrammarCompiler::IsBuiltIn()) GTEST_SKIP() << "built without xgrammar";
    stop_ = *tokenizer_.FindToken("<|im_end|>");
    GrammarCompiler compiler(
        {GrammarVocabularyOf(tokenizer_, tokenizer_.vocab_size(), std::vector<int32_t>{stop_}),
         {},
         ""});
    grammar_ = *compiler.Compile({GrammarSpec::Kind::kChoice, "", {"yes", "no"}});
  }
  AnswerConstraint Make(bool reasons, bool inside) {
    return AnswerConstraint(
        tokenizer_, grammar_,
        reasons ? std::optional<ReasoningFormat>(ReasoningFormat()) : std::nullopt, inside,
        {stop_});
  }
  int32_t Token(const char* text) const { return *tokenizer_.FindToken(text); }
  bool Allows(AnswerConstraint& constraint, int32_t token) {
    std::vector<uint32_t> mask(MaskWords(tokenizer_.vocab_size()));
    EXPECT_TRUE(constraint.Fill(mask).ok());
    return (mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1) != 0;
  }
  // Tells the constraint of text, which it must allow.
  void Write(AnswerConstraint& constraint, const std::string& text) {
    const auto tokens = tokenizer_.Encode(text);
    for (const int32_t token : *tokens) {
      EXPECT_TRUE(Allows(constraint, token)) << text;
      EXPECT_TRUE(constraint.Accept(token).ok()) << text;
    }
  }
  void ExpectAnswer(AnswerConstraint& constraint) {
    EXPECT_FALSE(Allows(constraint, stop_));
    EXPECT_FALSE(Allows(constraint, Token("{")));
    Write(constraint, "yes");
    EXPECT_FALSE(constraint.finished());
    EXPECT_TRUE(Allows(constraint, stop_));
    EXPECT_TRUE(constraint.Accept(stop_).ok());
    EXPECT_TRUE(constraint.finished());
  }

  Tokenizer tokenizer_ = std::move(*Tokenizer::Load(OSCAR_DEMO_MODEL));
  int32_t stop_ = 0;
  std::shared_ptr<const CompiledGrammar> grammar_;
};

TEST_F(AnswerConstraintTest, WithoutReasoningItBeginsAtOnce) {
  AnswerConstraint constraint = Make(false, false);
  EXPECT_FALSE(Allows(constraint, Token("<think>")));
  ExpectAnswer(constraint);
}

TEST_F(AnswerConstraintTest, ReasoningThatThePromptOpenedIsFree) {
  AnswerConstraint constraint = Make(true, true);
  EXPECT_FALSE(Allows(constraint, stop_));  // the answer has not begun
  Write(constraint, "I think { \"no\" or < / think");
  Write(constraint, "</think>");
  ExpectAnswer(constraint);
}

TEST_F(AnswerConstraintTest, TheFirstTokenMayOpenReasoning) {
  AnswerConstraint thinks = Make(true, false);
  EXPECT_TRUE(Allows(thinks, Token("<think>")));
  ASSERT_TRUE(thinks.Accept(Token("<think>")).ok());
  Write(thinks, "hm, anything goes</think>");
  EXPECT_FALSE(Allows(thinks, Token("<think>")));
  ExpectAnswer(thinks);
  AnswerConstraint answers = Make(true, false);
  ExpectAnswer(answers);
}

TEST_F(AnswerConstraintTest, EveryChoiceHasItsOwnState) {
  AnswerConstraint first = Make(false, false), second = Make(false, false);
  Write(first, "yes");
  Write(second, "no");
  EXPECT_TRUE(Allows(first, stop_));
  EXPECT_TRUE(Allows(second, stop_));
}

// A mark that is text may end within a token, with the beginning of the answer behind it.
TEST_F(AnswerConstraintTest, MarksAreFoundAcrossTokens) {
  AnswerConstraint constraint(tokenizer_, grammar_, ReasoningFormat{"", "final: "}, true, {stop_});
  Write(constraint, "first fina, then final");
  Write(constraint, ":");
  Write(constraint, " ");
  ExpectAnswer(constraint);
}

TEST_F(AnswerConstraintTest, ATokenThatIsNotAllowedIsAnError) {
  AnswerConstraint constraint = Make(false, false);
  EXPECT_EQ(constraint.Accept(Token("{")).code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace oscar::server
