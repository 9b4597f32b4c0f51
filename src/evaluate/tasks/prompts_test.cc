#include "tasks/prompts.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

class PromptsTest : public testing::Test {
 protected:
  void SetUp() override {
    auto encoder = PromptEncoder::Load(OSCAR_DEMO_MODEL);
    ASSERT_TRUE(encoder.has_value()) << encoder.error().ToString();
    encoder_ = std::move(*encoder);
    task_.max_input = 400;
    item_.prompt = "First words.";
    for (int i = 0; i < 300; ++i) item_.prompt += " filler " + std::to_string(i);
    item_.prompt += " Last words.";
    item_.max_tokens = 32;
  }
  int64_t Count(const std::string& text) const {
    return static_cast<int64_t>(encoder_->tokenizer().Encode(text)->size());
  }

  std::optional<PromptEncoder> encoder_;
  EvalTask task_;
  EvalItem item_;
};

// The published cut: half of the limit from each end, before the template.
TEST_F(PromptsTest, LongTextsLoseTheirMiddle) {
  ASSERT_GT(Count(item_.prompt), 400);
  const auto prompt = encoder_->Encode(task_, item_, item_.max_tokens, 0);
  ASSERT_TRUE(prompt.has_value()) << prompt.error().ToString();
  EXPECT_EQ(prompt->kept, 400);
  EXPECT_TRUE(prompt->text.starts_with("First words."));
  EXPECT_TRUE(prompt->text.ends_with("Last words."));
  EXPECT_NEAR(static_cast<double>(Count(prompt->text)), 400, 2);
  EXPECT_GT(prompt->tokens.size(), 400u);  // and the template
  item_.prompt = "Short.";
  EXPECT_EQ(encoder_->Encode(task_, item_, 32, 0)->kept, 0);
  EXPECT_EQ(encoder_->Encode(task_, item_, 32, 0)->text, "Short.");
}

// A context of the limit has no room for the template and the output.
TEST_F(PromptsTest, TemplateAndOutputFitTheContextToo) {
  for (const bool use_template : {true, false}) {
    item_.use_template = use_template;
    const auto prompt = encoder_->Encode(task_, item_, item_.max_tokens, 400);
    ASSERT_TRUE(prompt.has_value());
    EXPECT_LE(prompt->tokens.size() + 32, 400u);
    EXPECT_GE(prompt->tokens.size() + 32, 396u);
    EXPECT_TRUE(prompt->text.ends_with("Last words."));
  }
}

TEST_F(PromptsTest, OtherTasksAreNeverCut) {
  task_.max_input = 0;
  const auto prompt = encoder_->Encode(task_, item_, item_.max_tokens, 400);
  ASSERT_TRUE(prompt.has_value());
  EXPECT_EQ(prompt->text, item_.prompt);
  EXPECT_GT(prompt->tokens.size(), 400u);
}

}  // namespace
}  // namespace oscar
