#include "tasks/benchmarks.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "sandbox/sandbox.h"
#include "tasks/python_random.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The published OSCAR table: 32K tokens of generation, five seeds.
constexpr int64_t kReasoningTokens = 32768;
constexpr int kReasoningRepeats = 5;
constexpr uint64_t kMaxCsvBytes = uint64_t{1} << 28;
constexpr int64_t kLongBenchInput = 32768;

constexpr char kBoxedInstruction[] =
    "Please reason step by step, and put your final answer within \\boxed{}.";

// Makes an item of each record of a JSONL file.
Status ReadRecords(const fs::path& path, int64_t limit,
                   const std::function<Status(const json& record, EvalItem& item)>& fill,
                   EvalTask& task, std::vector<std::string>& warnings) {
  return ReadJsonLines(path, limit, warnings, [&](std::string_view line, int64_t index) -> Status {
    OSCAR_ASSIGN_OR_RETURN(const json record, ParseJson(line, "record"));
    if (!record.is_object()) return InvalidArgument("a record must be an object");
    EvalItem item;
    item.id = fmt::format("{}/{}", task.name, index);
    OSCAR_RETURN_IF_ERROR(fill(record, item));
    // Scores of two items with one id would be one.
    const auto is_same = [&](const EvalItem& other) { return other.id == item.id; };
    if (std::ranges::any_of(task.items, is_same)) {
      return InvalidArgument(fmt::format("id \"{}\" is there twice", item.id));
    }
    task.items.push_back(std::move(item));
    return {};
  });
}

Result<std::string> Text(const json& record, const char* name) {
  const auto found = record.find(name);
  if (found != record.end() && found->is_string()) return found->get<std::string>();
  if (found != record.end() && found->is_number()) return found->dump();
  return Unexpected(InvalidArgument(fmt::format("\"{}\" must be a string", name)));
}

Result<std::vector<std::string>> Texts(const json& record, const char* name) {
  std::vector<std::string> out;
  const json values = record.value(name, json());
  if (values.is_null()) return out;
  if (!values.is_array()) {
    return Unexpected(InvalidArgument(fmt::format("\"{}\" must be a list", name)));
  }
  for (const json& value : values) {
    if (!value.is_string()) {
      return Unexpected(InvalidArgument(fmt::format("\"{}\" must hold strings", name)));
    }
    out.push_back(value.get<std::string>());
  }
  return out;
}

// The code of an answer is run. Users hear before hours of generation, not after, that this cannot
// be done here or is done with less than usual.
void WarnOfSandbox(const EvalTask& task, std::vector<std::string>& warnings) {
  const Result<SandboxResult> trial = RunPython({{"trial.py", "pass"}}, {});
  const std::string warning =
      trial.has_value() ? SandboxWarning() : "no answer can be scored: " + trial.error().message();
  if (!warning.empty()) warnings.push_back(task.name + ": " + warning);
}

Status FillGsm8k(const json& record, EvalItem& item) {
  OSCAR_ASSIGN_OR_RETURN(const std::string question, Text(record, "question"));
  OSCAR_ASSIGN_OR_RETURN(const std::string answer, Text(record, "answer"));
  const size_t mark = answer.rfind("####");
  if (mark == std::string::npos) return InvalidArgument("\"answer\" has no #### line");
  item.prompt = question + "\n" + kBoxedInstruction;
  item.answer = FinalAnswer(std::string_view(answer).substr(mark + 4));
  return item.answer.empty() ? InvalidArgument("nothing follows ####") : Status();
}

Status FillMath(const json& record, EvalItem& item) {
  OSCAR_ASSIGN_OR_RETURN(item.prompt,
                         Text(record, record.contains("problem") ? "problem" : "question"));
  item.prompt += std::string("\n") + kBoxedInstruction;
  OSCAR_ASSIGN_OR_RETURN(item.answer, Text(record, "answer"));
  return FinalAnswer(item.answer).empty() ? InvalidArgument("\"answer\" is empty") : Status();
}

Status FillHumanEval(const json& record, EvalItem& item) {
  OSCAR_ASSIGN_OR_RETURN(item.id, Text(record, "task_id"));
  OSCAR_ASSIGN_OR_RETURN(item.tests_prompt, Text(record, "prompt"));
  OSCAR_ASSIGN_OR_RETURN(item.tests, Text(record, "test"));
  OSCAR_ASSIGN_OR_RETURN(item.entry_point, Text(record, "entry_point"));
  item.prompt =
      "Read the following function signature and docstring, and fully implement the function "
      "described. Your response should only contain the code for this function.\n" +
      item.tests_prompt;
  return {};
}

// simple-evals' template of four choices; GPQA and MMLU share it.
std::string ChoicePrompt(const std::string& question, std::span<const std::string, 4> choices) {
  return fmt::format(
      "Answer the following multiple choice question. The last line of your response should be "
      "of the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. "
      "Think step by step before answering.\n\n{}\n\nA) {}\nB) {}\nC) {}\nD) {}",
      question, choices[0], choices[1], choices[2], choices[3]);
}

Status FillMmlu(const json& record, EvalItem& item) {
  OSCAR_ASSIGN_OR_RETURN(const std::string question, Text(record, "question"));
  OSCAR_ASSIGN_OR_RETURN(const std::vector<std::string> choices, Texts(record, "choices"));
  const json answer = record.value("answer", json());
  if (choices.size() != 4) {
    return InvalidArgument(fmt::format("\"choices\" holds {}, not 4", choices.size()));
  }
  if (!answer.is_number_integer() || answer.get<int64_t>() < 0 || answer.get<int64_t>() > 3) {
    return InvalidArgument("\"answer\" must be 0 to 3");
  }
  item.prompt = ChoicePrompt(question, std::span<const std::string, 4>(choices.data(), 4));
  item.answer = std::string(1, static_cast<char>('A' + answer.get<int>()));
  return {};
}

// The published CSV files: no header, one a subject.
Status ReadMmluCsv(const fs::path& path, int64_t limit, EvalTask& task,
                   std::vector<std::string>& warnings) {
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxCsvBytes));
  const std::vector<std::vector<std::string>> rows = ParseCsv(text);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (limit > 0 && static_cast<int64_t>(task.items.size()) == limit) break;
    const std::vector<std::string>& row = rows[r];
    if (row.size() != 6 || row[5].size() != 1 || row[5][0] < 'A' || row[5][0] > 'D') {
      warnings.push_back(
          fmt::format("{}: record {}: left out: not a question, four choices and a letter A to D",
                      path.string(), r + 1));
      continue;
    }
    EvalItem item;
    item.id = fmt::format("{}/{}", path.stem().string(), r);
    item.prompt = ChoicePrompt(row[0], std::span<const std::string, 4>(&row[1], 4));
    item.answer = row[5];
    task.items.push_back(std::move(item));
  }
  return {};
}

Status ReadMmlu(const fs::path& path, int64_t limit, EvalTask& task,
                std::vector<std::string>& warnings) {
  if (path.extension() == ".jsonl") return ReadRecords(path, limit, FillMmlu, task, warnings);
  if (!IsDirectory(path)) return ReadMmluCsv(path, limit, task, warnings);
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    if (entry.path().extension() == ".csv") files.push_back(entry.path());
  }
  if (files.empty()) {
    return NotFound(
        fmt::format("{}: holds none of MMLU's files, such as anatomy_test.csv", path.string()));
  }
  std::ranges::sort(files);
  for (const fs::path& file : files) {
    OSCAR_RETURN_IF_ERROR(ReadMmluCsv(file, limit, task, warnings));
  }
  return {};
}

Status ReadGpqa(const fs::path& path, int64_t limit, EvalTask& task,
                std::vector<std::string>& warnings) {
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxCsvBytes));
  const std::vector<std::vector<std::string>> rows = ParseCsv(text);
  constexpr std::array<std::string_view, 5> kColumns = {"Question", "Correct Answer",
                                                        "Incorrect Answer 1", "Incorrect Answer 2",
                                                        "Incorrect Answer 3"};
  std::array<size_t, 5> columns;
  for (size_t i = 0; i < kColumns.size(); ++i) {
    const auto found = rows.empty() ? decltype(rows[0].begin()){}
                                    : std::find(rows[0].begin(), rows[0].end(), kColumns[i]);
    if (rows.empty() || found == rows[0].end()) {
      return InvalidArgument(
          fmt::format("{}: has no column \"{}\"; give GPQA's own CSV, such as gpqa_diamond.csv",
                      path.string(), kColumns[i]));
    }
    columns[i] = static_cast<size_t>(found - rows[0].begin());
  }
  // One permutation a row in file order, as simple-evals draws them.
  PythonRandom random(0);
  for (size_t r = 1; r < rows.size(); ++r) {
    const std::vector<uint32_t> order = random.Sample(4, 4);
    if (limit > 0 && static_cast<int64_t>(task.items.size()) == limit) break;
    if (rows[r].size() < rows[0].size()) {
      warnings.push_back(fmt::format("{}: record {}: left out: {} fields of {}", path.string(), r,
                                     rows[r].size(), rows[0].size()));
      continue;
    }
    const auto field = [&](size_t i) -> const std::string& { return rows[r][columns[i]]; };
    std::array<std::string, 4> choices;
    for (size_t i = 0; i < 4; ++i) {
      choices[i] = field(1 + order[i]);
    }
    const auto correct = std::find(choices.begin(), choices.end(), field(1)) - choices.begin();
    EvalItem item;
    item.id = fmt::format("gpqa/{}", r - 1);
    item.system = "You are a helpful assistant.";
    item.prompt = ChoicePrompt(field(0), choices);
    item.answer = std::string(1, static_cast<char>('A' + correct));
    task.items.push_back(std::move(item));
  }
  return {};
}

Status FillLiveCode(const json& record, EvalItem& item) {
  OSCAR_ASSIGN_OR_RETURN(item.id, Text(record, "question_id"));
  OSCAR_ASSIGN_OR_RETURN(const std::string question, Text(record, "question_content"));
  OSCAR_ASSIGN_OR_RETURN(const std::string starter, Text(record, "starter_code"));
  OSCAR_ASSIGN_OR_RETURN(const std::string public_tests, Text(record, "public_test_cases"));
  OSCAR_ASSIGN_OR_RETURN(const std::string private_tests, Text(record, "private_test_cases"));
  std::string function;
  if (const auto metadata = record.find("metadata");
      metadata != record.end() && metadata->is_string()) {
    const Result<json> parsed = ParseJson(metadata->get<std::string>(), "metadata");
    if (parsed.has_value() && parsed->is_object()) {
      const json name = parsed->value("func_name", json());
      if (name.is_string()) function = name.get<std::string>();
    }
  }
  item.system =
      "You are an expert Python programmer. You will be given a question (problem "
      "specification) and will generate a correct Python program that matches the "
      "specification and passes all tests.";
  item.prompt = "### Question:\n" + question + "\n\n";
  if (starter.empty()) {
    item.prompt +=
        "### Format: Read the inputs from stdin solve the problem and write the answer to "
        "stdout (do not directly test on the sample inputs). Enclose your code within "
        "delimiters as follows. Ensure that when the python program runs, it reads the "
        "inputs, runs the algorithm and writes output to STDOUT.\n```python\n# YOUR CODE "
        "HERE\n```\n\n";
  } else {
    item.prompt +=
        "### Format: You will use the following starter code to write the solution to the "
        "problem and enclose your code within delimiters.\n```python\n" +
        starter + "\n```\n\n";
  }
  item.prompt += "### Answer: (use the provided format with backticks)\n\n";
  item.tests = json{
      {"public", public_tests},
      {"private", private_tests},
      {"function", function},
      {"seconds",
       6}}.dump(-1, ' ', false, json::error_handler_t::replace);
  // Packed private tests cannot be counted here; problems have some tens of them.
  const Result<json> listed = ParseJson(private_tests, "private_test_cases");
  item.num_tests =
      listed.has_value() && listed->is_array() ? static_cast<int64_t>(listed->size()) + 3 : 40;
  return {};
}

struct LongBenchSet {
  std::string_view name;
  Scorer scorer;
  int64_t max_tokens;
  bool use_template;  // few-shot and completion prompts go to the model as they are
  std::string_view prompt;
};

constexpr std::array<LongBenchSet, 13> kLongBench = {{
    {"qasper", Scorer::kTokenF1, 128, true,
     "You are given a scientific article and a question. Answer the question as concisely as you "
     "can, using a single phrase or sentence if possible. If the question cannot be answered based "
     "on the information in the article, write \"unanswerable\". If the question is a yes/no "
     "question, answer \"yes\", \"no\", or \"unanswerable\". Do not provide any "
     "explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as "
     "concisely as you can, using a single phrase or sentence if possible. If the question cannot "
     "be answered based on the information in the article, write \"unanswerable\". If the question "
     "is a yes/no question, answer \"yes\", \"no\", or \"unanswerable\". Do not provide any "
     "explanation.\n\nQuestion: {input}\n\nAnswer:"},
    {"multifieldqa_en", Scorer::kTokenF1, 64, true,
     "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
     "question based on the above text, only give me the answer and do not output any other "
     "words.\n\nQuestion: {input}\nAnswer:"},
    {"hotpotqa", Scorer::kTokenF1, 32, true,
     "Answer the question based on the given passages. Only give me the answer and do not output "
     "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question "
     "based on the given passages. Only give me the answer and do not output any other "
     "words.\n\nQuestion: {input}\nAnswer:"},
    {"2wikimqa", Scorer::kTokenF1, 32, true,
     "Answer the question based on the given passages. Only give me the answer and do not output "
     "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question "
     "based on the given passages. Only give me the answer and do not output any other "
     "words.\n\nQuestion: {input}\nAnswer:"},
    {"gov_report", Scorer::kRougeL, 512, true,
     "You are given a report by a government agency. Write a one-page summary of the "
     "report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"},
    {"multi_news", Scorer::kRougeL, 512, true,
     "You are given several news passages. Write a one-page summary of all news. "
     "\n\nNews:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:"},
    {"trec", Scorer::kClass, 64, false,
     "Please determine the type of the question below. Here are some examples of "
     "questions.\n\n{context}\n{input}"},
    {"triviaqa", Scorer::kTokenF1FirstLine, 32, false,
     "Answer the question based on the given passage. Only give me the answer and do not output "
     "any other words. The following are some examples.\n\n{context}\n\n{input}"},
    {"samsum", Scorer::kRougeLFirstLine, 128, false,
     "Summarize the dialogue into a few short sentences. The following are some "
     "examples.\n\n{context}\n\n{input}"},
    {"passage_count", Scorer::kNumbersNamed, 32, true,
     "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
     "Please carefully read these paragraphs and determine how many unique paragraphs there are "
     "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
     "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
     "duplicates. The output format should only contain the number, such as 1, 2, 3, and so "
     "on.\n\nThe final answer is: "},
    {"passage_retrieval_en", Scorer::kNumbersNamed, 32, true,
     "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
     "paragraph the abstract is from.\n\n{context}\n\nThe following is an "
     "abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the abstract is from. "
     "The answer format must be like \"Paragraph 1\", \"Paragraph 2\", etc.\n\nThe answer is: "},
    {"lcc", Scorer::kCodeSimilarity, 64, false,
     "Please complete the code given below. \n{context}Next line of code:\n"},
    {"repobench-p", Scorer::kCodeSimilarity, 64, false,
     "Please complete the code given below. \n{context}{input}Next line of code:\n"},
}};

std::string FillPrompt(std::string_view prompt, std::string_view context, std::string_view input) {
  std::string out;
  for (size_t at = 0; at < prompt.size();) {
    const auto take = [&](std::string_view name, std::string_view text) {
      if (prompt.substr(at, name.size()) != name) return false;
      out += text;
      at += name.size();
      return true;
    };
    if (take("{context}", context) || take("{input}", input)) continue;
    out += prompt[at++];
  }
  return out;
}

Status FillLongBench(const LongBenchSet& set, const json& record, EvalItem& item) {
  OSCAR_ASSIGN_OR_RETURN(const std::string context, Text(record, "context"));
  OSCAR_ASSIGN_OR_RETURN(const std::string input, Text(record, "input"));
  OSCAR_ASSIGN_OR_RETURN(item.answers, Texts(record, "answers"));
  if (item.answers.empty()) return InvalidArgument("\"answers\" holds none");
  OSCAR_ASSIGN_OR_RETURN(item.classes, Texts(record, "all_classes"));
  const json length = record.value("length", json());
  if (!length.is_number()) return InvalidArgument("\"length\" must be a number");
  const auto words = length.get<double>();
  item.bucket = words < 4000 ? "0-4k" : words < 8000 ? "4-8k" : "8k+";
  item.prompt = FillPrompt(set.prompt, context, input);
  item.use_template = set.use_template;
  item.max_tokens = set.max_tokens;
  return {};
}

Result<EvalSuite> ReadLongBench(const fs::path& path, const SuiteOptions& options) {
  EvalSuite suite;
  for (const LongBenchSet& set : kLongBench) {
    const fs::path file = path / fmt::format("{}_e.jsonl", set.name);
    suite.names.push_back(fmt::format("{}_e", set.name));
    if (!options.Takes(suite.names.back())) continue;
    if (!Exists(file)) {
      suite.warnings.push_back(
          fmt::format("{}: not there, so {} is left out", file.string(), set.name));
      continue;
    }
    EvalTask task;
    task.name = suite.names.back();
    task.scorer = set.scorer;
    task.max_input = kLongBenchInput;
    OSCAR_RETURN_IF_ERROR(ReadRecords(
        file, options.LimitOf(task.name),
        [&](const json& record, EvalItem& item) { return FillLongBench(set, record, item); }, task,
        suite.warnings));
    suite.tasks.push_back(std::move(task));
  }
  if (suite.tasks.empty() && !suite.warnings.empty()) {
    return Unexpected(NotFound(fmt::format(
        "{}: holds none of LongBench-E's files, such as qasper_e.jsonl", path.string())));
  }
  return suite;
}

struct Benchmark {
  std::string_view name;
  Scorer scorer = {};
  int64_t max_tokens = 0;
  bool reasons = false;                                          // sampled, several times
  bool runs_code = false;                                        // of answers, to score them
  Status (*fill)(const json& record, EvalItem& item) = nullptr;  // of a JSONL file
  // Of another format.
  Status (*read)(const fs::path& path, int64_t limit, EvalTask& task,
                 std::vector<std::string>& warnings) = nullptr;
};

constexpr std::array<Benchmark, 8> kBenchmarks = {{
    {"gsm8k", Scorer::kNumber, 2048, false, false, FillGsm8k},
    {"math500", Scorer::kMath, kReasoningTokens, true, false, FillMath},
    {"aime25", Scorer::kMath, kReasoningTokens, true, false, FillMath},
    {"humaneval", Scorer::kHumanEval, kReasoningTokens, true, true, FillHumanEval},
    {"gpqa", Scorer::kChoice, kReasoningTokens, true, false, nullptr, ReadGpqa},
    {"mmlu", Scorer::kChoice, 2048, false, false, nullptr, ReadMmlu},
    {"livecodebench", Scorer::kLiveCode, kReasoningTokens, true, true, FillLiveCode},
    {"longbench-e"},
}};

}  // namespace

std::span<const std::string_view> BenchmarkNames() {
  static constexpr auto kNames = [] {
    std::array<std::string_view, kBenchmarks.size()> names;
    std::ranges::transform(kBenchmarks, names.begin(), &Benchmark::name);
    return names;
  }();
  return kNames;
}

bool IsBenchmark(std::string_view name) {
  return std::ranges::find(kBenchmarks, name, &Benchmark::name) != kBenchmarks.end();
}

Result<EvalSuite> ReadBenchmark(std::string_view name, const fs::path& path,
                                const SuiteOptions& options) {
  if (name == "longbench-e") return ReadLongBench(path, options);
  OSCAR_CHECK(IsBenchmark(name));
  const Benchmark& benchmark = *std::ranges::find(kBenchmarks, name, &Benchmark::name);
  EvalSuite suite;
  suite.names.emplace_back(name);
  if (!options.Takes(name)) return suite;
  EvalTask task;
  task.name = name;
  task.scorer = benchmark.scorer;
  if (benchmark.reasons) {
    task.sampling.emplace();
    task.sampling->temperature = 1.0f;
    task.sampling->top_p = 0.95f;
    task.sampling->top_k = 40;
    task.repeats = kReasoningRepeats;
  }
  if (benchmark.runs_code) WarnOfSandbox(task, suite.warnings);
  const int64_t limit = options.LimitOf(task.name);
  OSCAR_RETURN_IF_ERROR(benchmark.fill != nullptr
                            ? ReadRecords(path, limit, benchmark.fill, task, suite.warnings)
                            : benchmark.read(path, limit, task, suite.warnings));
  for (EvalItem& item : task.items) item.max_tokens = benchmark.max_tokens;
  if (task.items.empty()) {
    return Unexpected(InvalidArgument(
        fmt::format("{}: holds no record of {}{}", path.string(), name,
                    suite.warnings.empty() ? "" : "; first problem: " + suite.warnings.front())));
  }
  suite.tasks.push_back(std::move(task));
  return suite;
}

std::vector<std::string> MissingLongBenchFiles(const fs::path& directory) {
  std::vector<std::string> missing;
  for (const LongBenchSet& set : kLongBench) {
    std::string file = fmt::format("{}_e.jsonl", set.name);
    if (!Exists(directory / file)) missing.push_back(std::move(file));
  }
  return missing;
}

std::vector<std::vector<std::string>> ParseCsv(std::string_view text) {
  std::vector<std::vector<std::string>> rows(1);
  std::string field;
  bool quoted = false;
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c != '"') {
        field += c;
      } else if (i + 1 < text.size() && text[i + 1] == '"') {
        field += '"';
        ++i;
      } else {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == ',') {
      rows.back().push_back(std::move(field));
      field.clear();
    } else if (c == '\n') {
      rows.back().push_back(std::move(field));
      field.clear();
      rows.emplace_back();
    } else if (c != '\r') {
      field += c;
    }
  }
  if (!field.empty() || !rows.back().empty()) rows.back().push_back(std::move(field));
  std::erase_if(rows,
                [](const auto& row) { return row.empty() || (row.size() == 1 && row[0].empty()); });
  return rows;
}

}  // namespace oscar
