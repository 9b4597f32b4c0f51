// Calibration of the demo model on a few hundred tokens.
#include "calibrate/calibrate.h"

#include <gtest/gtest.h>

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
  ASSERT_EQ(first->errors.size(), 5u);
  for (size_t layer = 0; layer < 8; ++layer) {
    // The rotation must help against no rotation, in every layer.
    EXPECT_LT(first->errors[2].second[layer].first, first->errors[0].second[layer].first) << layer;
  }
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
  EXPECT_TRUE(FindZooPair(directory_ / "out").has_value());
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
