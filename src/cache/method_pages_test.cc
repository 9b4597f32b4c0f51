// The methods that claim to fit pages: what a page decodes to is, bit for bit, what the method's
// own codec decodes to, and both cost the same.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "base/rng.h"
#include "cache/block_codec.h"
#include "quant/kv_method.h"

namespace oscar {
namespace {

std::vector<Bf16> Rows(int dims, uint64_t stream) {
  const Philox rng(31, stream);
  std::vector<Bf16> rows(static_cast<size_t>(kPageTokens * dims));
  for (size_t i = 0; i < rows.size(); ++i) {
    const float outlier = i % 97 == 5 ? 9.0f : 1.0f;
    rows[i] = ToBf16(outlier * rng.Normal(i) + 0.25f);
  }
  return rows;
}

std::vector<float> ThroughCodec(const KvQuantizer& quantizer, int dims,
                                const std::vector<Bf16>& rows) {
  const TileShape shape{kPageTokens, 1, dims};
  std::vector<float> x(rows.size()), back(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) x[i] = ToFloat(rows[i]);
  std::vector<std::byte> bytes(quantizer.EncodedBytes(shape));
  quantizer.Encode(shape, x, bytes);
  EXPECT_TRUE(quantizer.Decode(shape, bytes, back).ok());
  return back;
}

void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(a[i]), std::bit_cast<uint32_t>(b[i])) << "element " << i;
  }
}

TEST(MethodPages, PagesAndCodecsAgreeToTheBit) {
  int methods = 0;
  for (const KvMethodInfo& info : KvMethodTable()) {
    for (int dims : {64, 128, 256}) {
      for (bool rotation : {false, true}) {
        if (rotation ? !info.takes_rotation : info.needs_rotation) continue;
        const auto method = MakeKvMethod(
            {.name = std::string(info.name), .head_dim = dims, .has_rotation = rotation});
        ASSERT_TRUE(method.has_value()) << method.error().ToString();
        if (method->storage == KvStorage::kSimulated || method->storage == KvStorage::kBf16)
          continue;
        const BlockKind kind =
            method->storage == KvStorage::kInt2Pages ? BlockKind::kInt2 : BlockKind::kInt4;
        const RowSpec &k_rows = method->k_rows, &v_rows = method->v_rows;
        ASSERT_EQ(k_rows.group_dims, v_rows.group_dims);
        ASSERT_EQ(k_rows.meta, MetaType::kFp16);
        ASSERT_EQ(v_rows.meta, MetaType::kFp16);
        const BlockRules rules{k_rows.rule, v_rows.rule, k_rows.clip_ratio, v_rows.clip_ratio};
        const auto k = Rows(dims, 1), v = Rows(dims, 2);
        for (CodeOrder order : {CodeOrder::kTensorCore, CodeOrder::kCpu}) {
          SCOPED_TRACE(std::string(info.name) + " " + std::to_string(dims));
          const BlockLayout layout(kind, order, dims, k_rows.group_dims);
          ASSERT_EQ(layout.bits(), k_rows.bits);
          EXPECT_EQ(layout.bits_per_element(), method->HistoryBits(1, dims));
          std::vector<std::byte> block(layout.block_bytes());
          std::vector<float> k_back(k.size()), v_back(v.size());
          EXPECT_EQ(EncodeBlock(layout, rules, k, v, block), 0);
          DecodeBlock(layout, block, k_back, v_back);
          ExpectSameBits(k_back, ThroughCodec(*method->k_quantizer, dims, k));
          ExpectSameBits(v_back, ThroughCodec(*method->v_quantizer, dims, v));
        }
        ++methods;
      }
    }
  }
  EXPECT_EQ(methods, 7 * 3);  // naive, quarot, saw-int4, int4, oscar, oscar+ with and without
}

// An fp16 min beyond 65504 would read back as -infinity.
TEST(MethodPages, SymmetricPagesOfHugeRowsStayFinite) {
  for (BlockKind kind : {BlockKind::kInt2, BlockKind::kInt4}) {
    const BlockLayout layout(kind, CodeOrder::kCpu, 128, 128);
    auto rows = Rows(128, 3);
    rows[7] = ToBf16(65280.0f);
    rows[8] = ToBf16(-65280.0f);
    std::vector<std::byte> block(layout.block_bytes());
    std::vector<float> k(rows.size()), v(rows.size());
    const BlockRules rules{RowRule::kSymmetric, RowRule::kSymmetric, 0.0f, 0.0f};
    EncodeBlock(layout, rules, rows, rows, block);
    DecodeBlock(layout, block, k, v);
    for (float x : k) ASSERT_TRUE(std::isfinite(x));
    EXPECT_LT(k[8], -60000.0f);
  }
}

}  // namespace
}  // namespace oscar
