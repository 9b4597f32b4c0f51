// What a model directory and its options are made into.
#include "engine/loaded_model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "base/file.h"
#include "rotation/sensitivity_file.h"

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

// The folder rotation/ of a model decides the bits of its heads, unless it is left out.
TEST(LoadedModel, SensitivitiesBesideTheWeightsAreFound) {
  namespace fs = std::filesystem;
  const fs::path folder =
      fs::path(testing::TempDir()) / ("oscar_bits_" + std::to_string(::getpid()));
  fs::create_directories(folder / "rotation");
  fs::copy_file(fs::path(OSCAR_DEMO_MODEL) / "config.json", folder / "config.json");
  ModelOptions options;
  options.model = folder;
  options.device = Device::kCpu;
  options.kv_memory = uint64_t{1} << 30;
  const auto bits = [&] {
    const auto plan = LoadedModel::Plan(options);
    EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
    return plan.has_value() ? (*plan)->kv().HistoryBits() : 0.0;
  };
  EXPECT_EQ(bits(), 2.25);
  Sensitivities found;
  for (int layer = 0; layer < 8; ++layer) found.layers[layer] = {{0.001, 0.0}, {0.002, 0.0}};
  found.layers[6][0].k = 0.5;
  ASSERT_TRUE(WriteSensitivities(folder / "rotation" / kSensitivityFileName, found).ok());
  EXPECT_EQ(bits(), 2.3125);
  {
    const auto plan = LoadedModel::Plan(options);
    EXPECT_EQ((*plan)->kv().bit_map()[6][0], (HeadBits{4, 2}));
    EXPECT_EQ((*plan)->sensitivity_path(), folder / "rotation" / kSensitivityFileName);
    const std::string text = (*plan)->DescribeBits();
    EXPECT_NE(text.find(kSensitivityFileName), std::string::npos) << text;
    EXPECT_NE(text.find("at 128K"), std::string::npos) << text;
  }
  options.bits = 2.5;
  EXPECT_EQ(bits(), 2.5);
  options.rotation = folder / "rotation";  // by name, and no rotation in it
  EXPECT_EQ(bits(), 2.5);
  options.bits.reset();
  options.rotation = "none";
  EXPECT_EQ(bits(), 2.25);
  options.rotation.clear();
  options.kv = "naive";  // its bits are its own
  EXPECT_EQ(bits(), 2.25);
  options.kv = "oscar+";
  found.layers.erase(7);
  ASSERT_TRUE(WriteSensitivities(folder / "rotation" / kSensitivityFileName, found).ok());
  EXPECT_FALSE(LoadedModel::Plan(options).has_value());
  ASSERT_TRUE(WriteFileAtomically(folder / "rotation" / kSensitivityFileName, "{").ok());
  const auto broken = LoadedModel::Plan(options);
  ASSERT_FALSE(broken.has_value());
  EXPECT_NE(broken.error().message().find(kSensitivityFileName), std::string::npos);
  fs::remove_all(folder);
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
