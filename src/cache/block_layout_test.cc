#include "cache/block_layout.h"

#include <gtest/gtest.h>

#include <vector>

namespace oscar {
namespace {

std::vector<BlockLayout> AllLayouts() {
  std::vector<BlockLayout> layouts;
  using enum BlockKind;
  std::vector<std::pair<BlockKind, BlockKind>> kinds = {{kBf16, kBf16}};
  for (const BlockKind k : {kInt2, kInt3, kInt4}) {
    for (const BlockKind v : {kInt2, kInt3, kInt4}) kinds.emplace_back(k, v);
  }
  for (const auto& [k, v] : kinds) {
    for (CodeOrder order : {CodeOrder::kTensorCore, CodeOrder::kCpu}) {
      for (int dim : {64, 128, 256}) {
        for (int group : {32, 64, 128, 256}) {
          if (BlockLayout::IsSupported(dim, group)) layouts.emplace_back(k, v, order, dim, group);
        }
      }
    }
  }
  return layouts;
}

// Keys that are not rows.
std::vector<BlockLayout> FormLayouts() {
  std::vector<BlockLayout> layouts;
  using enum BlockKind;
  for (CodeOrder order : {CodeOrder::kTensorCore, CodeOrder::kCpu}) {
    for (int dim : {64, 128, 256}) {
      for (const BlockKind kind : {kInt2, kInt3, kInt4}) {
        for (const int tokens : {32, 64, 128}) {
          for (const bool norms : {false, true}) {
            layouts.emplace_back(KeyFormat{kind, SideForm::kChannels, tokens, norms}, kInt2, order,
                                 dim, 32);
          }
        }
        layouts.emplace_back(KeyFormat{.kind = kind, .form = SideForm::kCodebook}, kInt3, order,
                             dim, dim);
      }
      for (const int boosted : {8, dim / 4}) {
        layouts.emplace_back(
            KeyFormat{.form = SideForm::kMixed, .group_tokens = 128, .boosted_dims = boosted},
            kInt2, order, dim, 64);
      }
    }
  }
  return layouts;
}

TEST(BlockLayout, EveryBitOfBlocksWhoseKeysAreNotRowsHasExactlyOneOwner) {
  for (const BlockLayout& layout : FormLayouts()) {
    std::vector<int> owners(layout.block_bytes() * 8, 0);
    const auto claim = [&](uint32_t byte, uint32_t shift, int bits) {
      for (int b = 0; b < bits; ++b) ++owners.at(byte * 8 + shift + static_cast<uint32_t>(b));
    };
    const auto claim_code = [&](int bits, CodePosition code, CodePosition high) {
      claim(code.offset, code.shift, bits == 3 ? 2 : bits);
      if (bits == 3) claim(high.offset, high.shift, 1);
    };
    for (int t = 0; t < kPageTokens; ++t) {
      for (int d = 0; d < layout.head_dim(); ++d) {
        claim_code(layout.k_bits(), layout.KCode(t, d), layout.KHighBit(t, d));
        claim_code(layout.v_bits(), layout.VCode(t, d), layout.VHighBit(t, d));
      }
      for (int g = 0; g < layout.num_groups(); ++g) {
        claim(layout.VScale(t, g), 0, 16);
        claim(layout.VMin(t, g), 0, 16);
      }
      if (layout.has_head_norms()) claim(layout.KNorm(t), 0, 32);
      if (layout.k_form() == SideForm::kCodebook) claim(layout.KRowNorm(t), 0, 16);
    }
    if (layout.k_form() != SideForm::kCodebook) {
      for (int i = 0; i < layout.channel_dims(); ++i) {
        for (int g = 0; g < layout.channel_groups(); ++g) {
          claim(layout.KChannelScale(g, i), 0, 16);
          claim(layout.KChannelMin(g, i), 0, 16);
        }
        if (layout.k_form() == SideForm::kMixed) claim(layout.KIndex(i), 0, 8);
      }
    }
    for (int i = 0; i < layout.boosted_dims(); ++i) {
      claim(layout.KBoost(i), 0, 8 * BlockLayout::kBoostBytes);
    }
    for (int owner : owners) ASSERT_EQ(owner, 1) << std::hex << layout.id();
    EXPECT_EQ(layout.block_bytes() % 32, 0u);
  }
}

TEST(BlockLayout, EveryBitOfEveryBlockHasExactlyOneOwner) {
  for (const BlockLayout& layout : AllLayouts()) {
    std::vector<int> owners(layout.block_bytes() * 8, 0);
    const auto claim = [&](uint32_t byte, uint32_t shift, int bits) {
      for (int b = 0; b < bits; ++b) ++owners.at(byte * 8 + shift + static_cast<uint32_t>(b));
    };
    for (int t = 0; t < kPageTokens; ++t) {
      for (int d = 0; d < layout.head_dim(); ++d) {
        const auto claim_code = [&](int bits, CodePosition code, CodePosition high) {
          const int low_bits = bits == 3 ? 2 : bits;
          ASSERT_EQ(code.offset % 4, 0u);
          ASSERT_LE(code.shift + static_cast<uint32_t>(low_bits), 32u);
          claim(code.offset, code.shift, low_bits);
          if (bits == 3) claim(high.offset, high.shift, 1);
        };
        claim_code(layout.k_bits(), layout.KCode(t, d), layout.KHighBit(t, d));
        claim_code(layout.v_bits(), layout.VCode(t, d), layout.VHighBit(t, d));
      }
      for (int g = 0; g < layout.num_groups(); ++g) {
        for (uint32_t at :
             {layout.KScale(t, g), layout.KMin(t, g), layout.VScale(t, g), layout.VMin(t, g)}) {
          claim(at, 0, 16);
        }
      }
    }
    for (int owner : owners) ASSERT_EQ(owner, 1);
    EXPECT_EQ(layout.block_bytes() % 128, 0u);  // bulk copies and cache lines
  }
}

// Blocks of one kind keep the ids that they have on disk.
TEST(BlockLayout, IdsStayWhatTheyWere) {
  EXPECT_EQ(BlockLayout(BlockKind::kInt2, CodeOrder::kCpu, 128, 128).id(), 0x0001000100800080u);
  EXPECT_EQ(BlockLayout(BlockKind::kInt4, CodeOrder::kTensorCore, 128, 64).id(),
            0x0001010000800040u);
}

TEST(BlockLayout, IdsAreDistinct) {
  auto layouts = AllLayouts();
  for (const BlockLayout& layout : FormLayouts()) layouts.push_back(layout);
  for (size_t i = 0; i < layouts.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      // A BF16 page has no groups, so its group does not distinguish it.
      if (layouts[i].kind() == BlockKind::kBf16 && layouts[j].kind() == BlockKind::kBf16 &&
          layouts[i].head_dim() == layouts[j].head_dim() &&
          layouts[i].order() == layouts[j].order()) {
        EXPECT_EQ(layouts[i], layouts[j]);
        continue;
      }
      EXPECT_NE(layouts[i].id(), layouts[j].id());
    }
  }
}

// The closed form that the measured decode kernel was written with (D 128, one group), restated.
TEST(BlockLayout, TensorCoreOrderIsTheFragmentOrder) {
  const BlockLayout layout(BlockKind::kInt2, CodeOrder::kTensorCore, 128, 128);
  for (int token = 0; token < 64; ++token) {
    for (int d = 0; d < 128; ++d) {
      const int tile = token / 16, r = token % 16, s = d / 16, c = d % 16;
      const CodePosition k = layout.KCode(token, d);
      EXPECT_EQ(k.offset, static_cast<uint32_t>(tile * 512 + ((r % 8) * 4 + (c % 8) / 2) * 16 +
                                                ((r / 8) * 2 + c / 8) * 4));
      EXPECT_EQ(k.shift, static_cast<uint32_t>(2 * s + 16 * (c & 1)));
      const CodePosition v = layout.VCode(token, d);
      EXPECT_EQ(v.offset,
                static_cast<uint32_t>(2048 + tile * 512 + ((c % 8) * 4 + (r % 8) / 2) * 16 +
                                      (c / 8 + 2 * (r / 8)) * 4));
      EXPECT_EQ(v.shift, static_cast<uint32_t>(2 * s + 16 * (r & 1)));
    }
    EXPECT_EQ(layout.KScale(token, 0),
              static_cast<uint32_t>(4096 + token % 8 * 32 + token / 8 * 4));
    EXPECT_EQ(layout.VMin(token, 0),
              static_cast<uint32_t>(4352 + token % 8 * 32 + token / 8 * 4 + 2));
  }
}

TEST(BlockLayout, RefusesShapesWithoutKernels) {
  EXPECT_FALSE(BlockLayout::IsSupported(96, 32));
  EXPECT_FALSE(BlockLayout::IsSupported(32, 32));
  EXPECT_FALSE(BlockLayout::IsSupported(128, 16));
  EXPECT_FALSE(BlockLayout::IsSupported(64, 128));
  EXPECT_TRUE(BlockLayout::IsSupported(256, 256));
}

TEST(BlockLayout, BitsPerElementCountMetadata) {
  EXPECT_DOUBLE_EQ(BlockLayout(BlockKind::kInt2, CodeOrder::kCpu, 128, 32).bits_per_element(), 3.0);
  EXPECT_DOUBLE_EQ(BlockLayout(BlockKind::kInt2, CodeOrder::kCpu, 64, 64).bits_per_element(), 2.5);
  EXPECT_DOUBLE_EQ(BlockLayout(BlockKind::kInt2, CodeOrder::kCpu, 256, 256).bits_per_element(),
                   2.125);
  EXPECT_DOUBLE_EQ(BlockLayout(BlockKind::kInt4, CodeOrder::kCpu, 128, 128).bits_per_element(),
                   4.25);
  EXPECT_DOUBLE_EQ(BlockLayout(BlockKind::kInt3, CodeOrder::kCpu, 128, 128).bits_per_element(),
                   3.25);
  EXPECT_DOUBLE_EQ(
      BlockLayout(BlockKind::kInt4, BlockKind::kInt2, CodeOrder::kCpu, 128, 128).bits_per_element(),
      3.25);
  EXPECT_DOUBLE_EQ(BlockLayout(BlockKind::kBf16, CodeOrder::kCpu, 128, 128).bits_per_element(),
                   16.0);
}

}  // namespace
}  // namespace oscar
