#include "scoring/math_answer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace oscar {
namespace {

TEST(MathAnswer, SameInOtherForms) {
  const std::pair<const char*, const char*> pairs[] = {
      {"\\frac{1}{2}", "0.5"},
      {"\\frac12", "\\dfrac{1}{2}"},
      {"1/2", "\\tfrac{1}{2}"},
      {"-\\frac{3}{4}", "\\frac{-3}{4}"},
      {"3\\frac{1}{2}", "7/2"},
      {"\\sqrt{8}", "2\\sqrt{2}"},
      {"\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt2}"},
      {"\\sqrt[3]{-8}", "-2"},
      {"10,000", "10000"},
      {"1{,}234", "1234"},
      {"\\$18.90", "18.9"},
      {"50\\%", "50"},
      {"90^\\circ", "90"},
      {"5 \\text{ inches}", "5"},
      {"12\\text{ cm}^2", "12"},
      {"\\text{Evelyn}", "Evelyn"},
      {"\\text{(B)}", "B"},
      {"(3, \\frac{\\pi}{2})", "\\left( 3, \\pi/2 \\right)"},
      {"\\{1, 2, 3\\}", "\\{3,2,1\\}"},
      {"1,-2", "-2, 1"},
      {"1 \\pm \\sqrt{2}", "1-\\sqrt2, 1+\\sqrt2"},
      {"x = 5", "5"},
      {"f(x) = 2x + 3", "3+2x"},
      {"2x+3", "3 + 2 \\cdot x"},
      {"x^2 - 1", "(x-1)(x+1)"},
      {"(-\\infty, 2) \\cup (3, \\infty)", "(3,\\infty)\\cup(-\\infty,2)"},
      {"6 - 5i", "-5i+6"},
      {"e^{i\\pi}", "-1"},
      {"\\begin{pmatrix} 1 & \\frac12 \\\\ 0 & 3 \\end{pmatrix}",
       "\\begin{bmatrix}1&0.5\\\\0&3\\end{bmatrix}"},
      {"\\sin^2 x + \\cos^2 x", "1"},
      {"\\log_2 8", "3"},
      {"\\binom{5}{2}", "10"},
      {"5!", "120"},
      {"2516_8", "2516_{8}"},
      {"x \\in [-2, 7]", "[-2,7]"},
      {"y = \\frac{1}{3} x^2", "x^2/3"},
      {"x^2 + y^2 = 1", "1 = y^2 + x^2"},
      {"$\\frac{3}{4}$.", "0.75"},
      {"\\pi r^2", "r^2 \\pi"},
      {"4.0", "4"},
      {".5", "\\frac{1}{2}"},
      // numbers
      {"0.\\overline{3}", "\\frac13"},
      {"1.2\\overline{34}", "\\frac{611}{495}"},
      {"0.333...", "1/3"},
      {"3 1/2", "3.5"},
      {"1\\,000", "1000"},
      {"11,\\! 111,\\! 111,\\! 100", "11111111100"},
      {"\u22123", "-3"},
      {"3 \\times 10^5", "300{,}000"},
      {"5\\text{ million}", "5000000"},
      {"2^{1000}", "4^{500}"},
      {"100!", "100 \\cdot 99!"},
      {"\\sqrt{-4}", "2i"},
      {"\\frac{1}{1+i}", "\\frac{1-i}{2}"},
      {"\\lfloor 3.5 \\rfloor", "3"},
      // angles and functions
      {"\\sin 30^\\circ", "\\frac12"},
      {"\\cot 45^{\\circ}", "1"},
      {"\\tan^{-1}(1)", "\\frac{\\pi}{4}"},
      {"\\sin 2\\theta", "2\\sin\\theta\\cos\\theta"},
      {"\\binom{n}{2}", "\\frac{n(n-1)}{2}"},
      {"{n \\choose 2}", "\\frac{n(n-1)}{2}"},
      {"\\binom{n}{k}", "\\frac{n!}{k!(n-k)!}"},
      {"n!", "n(n-1)!"},
      {"|x||y|", "|xy|"},
      {"\\sqrt{x}\\sqrt{y}", "\\sqrt{xy}"},
      {"\\sqrt[3]{x}", "x^{1/3}"},
      {"abc+1", "1+abc"},
      {"AB", "BA"},
      // lists and sets
      {"x=1, x=2", "1,2"},
      {"x=1 \\text{ or } x=2", "1,2"},
      {"x = \\pm 2", "-2, 2"},
      {"1,2", "\\{1,2\\}"},
      {"100,200,300", "300, 200, 100"},
      {"(1, 200)", "(1,200)"},
      {"\\emptyset", "\\varnothing"},
      {"\\{\\}", "\\emptyset"},
      {"\\left[\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right]",
       "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"},
      // equations and inequalities
      {"2x+3y-6=0", "2x+3y=6"},
      {"4x+6y=12", "2x+3y=6"},
      {"y-2=3(x-1)", "y=3x-1"},
      {"y=2x+3", "f(x)=2x+3"},
      {"2+3=5", "5"},
      {"(x,y)=(1,2)", "(1,2)"},
      {"3\\leq x", "x\\geq 3"},
      {"2x<6", "x<3"},
      {"-2<x\\le 5", "5\\ge x>-2"},
      // units and fonts
      {"5 cm", "5"},
      {"5 m", "5"},
      {"12 cm^2", "12"},
      {"60 km/h", "60"},
      {"5\\frac{\\text{m}}{\\text{s}}", "5"},
      {"\\text{Area} = 5", "5"},
      {"5 \\pmod{7}", "5"},
      {"x \\equiv 5 \\pmod 7", "5"},
      {"{\\bf 5}", "5"},
      {"\\underline{5}", "5"},
      {"\\color{red}{5}", "5"},
      {"\\boxed{5}", "5"},
      {"\\text{A and C}", "A,C"},
  };
  for (const auto& [a, b] : pairs) {
    EXPECT_TRUE(IsSameMathAnswer(a, b)) << a << " | " << b;
    EXPECT_TRUE(IsSameMathAnswer(b, a)) << b << " | " << a;
  }
}

TEST(MathAnswer, NotTheSame) {
  const std::pair<const char*, const char*> pairs[] = {
      {"\\frac{1}{2}", "2"},
      {"\\frac{1}{3}", "0.333"},
      {"(1,2)", "(2,1)"},
      {"[0,1)", "(0,1)"},
      {"\\{1,2\\}", "\\{1,2,3\\}"},
      {"1,2", "1,3"},
      {"2x+3", "2x-3"},
      {"x", "y"},
      {"\\text{east}", "seat"},
      {"(A)", "(B)"},
      {"\\sqrt{2}", "1.414"},
      {"10,00", "1000"},
      {"", ""},
      {"\\infty", "-\\infty"},
      {"\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}2\\\\1\\end{pmatrix}"},
      {"2516_8", "2516_9"},
      {"5", "-5"},
      {"1 \\pm \\sqrt{2}", "1 + \\sqrt{2}"},
      {"x^2+y^2=1", "x^2+y^2=2"},
      // rational values are compared exactly, of any length
      {"10000000001", "10000000002"},
      {"9999999999", "10000000000"},
      {"123456789012345678901", "123456789012345678902"},
      {"10000000001x", "10000000002x"},
      {"2^{1000}", "2^{1000}+1"},
      {"0.1666666667", "1/6"},
      {"\\sqrt{2}", "1.41421356237"},
      {"2305843009213693921", "0"},  // the prime of the residues
      // of either sign
      {"|x|", "x"},
      {"\\sqrt{x^2}", "x"},
      {"|x-3|", "3-x"},
      {"|xy|", "xy"},
      // what spaces, braces and words keep apart
      {"1 2", "12"},
      {"1 2", "2"},
      {"2\\text{ hours }30\\text{ minutes}", "230"},
      {"\\frac{1}{23}", "\\frac{12}{3}"},
      {"x^{12}", "x^12"},
      {"2x", "2X"},
      {"5m", "5"},
      {"5 g", "5 m"},
      {"\\angle ABC", "\\angle BAC"},
      {"f \\circ g", "g \\circ f"},
      {"(1,000)", "1000"},
      {"\\{1,2\\}", "(1,2)"},
      {"x=5", "y=5"},
      {"x=2,y=3", "x=3,y=2"},
      {"2x+3y=6", "2x+3y=7"},
      {"2+3=6", "6"},
      {"-x<3", "x<-3"},
      {"x<3", "x\\le 3"},
      {"5 \\pmod 7", "5 \\pmod 8"},
      {"3:2", "\\frac{3}{2}"},
      {"10_2", "10_8"},
  };
  for (const auto& [a, b] : pairs) {
    EXPECT_FALSE(IsSameMathAnswer(a, b)) << a << " | " << b;
    EXPECT_FALSE(IsSameMathAnswer(b, a)) << b << " | " << a;
  }
}

std::string Repeat(std::string_view piece, size_t bytes) {
  std::string out;
  while (out.size() + piece.size() <= bytes) out += piece;
  return out;
}

TEST(MathAnswer, HostileTextEnds) {
  EXPECT_FALSE(IsSameMathAnswer(std::string(100000, '{'), "1"));
  EXPECT_FALSE(IsSameMathAnswer(std::string(4000, '('), std::string(4000, '-')));
  EXPECT_FALSE(IsSameMathAnswer("\\frac", "\\frac{1}"));
  EXPECT_FALSE(IsSameMathAnswer("\\frac{1}{0}", "\\frac{2}{0}"));
  EXPECT_FALSE(LastBoxed("\\boxed{1").has_value());
  EXPECT_FALSE(LastBoxed("\\boxed").has_value());
  // Answers that differ only after what is read are not the same.
  EXPECT_FALSE(IsSameMathAnswer(std::string(5000, '1') + "2", std::string(5000, '1') + "3"));
}

// Long lists compare every pair, and some pieces nest, repeat or grow: each comparison ends soon.
// The limit leaves room for sanitizers; without bounds these take minutes or the stack.
TEST(MathAnswer, WorkIsBounded) {
  const auto start = std::chrono::steady_clock::now();
  // clang-format off
  const std::vector<const char*> answers = {
      "x,", "200!,", "\\binom{x}{200},", "x+y=1,", "\\pm1,", "\\frac12,", "(1,", "\\{1,", "{", "(",
      "|", "|x", "-", "2^", "2^{", "\\frac", "\\frac-", "\\sqrt[", "\\sin ", "\\log_", "x!", "!",
      "\\lfloor", "x^{1073741824}", "{n\\choose k}", "=x", "x<", "\\cup", "\\text{", "\\text{a}",
      "\\mathbf{", "\\begin{pmatrix}", "1&", "\\\\", "1,001", "1 001 ", "1\\circ", "\u2212",
      "1 million ", "5 cm ", "\\pmod", "{,}", "\\", "9", "0."};
  // clang-format on
  for (const char* piece : answers) {
    const std::string text = Repeat(piece, 4000);
    EXPECT_FALSE(IsSameMathAnswer(text, "7" + text)) << piece;
    EXPECT_FALSE(IsSameMathAnswer(text + "y", text + "z")) << piece;
  }
  // clang-format off
  const std::vector<const char*> outputs = {
      "\\boxed{", "{", "#### ", "#### 1 x\n", "answer", "answer ", "*answer\n", "answer is ",
      "answer: $", "$", "$1", "$x$ ", "\\(", "1,000", "1/", "1:", "1.", "1 1/", "m2 ", "1^", "-"};
  // clang-format on
  for (const char* piece : outputs) {
    const std::string output = Repeat(piece, 200000);
    FindMathAnswer(output);
    FindNumberAnswer(output);
  }
  EXPECT_FALSE(FindNumberAnswer(std::string(4 << 20, '#')).has_value());  // a model that is stuck
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

// Identities by construction: products and their expansions with coefficients of up to 14 digits,
// and the same with one of them off by one.
TEST(MathAnswer, RandomPolynomials) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 200; ++i) {
    const auto draw = [&] { return static_cast<int64_t>(random() % 20000000) - 10000000; };
    const int64_t a = draw(), b = draw(), c = draw(), d = draw();
    const auto product = fmt::format("({}x+{}y)({}x+{})", a, b, c, d);
    const auto expanded = [&](int64_t off) {
      return fmt::format("{}x^2+{}x+{}xy+{}y", a * c, a * d + off, b * c, b * d);
    };
    EXPECT_TRUE(IsSameMathAnswer(product, expanded(0))) << product;
    EXPECT_FALSE(IsSameMathAnswer(product, expanded(1))) << product;
    const auto fraction = fmt::format("\\frac{{{}}}{{{}}}", a * c, b * c);
    if (b * c == 0) continue;
    EXPECT_TRUE(IsSameMathAnswer(fraction, fmt::format("{}/{}", a, b))) << fraction;
    EXPECT_FALSE(IsSameMathAnswer(fraction, fmt::format("{}/{}", a + 1, b))) << fraction;
  }
}

TEST(MathAnswer, FindsWhatAnOutputStates) {
  EXPECT_EQ(LastBoxed("so \\boxed{1} no, \\boxed{\\frac{1}{2}}."), "\\frac{1}{2}");
  EXPECT_EQ(LastBoxed("\\boxed{1} then \\fbox{2}"), "2");
  EXPECT_EQ(LastBoxed("\\boxed{\\{1, 2\\}}"), "\\{1, 2\\}");
  EXPECT_EQ(LastBoxed("\\boxed 7."), "7");
  EXPECT_EQ(FindMathAnswer("thus $x=3$. The answer is: **42**."), "42");
  EXPECT_EQ(FindMathAnswer("The answer is $5$ because 3 were eaten."), "5");
  EXPECT_EQ(FindMathAnswer("**Final Answer:**\n\n\\[\n\\frac{1}{2}\n\\]"), "\\frac{1}{2}");
  EXPECT_EQ(FindMathAnswer("we get $a$ and $\\frac{2}{3}$"), "\\frac{2}{3}");
  EXPECT_EQ(FindMathAnswer("at $5 each and $3 more we get $x$ of them"), "x");
  EXPECT_EQ(FindMathAnswer("so \\(x=3\\) it is"), "x=3");
  EXPECT_EQ(FindMathAnswer("it costs 1,250 dollars"), "1250");
  EXPECT_FALSE(FindMathAnswer("no idea").has_value());
  EXPECT_EQ(LastNumber("$1,234.50."), "1234.50");
  EXPECT_EQ(LastNumber("it is -7"), "-7");
  EXPECT_EQ(LastNumber("it is -$7"), "-7");
  EXPECT_EQ(LastNumber("7-3"), "3");
  EXPECT_EQ(LastNumber("costs $.50"), "0.50");
  EXPECT_EQ(LastNumber("18 m^2 or 18 m2"), "18");
  EXPECT_EQ(LastNumber("1 1/2 hours"), "1 1/2");
  EXPECT_FALSE(LastNumber("none").has_value());
  EXPECT_FALSE(LastNumber("at 12:30").has_value());
}

TEST(MathAnswer, FindsNumbers) {
  struct Case {
    const char* output;
    const char* answer;
    bool same;
  };
  const Case cases[] = {
      // money is no formula
      {"He spends $20 and then $15, so he has 5 dollars left.\n#### 5", "5", true},
      {"She earns $160 per day, so after the $100 rent she keeps 60 dollars.", "60", true},
      {"The profit is 200,000-130,000=$<<200000-130000=70000>>70,000\n#### 70000", "70000", true},
      {"#### $1,234", "1234", true},
      {"#### 2. Add them\n3 and 4 make 7\n", "7", true},  // a heading
      {"1.\n2.\n#### -3 dollars\n", "-3", true},
      // statements
      {"The final answer is 42 (that is 6 x 7).", "42", true},
      {"The answer is 20 - 15 = 5.", "5", true},
      {"The answer is $5 because $3 were eaten.", "5", true},
      {"The answer is $5$ because 3 were eaten.", "5", true},
      {"**Answer:** 18", "18", true},
      {"Answer: 7\n\nNote that 3 is unused.", "7", true},
      {"## Final Answer\n\n$1{,}200$", "1200", true},
      {"Final answer: each costs $5, so 3 cost $15\n\nTherefore the total is **$15**", "15", true},
      {"So 3+4=7", "7", true},
      {"18.00", "18", true},
      {"2/5", "5", false},
      {"at 12:30", "30", false},
      {"on 5/6/2024", "2024", false},
      {"", "5", false},
      // boxes
      {"\\boxed{18 \\text{ m}^2}", "18", true},
      {"\\boxed{1{,}000}", "1000", true},
      {"\\boxed{1\\,000}", "1000", true},
      {"\\boxed{\\$1,000}", "1000", true},
      {"\\boxed{\\frac{10}{2}}", "5", true},
      {"\\boxed{3 \\times 10^2}", "300", true},
      {"\\boxed{\u22123}", "-3", true},
      {"\\boxed{20-15=5}", "5", true},
      {"\\boxed{x=5}", "5", true},
      {"\\boxed{50\\%}", "50", true},
      {"\\boxed{5 apples}", "5", true},
      {"\\boxed{\\text{Tom has }5}", "5", true},
      {"\\boxed{7}-8", "7", true},
      {"\\boxed{\\text{dollars}} 7", "7", true},
      {"\\boxed{100^2}", "2", false},
      {"\\boxed{12:30}", "30", false},
      {"\\boxed{10 \\text{ hours } 0 \\text{ minutes}}", "0", false},
      {"\\boxed{5x}", "5", false},
  };
  for (const Case& c : cases) {
    const std::string found = FindNumberAnswer(c.output).value_or("");
    EXPECT_EQ(IsSameMathAnswer(found, c.answer), c.same) << c.output << " | " << found;
  }
}

// Real problems: the box in each published solution is the published answer, and no answer is
// taken for the one of the next problem unless they are equal as text.
TEST(MathAnswer, PublishedSolutionsStateThePublishedAnswers) {
  std::ifstream file(OSCAR_TEST_DATA "/eval/math500_sample.jsonl");
  ASSERT_TRUE(file.good());
  std::string line, last;
  int count = 0, differing = 0;
  while (std::getline(file, line)) {
    const auto record = nlohmann::json::parse(line);
    const std::string answer = record["answer"];
    const auto stated = FindMathAnswer(record["solution"].get<std::string>());
    ASSERT_TRUE(stated.has_value()) << line;
    EXPECT_TRUE(IsSameMathAnswer(*stated, answer)) << *stated << " | " << answer;
    EXPECT_TRUE(IsSameMathAnswer(answer, answer)) << answer;
    if (!last.empty() && last != answer) differing += IsSameMathAnswer(answer, last) ? 0 : 1;
    last = answer;
    ++count;
  }
  EXPECT_GE(count, 40);
  EXPECT_GE(differing, count - 6);
}

TEST(MathAnswer, PublishedSolutionsStateThePublishedNumbers) {
  std::ifstream file(OSCAR_TEST_DATA "/eval/gsm8k_sample.jsonl");
  ASSERT_TRUE(file.good());
  std::string line;
  int count = 0;
  while (std::getline(file, line)) {
    const auto record = nlohmann::json::parse(line);
    const std::string solution = record["answer"];
    const std::string answer = solution.substr(solution.rfind("####") + 4);
    const auto stated = FindNumberAnswer(solution);
    ASSERT_TRUE(stated.has_value()) << line;
    EXPECT_TRUE(IsSameMathAnswer(*stated, answer)) << *stated << " | " << answer;
    ++count;
  }
  EXPECT_GE(count, 10);
}

}  // namespace
}  // namespace oscar
