#include "cache/block_codec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/file.h"
#include "base/rng.h"

namespace oscar {
namespace {

struct Rows {
  std::vector<Bf16> k, v;
};

Rows RandomRows(int dim, uint64_t seed) {
  const Philox rng(seed, 0);
  Rows rows;
  const auto count = static_cast<uint64_t>(kPageTokens * dim);
  for (uint64_t i = 0; i < count; ++i) {
    rows.k.push_back(ToBf16(rng.Normal(i) * 3.0f));
    rows.v.push_back(ToBf16(rng.Normal(count + i)));
  }
  return rows;
}

class BlockCodecTest : public testing::TestWithParam<std::tuple<BlockKind, CodeOrder, int, int>> {
 protected:
  BlockLayout layout() const {
    const auto [kind, order, dim, group] = GetParam();
    return {kind, order, dim, group};
  }
};

TEST_P(BlockCodecTest, DecodesWhatTheRowQuantiserChose) {
  const BlockLayout page = layout();
  const BlockRules rules{RowRule::kMseFitUnbiased, RowRule::kMinMax, 0.0f, 0.92f};
  const Rows rows = RandomRows(page.head_dim(), 7);
  std::vector<std::byte> block(page.block_bytes(), std::byte{0xff});
  EXPECT_EQ(EncodeBlock(page, rules, rows.k, rows.v, block), 0);
  const auto dims = static_cast<size_t>(page.head_dim());
  std::vector<float> k(dims * kPageTokens), v(k.size());
  DecodeBlock(page, block, k, v);
  if (page.kind() == BlockKind::kBf16) {
    for (size_t i = 0; i < k.size(); ++i) {
      ASSERT_EQ(k[i], ToFloat(rows.k[i]));
      ASSERT_EQ(v[i], ToFloat(rows.v[i]));
    }
    return;
  }
  const RowSpec k_spec{rules.k_rule, page.bits(), page.group_dims(), 0.0f};
  const RowSpec v_spec{rules.v_rule, page.bits(), page.group_dims(), 0.92f};
  std::vector<float> row(dims), back(dims), scale(kMaxGroups), min(kMaxGroups);
  std::vector<uint8_t> codes(dims);
  for (size_t t = 0; t < kPageTokens; ++t) {
    for (bool is_k : {true, false}) {
      const RowSpec& spec = is_k ? k_spec : v_spec;
      for (size_t d = 0; d < dims; ++d) row[d] = ToFloat((is_k ? rows.k : rows.v)[t * dims + d]);
      QuantizeRow(spec, row, codes, scale, min);
      DequantizeRow(spec, codes, scale, min, back);
      for (size_t d = 0; d < dims; ++d) ASSERT_EQ((is_k ? k : v)[t * dims + d], back[d]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, BlockCodecTest,
                         testing::Combine(testing::Values(BlockKind::kInt2, BlockKind::kInt3,
                                                          BlockKind::kInt4, BlockKind::kBf16),
                                          testing::Values(CodeOrder::kTensorCore, CodeOrder::kCpu),
                                          testing::Values(64, 128, 256), testing::Values(32, 64)));

TEST(BlockCodec, CountsSaturatedValues) {
  const BlockLayout page(BlockKind::kInt2, CodeOrder::kCpu, 64, 64);
  Rows rows = RandomRows(64, 9);
  rows.k[3] = ToBf16(1e6f);
  rows.v[64] = Bf16{0x7fc0};  // NaN
  std::vector<std::byte> block(page.block_bytes());
  EXPECT_EQ(EncodeBlock(page, {}, rows.k, rows.v, block), 2);
}

TEST(BlockCodec, RefusalsSayWhy) {
  EXPECT_TRUE(CheckBlockShape(128, 128).ok());
  EXPECT_NE(CheckBlockShape(96, 32).message().find("Hadamard"), std::string::npos);
  EXPECT_EQ(CheckBlockShape(128, 48).code(), StatusCode::kInvalidArgument);
}

// Golden blocks computed by tools/make_page_goldens.py, which shares no code with this project.
float GoldenElement(int dim, int which, int token, int d) {
  uint32_t h =
      static_cast<uint32_t>((which * kPageTokens + token) * dim + d) * 2654435761u + 12345u;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  int sum = 0;
  for (int k = 0; k < 4; ++k) sum += static_cast<int>((h >> (8 * k)) & 0x7fu) - 63;
  return static_cast<float>(sum) / 64.0f;
}

TEST(BlockCodec, MatchesGoldenBytes) {
  struct Golden {
    const char* file;
    BlockLayout layout;
  };
  const Golden goldens[] = {
      {"b2_tc_d128_g128", {BlockKind::kInt2, CodeOrder::kTensorCore, 128, 128}},
      {"b2_cpu_d128_g128", {BlockKind::kInt2, CodeOrder::kCpu, 128, 128}},
      {"b2_tc_d64_g32", {BlockKind::kInt2, CodeOrder::kTensorCore, 64, 32}},
      {"b2_cpu_d64_g64", {BlockKind::kInt2, CodeOrder::kCpu, 64, 64}},
      {"b2_tc_d256_g256", {BlockKind::kInt2, CodeOrder::kTensorCore, 256, 256}},
      {"b2_cpu_d256_g128", {BlockKind::kInt2, CodeOrder::kCpu, 256, 128}},
      {"b4_tc_d128_g64", {BlockKind::kInt4, CodeOrder::kTensorCore, 128, 64}},
      {"b4_cpu_d128_g128", {BlockKind::kInt4, CodeOrder::kCpu, 128, 128}},
      {"b3_tc_d128_g128", {BlockKind::kInt3, CodeOrder::kTensorCore, 128, 128}},
      {"b3_cpu_d128_g128", {BlockKind::kInt3, CodeOrder::kCpu, 128, 128}},
      {"b3_cpu_d64_g32", {BlockKind::kInt3, CodeOrder::kCpu, 64, 32}},
      {"b3_tc_d256_g128", {BlockKind::kInt3, CodeOrder::kTensorCore, 256, 128}},
      {"b4v2_cpu_d128_g128", {BlockKind::kInt4, BlockKind::kInt2, CodeOrder::kCpu, 128, 128}},
      {"b3v2_tc_d64_g64", {BlockKind::kInt3, BlockKind::kInt2, CodeOrder::kTensorCore, 64, 64}},
      {"b2v3_cpu_d256_g256", {BlockKind::kInt2, BlockKind::kInt3, CodeOrder::kCpu, 256, 256}},
      {"b16_tc_d64_g64", {BlockKind::kBf16, CodeOrder::kTensorCore, 64, 64}},
      {"b16_tc_d128_g128", {BlockKind::kBf16, CodeOrder::kTensorCore, 128, 128}},
      {"b16_cpu_d64_g64", {BlockKind::kBf16, CodeOrder::kCpu, 64, 64}},
  };
  for (const Golden& golden : goldens) {
    const int dim = golden.layout.head_dim();
    std::vector<Bf16> k, v;
    for (int t = 0; t < kPageTokens; ++t) {
      for (int d = 0; d < dim; ++d) {
        k.push_back(ToBf16(GoldenElement(dim, 0, t, d)));
        v.push_back(ToBf16(GoldenElement(dim, 1, t, d)));
      }
    }
    std::vector<std::byte> block(golden.layout.block_bytes());
    EncodeBlock(golden.layout, {RowRule::kMseFitUnbiased, RowRule::kMinMax, 0.0f, 0.92f}, k, v,
                block);
    auto file = ReadFile(std::string(OSCAR_TEST_DATA "/pages/") + golden.file + ".bin", 1 << 20);
    ASSERT_TRUE(file.has_value()) << file.error().ToString();
    ASSERT_EQ(file->size(), block.size()) << golden.file;
    EXPECT_EQ(std::memcmp(file->data(), block.data(), block.size()), 0) << golden.file;
  }
}

// Keys that are not rows: groups along tokens, with four bits for some dims, codebooks.
TEST(BlockCodec, MatchesGoldenBytesOfOtherForms) {
  using enum BlockKind;
  struct Golden {
    const char* file;
    KeyFormat k;
    RowRule rule;
    CodeOrder order;
    int head_dim, group_dims;
  };
  constexpr auto kCpu = CodeOrder::kCpu, kTensorCore = CodeOrder::kTensorCore;
  constexpr auto kChannels = SideForm::kChannels;
  const Golden goldens[] = {
      {"channels32_b2_cpu_d64", {kInt2, kChannels, 32}, RowRule::kRealMin, kCpu, 64, 32},
      {"channels32_norm_b2_tc_d64",
       {kInt2, kChannels, 32, true},
       RowRule::kIntegerZero,
       kTensorCore,
       64,
       32},
      {"channels64_b3_cpu_d64", {kInt3, kChannels, 64}, RowRule::kIntegerZero, kCpu, 64, 64},
      {"channels128_b2_cpu_d64", {kInt2, kChannels, 128}, RowRule::kRealMin, kCpu, 64, 64},
      {"channels128_norm_b4_tc_d64",
       {kInt4, kChannels, 128, true},
       RowRule::kIntegerZero,
       kTensorCore,
       64,
       64},
      {"mixed128_b2_cpu_d64",
       {kInt2, SideForm::kMixed, 128, false, 8},
       RowRule::kMinMax,
       kCpu,
       64,
       64},
      {"codebook_b3_cpu_d64", {kInt3, SideForm::kCodebook}, RowRule::kMinMax, kCpu, 64, 64},
      {"codebook_b2_tc_d128",
       {kInt2, SideForm::kCodebook},
       RowRule::kMinMax,
       kTensorCore,
       128,
       128},
  };
  for (const Golden& golden : goldens) {
    const int dim = golden.head_dim;
    const BlockLayout layout(golden.k, kInt2, golden.order, dim, golden.group_dims);
    const auto pages = static_cast<size_t>(layout.pages_together());
    std::vector<std::vector<Bf16>> rows(2 * pages);
    std::vector<const Bf16*> k, v;
    std::vector<std::byte> bytes(pages * layout.block_bytes());
    std::vector<std::byte*> blocks;
    for (size_t side = 0; side < rows.size(); ++side) {
      for (int t = 0; t < kPageTokens; ++t) {
        for (int d = 0; d < dim; ++d) {
          rows[side].push_back(ToBf16(GoldenElement(dim, static_cast<int>(side), t, d)));
        }
      }
      (side % 2 == 0 ? k : v).push_back(rows[side].data());
    }
    for (size_t page = 0; page < pages; ++page) {
      blocks.push_back(bytes.data() + page * layout.block_bytes());
    }
    EncodeBlocks(layout, {.k_rule = golden.rule, .v_rule = RowRule::kMinMax}, {k, v, blocks});
    auto file = ReadFile(std::string(OSCAR_TEST_DATA "/pages/") + golden.file + ".bin", 1 << 20);
    ASSERT_TRUE(file.has_value()) << file.error().ToString();
    ASSERT_EQ(file->size(), bytes.size()) << golden.file;
    EXPECT_EQ(std::memcmp(file->data(), bytes.data(), bytes.size()), 0) << golden.file;
  }
}

}  // namespace
}  // namespace oscar
