#include "scoring/code_scores.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace oscar {
namespace {

using nlohmann::json;

TEST(CodeBlocks, FirstOfPython) {
  EXPECT_EQ(FirstPythonBlock("```bash\npip\n```\n```python\nx\n```\n```py\ny\n```"), "x\n");
  EXPECT_EQ(FirstPythonBlock("```\nf(1) = 2\n```\nso\n``` Py \r\nx\n```"), "x\n");
  EXPECT_EQ(FirstPythonBlock("```Python3 title=a\nx\n```"), "x\n");
  EXPECT_EQ(FirstPythonBlock("```json\n{}\n```\n```\n  x\n```\n```\ny\n```"), "  x\n");
  EXPECT_EQ(FirstPythonBlock("use ```a``` here\n```python\nx\n```"), "x\n");
  EXPECT_EQ(FirstPythonBlock("```python\nx = 1\n"), "x = 1\n");
  EXPECT_EQ(FirstPythonBlock("```sh\nls\n```"), "```sh\nls\n```");
  EXPECT_EQ(FirstPythonBlock("  return 1"), "  return 1");
  EXPECT_EQ(FirstPythonBlock("```"), "```");
  EXPECT_EQ(FirstPythonBlock(""), "");
}

TEST(CodeBlocks, LastOfAny) {
  EXPECT_EQ(LastCodeBlock("```python\nx\n```\n```\ny\n```\nend"), "y\n");
  EXPECT_EQ(LastCodeBlock("```python\nx\n```\n```\ny\n"), "x\n");
  EXPECT_EQ(LastCodeBlock("x"), "x");
}

class CodeScoresTest : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("python3 -c pass") != 0) GTEST_SKIP() << "no python3";
  }
};

double HumanEval(const std::string& code) {
  EvalItem item;
  item.tests_prompt = "from typing import List\n\ndef add(a, b):\n    \"\"\"Adds.\"\"\"\n";
  item.tests = "def check(candidate):\n    assert candidate(1, 2) == 3\n";
  item.entry_point = "add";
  const auto score = HumanEvalScore(item, "```python\n" + code + "\n```");
  EXPECT_TRUE(score.has_value()) << score.error().ToString();
  return score.value_or(-1);
}

TEST_F(CodeScoresTest, OutputNeitherMakesNorLosesAPass) {
  const std::string good = "def add(a, b):\n    return a + b\n";
  for (const char* more :
       {"", "print('x' * 200000)", "import sys\nprint('x' * 200000, file=sys.stderr)",
        "import atexit\natexit.register(lambda: print('bye'))",
        "class X:\n    def __del__(self): print('x')\nx = X()",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "if __name__ == '__main__':\n    add(*map(int, input().split()))",
        "import os\nos.close(1)\nos.close(2)",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int' = 0"}) {
    EXPECT_EQ(HumanEval(good + more), 1) << more;
  }
  for (const char* code :
       {"def add(a, b): return a - b", "import os\nos._exit(0)", "import sys\nsys.exit(0)",
        "import os, sys\nprint('passed'); sys.stdout.flush(); os._exit(0)",
        "import os\nos.write(3, b'passed\\n'); os._exit(0)",
        "import os\nos.write(3, os.read(0, 64)); os._exit(0)",
        "import os\nos.write(3, b'True'); os._exit(126)",
        "import os, sys\n"
        "for s in [v for n in range(9) for v in vars(sys.modules['__main__']).values()]:\n"
        "    if isinstance(s, bytes): os.write(3, s)\nos._exit(0)",
        "import os, sys\nframe = sys._getframe()\n"
        "while frame:\n    for s in frame.f_locals.values():\n"
        "        if isinstance(s, bytes) and len(s) == 32: os.write(3, s)\n"
        "    frame = frame.f_back\nos._exit(0)"}) {
    EXPECT_EQ(HumanEval(code), 0) << code;
  }
}

double LiveCode(const std::string& code, const json& tests, const std::string& function = "",
                double seconds = 5) {
  EvalItem item;
  item.num_tests = static_cast<int64_t>(tests.size());
  item.tests =
      json{{"public", tests.dump()}, {"private", ""}, {"function", function}, {"seconds", seconds}}
          .dump();
  const auto score = LiveCodeScore(item, "Here:\n```python\n" + code + "\n```\n");
  EXPECT_TRUE(score.has_value()) << score.error().ToString();
  return score.value_or(-1);
}

TEST_F(CodeScoresTest, ProgramsReadAndWriteAsTheyLike) {
  const json tests = {{{"input", "3 4\n"}, {"output", "7\n"}, {"testtype", "stdin"}},
                      {{"input", "10 4\n"}, {"output", "14"}, {"testtype", "stdin"}}};
  for (const char* code :
       {"a, b = map(int, input().split())\nprint(a + b)",
        "print(sum(map(int, open(0).read().split())))",
        "print(sum(map(int, open('/dev/stdin').read().split())))",
        "import os\nprint(sum(map(int, os.read(0, 1 << 16).split())))",
        "print(sum(map(int, stdin.readline().split())))",
        "print(sum(map(int, sys.stdin.buffer.read().split())))",
        "sys.stdout.buffer.write(str(sum(map(int, input().split()))).encode())",
        "import os\nos.write(1, b'%d' % sum(map(int, input().split())))",
        "print(sum(map(int, input().split())), file=open(1, 'w'))",
        "from __future__ import annotations\nprint(sum(map(int, input().split())))",
        "def main():\n    print(sum(map(int, input().split())))\n"
        "if __name__ == '__main__':\n    main()",
        "print(sum(map(int, input().split())))\nquit()",
        "import threading\nthreading.stack_size(1 << 26)\n"
        "threading.Thread(target=lambda: print(sum(map(int, input().split())))).start()",
        "import atexit\nout = []\natexit.register(lambda: sys.__stdout__.write('\\n'.join(out)))\n"
        "out.append(str(sum(map(int, input().split()))))"}) {
    EXPECT_EQ(LiveCode(code, tests), 1) << code;
  }
  for (const char* code :
       {"print(7)", "import os\nos.write(1, b'passed\\n')\nos._exit(0)", "while True: pass",
        "import os\nprint(sum(map(int, input().split())), flush=True)\nos._exit(0)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass"}) {
    EXPECT_EQ(LiveCode(code, tests, "", 0.3), 0) << code;
  }
  EXPECT_EQ(LiveCode("print(7)", json::array()), 0);
}

// Names of the published prelude, the builtins before those of other modules.
TEST_F(CodeScoresTest, ProgramsHaveThePublishedNames) {
  const json none = {{{"input", ""}, {"output", "ok"}, {"testtype", "stdin"}}};
  EXPECT_EQ(LiveCode("assert pow(3, 4, 5) == 1 and type(pow(3, 4)) is int\n"
                     "assert deepcopy([1]) == copy.deepcopy([1]) and operator.add(1, 2) == 3\n"
                     "assert datetime.date(2020, 1, 1) < datetime.date(2020, 1, 2)\n"
                     "assert timedelta(1) > timedelta(0) and statistics.mean([1, 3]) == mean([2])\n"
                     "assert json.loads('1') == loads('1') and StringIO('x').read() == 'x'\n"
                     "assert re.sub('a', 'b', 'a') == 'b' and ascii_lowercase[0] == 'a'\n"
                     "assert gcd(4, 6) == math.gcd(4, 6) == 2 and inf > 1 and randint(1, 1) == 1\n"
                     "assert Counter('aa')['a'] == 2 and bisect_left([1, 2], 2) == 1\n"
                     "assert list(accumulate([1, 2])) == [1, 3] and reduce(add, [1, 2]) == 3\n"
                     "heappush([], 1); heapq.heappush([], 1); x: List[Optional[int]] = []\n"
                     "assert sum(map(abs, [-1])) == 1 and maxsize > 0\n"
                     "assert sys.getrecursionlimit() == 50000\n"
                     "print('ok')",
                     none),
            1);
}

TEST_F(CodeScoresTest, FunctionsAreCalled) {
  const json add = {{{"input", "3\n4"}, {"output", "7"}, {"testtype", "functional"}},
                    {{"input", "0\n4"}, {"output", "4"}, {"testtype", "functional"}}};
  const std::string head = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ";
  EXPECT_EQ(LiveCode(head + "return operator.add(a, b)", add, "add"), 1);
  EXPECT_EQ(LiveCode(head + "print(a); return int(pow(a + b, 1, 10**9 + 7))", add, "add"), 1);
  EXPECT_EQ(
      LiveCode("class Solution:\n    @cache\n    def add(self, a, b): return a + b", add, "add"),
      1);
  EXPECT_EQ(LiveCode("def add(a, b): return a + b", add, "add"), 1);
  EXPECT_EQ(LiveCode(head + "return a - b", add, "add"), 0);
  // Equal to everything, but no answer.
  EXPECT_EQ(
      LiveCode("class Any2:\n    __eq__ = lambda self, other: True\n" + head + "return Any2()", add,
               "add"),
      0);
  const json reverse = {{{"input", "[1, 2]"}, {"output", "[2, 1]"}, {"testtype", "functional"}}};
  EXPECT_EQ(LiveCode("class Solution:\n    def f(self, a): return tuple(deepcopy(a)[::-1])",
                     reverse, "f"),
            1);
}

}  // namespace
}  // namespace oscar
