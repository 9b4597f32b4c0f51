// Templates against jinja2 as transformers sets it up: goldens by tools/make_text_goldens.py.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "text/jinja/template.h"
#include "text/test_data.h"

namespace oscar::jinja {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kClock = 1721989230;  // 2024-07-26 10:20:30 UTC

const ordered_json& Goldens() {
  static const auto& goldens = *new auto(test::ReadJsonData("template_goldens.json.xz"));
  return goldens;
}

std::string TemplateSource(const std::string& name) {
  if (name != "demo") return test::ReadTextData("templates/" + name + ".jinja");
  const auto text =
      ReadFile(std::string(OSCAR_TEST_DATA) + "/../../models/demo/tokenizer_config.json", 1 << 20);
  return ParseOrderedJson(text.value(), "demo").value().at("chat_template").get<std::string>();
}

TEST(JinjaGoldenTest, RendersEveryTemplateAsTheReference) {
  std::map<std::string, int> counts;
  for (const auto& item : Goldens().at("chats")) {
    const auto name = item.at("template").get<std::string>();
    SCOPED_TRACE(name + " " + item.at("chat").get<std::string>());
    const auto parsed = Template::Parse(TemplateSource(name));
    ASSERT_TRUE(parsed.has_value()) << parsed.error().message();
    const auto& chat = Goldens().at("inputs").at(item.at("chat").get<std::string>());
    ordered_json input = {{"messages", chat.at("messages")},
                          {"tools", chat.contains("tools") ? chat.at("tools") : ordered_json()},
                          {"documents", nullptr},
                          {"add_generation_prompt", chat.value("add_generation_prompt", true)}};
    if (chat.contains("kwargs")) input.update(chat.at("kwargs"));
    const auto rendered = parsed->Render(input, Goldens().at("special"), {.now = kClock});
    if (item.contains("error")) {
      EXPECT_FALSE(rendered.has_value()) << "the reference fails: " << item.at("error");
    } else {
      ASSERT_TRUE(rendered.has_value()) << rendered.error().message();
      EXPECT_EQ(rendered->text(), item.at("text").get<std::string>());
    }
    ++counts[name];
  }
  EXPECT_EQ(counts.size(), 8u);
  for (const auto& [name, count] : counts) EXPECT_GE(count, 8) << name;
}

TEST(JinjaGoldenTest, RendersSnippetsAsTheReference) {
  int count = 0;
  for (const auto& item : Goldens().at("snippets")) {
    const auto source = item.at("source").get<std::string>();
    SCOPED_TRACE(source);
    ++count;
    const auto parsed = Template::Parse(source);
    if (!parsed.has_value()) {
      EXPECT_TRUE(item.contains("error")) << parsed.error().message();
      continue;
    }
    const auto rendered = parsed->Render(Goldens().at("variables"), nullptr, {.now = kClock});
    if (item.contains("error")) {
      EXPECT_FALSE(rendered.has_value())
          << "the reference fails: " << item.at("error") << "\nwe print: " << rendered->text();
    } else if (!rendered.has_value()) {
      ADD_FAILURE() << rendered.error().message();
    } else {
      EXPECT_EQ(rendered->text(), item.at("text").get<std::string>());
    }
  }
  EXPECT_GE(count, 200);
}

// Whatever marks a rendering carries, the text without them is the same, and every byte that is
// marked stands in some string of the request.
TEST(JinjaGoldenTest, MarksWhatTheUserWrote) {
  for (const auto& item : Goldens().at("chats")) {
    if (item.at("chat") != "injection" || item.contains("error")) continue;
    const auto name = item.at("template").get<std::string>();
    SCOPED_TRACE(name);
    const auto parsed = Template::Parse(TemplateSource(name)).value();
    const auto& chat = Goldens().at("inputs").at("injection");
    const ordered_json input = {
        {"messages", chat.at("messages")}, {"tools", nullptr}, {"add_generation_prompt", true}};
    const auto rendered = parsed.Render(input, Goldens().at("special")).value();
    std::string joined, trusted;
    bool found_attack = false;
    rendered.ForEachSegment([&](std::string_view text, bool is_input) {
      joined += text;
      if (is_input) {
        found_attack |= text.find("obey") != std::string_view::npos;
      } else {
        trusted += text;
      }
    });
    EXPECT_EQ(joined, rendered.text());
    EXPECT_TRUE(found_attack);
    EXPECT_EQ(trusted.find("obey"), std::string::npos) << trusted;
    EXPECT_EQ(trusted.find("{% raw"), std::string::npos) << trusted;
  }
}

}  // namespace
}  // namespace oscar::jinja
