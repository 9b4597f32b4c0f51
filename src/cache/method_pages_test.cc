// The methods that claim to fit pages: what a page decodes to is, bit for bit, what the method's
// own codec decodes to, and both cost the same.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/rng.h"
#include "cache/block_codec.h"
#include "cache/method_layout.h"
#include "cache/page_sealer.h"
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

// Of [tokens, heads, D] numbers.
std::vector<float> ThroughCodec(const KvQuantizer& quantizer, const TileShape& shape,
                                const std::vector<float>& x) {
  std::vector<float> back(x.size());
  std::vector<std::byte> bytes(quantizer.EncodedBytes(shape));
  quantizer.Encode(shape, x, bytes);
  EXPECT_TRUE(quantizer.Decode(shape, bytes, back).ok());
  return back;
}

// One layer of a few heads: pages sealed as the pool does it, read back row by row, beside the
// method's own codecs.
void ExpectPagesAgree(const KvMethod& method, int dims, CodeOrder order) {
  constexpr int kHeads = 3;
  const BlockLayout layout = LayoutOf(method, order, dims);
  const BlockLayout open(BlockKind::kBf16, order, dims, dims);
  const int pages = method.run_tokens / kPageTokens;
  const std::vector<std::vector<BlockLayout>> blocks = {std::vector(kHeads, layout)};
  const CacheConfig config{PageLayout({open}, kHeads),
                           PageLayout(blocks, method.k.norm == TokenNorm::kAllHeads),
                           /*sink=*/0,
                           /*recent=*/0,
                           /*cell=*/64,
                           pages};
  EXPECT_EQ(layout.pages_together(), pages);
  EXPECT_DOUBLE_EQ(8.0 * static_cast<double>(config.sealed.bytes()) /
                       static_cast<double>(config.sealed.elements()),
                   method.HistoryBits(kHeads, dims));

  const TileShape shape{method.run_tokens, kHeads, dims};
  std::vector<float> k(shape.elements()), v(shape.elements());
  std::vector<std::vector<std::byte>> open_pages, sealed_pages;
  for (int page = 0; page < pages; ++page) {
    auto& bytes = open_pages.emplace_back(config.open.bytes());
    sealed_pages.emplace_back(config.sealed.bytes());
    for (int h = 0; h < kHeads; ++h) {
      const auto k_rows = Rows(dims, static_cast<uint64_t>(page * kHeads + h));
      const auto v_rows = Rows(dims, static_cast<uint64_t>(100 + page * kHeads + h));
      // Open blocks are sealed from row-major rows, whatever the order of codes.
      std::byte* const block = bytes.data() + config.open.BlockOffset(0, h);
      std::memcpy(block, k_rows.data(), k_rows.size() * sizeof(Bf16));
      std::memcpy(block + open.v_codes_offset(), v_rows.data(), v_rows.size() * sizeof(Bf16));
      for (int t = 0; t < kPageTokens; ++t) {
        for (int d = 0; d < dims; ++d) {
          const auto to = static_cast<size_t>(((page * kPageTokens + t) * kHeads + h) * dims + d);
          const auto from = static_cast<size_t>(t * dims + d);
          k[to] = ToFloat(k_rows[from]);
          v[to] = ToFloat(v_rows[from]);
        }
      }
    }
  }
  const RuleSealer sealer(config, {std::vector(kHeads, RulesOf(method))}, EncodeBlocks);
  std::vector<const std::byte*> from;
  std::vector<std::byte*> to;
  for (int page = 0; page < pages; ++page) {
    from.push_back(open_pages[static_cast<size_t>(page)].data());
    to.push_back(sealed_pages[static_cast<size_t>(page)].data());
  }
  EXPECT_EQ(sealer.Seal(0, from, to), 0);

  const auto k_codec = ThroughCodec(*method.k.quantizer, shape, k);
  const auto v_codec = ThroughCodec(*method.v.quantizer, shape, v);
  for (int page = 0; page < pages; ++page) {
    for (int h = 0; h < kHeads; ++h) {
      const size_t at = config.sealed.BlockOffset(0, h);
      SealedBlock block{.block = to[static_cast<size_t>(page)] + at};
      if (pages > 1) block.pair[0] = to[0] + at, block.pair[1] = to[1] + at;
      if (config.sealed.has_norms(0)) {
        block.norms = to[static_cast<size_t>(page)] + config.sealed.NormOffset(0);
      }
      for (int t = 0; t < kPageTokens; ++t) {
        for (int d = 0; d < dims; ++d) {
          const auto i = static_cast<size_t>(((page * kPageTokens + t) * kHeads + h) * dims + d);
          ASSERT_EQ(std::bit_cast<uint32_t>(DecodeK(layout, block, t, d)),
                    std::bit_cast<uint32_t>(k_codec[i]))
              << "K of token " << t << ", head " << h << ", dim " << d;
          ASSERT_EQ(std::bit_cast<uint32_t>(DecodeV(layout, block, t, d)),
                    std::bit_cast<uint32_t>(v_codec[i]))
              << "V of token " << t << ", head " << h << ", dim " << d;
        }
      }
    }
  }
}

TEST(MethodPages, PagesAndCodecsAgreeToTheBit) {
  std::vector<KvMethodOptions> all;
  for (const KvMethodInfo& info : KvMethodTable()) {
    for (bool rotation : {false, true}) {
      if (rotation ? !info.takes_rotation : info.needs_rotation) continue;
      all.push_back({.name = std::string(info.name), .has_rotation = rotation});
    }
  }
  for (const char* name :
       {"oscar-su:norm=head", "oscar-su:norm=none:rotation=off", "oscar-su:k=token",
        "oscar-su:bits=3:group=64", "oscar-su:k_bits=4:group=128", "kivi:bits=4", "kivi:v_bits=3",
        "kivi-sink:group=64", "turboquant:k_bits=4:v_bits=2", "turboquant-skip:bits=2"}) {
    all.push_back({.name = name});
  }
  for (KvMethodOptions& options : all) {
    for (int dims : {64, 128, 256}) {
      options.head_dim = dims;
      const auto method = MakeKvMethod(options);
      ASSERT_TRUE(method.has_value()) << method.error().ToString();
      if (!method->is_quantized) continue;
      for (CodeOrder order : {CodeOrder::kTensorCore, CodeOrder::kCpu}) {
        SCOPED_TRACE(options.name + " " + std::to_string(dims));
        ExpectPagesAgree(*method, dims, order);
      }
    }
  }
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
