#include "cuda/kv/page_seal.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "cache/page_layout.h"
#include "cuda/attention/test_cache.h"
#include "cuda/kv/form_seal.h"

namespace oscar::cuda {
namespace {

// Rows that attack a quantiser: ties, zeros of both signs, constants, outliers, the ends of the
// range, NaN.
Bf16 TestValue(const Philox& rng, int token, int dim, size_t index) {
  const float x = rng.Normal(index);
  switch (token % 16) {
    case 0:
      return ToBf16(0.0f);
    case 1:
      return ToBf16((rng.Bits(index) & 1) != 0 ? -0.0f : 0.0f);
    case 2:
      return ToBf16(1.375f);
    case 3:
      return ToBf16(std::round(x * 2.0f) / 2.0f);
    case 4:
      return ToBf16(dim == 17 ? 1000.0f : x);
    case 5:
      return ToBf16(x * 1e-6f);
    case 6:
      return ToBf16(dim % 31 == 3 ? std::nanf("") : x);
    case 7:
      return ToBf16(dim % 37 == 5 ? (x > 0 ? 1e30f : -INFINITY) : x * 30000.0f);
    case 8:
      return ToBf16(std::fabs(x));
    case 9:
      return ToBf16(dim % 2 == 0 ? std::max(x, 0.0f) : -0.0f);
    case 10:
      return Bf16{static_cast<uint16_t>(rng.Bits(index))};  // any pattern at all
    case 11:
      return ToBf16(dim < 8 ? x : 1e-30f);
    case 12:
      return ToBf16(x * 1e-38f);
    default:
      return ToBf16(x + 0.3f * static_cast<float>(token % 5));
  }
}

struct SealCase {
  BlockKind kind;
  int head_dim, group_dims;
  RowRule k_rule, v_rule;
  float k_clip, v_clip;
};

std::vector<SealCase> Cases() {
  std::vector<SealCase> cases;
  for (const BlockKind kind : {BlockKind::kInt2, BlockKind::kInt4}) {
    for (const int dim : {64, 128, 256}) {
      for (const int group : {32, 64, 128, 256}) {
        if (!BlockLayout::IsSupported(dim, group)) continue;
        cases.push_back({kind, dim, group, RowRule::kMinMax, RowRule::kMinMax, 0.96f, 0.92f});
        cases.push_back({kind, dim, group, RowRule::kMseFitUnbiased, RowRule::kMseFit, 0.0f, 0.0f});
        if (kind == BlockKind::kInt4) continue;
        cases.push_back({kind, dim, group, RowRule::kLloydMax, RowRule::kLloydMax, 0.96f, 0.92f});
      }
    }
    cases.push_back({kind, 128, 128, RowRule::kMinMax, RowRule::kMinMax, 0.0f, 1.0f});
    cases.push_back({kind, 128, 64, RowRule::kMinMax, RowRule::kSymmetric, 0.3f, 0.92f});
    cases.push_back({kind, 128, 128, RowRule::kMseFitUnbiased, RowRule::kMinMax, 0.0f, 0.92f});
  }
  // Without a clip, beside a fit, and clipped to the least magnitude.
  cases.push_back({BlockKind::kInt2, 128, 128, RowRule::kLloydMax, RowRule::kMseFit, 0.0f, 0.0f});
  cases.push_back({BlockKind::kInt2, 128, 64, RowRule::kLloydMax, RowRule::kMinMax, 0.001f, 0.92f});
  return cases;
}

class PageSealTest : public testing::TestWithParam<SealCase> {};

TEST_P(PageSealTest, IsBitEqualToTheScalarEncoder) {
  const SealCase& c = GetParam();
  const AttentionShape shape{.history_kind = c.kind,
                             .head_dim = c.head_dim,
                             .group_dims = c.group_dims,
                             .num_q_heads = 3,
                             .num_kv_heads = 3};
  const BlockRules rules{c.k_rule, c.v_rule, c.k_clip, c.v_clip};
  // Two "layers" are two halves of each pool; four pages each, of which one is padding.
  constexpr int kPages = 4, kLayers = 2, kPadded = 2;
  TestCache cache(shape, kLayers, kPages, kPages, 1);
  const auto dims = static_cast<size_t>(c.head_dim);
  const Philox k_rng(7, 1), v_rng(7, 2);
  std::vector<Bf16> k, v;
  size_t index = 0;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int page = 0; page < kPages; ++page) {
      for (int h = 0; h < shape.num_kv_heads; ++h) {
        for (int t = 0; t < kPageTokens; ++t) {
          for (int d = 0; d < c.head_dim; ++d, ++index) {
            k.push_back(TestValue(k_rng, t, d, index));
            v.push_back(TestValue(v_rng, t + 5, d, index));
          }
        }
      }
    }
  }
  // Identity page ids inside a pool of [layers, pages].
  const size_t window_bytes = cache.window_page_bytes(), history_bytes = cache.history_page_bytes();
  std::vector<std::byte> window(window_bytes * kPages * kLayers),
      expected(history_bytes * kPages * kLayers, std::byte{0x5a});
  unsigned long long saturated = 0;
  const BlockLayout open = shape.window_layout(), sealed = shape.history_layout();
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int page = 0; page < kPages; ++page) {
      for (int h = 0; h < shape.num_kv_heads; ++h) {
        const size_t block = static_cast<size_t>((layer * kPages + page) * shape.num_kv_heads + h);
        const size_t at = block * kPageTokens * dims;
        const std::span<const Bf16> rows_k{&k[at], kPageTokens * dims},
            rows_v{&v[at], kPageTokens * dims};
        EncodeBlock(open, {}, rows_k, rows_v,
                    {window.data() + block * open.block_bytes(), open.block_bytes()});
        if (page == kPadded) continue;
        // Targets are in reverse order.
        const size_t target =
            static_cast<size_t>((layer * kPages + kPages - 1 - page) * shape.num_kv_heads + h);
        saturated += static_cast<unsigned long long>(
            EncodeBlock(sealed, rules, rows_k, rows_v,
                        {expected.data() + target * sealed.block_bytes(), sealed.block_bytes()}));
      }
    }
  }
  const auto d_window = Unwrap(DeviceBuffer<std::byte>::Copy(window));
  auto d_history = Unwrap(DeviceBuffer<std::byte>::Allocate(expected.size()));
  ASSERT_TRUE(d_history.Fill(0x5a).ok());
  const auto sources = Unwrap(DeviceBuffer<int32_t>::Copy(std::vector<int32_t>{0, 1, -1, 3}));
  const auto targets = Unwrap(DeviceBuffer<int32_t>::Copy(std::vector<int32_t>{3, 2, -1, 0}));
  auto count = Unwrap(DeviceBuffer<unsigned long long>::Allocate(1));
  ASSERT_TRUE(count.Fill(0).ok());
  const PageSeal seal = Unwrap(PageSeal::Create(shape, rules));
  SealArguments args;
  args.window_pool = d_window.data();
  args.history_pool = d_history.data();
  args.window_page_stride = static_cast<int64_t>(window_bytes);
  args.window_layer_stride = static_cast<int64_t>(window_bytes * kPages);
  args.history_page_stride = static_cast<int64_t>(history_bytes);
  args.history_layer_stride = static_cast<int64_t>(history_bytes * kPages);
  args.source_pages = sources.data();
  args.target_pages = targets.data();
  args.saturated = count.data();
  args.jobs = kPages;
  args.layers = kLayers;
  const Status launched = seal.Launch(args, nullptr);
  ASSERT_TRUE(launched.ok()) << launched.ToString();
  const Status done = CudaStatus(cudaDeviceSynchronize(), "seal");
  ASSERT_TRUE(done.ok()) << done.ToString();
  EXPECT_EQ(Unwrap(count.ToHost())[0], saturated);
  const std::vector<std::byte> actual = Unwrap(d_history.ToHost());
  size_t wrong = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] == expected[i]) continue;
    if (++wrong <= 8) {
      const size_t in_block = i % sealed.block_bytes();
      ADD_FAILURE() << "block " << i / sealed.block_bytes() << " byte " << in_block << " is "
                    << static_cast<int>(actual[i]) << ", not " << static_cast<int>(expected[i])
                    << " (K meta from " << sealed.k_meta_offset() << ", V meta from "
                    << sealed.v_meta_offset() << ")";
    }
  }
  EXPECT_EQ(wrong, 0u);
}

INSTANTIATE_TEST_SUITE_P(Rules, PageSealTest, testing::ValuesIn(Cases()), [](const auto& test) {
  const SealCase& c = test.param;
  return std::to_string(test.index) + "_bits" + (c.kind == BlockKind::kInt2 ? "2" : "4") + "_d" +
         std::to_string(c.head_dim) + "_g" + std::to_string(c.group_dims) + "_rules" +
         std::to_string(static_cast<int>(c.k_rule)) + std::to_string(static_cast<int>(c.v_rule));
});

// Every pair of bits, in layers whose heads have them in different orders: the bytes of the scalar
// encoder, one launch for both.
class MixedSealTest : public testing::TestWithParam<SealCase> {};

TEST_P(MixedSealTest, IsBitEqualToTheScalarEncoder) {
  const SealCase& c = GetParam();
  constexpr int kHeads = 9, kLayers = 2, kJobs = 2;
  const AttentionShape shape{.head_dim = c.head_dim,
                             .group_dims = c.group_dims,
                             .num_q_heads = kHeads,
                             .num_kv_heads = kHeads};
  const BlockRules rules{c.k_rule, c.v_rule, c.k_clip, c.v_clip};
  std::vector<std::vector<BlockLayout>> blocks(kLayers);
  for (const HeadBlock& head : NinePairs(c.head_dim, c.group_dims)) {
    const BlockLayout layout = head.Layout(c.head_dim, c.group_dims);
    blocks[0].push_back(layout);
    blocks[1].insert(blocks[1].begin(), layout);
  }
  const PageLayout page(blocks);
  const BlockLayout open = shape.window_layout();
  const size_t layer_bytes = open.block_bytes() * kHeads, open_bytes = layer_bytes * kLayers;
  const auto rows = static_cast<size_t>(kPageTokens * c.head_dim);
  std::vector<std::byte> window(open_bytes * kJobs);
  std::vector<std::byte> expected(page.bytes() * kJobs, std::byte{0x5a});
  std::vector<HeadBlocks> layers;
  HeadBlocks table;
  const Philox k_rng(7, 3), v_rng(7, 4);
  unsigned long long saturated = 0;
  size_t index = 0;
  for (int layer = 0; layer < kLayers; ++layer) {
    layers.push_back(HeadBlocksOf(page, layer));
    for (int h = 0; h < kHeads; ++h) {
      table.push_back({static_cast<uint32_t>(page.BlockOffset(layer, h)),
                       page.block(layer, h).k_kind(), page.block(layer, h).v_kind()});
      for (size_t job = 0; job < kJobs; ++job) {
        std::vector<Bf16> k(rows), v(rows);
        for (size_t i = 0; i < rows; ++i, ++index) {
          const int t = static_cast<int>(i) / c.head_dim, d = static_cast<int>(i) % c.head_dim;
          k[i] = TestValue(k_rng, t, d, index);
          v[i] = TestValue(v_rng, t + 5, d, index);
        }
        const size_t at = job * open_bytes + static_cast<size_t>(layer) * layer_bytes +
                          static_cast<size_t>(h) * open.block_bytes();
        EncodeBlock(open, {}, k, v, {window.data() + at, open.block_bytes()});
        const BlockLayout& sealed = page.block(layer, h);
        saturated += static_cast<unsigned long long>(
            EncodeBlock(sealed, rules, k, v,
                        {expected.data() + job * page.bytes() + page.BlockOffset(layer, h),
                         sealed.block_bytes()}));
      }
    }
  }
  const auto d_window = Unwrap(DeviceBuffer<std::byte>::Copy(window));
  auto d_history = Unwrap(DeviceBuffer<std::byte>::Allocate(expected.size()));
  ASSERT_TRUE(d_history.Fill(0x5a).ok());
  const auto ids = Unwrap(DeviceBuffer<int32_t>::Copy(std::vector<int32_t>{0, 1}));
  const auto d_table = Unwrap(DeviceBuffer<HeadBlock>::Copy(table));
  auto count = Unwrap(DeviceBuffer<unsigned long long>::Allocate(1));
  ASSERT_TRUE(count.Fill(0).ok());
  const PageSeal seal = Unwrap(PageSeal::Create(shape, rules, layers));
  // Another cache of the process, whose blocks are smaller, takes nothing from this one.
  std::vector<HeadBlocks> small(1, layers[0]);
  for (HeadBlock& head : small[0]) head.k = head.v = BlockKind::kInt2;
  Unwrap(PageSeal::Create(shape, rules, small));
  SealArguments args;
  args.window_pool = d_window.data();
  args.history_pool = d_history.data();
  args.window_page_stride = static_cast<int64_t>(open_bytes);
  args.window_layer_stride = static_cast<int64_t>(layer_bytes);
  args.history_page_stride = static_cast<int64_t>(page.bytes());
  args.source_pages = ids.data();
  args.target_pages = ids.data();
  args.saturated = count.data();
  args.jobs = kJobs;
  args.layers = kLayers;
  args.heads = d_table.data();
  args.heads_stride = kHeads;
  ASSERT_TRUE(seal.Launch(args, nullptr).ok());
  const Status done = CudaStatus(cudaDeviceSynchronize(), "seal");
  ASSERT_TRUE(done.ok()) << done.ToString();
  EXPECT_EQ(Unwrap(count.ToHost())[0], saturated);
  const std::vector<std::byte> actual = Unwrap(d_history.ToHost());
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int h = 0; h < kHeads; ++h) {
      const BlockLayout& sealed = page.block(layer, h);
      for (size_t job = 0; job < kJobs; ++job) {
        const size_t at = job * page.bytes() + page.BlockOffset(layer, h);
        EXPECT_EQ(std::memcmp(&actual[at], &expected[at], sealed.block_bytes()), 0)
            << "layer " << layer << " head " << h << ": " << sealed.k_bits() << " and "
            << sealed.v_bits() << " bits";
      }
    }
  }
}

std::vector<SealCase> MixedCases() {
  std::vector<SealCase> cases;
  for (const int dim : {64, 128, 256}) {
    for (const int group : {32, 64, 128, 256}) {
      if (!BlockLayout::IsSupported(dim, group)) continue;
      cases.push_back(
          {BlockKind::kInt2, dim, group, RowRule::kMseFitUnbiased, RowRule::kMinMax, 0.0f, 0.92f});
    }
  }
  cases.push_back({BlockKind::kInt2, 128, 128, RowRule::kMinMax, RowRule::kMseFit, 0.96f, 0.0f});
  cases.push_back({BlockKind::kInt2, 128, 64, RowRule::kSymmetric, RowRule::kMinMax, 0.9f, 0.0f});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Rules, MixedSealTest, testing::ValuesIn(MixedCases()),
                         [](const auto& test) {
                           return std::to_string(test.index) + "_d" +
                                  std::to_string(test.param.head_dim) + "_g" +
                                  std::to_string(test.param.group_dims);
                         });

// Methods with other keys than rows, or rules of their own: two layers of three heads, three runs
// of which one is padding, against EncodeBlocks with the norms of TokenNorms.
struct FormSealCase {
  const char* name;
  KeyFormat k;
  BlockKind v_kind;
  int head_dim, group_dims;
  BlockRules rules;
  bool all_norms = false;
};

class FormSealTest : public testing::TestWithParam<FormSealCase> {};

TEST_P(FormSealTest, IsBitEqualToTheScalarEncoder) {
  const FormSealCase& c = GetParam();
  constexpr int kHeads = 3, kLayers = 2, kRuns = 3, kPadded = 1;
  const BlockLayout layout(c.k, c.v_kind, CodeOrder::kTensorCore, c.head_dim, c.group_dims);
  const BlockLayout open(BlockKind::kBf16, CodeOrder::kTensorCore, c.head_dim, c.head_dim);
  const PageLayout page(
      std::vector<std::vector<BlockLayout>>(kLayers, std::vector<BlockLayout>(kHeads, layout)),
      c.all_norms);
  const int together = layout.pages_together();
  const auto run_pages = static_cast<size_t>(together);
  const auto rows = static_cast<size_t>(kPageTokens * c.head_dim);
  const size_t layer_bytes = open.block_bytes() * kHeads, open_bytes = layer_bytes * kLayers;
  const size_t pages = kRuns * run_pages;
  std::vector<std::byte> window(open_bytes * pages);
  std::vector<std::byte> expected(page.bytes() * pages, std::byte{0x5a});
  std::vector<int32_t> sources, targets;
  const Philox k_rng(7, 5), v_rng(7, 6);
  unsigned long long saturated = 0;
  size_t index = 0;
  for (int run = 0; run < kRuns; ++run) {
    // Targets are in reverse order of runs.
    const size_t first = static_cast<size_t>(run) * run_pages,
                 first_target = static_cast<size_t>(kRuns - 1 - run) * run_pages;
    for (size_t i = 0; i < run_pages; ++i) {
      sources.push_back(run == kPadded ? -1 : static_cast<int32_t>(first + i));
      targets.push_back(run == kPadded ? -1 : static_cast<int32_t>(first_target + i));
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<std::vector<Bf16>> k(kHeads * run_pages), v(k.size());
      for (size_t i = 0; i < k.size(); ++i) {
        for (size_t j = 0; j < rows; ++j, ++index) {
          const int t = static_cast<int>(j) / c.head_dim, d = static_cast<int>(j) % c.head_dim;
          // Channels have the tokens' attacks, too: those of one kind in every group.
          k[i].push_back(
              TestValue(k_rng, c.k.form == SideForm::kRows || run == 0 ? t : d, d, index));
          v[i].push_back(TestValue(v_rng, t + 5, d, index));
        }
        const size_t head = i / run_pages, in_run = i % run_pages;
        EncodeBlock(open, {}, k[i], v[i],
                    {window.data() + (first + in_run) * open_bytes +
                         static_cast<size_t>(layer) * layer_bytes + head * open.block_bytes(),
                     open.block_bytes()});
      }
      if (run == kPadded) continue;
      std::vector<float> norms;
      if (c.all_norms) {
        norms.resize(run_pages * kPageTokens);
        for (size_t i = 0; i < run_pages; ++i) {
          std::vector<const Bf16*> heads;
          for (size_t h = 0; h < kHeads; ++h) heads.push_back(k[h * run_pages + i].data());
          const std::span<float> part = std::span(norms).subspan(i * kPageTokens, kPageTokens);
          TokenNorms(heads, c.head_dim, part);
          std::memcpy(&expected[(first_target + i) * page.bytes() + page.NormOffset(layer)],
                      part.data(), part.size_bytes());
        }
      }
      for (size_t h = 0; h < kHeads; ++h) {
        std::vector<const Bf16*> k_rows, v_rows;
        std::vector<std::byte*> blocks;
        for (size_t i = 0; i < run_pages; ++i) {
          k_rows.push_back(k[h * run_pages + i].data());
          v_rows.push_back(v[h * run_pages + i].data());
          blocks.push_back(&expected[(first_target + i) * page.bytes() +
                                     page.BlockOffset(layer, static_cast<int>(h))]);
        }
        saturated += static_cast<unsigned long long>(EncodeBlocks(
            layout, c.rules, {k_rows, v_rows, blocks, norms.empty() ? nullptr : norms.data()}));
      }
    }
  }
  const auto d_window = Unwrap(DeviceBuffer<std::byte>::Copy(window));
  auto d_history = Unwrap(DeviceBuffer<std::byte>::Allocate(expected.size()));
  ASSERT_TRUE(d_history.Fill(0x5a).ok());
  const auto d_sources = Unwrap(DeviceBuffer<int32_t>::Copy(sources));
  const auto d_targets = Unwrap(DeviceBuffer<int32_t>::Copy(targets));
  auto count = Unwrap(DeviceBuffer<unsigned long long>::Allocate(1));
  ASSERT_TRUE(count.Fill(0).ok());
  ASSERT_TRUE(FormSeal::Takes(layout, c.rules));
  const FormSeal seal = Unwrap(FormSeal::Create(
      layout, c.rules, kHeads, c.all_norms ? static_cast<int64_t>(page.NormOffset(0)) : 0));
  SealArguments args;
  args.window_pool = d_window.data();
  args.history_pool = d_history.data();
  args.window_page_stride = static_cast<int64_t>(open_bytes);
  args.window_layer_stride = static_cast<int64_t>(layer_bytes);
  args.history_page_stride = static_cast<int64_t>(page.bytes());
  args.history_layer_stride = static_cast<int64_t>(page.BlockOffset(1, 0));
  args.source_pages = d_sources.data();
  args.target_pages = d_targets.data();
  args.saturated = count.data();
  args.jobs = static_cast<int>(pages);
  args.layers = kLayers;
  const Status launched = seal.Launch(args, nullptr);
  ASSERT_TRUE(launched.ok()) << launched.ToString();
  const Status done = CudaStatus(cudaDeviceSynchronize(), "seal");
  ASSERT_TRUE(done.ok()) << done.ToString();
  EXPECT_EQ(Unwrap(count.ToHost())[0], saturated);
  const std::vector<std::byte> actual = Unwrap(d_history.ToHost());
  size_t wrong = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] == expected[i] || ++wrong > 8) continue;
    ADD_FAILURE() << "page " << i / page.bytes() << " byte " << i % page.bytes() << " is "
                  << static_cast<int>(actual[i]) << ", not " << static_cast<int>(expected[i])
                  << " (blocks of " << layout.block_bytes() << ", V codes from "
                  << layout.v_codes_offset() << ", K meta " << layout.k_meta_offset() << ", V meta "
                  << layout.v_meta_offset() << ")";
  }
  EXPECT_EQ(wrong, 0u);
}

std::vector<FormSealCase> FormSealCases() {
  using enum BlockKind;
  constexpr BlockRules kKivi{RowRule::kRealMin, RowRule::kRealMin};
  constexpr BlockRules kOscarSu{RowRule::kIntegerZero, RowRule::kIntegerZero};
  constexpr BlockRules kMinMax{RowRule::kMinMax, RowRule::kMinMax};
  constexpr BlockRules kClipped{RowRule::kMinMax, RowRule::kMinMax, 0.0f, 0.92f};
  const auto channels = [](BlockKind kind, int group, bool norms = false) {
    return KeyFormat{
        .kind = kind, .form = SideForm::kChannels, .group_tokens = group, .head_norms = norms};
  };
  const auto kitty = [](int dims) {
    return KeyFormat{.form = SideForm::kMixed, .group_tokens = 128, .boosted_dims = dims / 8};
  };
  const auto codebook = [](BlockKind kind) {
    return KeyFormat{.kind = kind, .form = SideForm::kCodebook};
  };
  return {{"kivi", channels(kInt2, 32), kInt2, 128, 32, kKivi},
          {"kivi_d64", channels(kInt2, 32), kInt2, 64, 32, kKivi},
          {"kivi_d256", channels(kInt2, 32), kInt2, 256, 32, kKivi},
          {"kivi_sink", channels(kInt2, 128), kInt2, 128, 128, kKivi},
          {"kivi_sink_d64", channels(kInt2, 128), kInt2, 64, 64, kKivi},
          {"kivi_k3v4", channels(kInt3, 64), kInt4, 128, 64, kKivi},
          {"oscar_su", channels(kInt2, 32), kInt2, 128, 32, kOscarSu, true},
          {"oscar_su_d64_g128", channels(kInt2, 128), kInt2, 64, 64, kOscarSu, true},
          {"oscar_su_d256_g128", channels(kInt4, 128), kInt3, 256, 128, kOscarSu, true},
          {"oscar_su_head", channels(kInt2, 32, true), kInt2, 128, 32, kOscarSu},
          {"oscar_su_head_g128", channels(kInt3, 128, true), kInt3, 128, 128, kOscarSu},
          {"oscar_su_rows", {}, kInt2, 128, 32, kOscarSu},
          {"oscar_su_rows_k4v3", {.kind = kInt4}, kInt3, 64, 32, kOscarSu},
          {"kitty", kitty(128), kInt2, 128, 128, kMinMax},
          {"kitty_d64", kitty(64), kInt2, 64, 64, kMinMax},
          {"kitty_d256_clipped", kitty(256), kInt2, 256, 256, kClipped},
          {"turboquant", codebook(kInt3), kInt3, 128, 128, kMinMax},
          {"turboquant_d64_k2v2", codebook(kInt2), kInt2, 64, 64, kMinMax},
          {"turboquant_d256_k4v2_clipped", codebook(kInt4), kInt2, 256, 256, kClipped}};
}
INSTANTIATE_TEST_SUITE_P(Methods, FormSealTest, testing::ValuesIn(FormSealCases()),
                         [](const auto& test) { return test.param.name; });

TEST(FormSeal, CopiesBf16Blocks) {
  const BlockLayout open(BlockKind::kBf16, CodeOrder::kTensorCore, 128, 128);
  std::vector<std::byte> window(2 * open.block_bytes());
  for (size_t i = 0; i < window.size(); ++i) window[i] = static_cast<std::byte>(i * 7 + i / 256);
  const auto d_window = Unwrap(DeviceBuffer<std::byte>::Copy(window));
  auto d_history = Unwrap(DeviceBuffer<std::byte>::Allocate(window.size()));
  ASSERT_TRUE(d_history.Fill(0).ok());
  const auto ids = Unwrap(DeviceBuffer<int32_t>::Copy(std::vector<int32_t>{0}));
  const FormSeal seal = Unwrap(FormSeal::Create(open, {}, 2, 0));
  SealArguments args;
  args.window_pool = d_window.data();
  args.history_pool = d_history.data();
  args.source_pages = args.target_pages = ids.data();
  args.jobs = 1;
  ASSERT_TRUE(seal.Launch(args, nullptr).ok());
  EXPECT_EQ(Unwrap(d_history.ToHost()), window);
}

TEST(FormSeal, RefusesRulesItHasNotAndHalfRuns) {
  const BlockLayout layout({.form = SideForm::kChannels, .group_tokens = 128}, BlockKind::kInt2,
                           CodeOrder::kTensorCore, 128, 128);
  EXPECT_EQ(FormSeal::Create(layout, {RowRule::kMseFit, RowRule::kRealMin}, 2, 0).error().code(),
            StatusCode::kUnimplemented);
  const FormSeal seal =
      Unwrap(FormSeal::Create(layout, {RowRule::kRealMin, RowRule::kRealMin}, 2, 0));
  SealArguments args;
  args.jobs = 3;
  EXPECT_EQ(seal.Launch(args, nullptr).code(), StatusCode::kInvalidArgument);
}

TEST(PageSeal, RefusesLloydMaxOfOtherBits) {
  const BlockRules rules{RowRule::kMinMax, RowRule::kLloydMax};
  EXPECT_EQ(PageSeal::Create({.history_kind = BlockKind::kInt4}, rules).error().code(),
            StatusCode::kUnimplemented);
  EXPECT_TRUE(PageSeal::Create({.history_kind = BlockKind::kInt2}, rules).has_value());
}

TEST(PageSeal, RefusesBf16) {
  EXPECT_EQ(PageSeal::Create({.history_kind = BlockKind::kBf16}, {}).error().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace oscar::cuda
