#include "rotation/sensitivity_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

namespace oscar {
namespace {

Sensitivities Sample() {
  Sensitivities out;
  out.model_fingerprint = "00ff00ff00ff00ff";
  out.tokens = 1234;
  out.layers[0] = {{0.001, 0}, {0.25, 1e-9}};
  out.layers[3] = {{0.02, 0.0001}, {0, 0}};
  return out;
}

TEST(Sensitivities, SurviveTheFile) {
  const Sensitivities sample = Sample();
  const std::string text = SensitivitiesToJson(sample);
  const Result<Sensitivities> back = ParseSensitivities(text, "file");
  ASSERT_TRUE(back.has_value()) << back.error().ToString();
  EXPECT_EQ(*back, sample);
  EXPECT_EQ(SensitivitiesToJson(*back), text);
}

TEST(Sensitivities, AreThoseOfTheModelsLayers) {
  const Result<SensitivityMap> map = MapOf(Sample(), std::array{0, 3}, 2);
  ASSERT_TRUE(map.has_value());
  EXPECT_EQ((*map)[1][0].k, 0.02);
  EXPECT_FALSE(MapOf(Sample(), std::array{0, 1, 3}, 2).has_value());
  EXPECT_FALSE(MapOf(Sample(), std::array{0}, 2).has_value());
  EXPECT_FALSE(MapOf(Sample(), std::array{0, 3}, 4).has_value());
}

// Every broken file is an error that names the file, and none is read in part.
TEST(Sensitivities, HostileFilesAreRefused) {
  const std::string good = SensitivitiesToJson(Sample());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  const std::string broken[] = {"",
                                "[]",
                                "{}",
                                with("oscar-sensitivity-1", "oscar-sensitivity-2"),
                                with("\"hadamard\"", "\"other\""),
                                with("\"kl\"", "\"guess\""),
                                with("1234", "-1"),
                                with("1234", "1.5"),
                                with("\"0\"", "\"00\""),
                                with("\"0\"", "\"-1\""),
                                with("\"0\"", "\"99999999999\""),
                                with("0.001", "-0.001"),
                                with("0.001", "1e999"),
                                with("0.001", "\"x\""),
                                with("0.001,", ""),
                                with("\"model_fingerprint\"", "\"model\"")};
  for (const std::string& text : broken) {
    const Result<Sensitivities> back = ParseSensitivities(text, "some/file");
    ASSERT_FALSE(back.has_value()) << text;
    EXPECT_THAT(back.error().message(), testing::HasSubstr("some/file"));
  }
  for (size_t cut = 0; cut + 2 < good.size(); cut += 7) {
    EXPECT_FALSE(ParseSensitivities(good.substr(0, cut), "file").has_value());
  }
}

}  // namespace
}  // namespace oscar
