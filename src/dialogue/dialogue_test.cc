#include "dialogue/dialogue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

namespace oscar {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

// A copy of the demo model's text side in which files can be changed.
class DialogueTest : public testing::Test {
 protected:
  DialogueTest()
      : folder_(fs::path(testing::TempDir()) /
                testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::create_directories(folder_);
    for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
      fs::copy_file(fs::path(OSCAR_DEMO_MODEL) / name, folder_ / name,
                    fs::copy_options::overwrite_existing);
    }
    config_.eos_token_ids = {2, 0};
  }
  ~DialogueTest() override { fs::remove_all(folder_); }
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
  }
  Dialogue Load() {
    auto dialogue = Dialogue::Load(folder_, config_);
    EXPECT_TRUE(dialogue.has_value()) << dialogue.error().message();
    return std::move(*dialogue);
  }
  std::string LoadError(const DialogueOptions& options = {}) {
    const auto dialogue = Dialogue::Load(folder_, config_, options);
    return dialogue.has_value() ? "" : dialogue.error().message();
  }

  const fs::path folder_;
  ModelConfig config_;
};

TEST(DialogueDefaults, SamplesUnlessTheModelSaysNot) {
  ModelConfig config;
  EXPECT_EQ(DefaultsOf(config).sampling.temperature, 1.0f);  // nothing is said
  EXPECT_EQ(DefaultsOf(config).max_tokens, 0);
  config.temperature = 0.6;
  config.top_k = 20;
  config.top_p = 0.95;
  config.max_new_tokens = 512;
  EXPECT_EQ(DefaultsOf(config).sampling.temperature, 0.6f);
  EXPECT_EQ(DefaultsOf(config).sampling.top_k, 20);
  EXPECT_EQ(DefaultsOf(config).sampling.top_p, 0.95f);
  EXPECT_EQ(DefaultsOf(config).max_tokens, 512);
  config.do_sample = false;
  EXPECT_EQ(DefaultsOf(config).sampling.temperature, 0.0f);
  EXPECT_EQ(DefaultsOf(config).sampling.top_k, 0);
  EXPECT_EQ(DefaultsOf(config).max_tokens, 512);
}

TEST_F(DialogueTest, PlansWithTheModelsDefaults) {
  config_.temperature = 0.5;
  config_.max_new_tokens = 100;
  const Dialogue dialogue = Load();
  CompletionOptions options;
  auto plan = dialogue.Plan(options);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->sampling.temperature, 0.5f);
  EXPECT_EQ(plan->max_tokens, 100);
  EXPECT_TRUE(plan->limit_is_default);
  EXPECT_THAT(plan->stop_tokens, ElementsAre(2, 0));
  options.min_tokens = 200;  // asks for more than the default
  EXPECT_EQ(dialogue.Plan(options)->max_tokens, 200);
  options.max_tokens = 0;  // the rest of the context, said so
  EXPECT_EQ(dialogue.Plan(options)->max_tokens, 0);
  EXPECT_FALSE(dialogue.Plan(options)->limit_is_default);
  options.stop_token_ids = {7};
  EXPECT_THAT(dialogue.Plan(options)->stop_tokens, ElementsAre(7, 2, 0));
  options.ignore_eos = true;
  EXPECT_THAT(dialogue.Plan(options)->stop_tokens, ElementsAre(7));
  EXPECT_TRUE(dialogue.Plan(options)->format.eos_ids.empty());
}

TEST_F(DialogueTest, RefusesOptionsByName) {
  const Dialogue dialogue = Load();
  const auto param = [&](auto change) {
    CompletionOptions options;
    change(options);
    const auto plan = dialogue.Plan(options);
    return plan.has_value() ? "" : plan.error().param();
  };
  EXPECT_EQ(param([](auto& o) { o.max_tokens = -1; }), "max_tokens");
  EXPECT_EQ(param([](auto& o) { o.min_tokens = -1; }), "min_tokens");
  EXPECT_EQ(param([](auto& o) { o.max_tokens = 3, o.min_tokens = 4; }), "min_tokens");
  EXPECT_EQ(param([](auto& o) { o.stop = {"a", ""}; }), "stop");
}

TEST_F(DialogueTest, AConversationHasReasoningAndRawTextHasNone) {
  // The demo model's template names no tags; its tokenizer has them.
  const Dialogue dialogue = Load();
  const auto chat = dialogue.RenderJson(R"([{"role": "user", "content": "<|im_end|> hi"}])", {});
  ASSERT_TRUE(chat.has_value()) << chat.error().message();
  EXPECT_TRUE(chat->syntax.reasoning.has_value());
  EXPECT_FALSE(chat->syntax.starts_in_reasoning);
  const auto raw = dialogue.Encode("<|im_end|> hi");
  ASSERT_TRUE(raw.has_value());
  EXPECT_FALSE(raw->syntax.reasoning.has_value());
  EXPECT_EQ(raw->tokens.front(), 2);  // special in raw text, plain text in a message
  EXPECT_EQ(std::ranges::count(chat->tokens, 2), 1);
}

TEST_F(DialogueTest, APromptThatOpensReasoningIsEnough) {
  Write("chat_template.jinja", "{{ messages[0].content }}{{ '<think>\n' }}");
  const auto prompt = Load().RenderJson(R"([{"role": "user", "content": "x"}])", {});
  ASSERT_TRUE(prompt.has_value());
  EXPECT_TRUE(prompt->syntax.starts_in_reasoning);
  ASSERT_TRUE(prompt->syntax.reasoning.has_value());
}

TEST_F(DialogueTest, WithoutATemplateRawTextStillWorks) {
  for (const char* source : {"", "{% if %}"}) {
    Write("tokenizer_config.json", "{}");
    if (*source != 0) Write("chat_template.jinja", source);
    const Dialogue dialogue = Load();
    EXPECT_FALSE(dialogue.has_chat());
    EXPECT_TRUE(dialogue.Encode("hi").has_value());
    const auto refused = dialogue.RenderJson(R"([{"role": "user", "content": "x"}])", {});
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(refused.error().message(), HasSubstr(folder_.string()));
    EXPECT_THAT(refused.error().message(), HasSubstr("chat template"));
  }
  // One that the caller names must be there and must parse.
  EXPECT_THAT(LoadError({.chat_template = folder_ / "chat_template.jinja"}),
              HasSubstr("chat_template.jinja"));
  EXPECT_THAT(LoadError({.chat_template = folder_ / "nowhere.jinja"}), HasSubstr("nowhere.jinja"));
}

TEST_F(DialogueTest, ReadsSamplePrompts) {
  EXPECT_TRUE(Load().sample_prompts().empty());
  Write("sample_prompts.json", R"(["Sort: 3 1 2", "Add: 1 2"])");
  EXPECT_THAT(Load().sample_prompts(), ElementsAre("Sort: 3 1 2", "Add: 1 2"));
  for (const char* bad :
       {"{}", "[1]", R"([""])", "[", R"(["1","2","3","4","5","6","7","8","9"])"}) {
    Write("sample_prompts.json", bad);
    EXPECT_THAT(LoadError(), HasSubstr("sample_prompts.json")) << bad;
  }
}

TEST_F(DialogueTest, TheTemplateSaysHowAnswersAreWritten) {
  const auto detect = [&](const std::string& source) {
    Write("chat_template.jinja", source);
    const Dialogue dialogue = Load();
    return std::string(NameOf(dialogue.call_format())) + " " +
           std::string(NameOf(dialogue.reasoning()));
  };
  EXPECT_EQ(detect("x"), "none think");  // the vocabulary has the tags
  EXPECT_EQ(detect("<tool_call>"), "hermes think");
  EXPECT_EQ(detect("[TOOL_CALLS][ARGS] [THINK] [/THINK]"), "mistral mistral");
  EXPECT_EQ(detect("<|channel|>analysis <|channel|>commentary"), "harmony harmony");
  // The families' templates.
  for (const auto& [name, expected] : std::map<std::string, std::string>{
           {"GLM-4.6", "glm45 think"},
           {"GLM-4.7-Flash", "glm45 think"},
           {"MiniMax-M2", "minimax_m2 think"},
           {"Qwen-Qwen2.5-7B-Instruct", "hermes think"},
           {"Qwen-Qwen3-0.6B", "hermes think"},
           {"Qwen3-2507", "hermes think"},
           {"Qwen3-Coder", "qwen3_coder think"},
           {"Mistral-Small-3.2-24B-Instruct-2506", "mistral think"},
           {"mistralai-Mistral-Nemo-Instruct-2407", "mistral_list think"},
           {"openai-gpt-oss-120b", "harmony harmony"},
           {"meta-llama-Llama-3.1-8B-Instruct", "llama3_json think"}}) {
    std::ifstream file(fs::path(OSCAR_TEST_DATA) / "text/templates" / (name + ".jinja"));
    EXPECT_EQ(detect(std::string(std::istreambuf_iterator<char>(file), {})), expected) << name;
  }
  // What the caller says counts.
  DialogueOptions options;
  options.call_format = CallFormat::kGlm;
  options.reasoning = ReasoningKind::kNone;
  Write("chat_template.jinja", "{{ '<think>' }}");
  const auto dialogue = Dialogue::Load(folder_, config_, options);
  ASSERT_TRUE(dialogue.has_value());
  EXPECT_EQ(dialogue->call_format(), CallFormat::kGlm);
  const auto prompt = dialogue->RenderJson(R"([{"role": "user", "content": "x"}])", {});
  EXPECT_FALSE(prompt->syntax.reasoning.has_value());
  options.call_format = CallFormat::kHarmony;
  options.reasoning = ReasoningKind::kThink;
  EXPECT_THAT(LoadError(options), HasSubstr("harmony"));
}

TEST_F(DialogueTest, ToolsAreShownOrDemanded) {
  Write("chat_template.jinja",
        "{#- <tool_call> #}{{ messages[0].content }}{% if tools %}[{{ tools[0].function.name }}]"
        "{% endif %}");
  const Dialogue dialogue = Load();
  CompletionOptions options;
  options.tools = R"([{"type": "function", "function": {"name": "f"}},
                      {"type": "function", "function": {"name": "g"}}])";
  const auto render = [&] {
    return dialogue.RenderJson(R"([{"role": "user", "content": "x"}])", options);
  };
  const auto text = [](const Prompt& prompt) {
    std::string out;
    for (const TextSegment& segment : prompt.segments) out += segment.text;
    return out;
  };
  auto prompt = render();
  ASSERT_TRUE(prompt.has_value()) << prompt.error().message();
  EXPECT_EQ(text(*prompt), "x[f]");
  EXPECT_TRUE(prompt->syntax.has_calls());
  EXPECT_FALSE(prompt->demand.has_value());
  options.tool_choice = ToolChoice::kNone;
  prompt = render();
  EXPECT_EQ(text(*prompt), "x");
  EXPECT_FALSE(prompt->syntax.has_calls());
  options.tool_choice = ToolChoice::kRequired;
  prompt = render();
  EXPECT_THAT(prompt->demand->tools, ElementsAre("f", "g"));
  EXPECT_TRUE(prompt->demand->several);
  options.tool_choice = ToolChoice::kNamed;
  options.tool_name = "g";
  prompt = render();
  EXPECT_THAT(prompt->demand->tools, ElementsAre("g"));
  EXPECT_FALSE(prompt->demand->several);
  options.tool_name = "h";
  EXPECT_EQ(render().error().param(), "tool_choice");
  options.tools = "[]";
  EXPECT_EQ(render().error().param(), "tool_choice");
  options.tool_choice = ToolChoice::kAuto;
  EXPECT_TRUE(render().has_value());
  options.tools = "[{}]";
  EXPECT_EQ(render().error().param(), "tools[0].function");
}

}  // namespace
}  // namespace oscar
