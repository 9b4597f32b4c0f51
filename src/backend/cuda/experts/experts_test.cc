// Routing and the grouped GEMMs on the GPU against the specification and sums in double precision.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "arch/router.h"
#include "cuda/experts/grouped_gemm.h"
#include "cuda/experts/lane_order.h"
#include "cuda/experts/routing.h"
#include "cuda/gemm/test_matrix.h"

namespace oscar::cuda {
namespace {

template <typename T>
DeviceBuffer<T> Upload(const std::vector<T>& host) {
  return *DeviceBuffer<T>::Copy(host);
}

// ---- Routing

struct RoutingBuffers {
  RoutingBuffers(int pairs, int max_tiles)
      : experts(*DeviceBuffer<int32_t>::Allocate(static_cast<size_t>(pairs))),
        places(*DeviceBuffer<int32_t>::Allocate(static_cast<size_t>(pairs))),
        rows(*DeviceBuffer<int32_t>::Allocate(static_cast<size_t>(pairs))),
        num_tiles(*DeviceBuffer<int32_t>::Allocate(1)),
        weights(*DeviceBuffer<float>::Allocate(static_cast<size_t>(pairs))),
        tiles(*DeviceBuffer<ExpertTile>::Allocate(static_cast<size_t>(max_tiles))) {}
  Routing routing() const {
    return {experts.data(), weights.data(), places.data(),
            rows.data(),    tiles.data(),   num_tiles.data()};
  }
  DeviceBuffer<int32_t> experts, places, rows, num_tiles;
  DeviceBuffer<float> weights;
  DeviceBuffer<ExpertTile> tiles;
};

struct ChoiceCase {
  int experts, choices, groups, kept;
  bool bias, normalize;
  float scale;
  int rows, tile_rows;
};

class ChoiceTest : public testing::TestWithParam<ChoiceCase> {};

TEST_P(ChoiceTest, IsTheSpecifications) {
  const ChoiceCase& c = GetParam();
  ExpertsSpec spec;
  spec.num_experts = c.experts;
  spec.experts_per_token = c.choices;
  spec.groups = c.groups;
  spec.chosen_groups = c.kept;
  spec.normalize_weights = c.normalize;
  spec.weight_scale = c.scale;
  Random random(3);
  const auto experts = static_cast<size_t>(c.experts), choices = static_cast<size_t>(c.choices),
             rows = static_cast<size_t>(c.rows);
  std::vector<float> scores(rows * experts), bias(c.bias ? experts : 0);
  // Few different values, so that many are equal; some are no numbers.
  for (float& x : scores) x = static_cast<float>(random.Bits() % 16) / 16.0f;
  for (size_t i = 7; i < scores.size(); i += 97) scores[i] = std::nanf("");
  for (float& x : bias) x = static_cast<float>(random.Bits() % 8) / 8.0f - 0.5f;
  std::vector<int32_t> positions(rows, 5);
  for (size_t r = 2; r < rows; r += 5) positions[r] = -1;
  const int pairs = c.rows * c.choices, max_tiles = MaxTiles(pairs, c.experts, c.tile_rows);
  const RoutingBuffers buffers(pairs, max_tiles);
  const auto d_scores = Upload(scores), d_bias = Upload(bias);
  const auto d_positions = Upload(positions);
  auto counts = *DeviceBuffer<ExpertCounts>::Allocate(1);
  ASSERT_TRUE(counts.Fill(0).ok());
  const Routing routing = buffers.routing();
  const RoutingArguments args{.logits = d_scores.data(),
                              .are_scores = true,
                              .bias = c.bias ? d_bias.data() : nullptr,
                              .positions = d_positions.data(),
                              .rows = c.rows,
                              .tile_rows = c.tile_rows};
  ASSERT_TRUE(LaunchChoiceAndSort(spec, args, routing, counts.data(), nullptr).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto chosen = *buffers.experts.ToHost(), places = *buffers.places.ToHost(),
             place_rows = *buffers.rows.ToHost();
  const auto weights = *buffers.weights.ToHost();
  const auto tiles = *buffers.tiles.ToHost();
  const int num_tiles = buffers.num_tiles.ToHost()->front();
  std::map<int32_t, int> count;
  int live = 0;
  for (size_t r = 0; r < rows; ++r) {
    std::vector<ExpertChoice> expected(choices);
    RouteToken(spec, std::span(scores).subspan(r * experts, experts), bias, expected);
    for (size_t j = 0; j < choices; ++j) {
      const size_t i = r * choices + j;
      if (positions[r] < 0) {
        EXPECT_EQ(chosen[i], -1);
        EXPECT_EQ(places[i], -1);
        continue;
      }
      ASSERT_EQ(chosen[i], expected[j].expert) << "row " << r << " choice " << j;
      // Bits, so that what is no number is equal to itself.
      if (std::isnan(expected[j].weight)) {
        EXPECT_TRUE(std::isnan(weights[i]));
      } else {
        EXPECT_EQ(weights[i], expected[j].weight) << "row " << r << " choice " << j;
      }
      ++count[chosen[i]];
      ++live;
      EXPECT_EQ(place_rows[static_cast<size_t>(places[i])], static_cast<int32_t>(r));
    }
  }
  // Tiles are the places of each expert, in pieces, in order.
  ASSERT_LE(num_tiles, max_tiles);
  std::map<int32_t, int> covered;
  int next = 0;
  for (int t = 0; t < num_tiles; ++t) {
    const ExpertTile& tile = tiles[static_cast<size_t>(t)];
    EXPECT_EQ(tile.first, next);
    EXPECT_GT(tile.rows, 0);
    EXPECT_LE(tile.rows, c.tile_rows);
    next += tile.rows;
    covered[tile.expert] += tile.rows;
  }
  EXPECT_EQ(next, live);
  EXPECT_EQ(covered, count);
  std::set<int32_t> distinct;
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i] < 0) continue;
    EXPECT_TRUE(distinct.insert(places[i]).second);
    // Inside a tile of its expert.
    bool found = false;
    for (int t = 0; t < num_tiles; ++t) {
      const ExpertTile& tile = tiles[static_cast<size_t>(t)];
      found = found || (tile.expert == chosen[i] && places[i] >= tile.first &&
                        places[i] < tile.first + tile.rows);
    }
    EXPECT_TRUE(found);
  }
  const ExpertCounts counted = counts.ToHost()->front();
  EXPECT_EQ(counted.runs, live > 0 ? 1u : 0u);
  EXPECT_EQ(counted.touched, count.size());
}

INSTANTIATE_TEST_SUITE_P(Cases, ChoiceTest,
                         testing::Values(ChoiceCase{128, 8, 1, 1, false, true, 1.0f, 33, 16},
                                         ChoiceCase{256, 8, 1, 1, true, true, 2.5f, 20, 8},
                                         ChoiceCase{160, 8, 1, 1, true, true, 2.5f, 150, 64},
                                         ChoiceCase{12, 3, 4, 2, true, true, 1.5f, 40, 16},
                                         ChoiceCase{64, 6, 8, 3, false, false, 1.0f, 17, 8},
                                         ChoiceCase{512, 32, 32, 4, true, false, 1.0f, 6, 8},
                                         ChoiceCase{384, 8, 1, 1, false, true, 1.0f, 3, 8},
                                         ChoiceCase{3, 3, 1, 1, false, true, 1.0f, 70, 128},
                                         ChoiceCase{5, 1, 1, 1, false, false, 1.0f, 1, 8}));

// Padded rows alone: nothing is counted, and no tile is left from before.
TEST(Routing, PaddingGoesNowhere) {
  ExpertsSpec spec;
  spec.num_experts = 8;
  spec.experts_per_token = 2;
  const RoutingBuffers buffers(8, 8);
  auto counts = *DeviceBuffer<ExpertCounts>::Allocate(1);
  ASSERT_TRUE(counts.Fill(0).ok());
  const auto scores = Upload(std::vector<float>(32, 0.5f));
  const auto positions = Upload(std::vector<int32_t>(4, -1));
  const RoutingArguments args{.logits = scores.data(),
                              .are_scores = true,
                              .positions = positions.data(),
                              .rows = 4,
                              .tile_rows = 8};
  ASSERT_TRUE(LaunchChoiceAndSort(spec, args, buffers.routing(), counts.data(), nullptr).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(buffers.num_tiles.ToHost()->front(), 0);
  EXPECT_EQ(counts.ToHost()->front().runs, 0u);
}

TEST(Routing, RefusesWhatItHasNoRoomFor) {
  ExpertsSpec spec;
  spec.num_experts = 513;
  spec.experts_per_token = 8;
  EXPECT_NE(CheckExperts(spec).message().find("513 experts"), std::string::npos);
  spec.num_experts = 512;
  spec.experts_per_token = 33;
  EXPECT_NE(CheckExperts(spec).message().find("33 experts per token"), std::string::npos);
  spec.experts_per_token = 32;
  EXPECT_TRUE(CheckExperts(spec).ok());
  spec.groups = 64;
  EXPECT_NE(CheckExperts(spec).message().find("64 groups"), std::string::npos);
}

// Logits against double precision, the same bits however many rows there are; softmax and sigmoid
// weights.
TEST(Routing, LogitsDoNotDependOnTheBatch) {
  constexpr int kRows = 40, kHidden = 328, kExperts = 37, kStride = 384;
  Random random(9);
  std::vector<float> x(kRows * kHidden), norm(kHidden), router(kExperts * kHidden), folded;
  for (float& v : x) v = random.Normal() * 3.0f;
  for (float& v : norm) v = 1.0f + 0.2f * random.Normal();
  for (float& v : router) v = random.Normal() * 0.1f;
  std::vector<float> biases(kExperts);
  for (float& v : biases) v = random.Normal();
  const auto d_biases = Upload(biases);
  for (size_t i = 0; i < router.size(); ++i) folded.push_back(router[i] * norm[i % kHidden]);
  const auto d_x = Upload(x), d_norm = Upload(norm), d_router = Upload(folded);
  std::vector<float> first;
  for (const int rows : {kRows, 1, 5, 33}) {
    auto logits = *DeviceBuffer<float>::Allocate(static_cast<size_t>(rows) * kExperts);
    auto normed = *DeviceBuffer<Bf16>::Allocate(static_cast<size_t>(rows) * kStride);
    RouterArguments args;
    args.x = d_x.data();
    args.norm = d_norm.data();
    args.router = d_router.data();
    args.bias = d_biases.data();
    args.logits = logits.data();
    args.normed = normed.data();
    args.normed_stride = kStride;
    args.raise = rows == 5;
    args.lane_order = rows == 33;
    args.epsilon = 1e-6f;
    args.rows = rows;
    args.hidden = kHidden;
    args.num_experts = kExperts;
    ASSERT_TRUE(LaunchRouter(args, nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<float> got = *logits.ToHost();
    if (first.empty()) first = got;
    EXPECT_TRUE(std::equal(got.begin(), got.end(), first.begin())) << rows;
    const std::vector<Bf16> rounded = *normed.ToHost();
    for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
      double squares = 0.0;
      for (size_t k = 0; k < kHidden; ++k) squares += std::pow(double{x[r * kHidden + k]}, 2);
      const double factor = 1.0 / std::sqrt(squares / kHidden + 1e-6);
      for (size_t e = 0; e < kExperts; ++e) {
        double logit = double{biases[e]};
        for (size_t k = 0; k < kHidden; ++k) {
          logit += x[r * kHidden + k] * factor * norm[k] * double{router[e * kHidden + k]};
        }
        ASSERT_NEAR(got[r * kExperts + e], logit, 3e-6) << r << " " << e;
      }
      for (size_t k = 0; k < kStride; ++k) {
        const double wanted =
            k < kHidden ? x[r * kHidden + k] * factor * norm[k] * (args.raise ? 0x1p60 : 1.0) : 0.0;
        const auto at = static_cast<size_t>(PlaceOfInput(static_cast<int>(k)));
        ASSERT_NEAR(ToFloat(rounded[r * kStride + (args.lane_order ? at : k)]), wanted,
                    std::fabs(wanted) * 0x1p-8);
      }
    }
  }
}

// ---- Grouped GEMMs

constexpr int kWgmma = 1000 + kWgmmaTileRows;

struct GroupedCase {
  Kind kind;
  int outputs, inputs;  // of an expert; kSiluMul: of gates and ups together
  std::vector<int> counts;
  GemmOutput output;
  std::vector<int> tile_rows;  // all give one result, bit for bit; or kWgmma
  bool biased = false;         // and, of kSiluMul, clamped
};

class GroupedGemmTest : public testing::TestWithParam<GroupedCase> {};

TEST_P(GroupedGemmTest, AsInDoublePrecision) {
  const GroupedCase& c = GetParam();
  Random random(23);
  const bool pair = c.output == GemmOutput::kSiluMul;
  const bool fp8 = c.kind != Kind::kBf16 && c.kind != Kind::kMxfp4;
  const auto num_experts = static_cast<int>(c.counts.size());
  const TestMatrix matrix = MakeMatrix(c.kind, c.outputs * num_experts, c.inputs, random);
  int places = 0;
  for (const int count : c.counts) places += count;
  const bool wgmma = c.tile_rows[0] == kWgmma;
  if (wgmma && !HasGroupedWgmma()) GTEST_SKIP() << "this device has no wgmma";
  const bool lane_order = wgmma && c.kind != Kind::kBf16;
  const int width = pair ? c.outputs / 2 : c.outputs;
  const int stride = pair ? PaddedInputs(width, false) : (width + 3) / 4 * 4;
  // Rows of x are gathered from anywhere.
  const auto inputs = static_cast<size_t>(c.inputs);
  const size_t num_rows = static_cast<size_t>(places) / 2 + 3;
  std::vector<Bf16> x(num_rows * inputs);
  std::vector<float> values(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    values[i] = ToFloat(ToBf16(random.Normal()));
    const auto at = static_cast<size_t>(PlaceOfInput(static_cast<int>(i % inputs)));
    x[lane_order ? i - i % inputs + at : i] = ToBf16(values[i] * (fp8 ? 0x1p60f : 1.0f));
  }
  std::vector<int32_t> rows(static_cast<size_t>(places) + 1);
  for (int32_t& row : rows) row = static_cast<int32_t>(random.Bits() % num_rows);
  const auto d_x = Upload(x);
  const auto d_rows = Upload(rows);
  std::vector<float> biases(c.biased ? static_cast<size_t>(c.outputs * num_experts) : 0);
  for (float& bias : biases) bias = random.Normal();
  const auto d_biases = Upload(biases);
  const ClampedGate clamped{1.5f, 1.702f};
  std::vector<std::byte> first_bits;
  for (const int wanted_rows : c.tile_rows) {
    const int tile_rows = wgmma ? kWgmmaTileRows : wanted_rows;
    std::vector<ExpertTile> tiles;
    int at = 0;
    for (int e = 0; e < num_experts; ++e) {
      for (int done = 0; done < c.counts[static_cast<size_t>(e)]; done += tile_rows) {
        const int count = std::min(tile_rows, c.counts[static_cast<size_t>(e)] - done);
        tiles.push_back({e, at, count});
        at += count;
      }
    }
    const auto num_tiles = static_cast<int32_t>(tiles.size());
    const int max_tiles = num_tiles + 5;
    tiles.resize(static_cast<size_t>(max_tiles), ExpertTile{1 << 20, 1 << 20, 1 << 20});
    const auto d_tiles = Upload(tiles);
    const auto d_count = Upload(std::vector<int32_t>{num_tiles});
    const size_t size = static_cast<size_t>(places + 2) * static_cast<size_t>(stride);
    auto out = *DeviceBuffer<std::byte>::Allocate(size * (pair ? 2 : 4));
    ASSERT_TRUE(out.Fill(0xff).ok());
    GroupedGemm args;
    args.matrix = matrix.on_device;
    args.num_experts = num_experts;
    args.x = d_x.data();
    args.x_rows = d_rows.data();
    args.tiles = d_tiles.data();
    args.num_tiles = d_count.data();
    args.max_tiles = max_tiles;
    args.out = out.data();
    args.out_stride = stride;
    args.raise = fp8;
    args.lane_order = lane_order;
    args.output = c.output;
    if (c.biased) args.bias = d_biases.data();
    if (c.biased && pair) args.clamped = clamped;
    const Status launched = LaunchGroupedGemm(args, {tile_rows, wgmma}, nullptr);
    ASSERT_TRUE(launched.ok()) << launched.ToString();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<std::byte> bits = *out.ToHost();
    if (first_bits.empty()) first_bits = bits;
    EXPECT_EQ(bits, first_bits) << "tiles of " << tile_rows;
    const auto value_at = [&](size_t i) {
      if (!pair) return double{reinterpret_cast<const float*>(bits.data())[i]};
      return ToFloat(reinterpret_cast<const Bf16*>(bits.data())[i]) / (fp8 ? 0x1p60 : 1.0);
    };
    size_t place = 0;
    for (size_t e = 0; e < c.counts.size(); ++e) {
      for (int i = 0; i < c.counts[e]; ++i, ++place) {
        const float* in = &values[static_cast<size_t>(rows[place]) * inputs];
        const auto dot = [&](int output, double* magnitude) {
          const double* w =
              &matrix.values[(e * static_cast<size_t>(c.outputs) + static_cast<size_t>(output)) *
                             inputs];
          double sum = 0.0;
          for (size_t k = 0; k < inputs; ++k)
            sum += w[k] * in[k], *magnitude += std::fabs(w[k] * in[k]);
          return sum;
        };
        for (int m = 0; m < stride; ++m) {
          const int to = lane_order && pair ? PlaceOfInput(m) : m;
          const double got =
              value_at(place * static_cast<size_t>(stride) + static_cast<size_t>(to));
          if (m >= width) {
            if (pair) {
              ASSERT_EQ(got, 0.0) << "padding";
            }
            continue;
          }
          double magnitude = 0.0, up_magnitude = 0.0;
          double wanted = dot(m, &magnitude), tolerance = 2e-6 * magnitude;
          const auto bias_of = [&](int output) {
            return c.biased ? double{biases[e * static_cast<size_t>(c.outputs) +
                                            static_cast<size_t>(output)]}
                            : 0.0;
          };
          wanted += bias_of(m);
          if (pair && c.biased) {
            const double limit = double{clamped.limit}, slope = double{clamped.slope};
            const double gate = std::min(wanted, limit);
            const double up =
                std::clamp(dot(width + m, &up_magnitude) + bias_of(width + m), -limit, limit);
            const double gated = gate / (1.0 + std::exp(-slope * gate));
            tolerance = 2e-6 * (1.2 * magnitude * std::fabs(up + 1.0) +
                                up_magnitude * std::fabs(gated) + 2.0);
            wanted = gated * (up + 1.0);
            tolerance += std::fabs(wanted) * 0x1p-8;
          } else if (pair) {
            const double up = dot(width + m, &up_magnitude);
            const double gate = wanted / (1.0 + std::exp(-wanted));
            tolerance = 2e-6 * (1.1 * magnitude * std::fabs(up) + up_magnitude * std::fabs(gate));
            wanted = gate * up;
            tolerance += std::fabs(wanted) * 0x1p-8;
          }
          ASSERT_NEAR(got, wanted, tolerance + 1e-7)
              << "expert " << e << " row " << i << " output " << m << " tiles of " << tile_rows;
        }
      }
    }
    // Nothing is written behind the last place.
    const size_t written = place * static_cast<size_t>(stride) * (pair ? 2 : 4);
    EXPECT_TRUE(std::all_of(bits.begin() + static_cast<ptrdiff_t>(written), bits.end(),
                            [](std::byte b) { return b == std::byte{0xff}; }));
  }
}

const std::vector<int> kManyExperts = [] {
  std::vector<int> counts;
  for (int e = 0; e < 40; ++e) counts.push_back(e % 9 == 8 ? 0 : e == 20 ? 70 : 1 + e % 3);
  return counts;
}();
constexpr GemmOutput kSum = GemmOutput::kFloat, kGate = GemmOutput::kSiluMul;
INSTANTIATE_TEST_SUITE_P(
    Cases, GroupedGemmTest,
    testing::Values(
        // Experts without rows, all rows to one, tiles that are not full, tails of k.
        GroupedCase{Kind::kBf16, 48, 64, {1, 0, 3, 8}, kSum, {8, 16}},
        GroupedCase{Kind::kBf16, 37, 1088, {0, 2, 0, 17}, kSum, {8, 16}},
        GroupedCase{Kind::kBf16, 2 * 21, 192, {5, 1}, kGate, {8, 16}},
        GroupedCase{Kind::kBf16, 2 * 64, 2112, {0, 0, 9}, kGate, {16, 8}},
        GroupedCase{Kind::kRows, 33, 128, {1, 1, 1, 1, 7}, kSum, {8, 16}},
        GroupedCase{Kind::kRows, 2 * 40, 2176, {3, 12}, kGate, {8, 16}},
        GroupedCase{Kind::kBlocks, 48, 384, {2, 0, 5}, kSum, {8, 16}},
        GroupedCase{Kind::kBlocks, 2 * 24, 256, {1, 9}, kGate, {8, 16}},
        GroupedCase{Kind::kBlockRows, 2 * 19, 2304, {4, 1}, kGate, {8, 16}},
        // Biases, with gates that are clamped where there are any.
        GroupedCase{Kind::kBf16, 48, 64, {1, 0, 3, 8}, kSum, {8, 16}, true},
        GroupedCase{Kind::kBf16, 2 * 21, 192, {5, 1}, kGate, {8, 16}, true},
        GroupedCase{Kind::kRows, 2 * 40, 128, {3, 12}, kGate, {8, 16}, true},
        GroupedCase{Kind::kRows, 33, 256, {65, 0, 3}, kSum, {64}, true},
        GroupedCase{Kind::kBf16, 2 * 75, 192, {33, 66}, kGate, {64, 128}, true},
        GroupedCase{Kind::kBf16, 150, 64, {70, 0, 1}, kSum, {64, 128}, true},
        // MXFP4: tails of chunks, runs and stages.
        GroupedCase{Kind::kMxfp4, 48, 64, {1, 0, 3, 8}, kSum, {8, 16}, true},
        GroupedCase{Kind::kMxfp4, 37, 1216, {0, 2, 0, 17}, kSum, {8, 16}, true},
        GroupedCase{Kind::kMxfp4, 2 * 21, 2880, {5, 1}, kGate, {8, 16}, true},
        GroupedCase{Kind::kMxfp4, 18, 4672, {9}, kSum, {16, 8}, true},
        GroupedCase{Kind::kMxfp4, 131, 576, {65, 0, 3}, kSum, {64, 128}, true},
        GroupedCase{Kind::kMxfp4, 2 * 70, 1088, {10, 130}, kGate, {128, 64}, true},
        // No rows at all.
        GroupedCase{Kind::kBf16, 48, 64, {0, 0}, kSum, {8, 64}},
        // Tiles on tensor cores.
        GroupedCase{Kind::kBf16, 150, 64, {70, 0, 1}, kSum, {64, 128}},
        GroupedCase{Kind::kBf16, 128, 320, {0, 131, 20}, kSum, {128, 64}},
        GroupedCase{Kind::kBf16, 2 * 75, 192, {33, 66}, kGate, {64, 128}},
        GroupedCase{Kind::kBf16, 2 * 7, 128, {129}, kGate, {128, 64}},
        GroupedCase{Kind::kRows, 131, 256, {65, 0, 3}, kSum, {64}},
        GroupedCase{Kind::kRows, 2 * 70, 128, {10, 70}, kGate, {64}},
        GroupedCase{Kind::kBlocks, 144, 384, {1, 64, 2}, kSum, {64}},
        GroupedCase{Kind::kBlocks, 2 * 72, 256, {0, 67}, kGate, {64}},
        GroupedCase{Kind::kBlockRows, 2 * 35, 640, {31, 40}, kGate, {64}},
        // By wgmma: tiles of which 1 row, half, all but one, all and one more are there; more steps
        // than stages; outputs that are no whole tile, in a matrix that ends inside a box.
        GroupedCase{Kind::kBf16, 256, 64, {128}, kSum, {kWgmma}},
        GroupedCase{Kind::kBf16, 300, 320, {1, 0, 129, 64}, kSum, {kWgmma}},
        GroupedCase{Kind::kBf16, 37, 448, {0, 127, 65}, kSum, {kWgmma}},
        GroupedCase{Kind::kBf16, 2 * 128, 192, {0, 128, 3}, kGate, {kWgmma}},
        GroupedCase{Kind::kBf16, 2 * 75, 384, {129, 0, 40}, kGate, {kWgmma}},
        GroupedCase{Kind::kBf16, 150, 64, {70, 0, 1}, kSum, {kWgmma}, true},
        GroupedCase{Kind::kBf16, 2 * 140, 128, {33, 66}, kGate, {kWgmma}, true},
        GroupedCase{Kind::kBf16, 48, 64, {0, 0}, kSum, {kWgmma}},
        GroupedCase{Kind::kRows, 300, 512, {1, 0, 129}, kSum, {kWgmma}},
        GroupedCase{Kind::kRows, 2 * 140, 256, {127, 30}, kGate, {kWgmma}},
        GroupedCase{Kind::kRows, 131, 128, {65, 0, 3}, kSum, {kWgmma}, true},
        GroupedCase{Kind::kRows, 2 * 70, 640, {10, 70}, kGate, {kWgmma}, true},
        GroupedCase{Kind::kBlocks, 144, 384, {1, 128, 2}, kSum, {kWgmma}},
        GroupedCase{Kind::kBlocks, 2 * 72, 640, {0, 67}, kGate, {kWgmma}},
        GroupedCase{Kind::kBlockRows, 2 * 35, 1152, {31, 130}, kGate, {kWgmma}},
        GroupedCase{Kind::kMxfp4, 131, 576, {65, 0, 3}, kSum, {kWgmma}, true},
        GroupedCase{Kind::kMxfp4, 300, 64, {129, 1}, kSum, {kWgmma}, true},
        GroupedCase{Kind::kMxfp4, 2 * 140, 1088, {10, 128}, kGate, {kWgmma}, true},
        // More items than blocks: the ring and the scales' buffers carry over.
        GroupedCase{Kind::kBf16, 1040, 64, kManyExperts, kSum, {kWgmma}},
        GroupedCase{Kind::kBf16, 2 * 500, 320, kManyExperts, kGate, {kWgmma}},
        GroupedCase{Kind::kRows, 1040, 128, kManyExperts, kSum, {kWgmma}},
        GroupedCase{Kind::kBlocks, 544, 384, kManyExperts, kSum, {kWgmma}},
        GroupedCase{Kind::kMxfp4, 1040, 64, kManyExperts, kSum, {kWgmma}, true},
        GroupedCase{Kind::kMxfp4, 2 * 500, 576, kManyExperts, kGate, {kWgmma}, true}));

TEST(GroupedGemm, LaneOrderIsAPermutation) {
  std::set<int> places;
  for (int k = 64; k < 128; ++k) {
    EXPECT_EQ(InputAtPlace(PlaceOfInput(k)), k);
    places.insert(PlaceOfInput(k));
  }
  EXPECT_EQ(places.size(), 64u);
  EXPECT_EQ(*places.begin(), 64);
  EXPECT_EQ(*places.rbegin(), 127);
}

// What would be computed otherwise is refused.
TEST(GroupedGemm, BiasesAreOfKernelsThatHaveThem) {
  Random random(1);
  const auto bias = Upload(std::vector<float>(64));
  GroupedGemm args;
  args.num_experts = 1;
  args.max_tiles = 1;
  args.out_stride = 64;
  const auto refused = [&](Kind kind, int inputs, bool biased, GemmOutput output) {
    const TestMatrix matrix = MakeMatrix(kind, 64, inputs, random);
    args.matrix = matrix.on_device;
    args.bias = biased ? bias.data() : nullptr;
    args.output = output;
    const Status status = LaunchGroupedGemm(args, {8}, nullptr);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_NE(refused(Kind::kMxfp4, 64, false, kSum).find("MXFP4"), std::string::npos);
  EXPECT_NE(refused(Kind::kBlocks, 256, true, kSum).find("blocks"), std::string::npos);
  EXPECT_NE(refused(Kind::kBf16, 64, true, kGate).find("clamped"), std::string::npos);
}

TEST(GroupedGemm, TilesSuitTheRows) {
  ExpertsSpec spec;
  spec.num_experts = 128;
  spec.experts_per_token = 8;
  const auto rows = [&](int count, bool fp8, bool invariant) {
    const GroupedTiles tiles = TilesFor(spec, count, fp8, invariant, /*wgmma=*/false);
    EXPECT_FALSE(tiles.wgmma);
    return tiles.rows;
  };
  EXPECT_EQ(rows(1, false, false), 8);
  EXPECT_EQ(rows(32, false, false), 16);
  EXPECT_EQ(rows(512, false, false), 64);
  EXPECT_EQ(rows(4096, false, false), 128);
  EXPECT_EQ(rows(4096, true, false), 64);
  EXPECT_EQ(rows(4096, false, true), 16);
  for (const bool fp8 : {false, true}) {
    EXPECT_EQ(TilesFor(spec, 32, fp8, false, true), GroupedTiles{16});
    EXPECT_EQ(TilesFor(spec, 4096, fp8, false, true), (GroupedTiles{kWgmmaTileRows, true}));
    EXPECT_EQ(TilesFor(spec, 4096, fp8, true, true), GroupedTiles{16});
  }
}

}  // namespace
}  // namespace oscar::cuda
