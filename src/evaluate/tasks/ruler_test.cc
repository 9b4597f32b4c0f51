#include "tasks/ruler.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <set>

#include "scoring/scoring.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

// Words are tokens here.
int64_t CountWords(std::string_view text) {
  int64_t count = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool space = text[i] == ' ' || text[i] == '\n';
    const bool before = i == 0 || text[i - 1] == ' ' || text[i - 1] == '\n';
    count += !space && before ? 1 : 0;
  }
  return count;
}

// Like a byte-pair tokenizer: words in pieces of up to five letters, digits in pieces of up to
// three, every sign one of its own; so two UUIDs rarely have the same number of tokens.
int64_t CountPieces(std::string_view text) {
  int64_t count = 0;
  for (size_t i = 0; i < text.size();) {
    const auto is_letter = [&](size_t at) {
      return at < text.size() && (std::isalpha(static_cast<unsigned char>(text[at])) != 0);
    };
    const auto is_digit = [&](size_t at) {
      return at < text.size() && (std::isdigit(static_cast<unsigned char>(text[at])) != 0);
    };
    size_t end = i + (text[i] == ' ' ? 1 : 0);
    if (is_letter(end)) {
      const size_t most = end + 5;
      while (end < most && is_letter(end)) ++end;
    } else if (is_digit(end)) {
      const size_t most = end + 3;
      while (end < most && is_digit(end)) ++end;
    } else {
      ++end;
    }
    i = end;
    ++count;
  }
  return count;
}

std::string Essays() {
  std::string out;
  for (int i = 0; i < 3000; ++i) out += "Sentence number " + std::to_string(i) + " says little. ";
  return out;
}

RulerOptions Options(int64_t length, std::string_view essays) {
  RulerOptions options;
  options.length = length;
  options.samples = 3;
  options.essays = essays;
  options.count_tokens = [](std::string_view text) -> Result<int64_t> { return CountWords(text); };
  return options;
}

TEST(Ruler, EveryTaskFillsTheLengthAndHidesItsAnswers) {
  const std::string essays = Essays();
  for (const std::string_view name : RulerTasks()) {
    for (const int64_t length : {int64_t{2000}, int64_t{6000}}) {
      const auto task = MakeRulerTask(name, Options(length, essays));
      ASSERT_TRUE(task.has_value()) << name << ": " << task.error().ToString();
      ASSERT_EQ(task->items.size(), 3u);
      std::set<std::string> prompts;
      for (const EvalItem& item : task->items) {
        const int64_t words = CountWords(item.prompt + item.prefix) + item.max_tokens;
        EXPECT_LE(words, length) << name;
        EXPECT_GT(words, length * 3 / 4) << name;
        prompts.insert(item.prompt);
        // Every answer stands in the prompt, and giving them all scores 1.
        std::string output;
        for (const std::string& answer : item.answers) {
          EXPECT_NE(item.prompt.find(answer), std::string::npos) << name;
          output += answer + ", ";
        }
        EXPECT_EQ(*ScoreOutput(task->scorer, item, output), 1);
        EXPECT_EQ(*ScoreOutput(task->scorer, item, "nothing"), 0);
      }
      EXPECT_EQ(prompts.size(), 3u) << name;
      // The same seed draws the same items.
      const auto again = MakeRulerTask(name, Options(length, essays));
      EXPECT_EQ(again->items[2].prompt, task->items[2].prompt);
    }
  }
}

// Asked and actual, prompt and answer together, the shortest of three items. What is left over is
// a unit or two of the task (a line, a needle, a word) and what draws of one size differ by, most
// for cwe.
TEST(Ruler, ItemsAreAsLongAsAsked) {
  const std::string essays = Essays();
  std::string table;
  for (const std::string_view name : RulerTasks()) {
    for (const int64_t length : {1024, 2048, 4096, 8192, 16384, 32768}) {
      RulerOptions options = Options(length, essays);
      options.count_tokens = [](std::string_view text) -> Result<int64_t> {
        return CountPieces(text);
      };
      const auto task = MakeRulerTask(name, options);
      ASSERT_TRUE(task.has_value()) << name << ": " << task.error().ToString();
      int64_t shortest = length;
      for (const EvalItem& item : task->items) {
        const int64_t tokens = CountPieces(item.prompt + item.prefix) + item.max_tokens;
        EXPECT_LE(tokens, length) << name;
        shortest = std::min(shortest, tokens);
      }
      table +=
          std::string(name) + " " + std::to_string(length) + " " + std::to_string(shortest) + "\n";
      EXPECT_GE(shortest, length - std::max<int64_t>(length / 50, 80)) << name;
    }
  }
  RecordProperty("asked_actual", table);
}

TEST(Ruler, PromptsAreThePublishedOnes) {
  const std::string essays = Essays();
  const auto single = MakeRulerTask("niah_single_1", Options(2000, essays));
  ASSERT_TRUE(single.has_value());
  const EvalItem& item = single->items[0];
  EXPECT_TRUE(item.prompt.starts_with(
      "A special magic number is hidden within the following text. Make sure to memorize it. I "
      "will quiz you about the number afterwards.\nThe grass is green."))
      << item.prompt.substr(0, 200);
  EXPECT_NE(item.prompt.find("One of the special magic numbers for "), std::string::npos);
  EXPECT_NE(item.prompt.find("\nWhat is the special magic number for "), std::string::npos);
  EXPECT_TRUE(item.prefix.ends_with(" mentioned in the provided text is"));
  const auto query = MakeRulerTask("niah_multiquery", Options(2000, essays));
  EXPECT_EQ(query->items[0].answers.size(), 4u);
  EXPECT_NE(query->items[0].prompt.find("What are all the special magic numbers for "),
            std::string::npos);
  EXPECT_NE(query->items[0].prefix.find(", and "), std::string::npos);
  const auto value = MakeRulerTask("niah_multivalue", Options(2000, essays));
  EXPECT_EQ(value->items[0].answers.size(), 4u);
  const auto uuid = MakeRulerTask("niah_multikey_3", Options(2000, essays));
  EXPECT_EQ(uuid->items[0].answers.at(0).size(), 36u);
  EXPECT_EQ(uuid->items[0].answers[0][14], '4');
}

// The chain, followed by a reader of its own, is the answer.
TEST(Ruler, TrackingChainsHold) {
  const auto task = MakeRulerTask("vt", Options(3000, ""));
  ASSERT_TRUE(task.has_value());
  for (const EvalItem& item : task->items) {
    ASSERT_EQ(item.answers.size(), 5u);
    for (size_t i = 1; i < 5; ++i) {
      const std::string line = "VAR " + item.answers[i] + " = VAR " + item.answers[i - 1];
      EXPECT_NE(item.prompt.find(line), std::string::npos);
      EXPECT_EQ(item.answers[i].size(), 5u);
    }
    EXPECT_NE(item.prefix.find("5 variables are assigned the value "), std::string::npos);
  }
}

TEST(Ruler, FrequenciesAreInOrder) {
  const auto task = MakeRulerTask("fwe", Options(3000, ""));
  ASSERT_TRUE(task.has_value());
  const EvalItem& item = task->items[0];
  std::vector<int> counts;
  for (const std::string& word : item.answers) {
    int count = 0;
    for (size_t at = item.prompt.find(word); at != std::string::npos;
         at = item.prompt.find(word, at + 1)) {
      ++count;
    }
    counts.push_back(count);
  }
  EXPECT_GT(counts[0], counts[1]);
  EXPECT_GT(counts[1], counts[2]);
  EXPECT_GT(counts[2], 0);
}

TEST(Ruler, RefusesWhatDoesNotFit) {
  EXPECT_FALSE(MakeRulerTask("cwe", Options(200, "")).has_value());
  // More than there are different words for.
  const auto cwe = MakeRulerTask("cwe", Options(200000, ""));
  ASSERT_FALSE(cwe.has_value());
  EXPECT_NE(cwe.error().message().find("has words for"), std::string::npos);
  EXPECT_FALSE(MakeRulerTask("niah_single_2", Options(2000, "")).has_value());
  EXPECT_FALSE(MakeRulerTask("qa_1", Options(2000, "")).has_value());
}

TEST(Ruler, OnlyTasksInProseNeedEssays) {
  for (const std::string_view name : RulerTasks()) {
    const bool made = MakeRulerTask(name, Options(2000, "")).has_value();
    EXPECT_EQ(made, !RulerTaskNeedsEssays(name)) << name;
  }
}

TEST(Ruler, ProseMustHaveWords) {
  for (const char* essays : {"", " \n\t "}) {
    const auto task = MakeRulerTask("niah_single_2", Options(2000, essays));
    ASSERT_FALSE(task.has_value());
    EXPECT_NE(task.error().message().find("--haystack"), std::string::npos);
  }
  EXPECT_TRUE(MakeRulerTask("niah_single_2", Options(2000, "word")).has_value());
}

TEST(Ruler, ReadsHaystacksAndNamesTheirFile) {
  const fs::path directory =
      fs::temp_directory_path() / ("oscar_haystack_" + std::to_string(::getpid()));
  fs::create_directories(directory);
  const auto read = [&](const char* name, std::string_view bytes) {
    std::ofstream(directory / name, std::ios::binary) << bytes;
    return ReadHaystack(directory / name);
  };
  EXPECT_EQ(read("a.txt", "Prose. {\"text\":5}").value_or(""), "Prose. {\"text\":5}");
  EXPECT_EQ(read("a.json", R"({"text":"Prosé."})").value_or(""), "Prosé.");
  for (const char* bytes : {R"({"text":5})", R"(["Prose."])", R"({"texts":"Prose."})", "Prose."}) {
    const auto refused = read("b.json", bytes);
    ASSERT_FALSE(refused.has_value()) << bytes;
    EXPECT_NE(refused.error().message().find("b.json"), std::string::npos)
        << refused.error().message();
  }
  const auto broken = read("c.txt", "ab\xff\xfe");
  ASSERT_FALSE(broken.has_value());
  EXPECT_NE(broken.error().message().find("c.txt: the text is not valid UTF-8 at byte 2 of 4"),
            std::string::npos)
      << broken.error().message();
  fs::remove_all(directory);
}

}  // namespace
}  // namespace oscar
