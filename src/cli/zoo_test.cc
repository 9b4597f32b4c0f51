// The zoo commands through their command lines, and what serving says of a rotation that is not
// the model's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/file.h"
#include "cli/command_test_util.h"
#include "engine/loaded_model.h"
#include "rotation/rotation_file.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class ZooCommand : public CommandTest {
 protected:
  ZooCommand() : CommandTest(AddZooCommand, "zoo") {}
  void SetUp() override {
    CommandTest::SetUp();
    fs::create_directories(dir_ / "zoo/demo");
    fs::create_directories(dir_ / "zoo/other/deep");
    fs::create_directories(dir_ / "zoo/empty");
    ASSERT_TRUE(WriteRotationFile(dir_ / "zoo/demo/rotation.safetensors", Hadamard(8, 128)).ok());
    ASSERT_TRUE(WriteZooPair(dir_ / "zoo/other/deep", Hadamard(4, 64)).has_value());
  }
  static Rotation Hadamard(int num_layers, int head_dim) {
    std::vector<int> layers(static_cast<size_t>(num_layers));
    std::iota(layers.begin(), layers.end(), 0);
    return *MakeDataFreeRotation("hadamard", layers, head_dim);
  }
};

TEST_F(ZooCommand, ListsWhatLiesBelow) {
  ASSERT_TRUE(Run("list --json " + Path("zoo")).ok());
  const auto json = nlohmann::json::parse(output_);
  ASSERT_EQ(json["rotations"].size(), 2u);
  EXPECT_EQ(json["bad"], 0);
  EXPECT_EQ(json["rotations"][0]["name"], "demo");
  EXPECT_EQ(json["rotations"][0]["layers"], 8);
  EXPECT_EQ(json["rotations"][1]["name"], "other/deep");
  EXPECT_EQ(json["rotations"][1]["format"], "pt");
  EXPECT_EQ(json["rotations"][1]["head_dim"], 64);
  ASSERT_TRUE(Run("list " + Path("zoo")).ok());
  EXPECT_THAT(output_, HasSubstr("other/deep"));
  EXPECT_THAT(std::string(Run("list " + Path("zoo/empty")).message()), HasSubstr("no rotation"));
}

TEST_F(ZooCommand, LinksToNowhereAndInCirclesDoNotMatter) {
  for (const char* name : {"zoo/a", "zoo/zz", "zoo/empty/gone"}) {
    fs::create_symlink("nowhere", dir_ / name);
  }
  fs::create_directory_symlink(dir_ / "zoo", dir_ / "zoo/empty/round");
  EXPECT_TRUE(Run("verify " + Path("zoo")).ok());
}

TEST_F(ZooCommand, VerifiesSoundnessAndFit) {
  EXPECT_TRUE(Run("verify " + Path("zoo")).ok());
  const Status fit = Run("verify " + Path("zoo") + " --model " OSCAR_DEMO_MODEL);
  EXPECT_THAT(std::string(fit.message()), HasSubstr("1 of 2 rotations"));
  EXPECT_THAT(output_, HasSubstr("head dimension 64, the model has 128"));
  // Some rows of a matrix.
  std::string bytes = ReadFile(dir_ / "zoo/demo/rotation.safetensors", 1 << 28).value();
  bytes.replace(bytes.size() - 300000, 4096, 4096, '\0');
  std::ofstream(dir_ / "zoo/demo/rotation.safetensors", std::ios::binary) << bytes;
  const Status broken = Run("verify " + Path("zoo"));
  EXPECT_THAT(std::string(broken.message()), HasSubstr("1 of 2 rotations are broken"));
  for (const Status& status : {fit, broken}) EXPECT_EQ(InfoOf(status.code()).exit_code, 1);
  EXPECT_TRUE(Run("list " + Path("zoo")).ok());  // listing names it and goes on
}

// The pair beside a rotation.safetensors is not what serving takes, but others may.
TEST_F(ZooCommand, LooksAtBothFormsOfADirectory) {
  ASSERT_TRUE(WriteZooPair(dir_ / "zoo/demo", Hadamard(8, 128)).has_value());
  ASSERT_TRUE(Run("verify " + Path("zoo")).ok());
  EXPECT_THAT(output_, HasSubstr("safetensors, pt"));
  fs::resize_file(dir_ / "zoo/demo/v_rotation_hadamard.pt", 1000);
  EXPECT_THAT(std::string(Run("verify " + Path("zoo")).message()),
              HasSubstr("1 of 2 rotations are broken"));
  EXPECT_THAT(output_, HasSubstr("v_rotation_hadamard.pt"));
  ASSERT_TRUE(WriteZooPair(dir_ / "zoo/demo", Hadamard(4, 128)).has_value());
  EXPECT_TRUE(Run("verify " + Path("zoo/demo")).ok());
  EXPECT_FALSE(Run("verify " + Path("zoo/demo") + " --model " OSCAR_DEMO_MODEL).ok());
  EXPECT_THAT(output_, HasSubstr("4 layers; the model has 8"));
}

TEST_F(ZooCommand, ConvertsAllAndBackToTheSameBits) {
  ASSERT_TRUE(Run("convert --to pt " + Path("zoo") + " " + Path("pt")).ok());
  ASSERT_TRUE(Run("convert " + Path("pt") + " " + Path("back")).ok());
  for (const char* name : {"demo", "other/deep"}) {
    const auto before = LoadRotation(dir_ / "zoo" / name),
               after = LoadRotation(dir_ / "back" / name);
    ASSERT_TRUE(before.has_value() && after.has_value());
    EXPECT_EQ(before->layers.at(0).k.matrices, after->layers.at(0).k.matrices);
    EXPECT_EQ(before->layers.size(), after->layers.size());
  }
}

// What `oscar calibrate` writes: a matrix a KV head, and the published form in zoo/.
TEST_F(ZooCommand, ConvertsThePairOfACalibration) {
  Rotation heads = Hadamard(2, 64);
  for (auto& [layer, sides] : heads.layers) {
    for (SideRotation* side : {&sides.k, &sides.v}) {
      side->num_heads = 2;
      side->matrices.insert(side->matrices.end(), 64 * 64, 0.0f);
      std::copy_n(side->matrices.begin(), 64 * 64, side->matrices.begin() + 64 * 64);
      side->eigenvalues.resize(128, 1.0f);
      side->clip.resize(2, side->clip[0]);
    }
  }
  fs::create_directories(dir_ / "out/model");
  ASSERT_TRUE(WriteRotationFile(dir_ / "out/model/rotation.safetensors", heads).ok());
  const Status alone = Run("convert --to pt " + Path("out") + " " + Path("pt"));
  EXPECT_THAT(std::string(alone.message()), HasSubstr("1 of 1 rotations were not converted"));
  ASSERT_TRUE(WriteZooPair(dir_ / "out/model/zoo", Hadamard(2, 64)).has_value());
  ASSERT_TRUE(Run("convert --to pt " + Path("out") + " " + Path("pt")).ok());
  EXPECT_THAT(output_, HasSubstr("model: one matrix per KV head, left out"));
  EXPECT_TRUE(FindZooPair(dir_ / "pt/model/zoo").has_value());
  ASSERT_TRUE(Run("list --json " + Path("out")).ok());
  const auto json = nlohmann::json::parse(output_);
  ASSERT_EQ(json["rotations"].size(), 2u);
  EXPECT_EQ(json["rotations"][0]["matrices_a_layer"], 2);
  EXPECT_EQ(json["rotations"][1]["name"], "model/zoo");
  EXPECT_EQ(json["rotations"][1]["matrices_a_layer"], 1);
}

TEST_F(ZooCommand, ServingRefusesAnotherModelsRotation) {
  ModelOptions options;
  options.model = OSCAR_DEMO_MODEL;
  options.kv = "oscar";
  options.kv_memory = uint64_t{1} << 26;
  const auto refusal = [&](const Rotation& rotation) {
    EXPECT_TRUE(WriteRotationFile(dir_ / "r.safetensors", rotation).ok());
    options.rotation = dir_ / "r.safetensors";
    const auto loaded = LoadedModel::Load(options);
    return loaded.has_value() ? std::string("accepted") : std::string(loaded.error().message());
  };
  const std::string dim = refusal(Hadamard(8, 64));
  EXPECT_THAT(dim, HasSubstr("head dimension 64, the model has 128"));
  EXPECT_THAT(dim, HasSubstr("r.safetensors for " OSCAR_DEMO_MODEL));
  EXPECT_THAT(refusal(Hadamard(7, 128)), HasSubstr("7 layers; the model has 8"));
  EXPECT_THAT(refusal(Hadamard(9, 128)), HasSubstr("9 layers; the model has 8"));
  Rotation other = Hadamard(8, 128);
  other.info.model_fingerprint = "0123456789abcdef";
  const std::string model = refusal(other);
  EXPECT_THAT(model, HasSubstr("0123456789abcdef"));
  EXPECT_THAT(model, HasSubstr(OSCAR_DEMO_MODEL));
  EXPECT_EQ(refusal(Hadamard(8, 128)), "accepted");
}

}  // namespace
}  // namespace oscar::cli
