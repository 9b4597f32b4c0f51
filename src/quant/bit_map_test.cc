#include "quant/bit_map.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

SensitivityMap Flat(int layers, int heads, double value) {
  return SensitivityMap(
      static_cast<size_t>(layers),
      std::vector<HeadSensitivity>(static_cast<size_t>(heads), HeadSensitivity{value, value}));
}

TEST(ChooseBits, SpendsOnTheMostSensitiveSideFirst) {
  SensitivityMap map = Flat(8, 2, 0.0001);
  map[6][0].k = 0.02;
  // 32 sides: one bit more of one of them is 1/32.
  EXPECT_EQ(MeanCodeBits(ChooseBits(map, 2.0)), 2.0);
  const BitMap one = ChooseBits(map, 2.0 + 1.0 / 32);
  EXPECT_EQ(one[6][0], (HeadBits{3, 2}));
  EXPECT_EQ(MeanCodeBits(one), 2.0 + 1.0 / 32);
  const BitMap two = ChooseBits(map, 2.0 + kDefaultExtraBits);
  EXPECT_EQ(two[6][0], (HeadBits{4, 2}));
  for (size_t layer = 0; layer < two.size(); ++layer) {
    for (size_t head = 0; head < 2; ++head) {
      if (layer == 6 && head == 0) continue;
      EXPECT_EQ(two[layer][head], HeadBits());
    }
  }
  // The third goes to another side: the most sensitive one has all it can get.
  EXPECT_EQ(ChooseBits(map, 2.0 + 3.0 / 32)[0][0], (HeadBits{3, 2}));
}

TEST(ChooseBits, ComparesTheSecondBitOfOneWithTheFirstOfAnother) {
  SensitivityMap map = Flat(1, 2, 0);
  map[0][0].k = 1.0;
  map[0][1].v = 0.45;  // 0.261 for its first bit; the second of the other gains 0.247
  const BitMap two = ChooseBits(map, 2.5);
  EXPECT_EQ(two[0][0], (HeadBits{3, 2}));
  EXPECT_EQ(two[0][1], (HeadBits{2, 3}));
  map[0][1].v = 0.4;  // 0.232
  EXPECT_EQ(ChooseBits(map, 2.5)[0][0], (HeadBits{4, 2}));
}

TEST(ChooseBits, KeepsToTheBudgetAndReachesBothEnds) {
  const SensitivityMap map = Flat(3, 4, 0);
  double last = 2;
  for (double budget = 2; budget <= 4; budget += 0.01) {
    const double mean = MeanCodeBits(ChooseBits(map, budget));
    EXPECT_LE(mean, budget + 1e-6);
    EXPECT_GT(mean, budget - 1.0 / 24);
    EXPECT_GE(mean, last);
    last = mean;
  }
  EXPECT_EQ(ChooseBits(map, 4.0), UniformBits(3, 4, 4));
}

TEST(DrawBits, OneLinePerLayer) {
  BitMap map = UniformBits(2, 2, 2);
  map[1][0].k = 4;
  EXPECT_EQ(DrawBits(map, {0, 6}), "layer   0   2/2 2/2\nlayer   6   4/2 2/2\n");
}

}  // namespace
}  // namespace oscar
