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

class RulerQuestions : public testing::Test {
 protected:
  RulerQuestions()
      : directory_(fs::temp_directory_path() /
                   ("oscar_questions_" + std::to_string(::getpid()) + "_" +
                    testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::create_directories(directory_);
  }
  ~RulerQuestions() override { fs::remove_all(directory_); }
  RulerOptions OptionsFor(const std::string& text, int64_t length) {
    std::ofstream(directory_ / "data.json") << text;
    RulerOptions options = Options(length, "");
    options.documents = directory_ / "data.json";
    return options;
  }
  // 40 articles of three paragraphs; one question each on the first, one of them without answer.
  static std::string Squad() {
    std::string out = "{\"version\": \"v2.0\", \"data\": [";
    for (int a = 0; a < 40; ++a) {
      out += std::string(a == 0 ? "" : ", ") + "{\"title\": \"T\", \"paragraphs\": [";
      for (int p = 0; p < 3; ++p) {
        const std::string id = std::to_string(a) + "." + std::to_string(p);
        out += std::string(p == 0 ? "" : ", ") + "{\"context\": \"Paragraph " + id +
               " says nothing of any use to anyone.\", \"qas\": [";
        if (p == 0) {
          out += "{\"question\": \"Which is " + id +
                 "?\", \"is_impossible\": " + (a == 1 ? "true" : "false") + ", \"answers\": [" +
                 (a == 1 ? "" : "{\"text\": \"Nothing\"}, {\"text\": \"" + id + "\"}") + "]}";
        }
        out += "]}";
      }
      out += "]}";
    }
    return out + "]}";
  }
  fs::path directory_;
};

TEST_F(RulerQuestions, AskAboutOneDocumentAmongMany) {
  RulerOptions options = OptionsFor(Squad(), 400);
  options.samples = 100;
  const auto task = MakeRulerTask("qa_1", options);
  ASSERT_TRUE(task.has_value()) << task.error().ToString();
  EXPECT_EQ(task->scorer, Scorer::kContainsAny);
  ASSERT_EQ(task->items.size(), 39u) << "one of 40 questions has no answer";
  for (size_t i = 0; i < task->items.size(); ++i) {
    const EvalItem& item = task->items[i];
    const std::string id = std::to_string(i == 0 ? 0 : i + 1) + ".";
    EXPECT_TRUE(item.prompt.starts_with(
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words.\n\nThe following are given documents.\n\nDocument "
        "1:\nParagraph "));
    EXPECT_TRUE(item.prompt.ends_with("words.\n\nQuestion: Which is " + id + "0?"));
    EXPECT_EQ(item.prefix, " Answer:");
    EXPECT_EQ(item.max_tokens, 32);
    EXPECT_EQ(item.answers, (std::vector<std::string>{"Nothing", id + "0"}));
    for (int p = 0; p < 3; ++p) {  // the whole article is there, once
      const std::string text = "\nParagraph " + id + std::to_string(p) + " says";
      const size_t at = item.prompt.find(text);
      ASSERT_NE(at, std::string::npos) << text;
      EXPECT_EQ(item.prompt.find(text, at + 1), std::string::npos);
    }
    const int64_t length = CountWords(item.prompt + item.prefix) + 32;
    EXPECT_LE(length, 400);
    EXPECT_GT(length, 380);
  }
  EXPECT_EQ(*ScoreOutput(task->scorer, task->items[0], "It is nothing."), 1.0);
  EXPECT_EQ(*ScoreOutput(task->scorer, task->items[0], "It is something."), 0.0);
  // The same again.
  EXPECT_EQ(MakeRulerTask("qa_1", options)->items[7].prompt, task->items[7].prompt);
}

TEST_F(RulerQuestions, OfHotpotKeepEveryDocumentAsked) {
  std::string text = "[";
  for (int i = 0; i < 30; ++i) {
    const std::string n = std::to_string(i);
    text += std::string(i == 0 ? "" : ", ") + "{\"question\": \"Who is " + n +
            "?\", \"answer\": \"Number " + n + "\", \"context\": [[\"A" + n +
            "\", [\"First.\", \" Second.\"]], [\"B" + n + "\", [\"Third.\"]]]}";
  }
  const auto task = MakeRulerTask("qa_2", OptionsFor(text + "]", 150));
  ASSERT_TRUE(task.has_value()) << task.error().ToString();
  for (size_t i = 0; i < task->items.size(); ++i) {
    const std::string n = std::to_string(i);
    EXPECT_NE(task->items[i].prompt.find(":\nA" + n + "\nFirst. Second.\n"), std::string::npos);
    EXPECT_NE(task->items[i].prompt.find(":\nB" + n + "\nThird.\n"), std::string::npos);
    EXPECT_EQ(task->items[i].answers, std::vector<std::string>{"Number " + n});
  }
}

TEST_F(RulerQuestions, NameTheFileThatIsNone) {
  for (const char* bytes : {"[]", "{\"data\": []}", "{\"data\": 5}", "[{\"question\": 1}]"}) {
    for (const char* name : {"qa_1", "qa_2"}) {
      const auto task = MakeRulerTask(name, OptionsFor(bytes, 500));
      ASSERT_FALSE(task.has_value()) << bytes;
      EXPECT_EQ(task.error().code(), StatusCode::kDataLoss) << bytes;
      EXPECT_NE(task.error().message().find("data.json"), std::string::npos) << bytes;
    }
  }
  EXPECT_NE(MakeRulerTask("qa_2", Options(500, "")).error().message().find("qa_2=FILE"),
            std::string::npos);
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
