#include "rotation/recipe.h"

#include <gtest/gtest.h>

#include "numeric/hadamard.h"

namespace oscar {
namespace {

TEST(RecipeTest, ObjectiveNamesRoundTrip) {
  for (const char* name : {"qqt_sst", "qqt_sst_exact", "ktk_vtv", "uresidual", "hadamard",
                           "identity", "hadamard_sst", "qqt_identity", "identity_hadamard"}) {
    const auto pair = ParseObjectives(name);
    ASSERT_TRUE(pair.has_value()) << name;
    EXPECT_EQ(NameOf(*pair), name);
  }
  const auto pair = ParseObjectives("qqt_sst_exact");
  EXPECT_EQ(pair->k, Objective::kQqt);
  EXPECT_EQ(pair->v, Objective::kSstExact);
}

TEST(RecipeTest, UnknownNamesSayWhatIsKnown) {
  for (const char* name : {"", "qqt", "sst", "sst_qqt", "qqt_", "_sst", "qqt_sst_", "qqtsst"}) {
    const auto pair = ParseObjectives(name);
    ASSERT_FALSE(pair.has_value()) << name;
    EXPECT_NE(pair.error().message().find("qqt_sst"), std::string::npos);
  }
  const auto composition = ParseComposition("h_h");
  ASSERT_FALSE(composition.has_value());
  EXPECT_NE(composition.error().message().find("r_h_pbr"), std::string::npos);
}

TEST(RecipeTest, ZooObjectivesSplit) {
  std::string objective, composition;
  SplitZooObjective("qqt_r_h_pbr", objective, composition);
  EXPECT_EQ(objective, "qqt");
  EXPECT_EQ(composition, "r_h_pbr");
  EXPECT_EQ(ZooObjective(objective, composition), "qqt_r_h_pbr");
  SplitZooObjective("sst_exact_br", objective, composition);
  EXPECT_EQ(objective, "sst_exact");
  EXPECT_EQ(composition, "br");
  SplitZooObjective("something_else", objective, composition);
  EXPECT_EQ(objective, "something_else");
  EXPECT_EQ(composition, "");
  EXPECT_EQ(ZooObjective("hadamard", "plain"), "hadamard");
}

TEST(RecipeTest, FactorsMultiplyLeftToRight) {
  const int dim = 8;
  Matrix r = Matrix::Identity(dim);  // a plane rotation: symmetric in nothing
  r(1, 1) = r(2, 2) = 0.6;
  r(1, 2) = 0.8;
  r(2, 1) = -0.8;
  const std::vector<double> values{1, 2, 3, 4, 5, 6, 7, 8};
  const Matrix h = HadamardMatrix(dim);
  const Matrix p = Matrix::Identity(dim).PermutedColumns(BitReversalPermutation(values));
  const auto expect = [&](Composition composition, const Matrix& expected) {
    const auto m = Compose(r, values, composition);
    ASSERT_TRUE(m.has_value());
    EXPECT_LT(MaxAbsDifference(*m, expected), 1e-15) << NameOf(composition);
  };
  expect(Composition::kPlain, r);
  expect(Composition::kPbr, p);
  expect(Composition::kBr, Multiply(r, p));
  expect(Composition::kBrH128, Multiply(Multiply(r, p), h));
  expect(Composition::kRH, Multiply(r, h));
  expect(Composition::kHPbr, Multiply(h, p));
  expect(Composition::kHRPbr, Multiply(Multiply(h, r), p));
  expect(Composition::kHPbrR, Multiply(Multiply(h, p), r));
  expect(Composition::kRHPbr, Multiply(Multiply(r, h), p));
}

TEST(RecipeTest, OnlyPlainWorksForOtherDimensions) {
  const Matrix r = Matrix::Identity(12);
  const std::vector<double> values(12, 1.0);
  EXPECT_TRUE(Compose(r, values, Composition::kPlain).has_value());
  const auto bad = Compose(r, values, Composition::kRHPbr);
  ASSERT_FALSE(bad.has_value());
  EXPECT_NE(bad.error().message().find("12"), std::string::npos);
}

}  // namespace
}  // namespace oscar
