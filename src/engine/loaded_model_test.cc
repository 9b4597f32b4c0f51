// What a model directory and its options are made into.
#include "engine/loaded_model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "base/file.h"

namespace oscar {
namespace {

int64_t PositionsWith(const char* rope_scaling, int64_t max_context = 0) {
  ModelOptions options;
  options.model = OSCAR_DEMO_MODEL;
  options.device = Device::kCpu;
  options.kv_memory = uint64_t{1} << 30;
  options.rope_scaling = rope_scaling;
  options.max_context = max_context;
  const auto plan = LoadedModel::Plan(options);
  EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ((*plan)->max_context(), max_context > 0 ? max_context : (*plan)->spec().max_positions);
  return (*plan)->spec().max_positions;
}

// Engines take their limit from the spec.
TEST(LoadedModel, StretchedPositionsAreTheModels) {
  EXPECT_EQ(PositionsWith(""), 32768);
  EXPECT_EQ(PositionsWith("yarn:4"), 131072);
  EXPECT_EQ(PositionsWith("yarn:4", 100000), 131072);
  EXPECT_EQ(PositionsWith("linear:1.5"), 49152);
  EXPECT_EQ(PositionsWith("none"), 32768);
}

// A window hides nothing in a context no longer than itself.
TEST(LoadedModel, AStretchBeyondTheWindowIsRefused) {
  namespace fs = std::filesystem;
  std::string config = *ReadFile(OSCAR_TEST_DATA "/tiny-llama/bf16/config.json", 1 << 16);
  config.insert(config.find('{') + 1, "\"sliding_window\": 512, ");
  const fs::path file =
      fs::path(testing::TempDir()) / ("oscar_window_" + std::to_string(::getpid()) + ".json");
  ASSERT_TRUE(WriteFileAtomically(file, config).ok());
  ModelOptions options;
  options.model = file;
  options.random_weights = true;
  options.device = Device::kCpu;
  options.kv = "bf16";
  options.kv_memory = uint64_t{1} << 30;
  const auto plain = LoadedModel::Plan(options);
  options.rope_scaling = "yarn:2";
  const auto stretched = LoadedModel::Plan(options);
  fs::remove(file);
  ASSERT_TRUE(plain.has_value()) << plain.error().ToString();
  ASSERT_FALSE(stretched.has_value());
  EXPECT_NE(stretched.error().message().find("sliding_window"), std::string::npos)
      << stretched.error().ToString();
}

// The checkpoint has a head of its own, whatever its config says.
TEST(LoadedModel, KeepsTheCheckpointsHead) {
  namespace fs = std::filesystem;
  const fs::path from = OSCAR_TEST_DATA "/tiny-llama/bf16";
  const fs::path to =
      fs::path(testing::TempDir()) / ("oscar_tied_by_config_" + std::to_string(::getpid()));
  fs::create_directories(to);
  for (const auto& entry : fs::directory_iterator(from)) {
    if (entry.path().filename() == "config.json") continue;
    fs::create_symlink(fs::absolute(entry.path()), to / entry.path().filename());
  }
  std::string config = *ReadFile(from / "config.json", 1 << 16);
  const std::string untied = "\"tie_word_embeddings\": false";
  ASSERT_NE(config.find(untied), std::string::npos);
  config.replace(config.find(untied), untied.size(), "\"tie_word_embeddings\": true");
  ASSERT_TRUE(WriteFileAtomically(to / "config.json", config).ok());
  ModelOptions options;
  options.model = to;
  options.device = Device::kCpu;
  options.kv = "bf16";
  options.num_threads = 1;
  const auto loaded = LoadedModel::Load(options);
  fs::remove_all(to);
  ASSERT_TRUE(loaded.has_value()) << loaded.error().ToString();
  EXPECT_FALSE((*loaded)->spec().tied_head);
  EXPECT_EQ((*loaded)->memory().weight_bytes, 2 * TensorTable((*loaded)->spec()).num_parameters());
}

}  // namespace
}  // namespace oscar
