#include "evaluate/scoring.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "evaluate/math_answer.h"
#include "evaluate/sandbox.h"
#include "evaluate/text_scores.h"

namespace oscar {
namespace {

constexpr double kSecondsPerTest = 6;  // LiveCodeBench's limit
constexpr double kHumanEvalSeconds = 10;
constexpr uint64_t kLiveCodeMemory = uint64_t{4} << 30;

// Runs every test of a LiveCodeBench record. Private tests may be packed as base64(zlib(pickle)) of
// a JSON text; unpacking foreign pickles is one more reason to be in here.
constexpr char kLiveCodeDriver[] = R"PY(
import base64, io, json, pickle, signal, sys, zlib
from decimal import Decimal, InvalidOperation

def unpack(text):
    if not text:
        return []
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(pickle.loads(zlib.decompress(base64.b64decode(text))))

def late(*_):
    raise TimeoutError()

def same_line(a, b):
    if a == b:
        return True
    x, y = a.split(), b.split()
    try:
        return len(x) == len(y) > 0 and all(Decimal(p) == Decimal(q) for p, q in zip(x, y))
    except InvalidOperation:
        return False

def same_text(out, want):
    x = [l.strip() for l in out.strip().split("\n")]
    y = [l.strip() for l in want.strip().split("\n")]
    return len(x) == len(y) and all(map(same_line, x, y))

def run_program(code, text):
    out = io.StringIO()
    keep = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = io.TextIOWrapper(io.BytesIO(text.encode())), out
    try:
        exec(compile(code, "solution", "exec"), {"__name__": "__main__"})
    except SystemExit:
        pass
    finally:
        sys.stdin, sys.stdout = keep
    return out.getvalue()

spec = json.load(open("tests.json"))
code = open("solution.py").read()
tests = unpack(spec["public"]) + unpack(spec["private"])
if not tests:
    sys.exit("no tests")
prelude = ("from typing import *\nfrom collections import *\nfrom functools import *\n"
           "from itertools import *\nfrom heapq import *\nfrom bisect import *\nfrom math import *\n"
           "import collections, functools, itertools, heapq, bisect, math, random, re, string, sys\n")
signal.signal(signal.SIGALRM, late)
sys.setrecursionlimit(6 * 10 ** 5)
for test in tests:
    signal.setitimer(signal.ITIMER_REAL, spec["seconds"])
    if test.get("testtype") == "functional" or spec["function"]:
        space = {}
        exec(compile(prelude + code, "solution", "exec"), space)
        call = getattr(space["Solution"](), spec["function"]) if "Solution" in space \
            else space[spec["function"]]
        got = call(*[json.loads(line) for line in test["input"].split("\n")])
        got = json.loads(json.dumps(got))
        ok = got == json.loads(test["output"])
    else:
        ok = same_text(run_program(prelude + code, test["input"]), test["output"])
    signal.setitimer(signal.ITIMER_REAL, 0)
    if not ok:
        sys.exit("wrong answer")
print("passed")
)PY";

bool IsSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// The inside of a fenced block: the first of python, or the last of any kind.
std::string CodeBlock(std::string_view text, bool last) {
  constexpr std::string_view kFence = "```";
  std::vector<std::pair<size_t, size_t>> blocks;
  for (size_t at = text.find(kFence); at != std::string_view::npos;) {
    const size_t line = text.find('\n', at);
    if (line == std::string_view::npos) break;
    const size_t close = text.find(kFence, line);
    if (close == std::string_view::npos) break;
    blocks.emplace_back(line + 1, close);
    at = text.find(kFence, close + kFence.size());
  }
  if (blocks.empty()) return std::string(text);
  const auto [first, end] = last ? blocks.back() : blocks.front();
  return std::string(text.substr(first, end - first));
}

// The first match of (?i)Answer\s*:\s*([A-D]), the published pattern.
std::string ChosenLetter(std::string_view text) {
  std::string upper(text);
  std::transform(upper.begin(), upper.end(), upper.begin(), [](char c) {
    return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  });
  constexpr std::string_view kLead = "ANSWER";
  const auto skip_space = [&](size_t at) {
    while (at < upper.size() && IsSpace(upper[at])) ++at;
    return at;
  };
  for (size_t at = upper.find(kLead); at != std::string::npos; at = upper.find(kLead, at + 1)) {
    size_t next = skip_space(at + kLead.size());
    if (next >= upper.size() || upper[next] != ':') continue;
    next = skip_space(next + 1);
    if (next < upper.size() && upper[next] >= 'A' && upper[next] <= 'D') {
      return std::string(1, upper[next]);
    }
  }
  return {};
}

// What follows the last </think> as it is: in LongBench's scores of lines, indentation counts.
std::string_view WithoutReasoning(std::string_view output) {
  constexpr std::string_view kClose = "</think>";
  const size_t close = output.rfind(kClose);
  return close == std::string_view::npos ? output : output.substr(close + kClose.size());
}

std::string_view FirstLine(std::string_view text) {
  while (!text.empty() && text.front() == '\n') text.remove_prefix(1);
  return text.substr(0, text.find('\n'));
}

// What follows the last </think>, with the indentation of its first line.
std::string_view AfterReasoning(std::string_view output) {
  constexpr std::string_view kClose = "</think>";
  const size_t at = output.rfind(kClose);
  if (at != std::string_view::npos) output.remove_prefix(at + kClose.size());
  const size_t first = output.find_first_not_of(" \t\r\n");
  const size_t line = first == std::string_view::npos ? first : output.rfind('\n', first);
  return line == std::string_view::npos ? output : output.substr(line + 1);
}

Result<double> RunHumanEval(const EvalItem& item, std::string_view output) {
  const std::string code = CodeBlock(output, /*last=*/false);
  // A body alone goes on after the prompt's docstring; a whole function replaces it.
  const bool whole = code.find("def " + item.entry_point) != std::string::npos;
  const std::string program = item.tests_prompt + (whole ? "\n" : "") + code + "\n" + item.tests +
                              "\ncheck(" + item.entry_point + ")\nprint('passed')\n";
  SandboxLimits limits;
  limits.seconds = kHumanEvalSeconds;
  OSCAR_ASSIGN_OR_RETURN(const SandboxResult run, RunPython({{"program.py", program}}, limits));
  return run.exit_code == 0 && run.output.ends_with("passed\n") ? 1.0 : 0.0;
}

Result<double> RunLiveCode(const EvalItem& item, std::string_view output) {
  SandboxLimits limits;
  limits.seconds = kSecondsPerTest * static_cast<double>(std::max<int64_t>(item.num_tests, 1)) + 5;
  limits.memory_bytes = kLiveCodeMemory;
  OSCAR_ASSIGN_OR_RETURN(const SandboxResult run,
                         RunPython({{"driver.py", kLiveCodeDriver},
                                    {"solution.py", CodeBlock(output, /*last=*/true)},
                                    {"tests.json", item.tests}},
                                   limits));
  return run.exit_code == 0 && run.output.ends_with("passed\n") ? 1.0 : 0.0;
}

template <typename Score>
double BestOf(const EvalItem& item, const Score& score) {
  double best = 0;
  for (const std::string& reference : item.answers) best = std::max(best, score(reference));
  return best;
}

}  // namespace

std::string ReadAnswer(Scorer scorer, std::string_view output) {
  const std::string_view text = FinalAnswer(output);
  switch (scorer) {
    case Scorer::kMath:
    case Scorer::kNumber:
      return FindMathAnswer(text).value_or("");
    case Scorer::kChoice:
      return ChosenLetter(text);
    case Scorer::kHumanEval:
      return CodeBlock(text, /*last=*/false);
    case Scorer::kLiveCode:
      return CodeBlock(text, /*last=*/true);
    default:
      return std::string(text);
  }
}

Result<double> ScoreOutput(Scorer scorer, const EvalItem& item, std::string_view output) {
  const std::string_view text = FinalAnswer(output), whole = WithoutReasoning(output);
  switch (scorer) {
    case Scorer::kExact:
      return text == FinalAnswer(item.answer) ? 1.0 : 0.0;
    case Scorer::kContainsAll:
      return ContainsAll(text, item.answers);
    case Scorer::kMath:
      return IsSameMathAnswer(ReadAnswer(scorer, output), item.answer) ? 1.0 : 0.0;
    case Scorer::kNumber: {
      const std::optional<double> given = LastNumber(ReadAnswer(scorer, output));
      const std::optional<double> wanted = LastNumber(item.answer);
      return given.has_value() && wanted.has_value() && std::abs(*given - *wanted) < 1e-6 ? 1.0
                                                                                          : 0.0;
    }
    case Scorer::kChoice:
      return ReadAnswer(scorer, output) == item.answer ? 1.0 : 0.0;
    case Scorer::kHumanEval:
      return RunHumanEval(item, AfterReasoning(output));
    case Scorer::kLiveCode:
      return RunLiveCode(item, text);
    case Scorer::kTokenF1:
      return BestOf(item, [&](const std::string& r) { return TokenF1(text, r); });
    case Scorer::kTokenF1FirstLine:
      return BestOf(item, [&](const std::string& r) { return TokenF1(FirstLine(whole), r); });
    case Scorer::kRougeL:
      return BestOf(item, [&](const std::string& r) { return RougeL(text, r); });
    case Scorer::kRougeLFirstLine:
      return BestOf(item, [&](const std::string& r) { return RougeL(FirstLine(whole), r); });
    case Scorer::kClass:
      return BestOf(item, [&](const std::string& r) {
        return ClassScore(FirstLine(whole), r, item.classes);
      });
    case Scorer::kNumbersNamed:
      return BestOf(item, [&](const std::string& r) { return NumberScore(text, r); });
    case Scorer::kCodeSimilarity:
      return BestOf(item, [&](const std::string& r) { return CodeSimilarity(whole, r); });
  }
  return 0.0;
}

}  // namespace oscar
