#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "text/jinja/template.h"
#include "text/unicode.h"

namespace oscar::jinja {
namespace {

using nlohmann::ordered_json;
using testing::HasSubstr;

// Sanitizers slow the interpreter down.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kPatience = 10;
#else
constexpr double kPatience = 1;
#endif

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

// Containers that share their parts: `grow` is done sixty times to ns.a and ns.b, which then stand
// for 2^60 nodes each in a few kilobytes.
std::string Shared(std::string_view use, std::string_view grow = "[ns.x, ns.x]",
                   std::string_view leaf = "[]") {
  const auto set = [&](char name) {
    std::string text(grow);
    for (size_t at = 0; (at = text.find("ns.x", at)) != std::string::npos; ++at)
      text[at + 3] = name;
    return fmt::format("{{% set ns.{} = {} %}}", name, text);
  };
  return fmt::format(
      "{{% set ns = namespace(a={}, b={}) %}}{{% for i in range(60) %}}{}{}{{% endfor %}}{}", leaf,
      leaf, set('a'), set('b'), use);
}

class RunawayTest : public testing::TestWithParam<std::string> {};

TEST_P(RunawayTest, EndsInOneLineSoon) {
  const auto parsed = Template::Parse(GetParam());
  ASSERT_TRUE(parsed.has_value()) << parsed.error().message();
  const std::clock_t begin = std::clock();
  const auto rendered = parsed->Render(nullptr, nullptr);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  ASSERT_FALSE(rendered.has_value());
  EXPECT_EQ(rendered.error().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(rendered.error().message(), HasSubstr("template line 1: more than "));
  EXPECT_EQ(rendered.error().message().find('\n'), std::string::npos);
  EXPECT_LT(seconds, 3.0 * kPatience);
}

constexpr std::string_view kDict = "{'l': ns.x, 'r': ns.x}";
constexpr std::string_view kLong = "{% set s = 'a' * 4000000 %}";

INSTANTIATE_TEST_SUITE_P(
    Walks, RunawayTest,
    testing::Values(
        Shared("{{ ns.a }}"), Shared("{{ ns.a | tojson }}"),
        Shared("{{ ns.a | tojson(indent=64) }}"),
        Shared("{{ ns.a | tojson(separators=['x' * 1000000, ':']) }}"),
        Shared("{{ ns.a | string | length }}"), Shared("{{ ns.a ~ '' }}"),
        Shared("{{ [ns.a, ns.b] | unique | list | length }}"), Shared("{{ ns.a == ns.b }}"),
        Shared("{{ ns.a != ns.b }}"), Shared("{{ ns.a < ns.b }}"), Shared("{{ ns.a is ge ns.b }}"),
        Shared("{{ ns.a in [1, ns.b] }}"), Shared("{{ [ns.a].index(ns.b) }}"),
        Shared("{{ [ns.a].count(ns.b) }}"), Shared("{{ ns.a is eq(ns.b) }}"),
        Shared("{{ ns.a is sameas(ns.b) }}"), Shared("{{ ns.a is lower }}"),
        Shared("{{ [ns.a] | join(',') }}"), Shared("{{ ns.a | upper }}"),
        Shared("{{ ns.a | trim }}"), Shared("{{ ns.a | indent }}"),
        Shared("{{ ns.a | wordcount }}"), Shared("{{ ns.a | replace('[', '(') }}"),
        Shared("{{ 'x' | replace('x', ns.a) }}"), Shared("{{ raise_exception(ns.a) }}"),
        Shared("{{ {}[ns.a] }}"), Shared("{% for i in [1] %}{{ loop.changed(ns.a) }}{% endfor %}"),
        Shared("{% filter replace('x', ns.a) %}x{% endfilter %}"),
        Shared("{{ 1.5 | round(method=ns.a) }}"), Shared("{{ ns.a }}", kDict),
        Shared("{{ ns.a | tojson(sort_keys=true) }}", kDict), Shared("{{ ns.a == ns.b }}", kDict),
        Shared("{{ dict(k=ns.a) }}", "namespace(p=[ns.x, ns.x]).p"),
        Shared("{{ ns.a }}", "(ns.x, ns.x)", "'\\x01' * 100000"),
        Shared("{{ ns.a == ns.b }}", "[ns.x, ns.x]", "'a' * 1000000")));

INSTANTIATE_TEST_SUITE_P(
    LongStrings, RunawayTest,
    testing::Values(
        std::string(kLong) + "{% set t = 'a' * 4000000 %}{% for i in range(100000) %}"
                             "{% if s == t %}{% endif %}{% endfor %}",
        std::string(kLong) + "{% for i in range(100000) %}{% if s | wordcount %}{% endif %}"
                             "{% endfor %}",
        "{% set s = ' ' * 4000000 %}{% for i in range(100000) %}{{ s | trim }}{% endfor %}",
        std::string(kLong) + "{% for i in range(100000) %}{% if s | int %}{% endif %}{% endfor %}",
        std::string(kLong) +
            "{% for i in range(100000) %}{% if s is upper %}{% endif %}{% endfor %}",
        std::string(kLong) +
            "{% for i in range(100000) %}{% if 'x'.find(s) %}{% endif %}{% endfor %}",
        std::string(kLong) +
            "{{ 'x'.startswith((s,) * 1000000) }}"
            "{% for i in range(100000) %}{{ s.startswith((s,) * 100) }}{% endfor %}",
        std::string(kLong) + "{% set t = 'a' * 2000000 ~ 'b' %}{% if s.rfind(t) %}{% endif %}",
        std::string(kLong) + "{% set t = 'b' ~ 'a' * 2000000 %}{% if s.rsplit(sep=t) %}{% endif %}",
        "{% set l = ['a' * 4000000] * 100000 + ['a' * 4000000] * 100000 %}"
        "{{ l | sort(case_sensitive=true) | length }}"));

TEST(LimitTest, SearchesAreLinear) {
  EXPECT_EQ(
      Marked(std::string(kLong) + "{% set t = 'a' * 2000000 ~ 'b' %}{{ t in s }} {{ s.find(t) }} "
                                  "{{ s.count(t) }} {{ s.split(t) | length }}",
             nullptr),
      "False -1 0 1");
}

TEST(LimitTest, DepthCountsWhatLoopsAndMethodsHold) {
  // Values that hold their predecessors end in a recursion of destructors.
  for (const char* body : {"{% set ns.a = [ns.a.count] %}", "{% set ns.a = {ns.a.get: 1} %}",
                           "{% for x in [ns.a] %}{% set ns.a = [loop] %}{% endfor %}"}) {
    EXPECT_THAT(
        Marked(
            fmt::format("{{% set ns = namespace(a={}) %}}{{% for i in range(100000) %}}"
                        "{}{{% endfor %}}",
                        std::string_view(body).find("get") == std::string_view::npos ? "[]" : "{}",
                        body),
            nullptr),
        HasSubstr("nest deeper"))
        << body;
  }
}

TEST(LimitTest, SharedPartsCompareByIdentity) {
  EXPECT_EQ(
      Marked(Shared("{{ ns.a == ns.a }} {{ ns.a in [ns.a] }} {{ ns.a == 1 }} {{ ns.a | length }}"),
             nullptr),
      "True True False 2");
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
