#include "rotation/rotation.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <limits>

#include "numeric/hadamard.h"
#include "numeric/matrix.h"

namespace oscar {
namespace {

const std::vector<int> kLayers{0, 3, 7};

TEST(RotationTest, DataFreeRotations) {
  const auto hadamard = MakeDataFreeRotation("hadamard", kLayers, 32);
  ASSERT_TRUE(hadamard.has_value());
  EXPECT_EQ(hadamard->layers.size(), 3u);
  EXPECT_EQ(hadamard->Find(1), nullptr);
  const Matrix m = Matrix::FromFloats(hadamard->Find(3)->v.MatrixOf(0), 32, 32);
  EXPECT_LT(MaxAbsDifference(m, HadamardMatrix(32)), 1e-7);
  EXPECT_TRUE(ValidateRotation(*hadamard).ok());
  const auto identity = MakeDataFreeRotation("identity", kLayers, 24);
  ASSERT_TRUE(identity.has_value());
  EXPECT_EQ(MeasureOrthogonality(*identity).max_error, 0);
  EXPECT_FALSE(MakeDataFreeRotation("hadamard", kLayers, 24).has_value());
  EXPECT_FALSE(MakeDataFreeRotation("qqt", kLayers, 32).has_value());
  EXPECT_FALSE(MakeDataFreeRotation("identity", {}, 32).has_value());
}

TEST(RotationTest, ValidationNamesErrorAndTolerance) {
  Rotation rotation = MakeDataFreeRotation("hadamard", kLayers, 32).value();
  rotation.layers[3].v.matrices[5] += 0.25f;
  const Status status = ValidateRotation(rotation);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("layer 3 v, head 0"), std::string::npos) << status.message();
  const OrthogonalityReport report = MeasureOrthogonality(rotation);
  EXPECT_EQ(report.layer, 3);
  EXPECT_EQ(report.side, 'v');
  EXPECT_GT(report.max_error, 0.05);
  EXPECT_LT(report.by_layer.at(0).first, 1e-6);
  EXPECT_EQ(report.by_layer.at(3).second, report.max_error);
  EXPECT_NE(status.message().find(fmt::format("{:.3g}", report.max_error)), std::string::npos);
  EXPECT_NE(status.message().find("0.001"), std::string::npos) << status.message();
  EXPECT_TRUE(ValidateRotation(rotation, std::numeric_limits<double>::infinity()).ok());
}

TEST(RotationTest, ValidationRefusesWhatIsNotSound) {
  const Rotation good = MakeDataFreeRotation("hadamard", kLayers, 32).value();
  Rotation bad = good;
  bad.layers[0].k.clip[0] = 1.5f;
  EXPECT_FALSE(ValidateRotation(bad).ok());
  bad = good;
  bad.layers[0].k.clip[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(ValidateRotation(bad).ok());
  bad = good;
  bad.layers[0].k.eigenvalues[3] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(ValidateRotation(bad).ok());
  bad = good;
  bad.layers[0].k.matrices[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(ValidateRotation(bad).ok());
  bad = good;
  bad.layers[0].k.matrices.pop_back();
  EXPECT_FALSE(ValidateRotation(bad).ok());
  bad = good;
  bad.layers.clear();
  EXPECT_FALSE(ValidateRotation(bad).ok());
}

TEST(RotationTest, FitsTheModelItWasMadeFor) {
  Rotation rotation = MakeDataFreeRotation("hadamard", kLayers, 32).value();
  EXPECT_TRUE(CheckRotationFits(rotation, kLayers, 32, 4, "m1").ok());
  EXPECT_FALSE(CheckRotationFits(rotation, kLayers, 64, 4, "").ok());
  EXPECT_FALSE(CheckRotationFits(rotation, std::vector<int>{0, 3}, 32, 4, "").ok());
  EXPECT_FALSE(CheckRotationFits(rotation, std::vector<int>{0, 3, 7, 9}, 32, 4, "").ok());
  rotation.info.model_fingerprint = "m2";
  EXPECT_FALSE(CheckRotationFits(rotation, kLayers, 32, 4, "m1").ok());
  EXPECT_TRUE(CheckRotationFits(rotation, kLayers, 32, 4, "m2").ok());
  EXPECT_TRUE(CheckRotationFits(rotation, kLayers, 32, 4, "").ok());
  const std::vector<double> ones(32, 1.0);
  AppendHead(rotation.layers[3].k, HadamardMatrix(32), ones, 0.9f);
  EXPECT_FALSE(CheckRotationFits(rotation, kLayers, 32, 4, "m2").ok());  // 2 matrices, 4 heads
}

TEST(RotationTest, ProductAppliesTheFirstFirst) {
  const Rotation h = MakeDataFreeRotation("hadamard", kLayers, 32).value();
  const auto twice = MultiplyRotations(h, h);  // H H = I
  ASSERT_TRUE(twice.has_value());
  EXPECT_LT(MaxAbsDifference(Matrix::FromFloats(twice->Find(7)->k.MatrixOf(0), 32, 32),
                             Matrix::Identity(32)),
            1e-6);
  // A shared matrix times one a head; a swap of channels shows the order.
  Rotation swap = MakeDataFreeRotation("identity", kLayers, 32).value();
  std::vector<int> perm(32);
  for (int i = 0; i < 32; ++i) perm[static_cast<size_t>(i)] = i ^ 1;
  const std::vector<double> ones(32, 1.0);
  for (const int layer : kLayers) {
    AppendHead(swap.layers[layer].k, Matrix::Identity(32).PermutedColumns(perm), ones, 0.5f);
  }
  const auto product = MultiplyRotations(h, swap);
  ASSERT_TRUE(product.has_value());
  EXPECT_EQ(product->Find(0)->k.num_heads, 2);
  EXPECT_EQ(product->Find(0)->v.num_heads, 1);
  EXPECT_LT(MaxAbsDifference(Matrix::FromFloats(product->Find(0)->k.MatrixOf(1), 32, 32),
                             HadamardMatrix(32).PermutedColumns(perm)),
            1e-7);
  const std::vector<int> fewer{0, 3};
  EXPECT_FALSE(
      MultiplyRotations(h, MakeDataFreeRotation("identity", fewer, 32).value()).has_value());
  EXPECT_FALSE(
      MultiplyRotations(MakeDataFreeRotation("identity", fewer, 32).value(), h).has_value());
  EXPECT_FALSE(
      MultiplyRotations(h, MakeDataFreeRotation("identity", kLayers, 16).value()).has_value());
}

}  // namespace
}  // namespace oscar
