#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "text/jinja/template.h"
#include "text/unicode.h"

namespace oscar::jinja {
namespace {

using nlohmann::ordered_json;
using testing::HasSubstr;

// Input between guillemets: "a«b»c" means that b came from the request.
std::string Marked(std::string_view source, const ordered_json& input,
                   const ordered_json& trusted = nullptr) {
  const auto parsed = Template::Parse(source);
  if (!parsed.has_value()) return "parse error: " + parsed.error().message();
  const auto rendered = parsed->Render(input, trusted);
  if (!rendered.has_value()) return "error: " + rendered.error().message();
  std::string out;
  rendered->ForEachSegment([&](std::string_view text, bool is_input) {
    out += is_input ? "«" + std::string(text) + "»" : std::string(text);
  });
  return out;
}

TEST(MarkTest, FollowsEveryOperation) {
  const ordered_json input = {
      {"u", "user"}, {"s", " a,b "}, {"l", {"x", "y"}}, {"d", {{"k", "v"}}}};
  EXPECT_EQ(Marked("<{{ u }}>", input), "<«user»>");
  EXPECT_EQ(Marked("{{ '<' + u + '>' }}", input), "<«user»>");
  EXPECT_EQ(Marked("{{ '<' ~ u ~ 1 }}", input), "<«user»1");
  EXPECT_EQ(Marked("{{ ('<' + u + '>')[0:3] }}", input), "<«us»");
  EXPECT_EQ(Marked("{{ ('<' + u + '>')[::-1] }}", input), ">«resu»<");
  EXPECT_EQ(Marked("{{ ('<' + u + '>').upper() }}", input), "<«USER»>");
  EXPECT_EQ(Marked("{{ ('<' + u + '>') | title }}", input), "<«User»>");
  EXPECT_EQ(Marked("{{ s.strip() }}|{{ s | trim }}", input), "«a,b»|«a,b»");
  EXPECT_EQ(Marked("{{ s.split(',')[0] }}-", input), "« a»-");
  EXPECT_EQ(Marked("{{ u.replace('s', '-') }}", input), "«u»-«er»");
  EXPECT_EQ(Marked("{{ 'a-b'.replace('-', u) }}", input), "a«user»b");
  EXPECT_EQ(Marked("{{ ', '.join(l) }}|{{ l | join('+') }}", input), "«x», «y»|«x»+«y»");
  EXPECT_EQ(Marked("{{ u * 2 }}{{ 'ab' * 2 }}", input), "«useruser»abab");
  EXPECT_EQ(Marked("{{ u | first }}{{ 'q' | first }}", input), "«u»q");
  EXPECT_EQ(Marked("{% for c in u %}{{ c }}.{% endfor %}", input), "«u».«s».«e».«r».");
  EXPECT_EQ(Marked("{% set x %}[{{ u }}]{% endset %}{{ x }}", input), "[«user»]");
  EXPECT_EQ(Marked("{% macro m(t) %}({{ t }}){% endmacro %}{{ m(u) ~ m('q') }}", input),
            "(«user»)(q)");
  EXPECT_EQ(Marked("{% filter upper %}a{{ u }}b{% endfilter %}", input), "A«USER»B");
  EXPECT_EQ(Marked("{{ d | tojson }}{{ {'a': 1} | tojson }}", input), "«{\"k\": \"v\"}»{\"a\": 1}");
  EXPECT_EQ(Marked("{{ d }}{{ [1] }}", input), "«{'k': 'v'}»[1]");
  EXPECT_EQ(Marked("{% for k, v in d.items() %}{{ k }}={{ v }}{% endfor %}", input), "«k»=«v»");
  EXPECT_EQ(Marked("{{ (u if u else 'n') | default('z') }}{{ q | default(u) }}", input),
            "«useruser»");
  EXPECT_EQ(Marked("{{ u | indent(1, true) }}", {{"u", "a\nb"}}), " «a\n» «b»");
  EXPECT_EQ(Marked("{{ 'x' + e + 'y' }}", {{"e", ""}}), "xy");
}

TEST(MarkTest, ModelVariablesAreTrustedAndWin) {
  EXPECT_EQ(
      Marked("{{ bos_token }}{{ u }}", {{"u", "x"}, {"bos_token", "evil"}}, {{"bos_token", "<s>"}}),
      "<s>«x»");
}

TEST(TemplateTest, ErrorsNameTheLine) {
  EXPECT_EQ(Marked("a\nb\n{{ 1 | nope }}", nullptr),
            "parse error: template line 3: no filter named \"nope\"");
  EXPECT_EQ(Marked("a\n{% if x %}\n\n", nullptr),
            "parse error: template line 2: if is not closed by endif");
  EXPECT_EQ(Marked("a\n\n{{ raise_exception('no ' ~ 'way') }}", nullptr),
            "error: template line 3: no way");
  EXPECT_EQ(Marked("\n{{ x.y.z }}", {{"x", ordered_json::object()}}),
            "error: template line 2: 'dict object' has no attribute 'y'");
  EXPECT_EQ(Marked("\n{{ 'a' | trim(1, 2) }}", nullptr),
            "error: template line 2: trim takes at most 1 arguments");
  // Text of the request in a message is cut at a character and stays on one line.
  const std::string noise = Marked("{{ raise_exception(u) }}",
                                   {{"u", "\n\x7F" + std::string(497, 'x') + "\u00e9\u00e9"}});
  EXPECT_LT(noise.size(), 600u);
  EXPECT_TRUE(IsValidUtf8(noise));
  EXPECT_EQ(noise.find_first_of("\n\x7F"), std::string::npos);
  EXPECT_THAT(Marked("{% include 'x' %}", nullptr), HasSubstr("\"include\" is not supported"));
}

// As jinja2 3.1 renders them.
TEST(TemplateTest, ElseOfALoopThatIsCutShort) {
  EXPECT_EQ(Marked("{% for i in [1,2] %}{{ i }}{% break %}{% else %}e{% endfor %}", nullptr), "1e");
  EXPECT_EQ(Marked("{% for i in [1,2] %}{{ i }}{% continue %}{% else %}e{% endfor %}", nullptr),
            "12e");
  EXPECT_EQ(Marked("{% for i in [1,2] %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% else %}e"
                   "{% endfor %}",
                   nullptr),
            "12");
}

TEST(LimitTest, RunawayTemplatesEndInErrors) {
  const auto error = [](std::string_view source) {
    const auto parsed = Template::Parse(source);
    if (!parsed.has_value()) return parsed.error().message();
    RenderOptions options;  // the defaults, less patience
    options.limits.loop_iterations /= 100;
    options.limits.output_bytes /= 16;
    options.limits.work_bytes /= 16;
    const auto rendered = parsed->Render(nullptr, nullptr, options);
    return rendered.has_value() ? "rendered" : rendered.error().message();
  };
  EXPECT_THAT(error("{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}"
                    "{% endfor %}"),
              HasSubstr("loop iterations"));
  EXPECT_THAT(error("{{ 'a' * 9000000000000000000 }}"), HasSubstr("exceeds the limit"));
  EXPECT_THAT(error("{{ range(1000000) }}"), HasSubstr("at most 100000"));
  EXPECT_THAT(error("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), HasSubstr("too deeply"));
  EXPECT_THAT(error("{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(100) %}"
                    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}"),
              HasSubstr("intermediate text"));
  EXPECT_THAT(error("{% set ns = namespace(x=[]) %}{% for i in range(1000) %}"
                    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}"),
              HasSubstr("nest deeper"));
  EXPECT_THAT(error("{% set x = 'a' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}"),
              HasSubstr("of output"));
  EXPECT_THAT(error("{{ 9223372036854775807 + 1 }}"), HasSubstr("64 bits"));
  EXPECT_THAT(error("{{ 10 ** 100 }}"), HasSubstr("64 bits"));
  EXPECT_THAT(error("{{ 99999999999999999999 }}"), HasSubstr("too large"));
  EXPECT_THAT(error("{{ " + std::string(5000, '(') + "1" + std::string(5000, ')') + " }}"),
              HasSubstr("nested too deeply"));
  std::string chain = "{{ 1";
  for (int i = 0; i < 5000; ++i) chain += " + 1";
  EXPECT_THAT(error(chain + " }}"), HasSubstr("nested too deeply"));
  std::string blocks;
  for (int i = 0; i < 5000; ++i) blocks += "{% if 1 %}";
  EXPECT_THAT(error(blocks), HasSubstr("nested too deeply"));
  std::string nots = "{{ ";
  for (int i = 0; i < 5000; ++i) nots += "not ";
  EXPECT_THAT(error(nots + "1 }}"), HasSubstr("nested too deeply"));
}

TEST(LimitTest, ASelfReferringNamespaceIsFreed) {
  // Leak checkers fail this test where a cycle keeps values alive.
  EXPECT_EQ(
      Marked("{% set ns = namespace() %}{% set ns.me = ns %}{{ ns.me.me is defined }}", nullptr),
      "True");
  EXPECT_EQ(Marked("{% for x in [1, 2] %}{{ loop.changed([loop]) }}{% endfor %}", nullptr),
            "TrueTrue");
  EXPECT_EQ(Marked("{% set ns = namespace() %}{% for i in [1, 2] %}{% macro m() %}{{ i }}"
                   "{% endmacro %}{% set ns.m = m %}{% endfor %}{{ ns.m() }}",
                   nullptr),
            "2");
}

}  // namespace
}  // namespace oscar::jinja
