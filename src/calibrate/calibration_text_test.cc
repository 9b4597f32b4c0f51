#include "calibrate/calibration_text.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "base/file.h"
#include "calibrate/sample_prose.h"
#include "calibrate/synthetic_chats.h"
#include "io/gzip.h"
#include "tasks/suite.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

class CalibrationTextTest : public testing::Test {
 protected:
  CalibrationTextTest()
      : tokenizer_(*Tokenizer::Load(OSCAR_DEMO_MODEL)),
        chat_(*ChatTemplate::Load(OSCAR_DEMO_MODEL)) {
    options_.tokens = 6000;
    directory_ =
        fs::temp_directory_path() / ("oscar_calibration_text_" + std::to_string(::getpid()) + "_" +
                                     testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(directory_);
  }
  ~CalibrationTextTest() override { fs::remove_all(directory_); }
  Tokenizer tokenizer_;
  ChatTemplate chat_;
  CalibrationTextOptions options_;
  fs::path directory_;
};

TEST_F(CalibrationTextTest, TheSampleKeepsItsBudget) {
  const auto a = ReadCalibrationText(options_, tokenizer_, &chat_);
  ASSERT_TRUE(a.has_value()) << a.error().ToString();
  EXPECT_EQ(a->num_tokens, 6000);
  int64_t sum = 0;
  for (const auto& sequence : a->sequences) {
    EXPECT_LE(sequence.size(), 4096u);
    sum += static_cast<int64_t>(sequence.size());
  }
  EXPECT_EQ(sum, 6000);
  EXPECT_EQ(ReadCalibrationText(options_, tokenizer_, &chat_)->sequences, a->sequences);
  options_.seed = 1;
  EXPECT_NE(ReadCalibrationText(options_, tokenizer_, &chat_)->sequences, a->sequences);
}

TEST_F(CalibrationTextTest, TheSampleIsThatOfTheCommittedRotation) {
  EXPECT_EQ(*Gunzip(std::string(SampleProseGzip()), "sample", 1 << 24),
            *ReadFile(OSCAR_DEMO_MODEL "/eval/heldout_prose.json", 1 << 24));
}

TEST_F(CalibrationTextTest, NamesTheFileThatIsNotUtf8) {
  options_.data = directory_ / "d.txt";
  std::ofstream(options_.data) << "ab\xff";
  const auto text = ReadCalibrationText(options_, tokenizer_, &chat_);
  ASSERT_FALSE(text.has_value());
  EXPECT_NE(text.error().message().find("d.txt: text is not valid UTF-8 at byte 2 of 3"),
            std::string::npos)
      << text.error().message();
}

TEST_F(CalibrationTextTest, SaysWhyThereIsNothing) {
  const auto error = [&](const char* name, const char* content) {
    options_.data = directory_ / name;
    std::ofstream(options_.data) << content;
    const auto text = ReadCalibrationText(options_, tokenizer_, &chat_);
    return text.has_value() ? std::string() : std::string(text.error().message());
  };
  EXPECT_NE(error("a.jsonl", "\n{\"id\": 1}\n").find("a.jsonl:2: left out: a record needs"),
            std::string::npos);
  EXPECT_NE(error("b.json", "[\"words\"]").find("give a .jsonl"), std::string::npos);
  EXPECT_NE(error("c.txt", "").find("no text"), std::string::npos);
}

TEST_F(CalibrationTextTest, ReadsLinesAndNamesBrokenOnes) {
  options_.data = directory_ / "d.jsonl";
  std::ofstream(options_.data) << R"({"text":"plain words here"})"
                               << "\n{\n"
                               << R"({"prompt":"a question"})"
                               << "\n"
                               << R"({"messages":[{"role":"user","content":"hi"},)"
                               << R"({"role":"assistant","content":"yo"}]})"
                               << "\n"
                               << R"({"other":1})"
                               << "\n";
  const auto text = ReadCalibrationText(options_, tokenizer_, &chat_);
  ASSERT_TRUE(text.has_value()) << text.error().ToString();
  ASSERT_EQ(text->sequences.size(), 3u);
  EXPECT_EQ(tokenizer_.Decode(text->sequences[1], false),
            "<|im_start|>user\na question<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(tokenizer_.Decode(text->sequences[2], false),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n");
  ASSERT_EQ(text->warnings.size(), 2u);
  EXPECT_NE(text->warnings[0].find("d.jsonl:2:"), std::string::npos);
  EXPECT_NE(text->warnings[1].find("d.jsonl:5:"), std::string::npos);
}

// Read as text, records would be mostly marks.
TEST_F(CalibrationTextTest, LinesAreKnownByAnySpellingOfTheirName) {
  std::vector<std::vector<int32_t>> first;
  for (const char* name : {"d.jsonl", "d.JSONL", "d.ndjson"}) {
    options_.data = directory_ / name;
    std::ofstream(options_.data) << "{\"text\":\"plain words here\"}\n";
    const auto text = ReadCalibrationText(options_, tokenizer_, &chat_);
    ASSERT_TRUE(text.has_value()) << text.error().ToString();
    if (first.empty()) first = text->sequences;
    EXPECT_EQ(text->sequences, first) << name;
  }
}

// A few tokens of a long file cost what a few tokens cost: what lies behind them is not encoded.
TEST_F(CalibrationTextTest, ReadsNoMoreOfATextThanItNeeds) {
  std::string words;
  for (int i = 0; i < 400000; ++i) words += i % 7 == 0 ? " of the café.\n" : " word";
  options_.data = directory_ / "d.txt";
  options_.tokens = 1000;
  std::ofstream(options_.data) << words;
  const auto whole = ReadCalibrationText(options_, tokenizer_, &chat_);
  ASSERT_TRUE(whole.has_value()) << whole.error().ToString();
  const auto expected = tokenizer_.Encode(words);
  ASSERT_TRUE(expected.has_value());
  EXPECT_EQ(whole->sequences[0], std::vector<int32_t>(expected->begin(), expected->begin() + 1000));
  std::ofstream(options_.data) << words << "\xff";  // far behind
  EXPECT_TRUE(ReadCalibrationText(options_, tokenizer_, &chat_).has_value());
  // Few tokens a byte: a word that is read again and again until it is enough.
  std::ofstream(options_.data) << std::string(3000000, ' ') << words;
  const auto sparse = ReadCalibrationText(options_, tokenizer_, &chat_);
  ASSERT_TRUE(sparse.has_value()) << sparse.error().ToString();
  EXPECT_EQ(sparse->num_tokens, 1000);
}

TEST_F(CalibrationTextTest, CutsLongTextIntoPieces) {
  options_.data = directory_ / "d.txt";
  std::string words;
  for (int i = 0; i < 3000; ++i) words += " word";
  std::ofstream(options_.data) << words;
  options_.max_sequence = 100;
  options_.tokens = 250;
  const auto text = ReadCalibrationText(options_, tokenizer_, &chat_);
  ASSERT_TRUE(text.has_value());
  ASSERT_EQ(text->sequences.size(), 3u);
  EXPECT_EQ(text->sequences[2].size(), 50u);
  std::ofstream(options_.data) << "";
  EXPECT_FALSE(ReadCalibrationText(options_, tokenizer_, &chat_).has_value());
}

TEST(SyntheticChats, AreNeverItemsOfTheSuite) {
  const auto suite = ReadSuite(OSCAR_DEMO_MODEL "/eval", {});
  ASSERT_TRUE(suite.has_value());
  std::set<std::string> prompts;
  for (const EvalTask& task : suite->tasks) {
    for (const EvalItem& item : task.items) prompts.insert(item.prompt);
  }
  const std::vector<std::string> documents = {"One sentence. Another one. A third. "};
  std::set<std::string> made;
  for (uint64_t i = 0; i < 200; ++i) {
    const SyntheticChat chat = MakeSyntheticChat(0, i, documents, 500);
    EXPECT_FALSE(chat.assistant.empty());
    EXPECT_FALSE(prompts.contains(chat.user));
    EXPECT_TRUE(made.insert(chat.user).second) << i;  // each another
    if (i % 8 == 5 || i % 8 == 6) {
      EXPECT_NE(chat.user.find(chat.assistant), std::string::npos) << "the needle is in the text";
    }
  }
}

TEST_F(CalibrationTextTest, ReadsWikiTextByArticle) {
  const fs::path file = directory_ / "wiki.test.raw";
  std::ofstream(file)
      << " \n = Robert Boulter = \n \n Robert is an actor . \n = = Career = = \n He acts . \n"
         " \n = Du Fu = \n \n Du was a poet . \n";
  options_.data = "wikitext=" + file.string();
  const auto text = ReadCalibrationText(options_, tokenizer_, &chat_);
  ASSERT_TRUE(text.has_value()) << text.error().ToString();
  ASSERT_EQ(text->sequences.size(), 3u);  // what comes before the first article is one, too
  EXPECT_EQ(tokenizer_.Decode(text->sequences[1], false),
            " = Robert Boulter = \n \n Robert is an actor . \n = = Career = = \n He acts . \n \n");
  EXPECT_EQ(tokenizer_.Decode(text->sequences[2], false), " = Du Fu = \n \n Du was a poet . \n");
  options_.tokens = 10;
  EXPECT_EQ(ReadCalibrationText(options_, tokenizer_, &chat_)->num_tokens, 10);
  std::ofstream(file) << "PAR1 and so on";
  EXPECT_NE(std::string(ReadCalibrationText(options_, tokenizer_, &chat_).error().message())
                .find("Parquet is not read"),
            std::string::npos);
}

TEST_F(CalibrationTextTest, ReadsBenchmarksByName) {
  const fs::path file = directory_ / "gpqa.csv";
  std::ofstream(file) << "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,"
                         "Incorrect Answer 3\nWhy?,a,b,c,d\nHow?,e,f,g,h\n";
  options_.data = "gpqa=" + file.string();
  const auto text = ReadCalibrationText(options_, tokenizer_, &chat_);
  ASSERT_TRUE(text.has_value()) << text.error().ToString();
  ASSERT_EQ(text->sequences.size(), 2u);
  const std::string first = tokenizer_.Decode(text->sequences[0], false);
  // As the evaluation asks it.
  EXPECT_TRUE(first.starts_with("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"))
      << first;
  EXPECT_NE(first.find("Think step by step before answering.\n\nWhy?\n\nA) "), std::string::npos);
  EXPECT_TRUE(first.ends_with("<|im_start|>assistant\n")) << first;
  const auto error = [&](const std::string& data) {
    options_.data = data;
    const auto wrong = ReadCalibrationText(options_, tokenizer_, &chat_);
    return wrong.has_value() ? std::string() : std::string(wrong.error().message());
  };
  EXPECT_NE(error("trivia=x").find("no data set read by name; there are wikitext, gpqa"),
            std::string::npos);
  EXPECT_NE(error("mmlu=").find("name its file"), std::string::npos);
  EXPECT_NE(error("mmlu=/nowhere.csv").find("/nowhere.csv"), std::string::npos);
}

}  // namespace
}  // namespace oscar
