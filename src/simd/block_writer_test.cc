#include "simd/block_writer.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "base/rng.h"
#include "simd/dispatch.h"

namespace oscar::simd {
namespace {

enum class Fill {
  kGaussian,
  kOutliers,
  kConstant,
  kZeros,
  kPositive,
  kHuge,
  kTiny,
  kAnyBits,
  kTies
};

std::vector<Bf16> Rows(Fill fill, int dims, uint64_t seed) {
  const Philox rng(seed, static_cast<uint64_t>(fill));
  std::vector<Bf16> rows(static_cast<size_t>(kPageTokens * dims));
  for (size_t i = 0; i < rows.size(); ++i) {
    const float x = rng.Normal(i);
    const size_t row = i / static_cast<size_t>(dims);
    switch (fill) {
      case Fill::kGaussian:
        rows[i] = ToBf16(x);
        break;
      case Fill::kOutliers:
        rows[i] = ToBf16(i % 37 == 0 ? 200.0f * x : x);
        break;
      case Fill::kConstant:
        rows[i] = ToBf16(static_cast<float>(row) - 20.0f);
        break;
      case Fill::kZeros:  // of both signs, the first sign differing from row to row
        rows[i] = ToBf16((i + row) % 3 == 0 ? -0.0f : 0.0f);
        break;
      case Fill::kPositive:  // the minimum is a zero of either sign
        rows[i] = ToBf16((i + row) % 5 == 0 ? -0.0f : (i + row) % 7 == 0 ? 0.0f : std::fabs(x));
        break;
      case Fill::kHuge:  // around and beyond the fp16 limit
        rows[i] = ToBf16(x * 60000.0f);
        break;
      case Fill::kTiny:
        rows[i] = ToBf16(x * 1e-7f);
        break;
      case Fill::kAnyBits:  // NaN, infinities, subnormals
        rows[i].bits = static_cast<uint16_t>(rng.Bits(i));
        break;
      case Fill::kTies:  // few distinct values: many equal magnitudes
        rows[i] = ToBf16(static_cast<float>(rng.Below(i, 5)) - 2.0f);
        break;
    }
  }
  return rows;
}

constexpr Fill kFills[] = {Fill::kGaussian, Fill::kOutliers, Fill::kConstant,
                           Fill::kZeros,    Fill::kPositive, Fill::kHuge,
                           Fill::kTiny,     Fill::kAnyBits,  Fill::kTies};
constexpr RowRule kRules[] = {RowRule::kMinMax,     RowRule::kSymmetric,      RowRule::kMseFit,
                              RowRule::kLloydMax,   RowRule::kMseFitUnbiased, RowRule::kRealMin,
                              RowRule::kIntegerZero};

TEST(BlockWriter, IsBitEqualToTheScalarEncoderOnEveryTarget) {
  int pages = 0;
  using enum BlockKind;
  for (const auto& [kind, v_kind] : {std::pair{kInt2, kInt2},
                                     {kInt3, kInt3},
                                     {kInt4, kInt4},
                                     {kInt3, kInt2},
                                     {kInt2, kInt3},
                                     {kInt4, kInt3},
                                     {kBf16, kBf16}}) {
    for (const auto& [dims, group] :
         {std::pair{64, 32}, {64, 64}, {128, 32}, {128, 64}, {128, 128}, {256, 32}, {256, 256}}) {
      if (kind == BlockKind::kBf16 && group != dims) continue;
      const BlockLayout layout(kind, v_kind, CodeOrder::kCpu, dims, group);
      for (const RowRule rule : kRules) {
        const bool two_bits = kind == kInt2 && v_kind == kInt2;
        if (rule == RowRule::kLloydMax && !two_bits) continue;
        for (const Fill fill : kFills) {
          const auto k = Rows(fill, dims, 1), v = Rows(fill, dims, 2);
          // Clip ratios: off, published, the first and the last element.
          const float clip =
              std::array{0.0f, 0.96f, 0.001f, 1.0f}[static_cast<size_t>(pages++ % 4)];
          const BlockRules rules{rule, rule, clip, clip == 0.96f ? 0.92f : clip};
          std::vector<std::byte> expected(layout.block_bytes());
          const int count = EncodeBlock(layout, rules, k, v, expected);
          for (const Target target : SupportedTargets()) {
            const ScopedTarget scope(target);
            std::vector<std::byte> actual(layout.block_bytes(), std::byte{0xa5});
            EXPECT_EQ(WriteBlock(layout, rules, k, v, actual), count);
            ASSERT_EQ(actual, expected)
                << "dims " << dims << " group " << group << " bits " << layout.bits() << " rule "
                << static_cast<int>(rule) << " fill " << static_cast<int>(fill) << " clip " << clip
                << " on " << TargetName(target);
          }
        }
      }
    }
  }
}

TEST(BlockWriter, KeysThatAreNotRowsAreBitEqualOnEveryTarget) {
  using enum BlockKind;
  for (const int dims : {64, 128, 256}) {
    std::vector<std::pair<KeyFormat, RowRule>> formats;
    for (const BlockKind kind : {kInt2, kInt3, kInt4}) {
      formats.push_back({{.kind = kind, .form = SideForm::kCodebook}, RowRule::kMinMax});
      for (const int tokens : {32, 64, 128}) {
        for (const RowRule rule : {RowRule::kRealMin, RowRule::kIntegerZero, RowRule::kMinMax}) {
          formats.push_back({{.kind = kind,
                              .form = SideForm::kChannels,
                              .group_tokens = tokens,
                              .head_norms = rule == RowRule::kIntegerZero && tokens == 64},
                             rule});
        }
      }
    }
    formats.push_back({{.form = SideForm::kMixed, .group_tokens = 128, .boosted_dims = dims / 8},
                       RowRule::kMinMax});
    for (const auto& [format, rule] : formats) {
      const BlockLayout layout(format, kInt2, CodeOrder::kCpu, dims, 32);
      for (const Fill fill : kFills) {
        std::vector<std::vector<Bf16>> rows;
        std::vector<std::vector<std::byte>> expected, actual;
        std::vector<const Bf16*> k, v;
        std::vector<std::byte*> expected_at, actual_at;
        const auto pages = static_cast<size_t>(layout.pages_together());
        rows.reserve(2 * pages);
        for (size_t page = 0; page < pages; ++page) {
          k.push_back(rows.emplace_back(Rows(fill, dims, 3 + page)).data());
          v.push_back(rows.emplace_back(Rows(fill, dims, 9 + page)).data());
          expected.emplace_back(layout.block_bytes(), std::byte{0x5a});
          expected_at.push_back(expected.back().data());
        }
        // Norms from elsewhere, where the block has none of its own.
        std::vector<float> norms(pages * kPageTokens);
        for (size_t t = 0; t < norms.size(); ++t) norms[t] = 0.25f + static_cast<float>(t % 7);
        const bool takes = format.form == SideForm::kChannels && !format.head_norms;
        const float* const given = takes && rule == RowRule::kIntegerZero ? norms.data() : nullptr;
        const BlockRules rules{.k_rule = rule, .v_rule = RowRule::kIntegerZero};
        const int count = EncodeBlocks(layout, rules, {k, v, expected_at, given});
        for (const Target target : SupportedTargets()) {
          const ScopedTarget scope(target);
          actual.assign(pages, std::vector<std::byte>(layout.block_bytes(), std::byte{0xa5}));
          actual_at.clear();
          for (auto& block : actual) actual_at.push_back(block.data());
          EXPECT_EQ(WriteBlocks(layout, rules, {k, v, actual_at, given}), count);
          ASSERT_EQ(actual, expected)
              << "dims " << dims << " form " << static_cast<int>(format.form) << " bits "
              << layout.k_bits() << " tokens " << format.group_tokens << " rule "
              << static_cast<int>(rule) << " fill " << static_cast<int>(fill) << " on "
              << TargetName(target);
        }
      }
    }
  }
}

TEST(BlockWriter, PassesOtherOrdersOn) {
  const BlockLayout layout(BlockKind::kInt2, CodeOrder::kTensorCore, 128, 128);
  const auto k = Rows(Fill::kGaussian, 128, 1), v = Rows(Fill::kGaussian, 128, 2);
  std::vector<std::byte> expected(layout.block_bytes()), actual(layout.block_bytes());
  EncodeBlock(layout, {}, k, v, expected);
  WriteBlock(layout, {}, k, v, actual);
  EXPECT_EQ(actual, expected);
}

}  // namespace
}  // namespace oscar::simd
