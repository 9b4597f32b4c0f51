#include "quant/row_quantizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "base/json.h"
#include "quant/quant_test_util.h"

namespace oscar {
namespace {

constexpr int kDims = 128;

struct Encoded {
  std::vector<uint8_t> codes;
  std::vector<float> scale, min;
  int saturated = 0;
};

Encoded Encode(const RowSpec& spec, std::span<const float> row) {
  Encoded e;
  e.codes.assign(row.size(), 0xee);
  e.scale.resize(row.size() / static_cast<size_t>(spec.group_dims));
  e.min.resize(e.scale.size());
  e.saturated = QuantizeRow(spec, row, e.codes, e.scale, e.min);
  return e;
}

std::vector<float> Decode(const RowSpec& spec, const Encoded& e) {
  std::vector<float> row(e.codes.size());
  DequantizeRow(spec, e.codes, e.scale, e.min, row);
  return row;
}

std::vector<RowSpec> AllSpecs() {
  std::vector<RowSpec> specs;
  for (MetaType meta : {MetaType::kFp16, MetaType::kBf16, MetaType::kFp32}) {
    for (int group : {32, 64, 128}) {
      for (int bits : {2, 3, 4, 8}) {
        for (float clip : {0.0f, 0.92f}) {
          specs.push_back({RowRule::kMinMax, bits, group, clip, meta});
          specs.push_back({RowRule::kSymmetric, bits, group, clip, meta});
        }
        for (float clip : {0.0f, 0.92f}) {
          if (bits == 2) specs.push_back({RowRule::kLloydMax, bits, group, clip, meta});
        }
        if (bits == 8) continue;
        specs.push_back({RowRule::kMseFit, bits, group, 0.0f, meta});
        specs.push_back({RowRule::kMseFitUnbiased, bits, group, 0.0f, meta});
      }
    }
  }
  return specs;
}

// How far all of a constant group may come back from its value: kLloydMax has no level there, and a
// step of at least 1.17e-4.
float ConstantSlack(const RowSpec& s) { return s.rule == RowRule::kLloydMax ? 6e-5f : 0.0f; }

std::string Describe(const RowSpec& s) {
  return "rule " + std::to_string(static_cast<int>(s.rule)) + " bits " + std::to_string(s.bits) +
         " group " + std::to_string(s.group_dims) + " clip " + std::to_string(s.clip_ratio) +
         " meta " + std::to_string(static_cast<int>(s.meta));
}

// tools/make_row_goldens.py, an independent numpy implementation, wrote the file.
TEST(RowQuantizer, Goldens) {
  std::ifstream file(OSCAR_TEST_DATA "/quant/row_goldens.json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto json = ParseJson(text, "row_goldens.json");
  ASSERT_TRUE(json.has_value()) << json.error().ToString();
  int cases = 0;
  for (const auto& c : json->at("cases")) {
    std::vector<float> row;
    for (uint16_t word : json->at("rows").at(c.at("row").get<std::string>())) {
      row.push_back(ToFloat(Bf16{word}));
    }
    const std::string rule = c.at("rule"), meta = c.at("meta"), hex = c.at("codes");
    RowSpec spec;
    spec.rule = rule == "minmax"      ? RowRule::kMinMax
                : rule == "symmetric" ? RowRule::kSymmetric
                : rule == "mse"       ? RowRule::kMseFit
                : rule == "lloyd_max" ? RowRule::kLloydMax
                                      : RowRule::kMseFitUnbiased;
    spec.meta = meta == "fp16"   ? MetaType::kFp16
                : meta == "bf16" ? MetaType::kBf16
                                 : MetaType::kFp32;
    spec.bits = c.at("bits");
    spec.group_dims = c.at("group");
    spec.clip_ratio = c.at("clip");
    const Encoded e = Encode(spec, row);
    SCOPED_TRACE(c.at("row").get<std::string>() + " " + Describe(spec));
    ASSERT_EQ(hex.size(), 2 * e.codes.size());
    for (size_t i = 0; i < e.codes.size(); ++i) {
      ASSERT_EQ(e.codes[i], std::stoi(hex.substr(2 * i, 2), nullptr, 16)) << "dim " << i;
    }
    for (size_t g = 0; g < e.scale.size(); ++g) {
      EXPECT_EQ(std::bit_cast<uint32_t>(e.scale[g]), c.at("scale_bits")[g].get<uint32_t>());
      EXPECT_EQ(std::bit_cast<uint32_t>(e.min[g]), c.at("min_bits")[g].get<uint32_t>());
    }
    ++cases;
  }
  EXPECT_EQ(cases, 4 * 27);
}

// Small enough to check by eye: 16 dims, powers of two.
TEST(RowQuantizer, MinMaxByHand) {
  std::vector<float> row(16, 0.0f);
  row[0] = -1.0f;
  row[1] = 2.0f;
  row[2] = 0.5f;   // exactly between levels 0 and 1: half goes up
  row[3] = -0.5f;  // between -1 and 0: up
  row[4] = 0.49f;
  const RowSpec spec{RowRule::kMinMax, 2, 16, 0.0f, MetaType::kFp16};
  const Encoded e = Encode(spec, row);
  EXPECT_EQ(e.scale[0], 1.0f);
  EXPECT_EQ(e.min[0], -1.0f);
  EXPECT_THAT(std::vector<uint8_t>(e.codes.begin(), e.codes.begin() + 6),
              testing::ElementsAre(0, 3, 2, 1, 1, 1));
}

TEST(RowQuantizer, SymmetricByHand) {
  std::vector<float> row(16, 0.0f);
  row[0] = -1.0f;
  row[1] = 0.75f;
  row[2] = 0.5f;  // tie: to even, 0
  row[3] = -1.0f;
  row[4] = -0.5f;  // tie: to even, 0
  const RowSpec spec{RowRule::kSymmetric, 2, 16, 0.0f, MetaType::kFp16};
  const Encoded e = Encode(spec, row);
  EXPECT_EQ(e.scale[0], 1.0f);
  EXPECT_EQ(e.min[0], -2.0f);
  EXPECT_THAT(std::vector<uint8_t>(e.codes.begin(), e.codes.begin() + 6),
              testing::ElementsAre(1, 3, 2, 1, 2, 2));
}

// Rows with the mean 0 and a deviation that is known.
TEST(RowQuantizer, LloydMaxByHand) {
  const RowSpec spec{RowRule::kLloydMax, 2, 16, 0.0f, MetaType::kFp32};
  // Half at +1, half at -1: deviation 1 (to 1e-8), outer codes, the published outer level.
  std::vector<float> row(16);
  for (size_t i = 0; i < row.size(); ++i) row[i] = i % 2 == 0 ? 1.0f : -1.0f;
  const Encoded ends = Encode(spec, row);
  EXPECT_NEAR(ends.scale[0], 1.16739f, 1e-5f);
  EXPECT_NEAR(ends.min[0], -1.75109f, 1e-5f);
  EXPECT_EQ(ends.codes[0], 3);
  EXPECT_EQ(ends.codes[1], 0);
  // The sum of squares is 2 a^2 + 2 b^2 = 16: the deviation is 1, and a lies beside the threshold.
  for (const auto& [a, inside] : {std::pair{0.98f, true}, {0.982f, false}}) {
    std::fill(row.begin(), row.end(), 0.0f);
    row[2] = a, row[3] = -a;
    row[4] = std::sqrt(8.0f - a * a), row[5] = -row[4];
    const Encoded e = Encode(spec, row);
    EXPECT_EQ(e.codes[0], 2);  // a number at the mean is above it
    EXPECT_EQ(e.codes[2], inside ? 2 : 3);
    EXPECT_EQ(e.codes[3], inside ? 1 : 0);
    EXPECT_EQ(e.codes[4], 3);
    EXPECT_EQ(e.codes[5], 0);
    EXPECT_NEAR(Decode(spec, e)[0], 0.58370f, 1e-5f);
  }
}

// Beyond 65504 / 1.751 deviations the min saturates, as docs/quantizers.md says.
TEST(RowQuantizer, LloydMaxOfHugeGroupsStaysFinite) {
  const RowSpec spec{RowRule::kLloydMax, 2, kDims, 0.0f, MetaType::kFp16};
  for (const float size : {37000.0f, 65504.0f}) {
    std::vector<float> row(kDims);
    for (size_t i = 0; i < row.size(); ++i) row[i] = i % 2 == 0 ? size : -size;
    const Encoded e = Encode(spec, row);
    EXPECT_EQ(e.saturated, 0);
    EXPECT_EQ(e.min[0] == -kFp16Max, size > 37400.0f);
    for (float v : Decode(spec, e)) ASSERT_TRUE(std::isfinite(v));
  }
}

TEST(RowQuantizer, ClipTakesTheElementTheRuleNames) {
  EXPECT_EQ(ClipIndex(0.92f, 128), 117);
  EXPECT_EQ(ClipIndex(0.96f, 128), 122);
  EXPECT_EQ(ClipIndex(1.0f, 128), 127);  // nothing above the largest: clips nothing
  EXPECT_EQ(ClipIndex(0.96f, 64), 61);
  EXPECT_EQ(ClipIndex(0.92f, 256), 235);
  EXPECT_EQ(ClipIndex(1e-6f, 128), 0);
  // |row| is a permutation of 1..128, so the threshold is index + 1.
  std::vector<float> row(kDims);
  for (int i = 0; i < kDims; ++i) {
    row[static_cast<size_t>(i * 37 % kDims)] = static_cast<float>((i % 2 ? 1 : -1) * (i + 1));
  }
  for (const auto& [ratio, threshold] :
       {std::pair{0.0f, 128.0f}, {0.92f, 118.0f}, {0.96f, 123.0f}, {1.0f, 128.0f}}) {
    const RowSpec spec{RowRule::kMinMax, 2, kDims, ratio, MetaType::kFp32};
    const Encoded e = Encode(spec, row);
    // Both ends are clipped or kept to within one (odd magnitudes are negative).
    EXPECT_NEAR(-e.min[0], threshold, 1.0f) << ratio;
    EXPECT_NEAR(e.min[0] + 3.0f * e.scale[0], threshold, 1.0f) << ratio;
    EXPECT_EQ(std::max(-e.min[0], e.min[0] + 3.0f * e.scale[0]), threshold) << ratio;
  }
}

TEST(RowQuantizer, ClipIsTakenOverTheRowBeforeGrouping) {
  // All large values sit in the first of four groups. A clip per group would cut the others too.
  std::vector<float> row(kDims, 1.0f);
  for (int i = 0; i < 32; ++i) row[static_cast<size_t>(i)] = static_cast<float>(100 + i);
  for (int i = 32; i < kDims; ++i) row[static_cast<size_t>(i)] = static_cast<float>(i % 2);
  const RowSpec spec{RowRule::kMinMax, 2, 32, 0.96f, MetaType::kFp32};
  const Encoded e = Encode(spec, row);
  EXPECT_EQ(e.min[0] + 3.0f * e.scale[0], 126.0f);  // sorted |row|[122] = 100 + (122 - 96)
  for (size_t g = 1; g < 4; ++g) {
    EXPECT_EQ(e.min[g], 0.0f);
    EXPECT_EQ(e.scale[g], 1.0f / 3.0f);
  }
}

TEST(RowQuantizer, CodesStayInRangeAndMetadataIsOfItsType) {
  for (const RowSpec& spec : AllSpecs()) {
    for (uint64_t stream = 0; stream < 8; ++stream) {
      auto row = GaussianRows(kDims, stream);
      for (float& v : row) v = v * std::exp2(static_cast<float>(4 * stream) - 14.0f) + 0.3f;
      const Encoded e = Encode(spec, row);
      for (uint8_t c : e.codes) ASSERT_LT(c, 1 << spec.bits) << Describe(spec);
      for (size_t g = 0; g < e.scale.size(); ++g) {
        ASSERT_GE(e.scale[g], kMinScale);
        ASSERT_EQ(RoundMeta(e.scale[g], spec.meta), e.scale[g]) << Describe(spec);
        ASSERT_EQ(RoundMeta(e.min[g], spec.meta), e.min[g]) << Describe(spec);
      }
    }
  }
}

TEST(RowQuantizer, MinMaxDecodesWithinHalfAStep) {
  for (const RowSpec& spec : AllSpecs()) {
    if (spec.rule != RowRule::kMinMax || spec.clip_ratio > 0.0f) continue;
    // Half a step, plus what rounding the metadata moved the ends: half an ulp of min, and of the
    // scale times every level.
    const float ulp = spec.meta == MetaType::kFp16   ? 0x1p-11f
                      : spec.meta == MetaType::kBf16 ? 0x1p-8f
                                                     : 0x1p-23f;
    const auto levels = static_cast<float>((1 << spec.bits) - 1);
    for (uint64_t stream = 0; stream < 16; ++stream) {
      const auto row = GaussianRows(kDims, stream);
      const Encoded e = Encode(spec, row);
      const auto back = Decode(spec, e);
      for (size_t i = 0; i < row.size(); ++i) {
        const size_t g = i / static_cast<size_t>(spec.group_dims);
        const float bound =
            0.5f * e.scale[g] + ulp * std::fabs(e.min[g]) + ulp * levels * e.scale[g] + 1e-6f;
        ASSERT_LE(std::fabs(back[i] - row[i]), bound) << Describe(spec) << " dim " << i;
      }
    }
  }
}

TEST(RowQuantizer, MinMaxReencodesToItself) {
  for (const RowSpec& spec : AllSpecs()) {
    if (spec.rule != RowRule::kMinMax || spec.clip_ratio > 0.0f) continue;
    // 255 steps of a scale that is off by 2^-9 miss the end by half a step: code 255 may stay
    // unused.
    if (spec.bits == 8 && spec.meta == MetaType::kBf16) continue;
    for (uint64_t stream = 0; stream < 16; ++stream) {
      const Encoded once = Encode(spec, GaussianRows(kDims, stream));
      const auto row = Decode(spec, once);
      const Encoded twice = Encode(spec, row);
      ASSERT_EQ(twice.codes, once.codes) << Describe(spec);
      if (spec.meta == MetaType::kFp32) continue;  // the last bit of a division by 3 may move
      ASSERT_EQ(twice.scale, once.scale) << Describe(spec);
      ASSERT_EQ(twice.min, once.min) << Describe(spec);
    }
  }
}

TEST(RowQuantizer, GroupsAreIndependent) {
  for (RowSpec spec : AllSpecs()) {
    if (spec.clip_ratio > 0.0f) continue;  // the clip is over the row by design
    const auto row = GaussianRows(kDims, 5);
    const Encoded whole = Encode(spec, row);
    const auto group = static_cast<size_t>(spec.group_dims);
    for (size_t g = 0; g < row.size() / group; ++g) {
      const Encoded part = Encode(spec, {row.data() + g * group, group});
      ASSERT_TRUE(std::equal(part.codes.begin(), part.codes.end(),
                             whole.codes.begin() + static_cast<ptrdiff_t>(g * group)))
          << Describe(spec);
      ASSERT_EQ(part.scale[0], whole.scale[g]);
      ASSERT_EQ(part.min[0], whole.min[g]);
    }
  }
}

TEST(RowQuantizer, ConstantRowsDecodeToTheirValue) {
  for (const RowSpec& spec : AllSpecs()) {
    for (float value : {0.0f, 1.0f, -1.0f, 0.1f, 1234.0f, -65504.0f, 65504.0f, 6e-8f, 1e-30f}) {
      // The capped scale of symmetric fp16 rows ends at (h - 1) / h of 65504.
      if (spec.rule == RowRule::kSymmetric && spec.meta == MetaType::kFp16 && value > 32752.0f) {
        continue;
      }
      const std::vector<float> row(kDims, value);
      const Encoded e = Encode(spec, row);
      EXPECT_EQ(e.saturated, 0);
      for (float v : Decode(spec, e)) {
        // Symmetric levels: +-max is a level at any width, up to the rounding of the scale.
        const float tolerance =
            (spec.meta == MetaType::kBf16 ? 0x1p-8f : 0x1p-11f) * std::fabs(value) +
            4.0f * kMinScale + ConstantSlack(spec);
        ASSERT_NEAR(v, value, tolerance) << Describe(spec);
      }
    }
  }
}

TEST(RowQuantizer, ZeroRowsAreExact) {
  const std::vector<float> row(kDims, 0.0f);
  for (const RowSpec& spec : AllSpecs()) {
    for (float v : Decode(spec, Encode(spec, row))) {
      ASSERT_LE(std::fabs(v), ConstantSlack(spec)) << Describe(spec);
    }
  }
}

TEST(RowQuantizer, SubnormalRowsDecodeToNearlyNothing) {
  auto row = GaussianRows(kDims, 3);
  for (float& v : row) v *= 1e-40f;
  for (const RowSpec& spec : AllSpecs()) {
    const Encoded e = Encode(spec, row);
    EXPECT_EQ(e.saturated, 0);
    const auto levels = static_cast<float>(1 << spec.bits);
    for (float v : Decode(spec, e)) {
      // The step of kLloydMax is there, whatever the row: its outer codes are three halves of it.
      ASSERT_LE(std::fabs(v), levels * kMinScale + 3.0f * ConstantSlack(spec)) << Describe(spec);
    }
  }
}

TEST(RowQuantizer, NanIsZeroAndBeyondFp16Saturates) {
  const float inf = std::numeric_limits<float>::infinity();
  const auto clean = [] {
    auto row = GaussianRows(kDims, 11);
    row[3] = 0.0f;
    row[70] = kFp16Max;
    row[71] = -kFp16Max;
    row[99] = kFp16Max;
    return row;
  }();
  auto dirty = clean;
  dirty[3] = std::nanf("");
  dirty[70] = inf;
  dirty[71] = -inf;
  dirty[99] = 1e9f;
  for (const RowSpec& spec : AllSpecs()) {
    const Encoded a = Encode(spec, clean), b = Encode(spec, dirty);
    EXPECT_EQ(a.saturated, 0);
    EXPECT_EQ(b.saturated, 4);
    ASSERT_EQ(a.codes, b.codes) << Describe(spec);
    ASSERT_EQ(a.scale, b.scale) << Describe(spec);
    ASSERT_EQ(a.min, b.min) << Describe(spec);
    for (float v : Decode(spec, b)) ASSERT_TRUE(std::isfinite(v)) << Describe(spec);
  }
  const std::vector<float> nans(kDims, std::nanf(""));
  for (const RowSpec& spec : AllSpecs()) {
    const Encoded e = Encode(spec, nans);
    EXPECT_EQ(e.saturated, kDims);
    for (float v : Decode(spec, e)) {
      ASSERT_LE(std::fabs(v), ConstantSlack(spec)) << Describe(spec);
    }
  }
}

// The level below the most negative one an fp16 page can hold would be stored as -infinity.
TEST(RowQuantizer, SymmetricMinFitsItsType) {
  for (int bits : {2, 3, 4, 8}) {
    const RowSpec spec{RowRule::kSymmetric, bits, kDims, 0.0f, MetaType::kFp16};
    auto row = GaussianRows(kDims, 4);
    row[9] = kFp16Max;
    row[10] = -kFp16Max;
    const Encoded e = Encode(spec, row);
    EXPECT_EQ(e.min[0], -kFp16Max);
    EXPECT_EQ(e.scale[0], kFp16Max / static_cast<float>(1 << (bits - 1)));
    EXPECT_EQ(e.codes[9], (1 << bits) - 1);
    EXPECT_EQ(Decode(spec, e)[10], -kFp16Max);
  }
}

TEST(RowQuantizer, OneHugeOutlierCostsMinMaxAndFitsTheRestAndClipDoesNot) {
  auto row = GaussianRows(kDims, 12);
  row[40] = 60000.0f;
  const auto error_of_the_rest = [&row](const RowSpec& of) {
    auto rest = row, back = Decode(of, Encode(of, row));
    rest[40] = back[40] = 0.0f;
    return RelativeError(rest, back);
  };
  RowSpec spec{RowRule::kMinMax, 2, kDims, 0.0f, MetaType::kFp16};
  const Encoded plain = Encode(spec, row);
  EXPECT_EQ(std::accumulate(plain.codes.begin(), plain.codes.end(), 0), 3);  // the outlier alone
  EXPECT_GT(error_of_the_rest(spec), 0.9);
  for (const RowRule fit : {RowRule::kMseFit, RowRule::kMseFitUnbiased}) {
    EXPECT_GT(error_of_the_rest({fit, 2, kDims, 0.0f, MetaType::kFp16}), 0.9);
  }
  spec.clip_ratio = 0.96f;
  EXPECT_LT(error_of_the_rest(spec), 0.25);
}

// What docs/quantizers.md says of metadata that saturates.
TEST(RowQuantizer, FitsOfHugeGroupsStayFinite) {
  for (const RowRule rule : {RowRule::kMseFit, RowRule::kMseFitUnbiased}) {
    for (const float size : {24000.0f, 65504.0f}) {
      const RowSpec spec{rule, 2, kDims, 0.0f, MetaType::kFp16};
      std::vector<float> row(kDims, -size);
      row[7] = size;  // the others take code 1, so that min lies a step below them
      const Encoded e = Encode(spec, row);
      EXPECT_EQ(e.saturated, 0);
      EXPECT_EQ(e.min[0], std::max(-2.0f * size, -kFp16Max));
      for (float v : Decode(spec, e)) ASSERT_TRUE(std::isfinite(v));
      if (size < 25000.0f) {
        EXPECT_EQ(Decode(spec, e), row);
      }
    }
  }
}

double CentredDot(std::span<const float> x, std::span<const float> y) {
  double mx = 0.0, my = 0.0, dot = 0.0;
  for (size_t i = 0; i < x.size(); ++i) mx += x[i], my += y[i];
  mx /= static_cast<double>(x.size());
  my /= static_cast<double>(x.size());
  for (size_t i = 0; i < x.size(); ++i) dot += (x[i] - mx) * (y[i] - my);
  return dot;
}

TEST(RowQuantizer, UnbiasedRowsKeepTheirInnerProduct) {
  for (int bits : {2, 3, 4}) {
    for (MetaType meta : {MetaType::kFp16, MetaType::kFp32}) {
      const RowSpec spec{RowRule::kMseFitUnbiased, bits, kDims, 0.0f, meta};
      const RowSpec plain{RowRule::kMseFit, bits, kDims, 0.0f, meta};
      double shrink = 0.0;
      for (uint64_t stream = 0; stream < 64; ++stream) {
        const auto row = GaussianRows(kDims, stream);
        const double self = CentredDot(row, row);
        const Encoded e = Encode(spec, row);
        const auto back = Decode(spec, e);
        // The scale is off by at most half an ulp: 2^-11 relative in fp16.
        const double tolerance = meta == MetaType::kFp16 ? 0x1p-11 : 1e-5;
        ASSERT_NEAR(CentredDot(row, back) / self, 1.0, tolerance + 1e-6);
        // The mean is kept whatever rounding did to the scale: min rounds to half its own ulp.
        double mean = 0.0, kept = 0.0;
        for (size_t i = 0; i < row.size(); ++i) mean += row[i], kept += back[i];
        ASSERT_NEAR(kept / kDims, mean / kDims,
                    (meta == MetaType::kFp16 ? 0x1p-11 : 1e-6) * std::fabs(e.min[0]) + 1e-6);
        shrink += CentredDot(row, Decode(plain, Encode(plain, row))) / self;
        ASSERT_EQ(Encode(plain, row).codes, e.codes);  // codes are not chosen again
      }
      // What the rescale is for: the plain fit is shorter by about its distortion.
      if (bits == 2) {
        EXPECT_NEAR(shrink / 64, 1.0 - 0.114, 0.01);
      }
    }
  }
}

// An upper bound from a dense search: the five steps lose little against the best of 200.
TEST(RowQuantizer, MseFitIsCloseToTheBestStepOfADenseSearch) {
  const RowSpec spec{RowRule::kMseFit, 2, kDims, 0.0f, MetaType::kFp32};
  double ours = 0.0, best_sum = 0.0;
  for (uint64_t stream = 0; stream < 64; ++stream) {
    const auto row = GaussianRows(kDims, stream);
    const double self = CentredDot(row, row);
    double mean = 0.0;
    for (float v : row) mean += v / kDims;
    double best = 1e9;
    for (double step = 0.4; step < 1.6; step += 0.006) {
      std::array<double, kDims> q;
      double mq = 0.0, qq = 0.0, qx = 0.0;
      for (size_t i = 0; i < kDims; ++i) {
        q[i] =
            std::clamp(std::floor((row[i] - mean) / (step * std::sqrt(self / kDims))), -2.0, 1.0);
        mq += q[i] / kDims;
      }
      for (size_t i = 0; i < kDims; ++i) {
        qq += (q[i] - mq) * (q[i] - mq);
        qx += (q[i] - mq) * (row[i] - mean);
      }
      best = std::min(best, self - qx * qx / qq);
    }
    double error = 0.0;
    const auto back = Decode(spec, Encode(spec, row));
    for (size_t i = 0; i < kDims; ++i) error += (back[i] - row[i]) * (back[i] - row[i]);
    ASSERT_GE(error, best * (1.0 - 1e-4));
    ours += error;
    best_sum += best;
  }
  EXPECT_LT(ours, 1.02 * best_sum);
}

double Distortion(const RowSpec& spec) {
  constexpr size_t kRows = 2000;
  const auto rows = GaussianRows(kRows * kDims, 77);
  std::vector<float> back(rows.size());
  for (size_t r = 0; r < kRows; ++r) {
    const std::span<const float> row{rows.data() + r * kDims, kDims};
    const Encoded e = Encode(spec, row);
    DequantizeRow(spec, e.codes, e.scale, e.min, {back.data() + r * kDims, kDims});
  }
  return RelativeError(rows, back);
}

// Expected values: independent Monte-Carlo runs of the published rules on the same distribution,
// printed to three digits. Half a unit of the last digit plus about 1 % of sampling error.
TEST(RowQuantizer, GaussianDistortionMatchesTheKnownValues) {
  struct Case {
    RowSpec spec;
    double expected;
  };
  const auto f16 = MetaType::kFp16;
  for (const Case& c :
       std::initializer_list<Case>{{{RowRule::kMinMax, 2, 128, 0.0f, f16}, 0.250},
                                   {{RowRule::kMinMax, 2, 64, 0.0f, f16}, 0.203},
                                   {{RowRule::kMinMax, 2, 32, 0.0f, f16}, 0.154},
                                   {{RowRule::kMinMax, 2, 128, 0.96f, f16}, 0.156},
                                   {{RowRule::kMinMax, 2, 128, 0.92f, f16}, 0.127},
                                   {{RowRule::kMinMax, 2, 128, 0.90f, f16}, 0.122},
                                   {{RowRule::kMinMax, 2, 128, 0.85f, f16}, 0.118},
                                   {{RowRule::kMinMax, 2, 128, 0.80f, f16}, 0.126},
                                   {{RowRule::kMseFit, 2, 128, 0.0f, f16}, 0.114},
                                   {{RowRule::kMseFitUnbiased, 2, 128, 0.0f, f16}, 0.129},
                                   {{RowRule::kLloydMax, 2, 128, 0.96f, f16}, 0.141},
                                   {{RowRule::kLloydMax, 2, 128, 0.92f, f16}, 0.137},
                                   // The rest from tools/gaussian_distortion.py.
                                   {{RowRule::kMseFit, 2, 64, 0.0f, f16}, 0.1093},
                                   {{RowRule::kMseFit, 2, 32, 0.0f, f16}, 0.0998},
                                   {{RowRule::kMseFit, 3, 128, 0.0f, f16}, 0.0347},
                                   {{RowRule::kMseFit, 4, 128, 0.0f, f16}, 0.0099},
                                   {{RowRule::kMseFitUnbiased, 2, 64, 0.0f, f16}, 0.1235},
                                   {{RowRule::kMseFitUnbiased, 2, 32, 0.0f, f16}, 0.1123},
                                   {{RowRule::kMseFitUnbiased, 3, 128, 0.0f, f16}, 0.0360},
                                   {{RowRule::kMseFitUnbiased, 4, 128, 0.0f, f16}, 0.0101}}) {
    const double d = Distortion(c.spec);
    RecordProperty(Describe(c.spec), std::to_string(d));
    const double digit = c.expected < 0.1 ? 5e-5 : 5e-4;
    EXPECT_NEAR(d, c.expected, digit + 0.012 * c.expected) << Describe(c.spec);
  }
}

TEST(RowQuantizer, Sum16HasTheStatedOrder) {
  // 2^24 absorbs a lone 1 but not the pair: only the lane order below gives this answer.
  std::vector<float> x(48, 0.0f);
  x[0] = 0x1p24f;
  x[16] = 1.0f;  // same lane as x[0]: absorbed
  x[8] = 1.0f;   // folds onto lane 0 at width 8: absorbed
  x[1] = 1.0f;
  x[9] = 1.0f;  // lanes 1 and 9 make 2 before they meet lane 0
  EXPECT_EQ(Sum16(x), 0x1p24f + 2.0f);
}

TEST(RowQuantizer, BitsCountTheMetadata) {
  EXPECT_DOUBLE_EQ(BitsPerElement({RowRule::kMinMax, 2, 128, 0.0f, MetaType::kFp16}), 2.25);
  EXPECT_DOUBLE_EQ(BitsPerElement({RowRule::kMinMax, 2, 128, 0.0f, MetaType::kFp32}), 2.5);
  EXPECT_DOUBLE_EQ(BitsPerElement({RowRule::kMinMax, 2, 32, 0.0f, MetaType::kBf16}), 3.0);
  EXPECT_DOUBLE_EQ(BitsPerElement({RowRule::kSymmetric, 4, 128, 0.0f, MetaType::kFp16}), 4.125);
}

TEST(RowQuantizerDeathTest, RefusesWidthsThatARuleDoesNotHave) {
  const auto row = GaussianRows(kDims, 1);
  EXPECT_DEATH(Encode({RowRule::kMseFit, 8, kDims, 0.0f, MetaType::kFp16}, row), "bits");
  EXPECT_DEATH(Encode({RowRule::kLloydMax, 3, kDims, 0.0f, MetaType::kFp16}, row), "bits");
}

}  // namespace
}  // namespace oscar
