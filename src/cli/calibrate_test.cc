// oscar calibrate through its command line.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "cli/command_test_util.h"
#include "rotation/rotation_file.h"

namespace oscar::cli {
namespace {

using testing::HasSubstr;

class CalibrateCommand : public CommandTest {
 protected:
  CalibrateCommand() : CommandTest(AddCalibrateCommand, "calibrate") {}
  Status Calibrate(const std::string& arguments) {
    const bool budget = arguments.find("--tokens") != std::string::npos;
    return Run(std::string("--model " OSCAR_DEMO_MODEL) + (budget ? "" : " --tokens 64") +
               " --kv-memory 64MiB --out " + Path("out") + " " + arguments);
  }
  std::string Error(const std::string& arguments) {
    return std::string(Calibrate(arguments).message());
  }
};

TEST_F(CalibrateCommand, FixedClipsGoIntoTheFile) {
  const Status status = Calibrate("--clip fixed --k-clip 0.5 --group 64");
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_THAT(output_, HasSubstr("use --rotation " + Path("out") + "\n"));
  EXPECT_THAT(output_, HasSubstr("use --rotation " + Path("out/zoo") + "\n"));
  const auto rotation = LoadRotation(dir_ / "out");
  ASSERT_TRUE(rotation.has_value());
  EXPECT_EQ(rotation->layers.at(0).k.clip, std::vector<float>(2, 0.5f));
  EXPECT_EQ(rotation->layers.at(0).v.clip, std::vector<float>(2, kPublishedVClip));
  EXPECT_EQ(rotation->info.clip_source, "given");
  EXPECT_TRUE(LoadRotation(dir_ / "out/zoo").has_value());
}

TEST_F(CalibrateCommand, RefusesOptionsWithoutEffect) {
  EXPECT_THAT(Error("--k-clip 0.5"), HasSubstr("--k-clip: --clip fitted chooses the ratios"));
  EXPECT_THAT(Error("--v-clip 0.5"), HasSubstr("--v-clip: --clip fitted chooses the ratios"));
  std::ofstream(dir_ / "d.txt") << "some words";
  EXPECT_THAT(Error("--seed 1 --data " + Path("d.txt")), HasSubstr("--seed"));
  EXPECT_THAT(Error("--objective hadamard --composition br"),
              HasSubstr("--composition br: objective hadamard has none"));
  EXPECT_THAT(Error("--tokens 100000000000"), HasSubstr("usage:"));
  for (const char* option : {"--sink 128", "--recent 0", "--prefill-cell 64", "--kv oscar"}) {
    EXPECT_THAT(Error(option), HasSubstr("usage:")) << option;
  }
}

TEST_F(CalibrateCommand, AsksForAnotherDirectoryBeforeItReadsTheModel) {
  std::filesystem::create_directories(dir_ / "out/zoo");
  std::ofstream(dir_ / "out/zoo/k_rotation_ktk_r_h_pbr.pt") << "x";
  EXPECT_THAT(std::string(Run("--model nowhere --out " + Path("out")).message()),
              HasSubstr("belongs to another rotation"));
}

// What needs no model to be seen to be wrong.
TEST_F(CalibrateCommand, ChecksItsOptionsBeforeItReadsTheModel) {
  const auto error = [&](const std::string& arguments) {
    return std::string(Run("--model nowhere --out " + Path("out") + " " + arguments).message());
  };
  EXPECT_THAT(error("--objective uresidual"), HasSubstr("oscar rotation fit --dump"));
  EXPECT_THAT(error("--objective qqt_uresidual"), HasSubstr("--reference"));
  EXPECT_THAT(error("--clip fixed --k-clip 1.5"),
              HasSubstr("--k-clip: 1.5 is not between 0 and 1"));
  EXPECT_THAT(error("--clip fixed --v-clip nan"),
              HasSubstr("--v-clip: nan is not between 0 and 1"));
}

TEST_F(CalibrateCommand, TheTableShowsTheClipsOfAllHeads) {
  const Status status = Calibrate("--tokens 300");
  ASSERT_TRUE(status.ok()) << status.message();
  const auto rotation = LoadRotation(dir_ / "out");
  ASSERT_TRUE(rotation.has_value());
  bool differ = false;
  for (const auto& [id, layer] : rotation->layers) {
    const auto [low, high] = std::minmax_element(layer.k.clip.begin(), layer.k.clip.end());
    if (*low == *high) continue;
    differ = true;
    EXPECT_THAT(output_, HasSubstr(fmt::format("{:.2f}-{:.2f}", *low, *high))) << id;
  }
  EXPECT_TRUE(differ);  // else this shows nothing
}

}  // namespace
}  // namespace oscar::cli
