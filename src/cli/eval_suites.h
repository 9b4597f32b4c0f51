// What an evaluation measures, from the names of a command line: the demo suite, directories, RULER
// and benchmarks. `oscar eval` and `oscar reproduce` ask alike. Free functions; one thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/status.h"
#include "tasks/suite.h"

namespace oscar::cli {

struct SuiteArguments {
  std::vector<std::string> suites = {"demo"};
  std::vector<std::string> tasks;  // only these; empty: all
  std::string limit = "0";         // of items: "60", "60,hop=20"
  std::vector<int64_t> lengths = {4096};
  int64_t samples = 100;           // of suites that are generated
  bool generates_demo = false;     // rather than reading the one that ships
  std::filesystem::path haystack;  // empty: the demo suite's
  std::optional<uint64_t> seed;    // of items that are generated
  std::filesystem::path model;     // whose tokenizer counts; empty: the demo model's
  bool is_remote = false;          // a server answers
};

// Parts between commas, empty ones left out.
std::vector<std::string> SplitList(const std::string& text);

// "ruler" or one of its tasks, with or without data ("qa_1=FILE").
bool IsRulerSuite(const std::string& suite);

// All tasks of all suites. `prose` is set where a suite brings a text for perplexity. Warnings are
// logged.
Result<EvalSuite> MakeSuites(const SuiteArguments& arguments, std::filesystem::path& prose);

}  // namespace oscar::cli
