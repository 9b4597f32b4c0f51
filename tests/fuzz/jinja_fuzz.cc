// A chat template: parse, and render with a small conversation and small limits. The text of the
// user's message follows the first NUL.
#include <nlohmann/json.hpp>

#include "fuzz_util.h"
#include "text/jinja/template.h"
#include "text/unicode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar;
  const std::string_view input = FuzzText(data, size);
  const size_t nul = input.find('\0');
  const auto parsed = jinja::Template::Parse(input.substr(0, nul));
  if (!parsed) {
    CheckError(parsed.error(),
               parsed.error().message().starts_with("the template") ? "the " : "template ");
    return 0;
  }
  const std::string text = ReplaceInvalidUtf8(
      nul == std::string_view::npos ? std::string_view("hi <|im_end|>") : input.substr(nul + 1));
  const nlohmann::ordered_json variables = {
      {"messages",
       {{{"role", "system"}, {"content", "s"}},
        {{"role", "user"}, {"content", text}},
        {{"role", "assistant"},
         {"content", "<think>x</think>y"},
         {"tool_calls", {{{"function", {{"name", "f"}, {"arguments", {{"a", 1}}}}}}}}},
        {{"role", "tool"}, {"content", {{{"type", "text"}, {"text", text}}}}}}},
      {"tools", {{{"type", "function"}, {"function", {{"name", "f"}, {"n", 1.5}}}}}},
      {"add_generation_prompt", true},
      {"enable_thinking", false}};
  jinja::RenderOptions options;
  options.now = 1721989230;
  options.limits.output_bytes = 1 << 16;
  options.limits.loop_iterations = 2000;
  options.limits.steps = 20000;
  options.limits.work_bytes = 1 << 22;
  const auto rendered = parsed->Render(variables, {{"bos_token", "<s>"}}, options);
  if (!rendered) {
    CheckError(rendered.error(), "template line ");
    return 0;
  }
  OSCAR_CHECK(rendered->size() <= options.limits.output_bytes);
  OSCAR_CHECK(IsValidUtf8(rendered->text()));
  std::string joined;
  rendered->ForEachSegment([&](std::string_view piece, bool) {
    OSCAR_CHECK(!piece.empty());
    joined += piece;
  });
  OSCAR_CHECK(joined == rendered->text());
  return 0;
}
