#include "cli/eval_suites.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/log.h"
#include "engine/loaded_model.h"
#include "tasks/benchmarks.h"
#include "tasks/demo_suite.h"
#include "tasks/ruler.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kItemSeed = 42;

// "60" or "60,multikey_14k=30".
Status ParseLimits(const std::string& text, SuiteOptions& options) {
  Status wrong = InvalidArgument(fmt::format(
      "--limit \"{}\": give a number, or numbers of tasks as in 60,hop=20, each once", text));
  bool has_common = false;
  const std::vector<std::string> parts = SplitList(text);
  if (parts.empty()) return wrong;
  for (const std::string& part : parts) {
    const size_t equals = part.find('=');
    const std::string number = equals == std::string::npos ? part : part.substr(equals + 1);
    int64_t value = 0;
    const auto [stop, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    if (error != std::errc() || stop != number.data() + number.size() || value < 0) return wrong;
    if (equals == std::string::npos) {
      if (has_common) return wrong;
      has_common = true;
      options.limit = value;
    } else if (!options.task_limits.emplace(part.substr(0, equals), value).second) {
      return wrong;
    }
  }
  return {};
}

// What a prompt of the model's chat costs, for tasks that are generated to a length.
Result<std::function<Result<int64_t>(std::string_view)>> MakeTokenCounter(const fs::path& model) {
  OSCAR_ASSIGN_OR_RETURN(Tokenizer loaded, Tokenizer::Load(model));
  auto tokenizer = std::make_shared<const Tokenizer>(std::move(loaded));
  int64_t overhead = 0;
  const Result<ChatTemplate> chat = ChatTemplate::Load(model);
  if (chat.has_value()) {
    const nlohmann::ordered_json messages = {{{"role", "user"}, {"content", "x"}}};
    TemplateInput input;
    input.messages = &messages;
    input.now = 0;
    OSCAR_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, chat->Encode(input, *tokenizer));
    overhead = static_cast<int64_t>(tokens.size());
  } else if (chat.error().code() != StatusCode::kNotFound) {
    return Unexpected(chat.error());
  }
  return [tokenizer, overhead](std::string_view text) -> Result<int64_t> {
    OSCAR_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, tokenizer->Encode(text));
    return static_cast<int64_t>(tokens.size()) + overhead;
  };
}

// What tasks take from the demo model where nothing else is named; `instead` says how to name it.
Result<fs::path> DemoModelFor(std::string_view what, std::string_view instead) {
  Result<fs::path> demo = FindDemoModel();
  if (demo.has_value()) return demo;
  return Unexpected(NotFound(fmt::format(
      "{} with the demo model, which was not found beside the program; {}", what, instead)));
}

Result<EvalSuite> MakeRuler(const SuiteArguments& arguments, const std::string& name,
                            const SuiteOptions& options) {
  EvalSuite suite;
  std::vector<std::string> wanted;
  const size_t equals = name.find('=');
  const std::string kind = name.substr(0, equals);
  const bool takes_data = RulerTaskNeedsDocuments(kind);
  if (!takes_data && equals != std::string::npos) {
    return Unexpected(InvalidArgument(
        fmt::format("--suite {}: {} makes its own items and reads no data", name, kind)));
  }
  for (const std::string_view task : RulerTasks()) {
    if (kind != "ruler" && kind != task) continue;
    suite.names.emplace_back(task);
    if (options.Takes(task)) wanted.emplace_back(task);
  }
  if (takes_data) {
    suite.names.push_back(kind);
    if (options.Takes(kind)) wanted.push_back(kind);
  }
  if (wanted.empty()) return suite;
  fs::path model = arguments.model, haystack = arguments.haystack;
  const bool needs_essays = std::any_of(wanted.begin(), wanted.end(), RulerTaskNeedsEssays);
  if (model.empty()) {
    OSCAR_ASSIGN_OR_RETURN(
        model, DemoModelFor(fmt::format("the tokenizer that counts {}'s tokens comes", name),
                            "name the model's directory with --model DIR"));
  }
  std::string essays;
  if (needs_essays) {
    if (haystack.empty()) {
      OSCAR_ASSIGN_OR_RETURN(
          haystack, DemoModelFor(fmt::format("the prose that {} hides needles in comes", name),
                                 "name a text with --haystack FILE"));
      haystack /= "eval/haystack.txt";
    }
    OSCAR_ASSIGN_OR_RETURN(essays, ReadHaystack(haystack));
  }
  RulerOptions ruler;
  OSCAR_ASSIGN_OR_RETURN(ruler.count_tokens, MakeTokenCounter(model));
  ruler.essays = essays;
  if (takes_data && equals != std::string::npos) ruler.documents = name.substr(equals + 1);
  const uint64_t seed = arguments.seed.value_or(kItemSeed);
  if (seed > std::numeric_limits<uint32_t>::max()) {
    return Unexpected(
        InvalidArgument(fmt::format("--seed {}: RULER's items take seeds below 2^32", seed)));
  }
  ruler.seed = static_cast<uint32_t>(seed);
  for (const int64_t length : arguments.lengths) {
    ruler.length = length;
    for (const std::string& task : wanted) {
      const int64_t limit = options.LimitOf(task);
      ruler.samples = limit > 0 ? std::min(limit, arguments.samples) : arguments.samples;
      Result<EvalTask> made = MakeRulerTask(task, ruler);
      if (made.has_value()) {
        suite.tasks.push_back(std::move(*made));
      } else if (made.error().code() == StatusCode::kOutOfRange) {
        suite.warnings.push_back(fmt::format("left out: {}", made.error().message()));
      } else {
        return Unexpected(made.error());
      }
    }
  }
  if (arguments.is_remote && arguments.model.empty()) {
    suite.warnings.push_back(
        "RULER's lengths are counted with the demo model's tokenizer; name a directory with the "
        "server's own by --model");
  }
  return suite;
}

Status UnknownSuite(const std::string& name) {
  std::string ruler, benchmarks;
  for (const std::string_view task : RulerTasks()) ruler += fmt::format(", {}", task);
  ruler += ", qa_1=FILE, qa_2=FILE";
  for (const std::string_view benchmark : BenchmarkNames()) {
    benchmarks += fmt::format("{}{}=PATH", benchmarks.empty() ? "" : ", ", benchmark);
  }
  return InvalidArgument(
      fmt::format("--suite {}: no suite and no directory has this name; give a "
                  "directory of *.jsonl, or demo, ruler{}, or your data as {}",
                  name, ruler, benchmarks));
}

// The tasks of one name of --suite; the prose for perplexity comes with a directory.
Result<EvalSuite> MakeSuite(const SuiteArguments& arguments, const std::string& name,
                            const SuiteOptions& options, fs::path& prose) {
  const size_t equals = name.find('=');
  const std::string kind = name.substr(0, equals);
  if (IsRulerSuite(name)) return MakeRuler(arguments, name, options);
  if (IsBenchmark(kind)) {
    const std::string path = equals == std::string::npos ? "" : name.substr(equals + 1);
    if (path.empty()) {
      return Unexpected(InvalidArgument(fmt::format(
          "--suite {}: name your copy of its data as {}=PATH; see docs/tasks.md for the format",
          name, kind)));
    }
    return ReadBenchmark(kind, path, options);
  }
  fs::path directory = name;
  if (name == "demo") {
    OSCAR_ASSIGN_OR_RETURN(
        directory, DemoModelFor("the demo suite comes", "name a directory with --suite DIR"));
    directory /= "eval";
    if (arguments.generates_demo) {
      prose = directory / "heldout_prose.json";
      OSCAR_ASSIGN_OR_RETURN(std::string text, ReadHaystack(directory / "haystack.txt"));
      OSCAR_ASSIGN_OR_RETURN(const CodePointText haystack,
                             CodePointText::Create(std::move(text), "haystack.txt"));
      return MakeDemoSuite(arguments.samples, arguments.seed.value_or(kItemSeed), haystack,
                           options);
    }
  }
  if (!IsDirectory(directory)) return Unexpected(UnknownSuite(name));
  if (Exists(directory / "heldout_prose.json")) prose = directory / "heldout_prose.json";
  return ReadSuite(directory, options);
}

}  // namespace

std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    if (end > at) out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

bool IsRulerSuite(const std::string& suite) {
  return suite == "ruler" || IsRulerTask(suite.substr(0, suite.find('=')));
}

Result<EvalSuite> MakeSuites(const SuiteArguments& arguments, fs::path& prose) {
  SuiteOptions options;
  options.tasks = arguments.tasks;
  OSCAR_RETURN_IF_ERROR(ParseLimits(arguments.limit, options));
  std::vector<NamedSuite> parts;
  for (const std::string& name : arguments.suites) {
    parts.push_back({name, {}});
    OSCAR_ASSIGN_OR_RETURN(parts.back().suite, MakeSuite(arguments, name, options, prose));
  }
  OSCAR_ASSIGN_OR_RETURN(EvalSuite suite, JoinSuites(std::move(parts), options));
  for (const std::string& warning : suite.warnings) LogWarning("{}", warning);
  return suite;
}

}  // namespace oscar::cli
