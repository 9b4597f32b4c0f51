#include "scoring/code_scores.h"

#include <algorithm>
#include <vector>

#include "sandbox/sandbox.h"

namespace oscar {
namespace {

constexpr double kSecondsPerTest = 6;  // LiveCodeBench's limit
constexpr double kHumanEvalSeconds = 10;
constexpr uint64_t kLiveCodeMemory = uint64_t{4} << 30;
constexpr uint64_t kLiveCodeStream = uint64_t{1} << 27;   // of one test's input, or output
constexpr uint64_t kLiveCodeWritten = uint64_t{1} << 30;  // all tests' inputs are in this, too

// The verdict: the secret of standard input, on a pipe of its own, once run() has returned True.
// While it runs, the secret lies on the interpreter's stack, in no variable.
constexpr char kDriverEnd[] = R"PY(
def take():
    secret = os.read(0, 64)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return secret

def deliver(secret, passed, write=os.write, leave=os._exit):
    if passed is True:
        write(3, secret)
    leave(0)

deliver(take(), run())
)PY";

// The published harness runs the program with a __name__ that is not __main__, too.
constexpr char kHumanEvalDriver[] = R"PY(
import os, sys, types

def run():
    with open("program.py", "rb") as file:
        text = file.read()
    sys.modules["solution"] = module = types.ModuleType("solution")
    exec(compile(text, "program.py", "exec", dont_inherit=True), module.__dict__)
    return True
)PY";

// Runs every test of a LiveCodeBench record. Private tests may be packed as base64(zlib(pickle)) of
// a JSON text; unpacking foreign pickles is one more reason to be in here.
constexpr char kLiveCodeDriver[] = R"PY(
import atexit, base64, importlib, json, os, pickle, signal, sys, threading, types, zlib
from decimal import Decimal, InvalidOperation

# What solutions may use without importing it, in the published order: later names win, so that
# pow and open are the builtins again.
MODULES = ("string re datetime collections heapq bisect copy math random statistics itertools "
           "functools operator io sys json").split()

def prelude():
    space = {}
    for name in MODULES + ["builtins", "typing"]:
        exec("from %s import *" % name, space)
    for name in MODULES:
        space[name] = importlib.import_module(name)
    return space

def read_once(name):
    with open(name, "rb") as file:
        out = file.read()
    try:
        os.unlink(name)
    except OSError:
        pass
    return out

def unpack(text):
    if not text:
        return []
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(pickle.loads(zlib.decompress(base64.b64decode(text))))

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

def enter(code, name, base):
    sys.modules[name] = module = types.ModuleType(name)
    space = module.__dict__
    space.update(base)
    space.update(__name__=name, stdin=sys.stdin, stdout=sys.stdout)
    sys.setrecursionlimit(50000)
    exec(code, space)
    return space

# To put at the descriptor itself: programs read open(0) and /dev/stdin, and write to 1.
def stream(number, content=b""):
    file = os.memfd_create("stream")
    with open(file, "wb", closefd=False) as out:
        out.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, number)
    return file

def flush(file):
    try:
        file.flush()
    except Exception:
        pass

# As an interpreter ends.
def finish():
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()

def run_program(code, text, base):
    keep = [(number, os.dup(number)) for number in (0, 1)]
    source, sink = stream(0, text.encode()), stream(1)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = out = open(1, "w", encoding="utf-8", closefd=False)
    try:
        enter(code, "__main__", base)
    except SystemExit:
        pass
    finish()
    flush(sys.stdout)
    flush(out)
    for number, file in keep:
        os.dup2(file, number)
        os.close(file)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    os.close(source)
    os.lseek(sink, 0, os.SEEK_SET)
    with open(sink, "rb") as file:
        return file.read().decode("utf-8", "replace")

def run():
    spec = json.loads(read_once("tests.json"))
    code = compile(read_once("solution.py"), "solution.py", "exec", dont_inherit=True)
    tests = unpack(spec["public"]) + unpack(spec["private"])
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    base = prelude()
    call = None
    for test in tests:
        signal.setitimer(signal.ITIMER_REAL, spec["seconds"])
        if test.get("testtype") == "functional" or spec["function"]:
            if call is None:
                space = enter(code, "solution", base)
                call = getattr(space["Solution"](), spec["function"]) if "Solution" in space \
                    else space[spec["function"]]
            got = call(*[json.loads(line) for line in test["input"].split("\n")])
            # Tuples are lists, and numpy's numbers are numbers.
            got = json.loads(json.dumps(got, default=lambda value: value.item()))
            ok = got == json.loads(test["output"])
        else:
            ok = same_text(run_program(code, test["input"], base), test["output"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not ok:
            sys.exit("wrong answer")
    return len(tests) > 0
)PY";

struct Block {
  std::string language;  // in lower case
  size_t begin, end;
  bool closed;
};

std::vector<Block> FindBlocks(std::string_view text) {
  constexpr std::string_view kFence = "```";
  std::vector<Block> out;
  for (size_t at = text.find(kFence); at != std::string_view::npos;) {
    at += kFence.size();
    const size_t line = text.find('\n', at);
    if (line == std::string_view::npos) break;
    const std::string_view info = text.substr(at, line - at);
    if (const size_t inline_end = info.find(kFence); inline_end != std::string_view::npos) {
      at = text.find(kFence, at + inline_end + kFence.size());  // code within a line
      continue;
    }
    Block block;
    const size_t first = info.find_first_not_of(" \t\r");
    if (first != std::string_view::npos) {
      block.language = info.substr(first, info.find_first_of(" \t\r{", first) - first);
    }
    std::transform(block.language.begin(), block.language.end(), block.language.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
    const size_t close = text.find(kFence, line);
    block.begin = line + 1;
    block.closed = close != std::string_view::npos;
    block.end = block.closed ? close : text.size();
    out.push_back(block);
    at = block.closed ? text.find(kFence, close + kFence.size()) : std::string_view::npos;
  }
  return out;
}

std::string Inside(std::string_view text, const Block& block) {
  return std::string(text.substr(block.begin, block.end - block.begin));
}

}  // namespace

std::string FirstPythonBlock(std::string_view text) {
  const std::vector<Block> blocks = FindBlocks(text);
  for (const Block& block : blocks) {
    if (block.language == "python" || block.language == "py" || block.language == "python3") {
      return Inside(text, block);
    }
  }
  for (const Block& block : blocks) {
    if (block.language.empty() && block.closed) return Inside(text, block);
  }
  return std::string(text);
}

std::string LastCodeBlock(std::string_view text) {
  const std::vector<Block> blocks = FindBlocks(text);
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    if (block->closed) return Inside(text, *block);
  }
  return std::string(text);
}

Result<double> HumanEvalScore(const EvalItem& item, std::string_view output) {
  const std::string code = FirstPythonBlock(output);
  // A body alone goes on after the prompt's docstring; a whole function replaces it.
  const bool whole = code.find("def " + item.entry_point) != std::string::npos;
  const std::string program = item.tests_prompt + (whole ? "\n" : "") + code + "\n" + item.tests +
                              "\ncheck(" + item.entry_point + ")\n";
  SandboxLimits limits;
  limits.seconds = kHumanEvalSeconds;
  OSCAR_ASSIGN_OR_RETURN(const SandboxResult run,
                         RunPython({{"driver.py", std::string(kHumanEvalDriver) + kDriverEnd},
                                    {"program.py", program}},
                                   limits));
  return run.confirmed ? 1.0 : 0.0;
}

Result<double> LiveCodeScore(const EvalItem& item, std::string_view output) {
  SandboxLimits limits;
  limits.seconds = kSecondsPerTest * static_cast<double>(std::max<int64_t>(item.num_tests, 1)) + 5;
  limits.memory_bytes = kLiveCodeMemory;
  limits.file_bytes = kLiveCodeStream;
  limits.written_bytes = kLiveCodeWritten;
  limits.directory_bytes += item.tests.size();
  OSCAR_ASSIGN_OR_RETURN(const SandboxResult run,
                         RunPython({{"driver.py", std::string(kLiveCodeDriver) + kDriverEnd},
                                    {"solution.py", LastCodeBlock(output)},
                                    {"tests.json", item.tests}},
                                   limits));
  return run.confirmed ? 1.0 : 0.0;
}

}  // namespace oscar
