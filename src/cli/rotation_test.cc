// The rotation commands through their command lines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "cli/command_test_util.h"
#include "rotation/dump.h"
#include "rotation/rotation_file.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class RotationCommand : public CommandTest {
 protected:
  RotationCommand() : CommandTest(AddRotationCommand, "rotation") {}

  std::string Bytes(const std::string& name) const {
    return ReadFile(dir_ / name, uint64_t{1} << 28).value();
  }

  void WriteDump(const std::string& name) const {
    const QkvShape shape{4, 2, 16};
    auto writer = DumpWriter::Create(dir_ / name, shape).value();
    const Philox rng(1, 0);
    uint64_t next = 0;
    for (const int layer : {0, 2}) {
      std::vector<float> q(40 * 4 * 16), k(40 * 2 * 16), v(40 * 2 * 16);
      for (std::vector<float>* part : {&q, &k, &v}) {
        for (size_t i = 0; i < part->size(); ++i) {
          (*part)[i] = rng.Normal(next++) * (1.0f + static_cast<float>(i % 16));
        }
      }
      const std::vector<int32_t> lengths{30, 10};
      ASSERT_TRUE(writer.Write(layer, {40, q, k, v, lengths}).ok());
    }
  }
};

const std::string kZoo =
    std::string(OSCAR_TEST_DATA) + "/rotations/qwen3-4b-thinking-2507-2-layers";

TEST_F(RotationCommand, ConvertsThePublishedPairAndBack) {
  ASSERT_TRUE(Run("convert " + kZoo + " " + Path("ours")).ok());
  EXPECT_THAT(output_, HasSubstr("head dimension  128"));
  EXPECT_THAT(output_, HasSubstr("max |R R^T - I|"));
  ASSERT_TRUE(Run("convert " + Path("ours") + " " + Path("zoo")).ok());
  const Rotation original = LoadRotation(kZoo).value();
  const Rotation again = LoadRotation(dir_ / "zoo").value();
  EXPECT_EQ(again.layers, original.layers);
  // --to overrides the default; a clip given by hand is recorded as such.
  ASSERT_TRUE(Run("convert " + Path("ours") + " " + Path("copy.safetensors") +
                  " --k-clip 0.9 --to safetensors")
                  .ok());
  const Rotation copy = LoadRotation(dir_ / "copy.safetensors").value();
  EXPECT_EQ(copy.layers.begin()->second.k.clip[0], 0.9f);
  EXPECT_EQ(copy.info.clip_source, "given");
}

TEST_F(RotationCommand, FitWritesTheSameBytesForAnyThreads) {
  WriteDump("dump");
  const std::string fit = "fit --dump " + Path("dump") + " --per-head --fit-clip --out ";
  ASSERT_TRUE(Run(fit + Path("a") + " --threads 1").ok());
  EXPECT_THAT(output_, HasSubstr("fitted ratios"));
  ASSERT_TRUE(Run(fit + Path("b") + " --threads 4 --skip-chunk 0").ok());
  EXPECT_EQ(Bytes("a/rotation.safetensors"), Bytes("b/rotation.safetensors"));
  const std::string shared = "fit --dump " + Path("dump") + " --out " + Path("k") + " --per-head";
  ASSERT_TRUE(Run(shared + "=k").ok());
  EXPECT_EQ(LoadRotation(dir_ / "k").value().Find(2)->k.num_heads, 2);
  EXPECT_EQ(LoadRotation(dir_ / "k").value().Find(2)->v.num_heads, 1);
  EXPECT_FALSE(Run(shared + "=q").ok());
  // Per-head rotations do not fit into a pair.
  const Status status = Run("convert " + Path("a") + " " + Path("zoo"));
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("--per-head"));
}

TEST_F(RotationCommand, FitEveryObjective) {
  WriteDump("dump");
  for (const std::string objective : {"qqt_sst", "qqt_sst_exact", "ktk_vtv", "hadamard"}) {
    ASSERT_TRUE(Run("fit --dump " + Path("dump") + " --out " + Path(objective) + " --objective " +
                    objective + (objective == "hadamard" ? "" : " --composition br") + " --json")
                    .ok());
    const auto json = ParseJson(output_, "fit");
    ASSERT_TRUE(json.has_value()) << output_;
    EXPECT_EQ((*json)["layers"], 2);
    EXPECT_LT((*json)["max_orthogonality_error"].get<double>(), 1e-6);
    EXPECT_EQ((*json)["composition"], objective == "hadamard" ? "plain" : "br");
  }
  // uresidual asks for its reference.
  const std::string fit =
      "fit --dump " + Path("dump") + " --objective uresidual --out " + Path("u");
  EXPECT_THAT(Run(fit).message(), HasSubstr("reference"));
  EXPECT_TRUE(Run(fit + " --reference " + Path("hadamard")).ok());
}

TEST_F(RotationCommand, ComposeMakesAndMultiplies) {
  ASSERT_TRUE(
      Run("compose --objective hadamard --layers 0-2,7 --head-dim 32 --out " + Path("h")).ok());
  const Rotation h = LoadRotation(dir_ / "h").value();
  EXPECT_EQ(h.layers.size(), 4u);
  EXPECT_NE(h.Find(7), nullptr);
  ASSERT_TRUE(Run("compose " + Path("h") + " " + Path("h") + " --out " + Path("hh")).ok());
  const Rotation hh = LoadRotation(dir_ / "hh").value();
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(hh.Find(7)->k.MatrixOf(0)[i * 33], 1.0f, 1e-6f);
  }
  EXPECT_FALSE(Run("compose " + Path("h") + " --out " + Path("x")).ok());
  EXPECT_FALSE(Run("compose --objective hadamard --head-dim 32 --out " + Path("x")).ok());
  for (const std::string layers : {"", "a", "3-1", "1,", "1,1", "0-99999", "-1", "1-"}) {
    EXPECT_FALSE(
        Run("compose --objective identity --head-dim 4 --layers=" + layers + " --out " + Path("x"))
            .ok())
        << layers;
  }
  EXPECT_FALSE(
      Run("compose --objective hadamard --layers 0 --head-dim 24 --out " + Path("x")).ok());
  EXPECT_FALSE(fs::exists(dir_ / "x"));
}

TEST_F(RotationCommand, VerifyTellsGoodFromBad) {
  ASSERT_TRUE(Run("verify " + kZoo).ok());
  EXPECT_THAT(output_, HasSubstr("eigen max"));
  ASSERT_TRUE(Run("verify --json " + kZoo).ok());
  const auto good = ParseJson(output_, "verify");
  ASSERT_TRUE(good.has_value());
  EXPECT_EQ((*good)["ok"], true);
  EXPECT_EQ((*good)["by_layer"].size(), 2u);
  // Tighter than fp32 can be: the same file fails, with both numbers named and the table printed.
  const Status status = Run("verify --tolerance 1e-12 " + kZoo);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(InfoOf(status.code()).exit_code, 0);
  EXPECT_THAT(status.message(), HasSubstr("1e-12"));
  EXPECT_THAT(output_, HasSubstr("eigen max"));
  EXPECT_FALSE(Run("verify " + Path("absent")).ok());
  for (const char* no_bound : {"nan", "-1", "-nan", "x"}) {
    EXPECT_THAT(Run(std::string("verify --tolerance=") + no_bound + " " + kZoo).message(),
                HasSubstr("usage: --tolerance"))
        << no_bound;
  }
}

// An option that would change nothing is a mistake, and said to be one.
TEST_F(RotationCommand, OptionsThatWouldBeIgnoredAreErrors) {
  WriteDump("dump");
  const std::string fit = "fit --dump " + Path("dump") + " --out " + Path("out");
  EXPECT_THAT(Run(fit + " --group 8").message(), HasSubstr("--fit-clip"));
  EXPECT_THAT(Run(fit + " --clip-bits 3").message(), HasSubstr("--fit-clip"));
  EXPECT_THAT(Run(fit + " --fit-clip --k-clip 0.9").message(), HasSubstr("--fit-clip"));
  EXPECT_THAT(Run(fit + " --objective hadamard --composition br").message(),
              HasSubstr("--composition br: objective hadamard has none"));
  ASSERT_TRUE(Run(fit).ok());
  EXPECT_THAT(Run(fit + " --reference " + Path("out")).message(),
              HasSubstr("--reference is what uresidual starts from"));
  EXPECT_FALSE(Run("compose " + Path("out") + " " + Path("out") + " --out " + Path("square") +
                   " --head-dim 32")
                   .ok());
  EXPECT_FALSE(fs::exists(dir_ / "square"));
}

}  // namespace
}  // namespace oscar::cli
