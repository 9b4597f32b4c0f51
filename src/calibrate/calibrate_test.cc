// Calibration of the demo model on a few hundred tokens.
#include "calibrate/calibrate.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "base/file.h"
#include "engine/loaded_model.h"
#include "rotation/dump.h"
#include "rotation/rotation_file.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

class CalibrateTest : public testing::Test {
 protected:
  CalibrateTest() {
    directory_ =
        fs::temp_directory_path() / ("oscar_calibrate_" + std::to_string(::getpid()) + "_" +
                                     testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(directory_);
    options_.model.model = OSCAR_DEMO_MODEL;
    options_.model.num_threads = 2;
    options_.model.kv_memory = uint64_t{1} << 29;
    options_.text.tokens = 900;
    options_.text.max_sequence = 300;
    options_.fit.per_head_k = options_.fit.per_head_v = true;
    options_.fit.fit_clip = true;
    options_.show_progress = false;
  }
  ~CalibrateTest() override { fs::remove_all(directory_); }
  std::string Bytes(const char* folder) const {
    return *ReadFile(directory_ / folder / kRotationFileName, 1 << 24);
  }
  fs::path directory_;
  CalibrateOptions options_;
};

TEST_F(CalibrateTest, SameInputsSameBytes) {
  auto first = Calibrate(options_);
  ASSERT_TRUE(first.has_value()) << first.error().ToString();
  ASSERT_TRUE(WriteCalibration(*first, directory_ / "a").ok());
  options_.model.num_threads = 1;
  options_.model.chunk = 64;
  auto second = Calibrate(options_);
  ASSERT_TRUE(second.has_value());
  ASSERT_TRUE(WriteCalibration(*second, directory_ / "b").ok());
  EXPECT_EQ(Bytes("a"), Bytes("b"));
  EXPECT_EQ(CalibrationToJson(*first), CalibrationToJson(*second));
  EXPECT_EQ(first->rotation.layers.size(), 8u);
  EXPECT_EQ(first->rotation.layers.at(3).k.num_heads, 2);
  EXPECT_EQ(first->rotation.info.calibration_tokens, 900);
  // Errors are those of tokens that the fit did not see.
  EXPECT_EQ(first->held_out_tokens, 1024);
  EXPECT_THAT(VerdictOf(*first).figures, testing::HasSubstr("on 1024 held-out tokens"));
  ASSERT_EQ(first->errors.size(), 5u);
  for (size_t layer = 0; layer < 8; ++layer) {
    // The rotation must help against no rotation, in every layer.
    EXPECT_LT(first->errors[2].second[layer].first, first->errors[0].second[layer].first) << layer;
  }
  // The page says first what to use, and leaves fingerprints to the JSON.
  const std::string html = CalibrationToHtml(*first);
  const size_t verdict = html.find("class=\"verdict\"><b>");
  EXPECT_LT(verdict, html.find("<h2>"));
  EXPECT_NE(html.find("than the Hadamard</b>", verdict), std::string::npos);
  EXPECT_EQ(html.find(first->rotation.info.model_fingerprint), std::string::npos);
  EXPECT_EQ(html.find(first->rotation.info.calibration_hash), std::string::npos);
  // What was written serves the model it was made on, and no other.
  ModelOptions serve = options_.model;
  serve.kv = "oscar";
  serve.rotation = directory_ / "a";
  EXPECT_TRUE(LoadedModel::Load(serve).has_value());
  Rotation foreign = first->rotation;
  foreign.info.model_fingerprint = "0123456789abcdef";
  ASSERT_TRUE(WriteRotationFile(directory_ / "b" / kRotationFileName, foreign).ok());
  serve.rotation = directory_ / "b";
  const auto other = LoadedModel::Load(serve);
  ASSERT_FALSE(other.has_value());
  for (const std::string& name :
       {foreign.info.model_fingerprint, first->rotation.info.model_fingerprint}) {  // names both
    EXPECT_NE(other.error().message().find(name), std::string::npos) << other.error().message();
  }
}

// One run writes both forms; the pair is the one that a layer-shared run writes.
TEST_F(CalibrateTest, WritesThePublishedPairBesideTheHeads) {
  options_.text.tokens = 300;
  const auto heads = Calibrate(options_);
  ASSERT_TRUE(heads.has_value()) << heads.error().ToString();
  ASSERT_TRUE(WriteCalibration(*heads, directory_ / "heads").ok());
  options_.fit.per_head_k = options_.fit.per_head_v = false;
  const auto shared = Calibrate(options_);
  ASSERT_TRUE(shared.has_value());
  ASSERT_TRUE(WriteCalibration(*shared, directory_ / "shared").ok());
  for (const char* name : {"zoo/k_rotation_qqt_r_h_pbr.pt", "zoo/v_rotation_sst_r_h_pbr.pt"}) {
    const auto a = ReadFile(directory_ / "heads" / name, 1 << 24),
               b = ReadFile(directory_ / "shared" / name, 1 << 24);
    ASSERT_TRUE(a.has_value() && b.has_value()) << name;
    EXPECT_TRUE(*a == *b) << name;
  }
  EXPECT_EQ(LoadRotation(directory_ / "heads")->layers.at(0).v.num_heads, 2);
  const auto pair = LoadRotation(directory_ / "heads/zoo");
  ASSERT_TRUE(pair.has_value()) << pair.error().ToString();
  EXPECT_EQ(pair->layers, heads->shared.layers);
  EXPECT_EQ(pair->layers.at(0).k.matrices, shared->rotation.layers.at(0).k.matrices);
  ModelOptions serve = options_.model;
  serve.kv = "oscar";
  serve.rotation = directory_ / "heads/zoo";
  EXPECT_TRUE(LoadedModel::Load(serve).has_value());
}

TEST_F(CalibrateTest, LeavesNoOtherRotationBeside) {
  const FitOptions fit;
  EXPECT_TRUE(CheckCalibrationDirectory(fit, directory_ / "absent").ok());
  fs::create_directories(directory_ / "zoo");
  const auto refusal = [&](const char* name) {
    EXPECT_TRUE(WriteFileAtomically(directory_ / name, "x").ok());
    const Status status = CheckCalibrationDirectory(fit, directory_);
    fs::remove(directory_ / name);
    return status.ok() ? std::string("none") : std::string(status.message());
  };
  // What the run replaces, and what is not a rotation's.
  for (const char* name :
       {"rotation.safetensors", "calibration.json", "zoo/k_rotation_qqt_r_h_pbr.pt",
        "zoo/v_rotation_sst_r_h_pbr.pt", "notes.txt", "zoo/README.md"}) {
    EXPECT_EQ(refusal(name), "none");
  }
  for (const char* name : {"k_rotation_qqt_r_h_pbr.pt", "v_own.pt", "zoo/k_rotation_ktk_r_h_pbr.pt",
                           "zoo/v_rotation_vtv_plain.pt"}) {
    EXPECT_NE(refusal(name).find((directory_ / name).string() + ": belongs to another rotation"),
              std::string::npos)
        << name;
  }
  ASSERT_TRUE(WriteFileAtomically(directory_ / "file", "x").ok());
  for (const char* path : {"file", "file/below", "file/below/deeper"}) {
    EXPECT_NE(CheckCalibrationDirectory(fit, directory_ / path).message().find("not a directory"),
              std::string::npos)
        << path;
  }
  fs::create_directories(directory_ / "taken");
  ASSERT_TRUE(WriteFileAtomically(directory_ / "taken/zoo", "x").ok());
  EXPECT_NE(CheckCalibrationDirectory(fit, directory_ / "taken").message().find("not a directory"),
            std::string::npos);
  EXPECT_NE(CheckCalibrationDirectory(fit, "/proc/self/none").message().find("cannot be written"),
            std::string::npos);
}

// A page has 64 tokens: sequences that are shorter are judged together, and too little not at all.
TEST_F(CalibrateTest, ShortSequencesHaveErrorsToo) {
  options_.text.max_sequence = 40;
  options_.text.tokens = 200;
  const auto together = Calibrate(options_);
  ASSERT_TRUE(together.has_value()) << together.error().ToString();
  ASSERT_EQ(together->errors.size(), 5u);
  for (const auto& [label, errors] : together->errors) {
    for (const auto& [k, v] : errors) {
      EXPECT_GT(k, 0) << label;
      EXPECT_GT(v, 0) << label;
    }
  }
  options_.text.tokens = 60;
  const auto little = Calibrate(options_);
  ASSERT_TRUE(little.has_value()) << little.error().ToString();
  EXPECT_TRUE(little->errors.empty());
  EXPECT_EQ(CalibrationToJson(*little).find("\"errors\""), std::string::npos);
  EXPECT_EQ(CalibrationToHtml(*little).find("Error before and after"), std::string::npos);
  EXPECT_NE(CalibrationToHtml(*little).find("<b>No verdict</b>"), std::string::npos);
}

// What comes after the budget changes the errors and nothing of the fit.
TEST_F(CalibrateTest, ErrorsAreOfHeldOutTextWhereThereIsSome) {
  std::string text;
  for (int i = 0; i < 400; ++i) text += fmt::format("Sentence {} has the number {}. ", i, i * i);
  const fs::path file = directory_ / "text.txt";
  ASSERT_TRUE(WriteFileAtomically(file, text).ok());
  options_.text.data = file;
  const auto with = Calibrate(options_);
  ASSERT_TRUE(with.has_value()) << with.error().ToString();
  EXPECT_EQ(with->num_tokens, 900);
  EXPECT_EQ(with->held_out_tokens, 1024);
  // The same beginning and nothing after it.
  auto tokenizer = Tokenizer::Load(OSCAR_DEMO_MODEL);
  ASSERT_TRUE(tokenizer.has_value());
  auto tokens = tokenizer->Encode(text);
  ASSERT_TRUE(tokens.has_value());
  tokens->resize(900);
  ASSERT_TRUE(WriteFileAtomically(file, tokenizer->Decode(*tokens, false)).ok());
  const auto without = Calibrate(options_);
  ASSERT_TRUE(without.has_value()) << without.error().ToString();
  EXPECT_EQ(without->held_out_tokens, 0);
  EXPECT_THAT(VerdictOf(*without).figures, testing::HasSubstr("on the text of the fit"));
  for (const auto& [id, layer] : with->rotation.layers) {
    EXPECT_EQ(layer.k.matrices, without->rotation.layers.at(id).k.matrices) << id;
  }
  EXPECT_NE(with->errors, without->errors);
}

TEST_F(CalibrateTest, LengthsThatDoNotFitAreRefused) {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  for (const auto& [length, generate] :
       {std::pair<int64_t, int64_t>{kLargest, 1}, {4096, kLargest}, {32768, 1}, {0, 32768}}) {
    options_.text.max_sequence = length;
    options_.generate = generate;
    const auto result = Calibrate(options_);
    ASSERT_FALSE(result.has_value()) << length;
    EXPECT_NE(result.error().message().find("do not fit the context of 32768"), std::string::npos)
        << result.error().message();
  }
  // Not given, it is what a short context holds.
  options_.text.max_sequence = 0;
  options_.generate = 10;
  options_.model.max_context = 160;
  options_.text.tokens = 300;
  const auto shorter = Calibrate(options_);
  ASSERT_TRUE(shorter.has_value()) << shorter.error().ToString();
  EXPECT_EQ(shorter->num_sequences, 2);
}

TEST_F(CalibrateTest, FinishedAnswersAreNotGoneOnWith) {
  const std::string question = R"({"role": "user", "content": "What is in the box?"})";
  const std::string answer = R"({"role": "assistant", "content": "A lamp and two old maps."})";
  const auto generated = [&](const std::string& messages) {
    options_.text.data = directory_ / "chat.jsonl";
    std::string lines;
    for (int i = 0; i < 8; ++i) lines += "{\"messages\": [" + messages + "]}\n";
    EXPECT_TRUE(WriteFileAtomically(options_.text.data, lines).ok());
    options_.generate = 6;
    const auto result = Calibrate(options_);
    EXPECT_TRUE(result.has_value()) << result.error().ToString();
    return result->generated_tokens;
  };
  EXPECT_EQ(generated(question + ", " + answer), 0);
  EXPECT_GT(generated(question), 0);
}

// Hours of generation come first where they are asked for; what cannot be written is found before.
TEST_F(CalibrateTest, ADumpThatCannotBeWrittenIsFoundBeforeTheModelIsRead) {
  options_.model.model = directory_ / "no model";
  ASSERT_TRUE(WriteFileAtomically(directory_ / "file", "x").ok());
  options_.dump = directory_ / "file";
  EXPECT_NE(Calibrate(options_).error().message().find("file is not a directory"),
            std::string::npos)
      << Calibrate(options_).error().message();
  fs::create_directories(directory_ / "old/layer_0");
  options_.dump = directory_ / "old";
  EXPECT_NE(Calibrate(options_).error().message().find("already holds a dump"), std::string::npos);
}

TEST_F(CalibrateTest, GivenClipsAndGroupsAreUsed) {
  options_.text.tokens = 300;
  options_.fit.fit_clip = false;
  options_.fit.k_clip = 0.5f;
  options_.model.k_clip = 0.5f;  // as the command has it; the BF16 cache has no such thing
  const auto given = Calibrate(options_);
  ASSERT_TRUE(given.has_value()) << given.error().ToString();
  EXPECT_EQ(given->rotation.info.clip_source, "given");
  EXPECT_EQ(given->rotation.layers.at(3).k.clip, std::vector<float>(2, 0.5f));
  EXPECT_EQ(given->rotation.layers.at(3).v.clip, std::vector<float>(2, kPublishedVClip));
  options_.group_dims = 32;
  const auto groups = Calibrate(options_);
  ASSERT_TRUE(groups.has_value()) << groups.error().ToString();
  EXPECT_LT(groups->errors[0].second[3].first, given->errors[0].second[3].first);
  options_.fit.fit_clip = true;
  const auto fitted = Calibrate(options_);
  options_.group_dims = 0;
  const auto whole = Calibrate(options_);
  ASSERT_TRUE(fitted.has_value() && whole.has_value());
  EXPECT_NE(fitted->rotation.layers.at(3).k.clip, whole->rotation.layers.at(3).k.clip);
  options_.group_dims = 48;
  EXPECT_NE(Calibrate(options_).error().message().find("group size 48"), std::string::npos);
}

// The published path (dump, then fit) sees the same numbers as the stream, but for BF16 on disk.
TEST_F(CalibrateTest, StreamingMatchesTheDump) {
  options_.fit.per_head_k = options_.fit.per_head_v = false;
  options_.fit.fit_clip = false;
  options_.dump = directory_ / "dump";
  options_.generate = 5;
  const auto streamed = Calibrate(options_);
  ASSERT_TRUE(streamed.has_value()) << streamed.error().ToString();
  EXPECT_GT(streamed->generated_tokens, 0);
  ASSERT_TRUE(WriteCalibration(*streamed, directory_ / "out").ok());
  EXPECT_TRUE(FindZooPair(directory_ / "out/zoo").has_value());
  const auto reader = DumpReader::Open(directory_ / "dump");
  ASSERT_TRUE(reader.has_value()) << reader.error().ToString();
  ThreadPool pool(2);
  const auto fitted = FitDump(*reader, options_.fit, pool);
  ASSERT_TRUE(fitted.has_value()) << fitted.error().ToString();
  EXPECT_EQ(fitted->info.calibration_tokens, 900 + streamed->generated_tokens);
  for (const auto& [id, layer] : streamed->rotation.layers) {
    const std::vector<float>& a = layer.k.eigenvalues;
    const std::vector<float>& b = fitted->layers.at(id).k.eigenvalues;
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-2 * a[i] + 1e-5) << id;
  }
}

}  // namespace
}  // namespace oscar
