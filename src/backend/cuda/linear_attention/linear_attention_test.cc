// Linear attention on the GPU against numeric/delta_rule.h and what is around it in double
// precision.
#include "cuda/linear_attention/linear_attention.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/rng.h"
#include "cuda/device/device_buffer.h"
#include "numeric/delta_rule.h"

namespace oscar::cuda {
namespace {

template <typename T>
DeviceBuffer<T> Upload(const std::vector<T>& host) {
  return *DeviceBuffer<T>::Copy(host);
}

double Silu(double x) { return x / (1.0 + std::exp(-x)); }

struct ShapeCase {
  const char* name;
  int key_heads, value_heads, key_dim, value_dim, taps;
  bool grouped;
};

// Sequences of some lengths, in the middle of their lives: weights, inputs, states.
struct Case {
  LinearAttentionSpec spec;
  std::vector<int> lengths;
  std::vector<float> conv, decay_rate, step_bias, norm, inputs;
  std::vector<float> states;  // [places, state floats]
  int rows = 0;

  Case(const ShapeCase& shape, std::vector<int> of_lengths, uint64_t seed = 1)
      : lengths(std::move(of_lengths)) {
    spec.key_heads = shape.key_heads;
    spec.value_heads = shape.value_heads;
    spec.key_dim = shape.key_dim;
    spec.value_dim = shape.value_dim;
    spec.conv_kernel = shape.taps;
    spec.grouped_inputs = shape.grouped;
    for (const int length : lengths) rows += length;
    const Philox rng(seed, 0);
    uint64_t next = 0;
    const auto fill = [&](std::vector<float>& to, size_t count, double scale, double middle = 0.0) {
      to.resize(count);
      for (float& x : to) {
        const double u = static_cast<double>(rng.Bits(next++)) / 4294967296.0;
        x = static_cast<float>(middle + scale * (2.0 * u - 1.0));
      }
    };
    const auto channels = static_cast<size_t>(spec.conv_channels());
    const auto heads = static_cast<size_t>(spec.value_heads);
    fill(conv, channels * static_cast<size_t>(spec.conv_kernel), 0.6);
    fill(decay_rate, heads, 4.0, 4.0);  // from hardly any decay to nearly all of it
    fill(step_bias, heads, 3.0, -3.0);
    fill(norm, static_cast<size_t>(spec.value_dim), 0.4, 1.0);
    fill(inputs, static_cast<size_t>(rows * spec.input_width()), 2.0);
    fill(states, lengths.size() * state_floats(), 0.5);
  }
  size_t state_floats() const { return spec.state_bytes() / sizeof(float); }

  // Outputs [rows, value_width] and states after them; `rounds`: of q, k and v rounded to BF16.
  std::pair<std::vector<double>, std::vector<double>> Expected(bool rounds) const {
    std::vector<double> out(static_cast<size_t>(rows * spec.value_width()));
    std::vector<double> after(states.begin(), states.end());
    int first = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      ExpectItem(first, lengths[i], rounds, after.data() + i * state_floats(), out.data());
      first += lengths[i];
    }
    return {out, after};
  }
  void ExpectItem(int first, int length, bool rounds, double* state, double* out) const;
};

void Case::ExpectItem(int first, int length, bool rounds, double* state, double* out) const {
  const int taps = spec.conv_kernel, channels = spec.conv_channels();
  const auto dk = static_cast<size_t>(spec.key_dim), dv = static_cast<size_t>(spec.value_dim);
  const auto tokens = static_cast<size_t>(length);
  double* const kept = state + spec.matrix_floats();
  const auto input = [&](int token, int column) {
    return static_cast<double>(
        inputs[static_cast<size_t>(first + token) * static_cast<size_t>(spec.input_width()) +
               static_cast<size_t>(column)]);
  };
  const auto convolved = [&](int token, int column, int channel) {
    double sum = 0.0;
    for (int j = 0; j < taps; ++j) {
      const int from = token - (taps - 1) + j;
      const double x =
          from >= 0 ? input(from, column) : kept[(taps - 1 + from) * channels + channel];
      sum += static_cast<double>(conv[static_cast<size_t>(j * channels + channel)]) * x;
    }
    return Silu(sum);
  };
  for (int head = 0; head < spec.value_heads; ++head) {
    const int key_head = head / spec.values_per_key_head();
    std::vector<double> q(tokens * dk), k(tokens * dk), v(tokens * dv), decay(tokens), beta(tokens),
        o(tokens * dv);
    for (int t = 0; t < length; ++t) {
      const auto at = static_cast<size_t>(t);
      double qq = 0.0, kk = 0.0;
      for (int d = 0; d < spec.key_dim; ++d) {
        const auto to = at * dk + static_cast<size_t>(d);
        const int channel = key_head * spec.key_dim + d;
        q[to] = convolved(t, spec.QOf(key_head) + d, channel);
        k[to] = convolved(t, spec.KOf(key_head) + d, spec.key_width() + channel);
        qq += q[to] * q[to];
        kk += k[to] * k[to];
      }
      for (size_t d = at * dk; d < (at + 1) * dk; ++d) {
        q[d] /= std::sqrt((qq + 1e-6) * static_cast<double>(dk));
        k[d] /= std::sqrt(kk + 1e-6);
      }
      for (int c = 0; c < spec.value_dim; ++c) {
        v[at * dv + static_cast<size_t>(c)] =
            convolved(t, spec.VOf(head) + c, 2 * spec.key_width() + head * spec.value_dim + c);
      }
      const auto h = static_cast<size_t>(head);
      decay[at] = -static_cast<double>(decay_rate[h]) *
                  std::log1p(std::exp(input(t, spec.AOf(head)) + step_bias[h]));
      beta[at] = 1.0 / (1.0 + std::exp(-input(t, spec.BOf(head))));
    }
    for (auto* values : {&q, &k, &v}) {
      for (double& x : *values) {
        if (rounds) x = ToFloat(ToBf16(static_cast<float>(x)));
      }
    }
    DeltaRuleRecurrent({q, k, v, decay, beta},
                       {state + static_cast<size_t>(head) * dk * dv, dk * dv}, o);
    for (int t = 0; t < length; ++t) {
      double sum = 0.0;
      const double* const row = o.data() + static_cast<size_t>(t) * dv;
      for (size_t c = 0; c < dv; ++c) sum += row[c] * row[c];
      const double factor = 1.0 / std::sqrt(sum / static_cast<double>(dv) + 1e-6);
      for (int c = 0; c < spec.value_dim; ++c) {
        out[(first + t) * spec.value_width() + head * spec.value_dim + c] =
            row[c] * factor * static_cast<double>(norm[static_cast<size_t>(c)]) *
            Silu(input(t, spec.ZOf(head) + c));
      }
    }
  }
  std::vector<double> left(static_cast<size_t>((taps - 1) * channels));
  for (int head = 0; head < spec.value_heads; ++head) {
    const int key_head = head / spec.values_per_key_head();
    const auto keep = [&](int column, int channel, int dims) {
      for (int j = 0; j < taps - 1; ++j) {
        const int from = length - (taps - 1) + j;
        for (int d = 0; d < dims; ++d) {
          left[static_cast<size_t>(j * channels + channel + d)] =
              from >= 0 ? input(from, column + d)
                        : kept[(taps - 1 + from) * channels + channel + d];
        }
      }
    };
    keep(spec.QOf(key_head), key_head * spec.key_dim, spec.key_dim);
    keep(spec.KOf(key_head), spec.key_width() + key_head * spec.key_dim, spec.key_dim);
    keep(spec.VOf(head), 2 * spec.key_width() + head * spec.value_dim, spec.value_dim);
  }
  std::ranges::copy(left, kept);
}

// The device's memory of a case; states lie in places that are not in order.
struct OnDevice {
  const Case& c;
  DeviceBuffer<float> conv, decay_rate, step_bias, norm, inputs, states;
  DeviceBuffer<uint32_t> arrivals;
  DeviceBuffer<Bf16> out;

  explicit OnDevice(const Case& of)
      : c(of),
        conv(Upload(of.conv)),
        decay_rate(Upload(of.decay_rate)),
        step_bias(Upload(of.step_bias)),
        norm(Upload(of.norm)),
        inputs(Upload(of.inputs)),
        states(Upload(Placed())),
        arrivals(*DeviceBuffer<uint32_t>::Allocate(
            static_cast<size_t>((of.rows + 1) * of.spec.key_heads))),
        out(*DeviceBuffer<Bf16>::Allocate(
            static_cast<size_t>((of.rows + 1) * of.spec.value_width()))) {
    EXPECT_TRUE(arrivals.Fill(0).ok());
    EXPECT_TRUE(out.Fill(0x11).ok());
  }
  static constexpr int64_t kPlace = 256;
  int64_t units() const {
    return (static_cast<int64_t>(c.spec.state_bytes()) + 512 + kPlace - 1) / kPlace;
  }
  int32_t PlaceOf(size_t item) const {
    return static_cast<int32_t>(units()) * static_cast<int32_t>(c.lengths.size() - 1 - item);
  }
  size_t FloatsAt(size_t item) const {  // a layer's state lies behind others
    return (static_cast<size_t>(PlaceOf(item)) * kPlace + 512) / sizeof(float);
  }
  std::vector<float> Placed() const {
    std::vector<float> all(c.lengths.size() * static_cast<size_t>(units()) * kPlace / sizeof(float),
                           7.0f);
    for (size_t i = 0; i < c.lengths.size(); ++i) {
      std::copy_n(c.states.begin() + static_cast<ptrdiff_t>(i * c.state_floats()), c.state_floats(),
                  all.begin() + static_cast<ptrdiff_t>(FloatsAt(i)));
    }
    return all;
  }
  StateArguments Arguments() const {
    StateArguments args;
    args.spec = c.spec;
    args.weights.conv = conv.data();
    args.weights.decay_rate = decay_rate.data();
    args.weights.step_bias = step_bias.data();
    args.weights.norm = norm.data();
    args.norm_epsilon = 1e-6f;
    args.inputs = inputs.data();
    args.arena = reinterpret_cast<std::byte*>(states.data());
    args.place_bytes = kPlace;
    args.layer_offset = 512;
    return args;
  }
  // Chunks of the sequences' next tokens: at most `most` of each, from `done` on.
  void Run(const std::vector<int>& done, int most) {
    std::vector<PrefillChunk> chunks;
    std::vector<int32_t> places;
    int first = 0;
    for (size_t i = 0; i < c.lengths.size(); ++i) {
      const int count = std::min(most, c.lengths[i] - done[i]);
      if (count > 0) {
        chunks.push_back({first + done[i], count});
        places.push_back(PlaceOf(i));
      }
      first += c.lengths[i];
    }
    const auto at = Upload(chunks);
    const auto where = Upload(places);
    StateArguments args = Arguments();
    args.states = where.data();
    args.chunks = at.data();
    args.batch = static_cast<int>(chunks.size());
    ASSERT_TRUE(LaunchStates(args, arrivals.data(), out.data(), nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  // The same through the chunked form, sequences beginning at these positions.
  void RunChunks(const std::vector<int64_t>& positions, const std::vector<int>& done, int most) {
    std::vector<PrefillChunk> chunks;
    std::vector<int32_t> places;
    std::vector<StateTile> tiles;
    std::vector<TileRange> ranges;
    int first = 0;
    for (size_t i = 0; i < c.lengths.size(); ++i) {
      const int count = std::min(most, c.lengths[i] - done[i]);
      if (count > 0) {
        TileRange range{static_cast<int32_t>(tiles.size()), 0};
        for (int at = 0; at < count; ++range.count) {
          const auto in_tile = static_cast<int>((positions[i] + done[i] + at) % kStateTileTokens);
          const int tokens = std::min(kStateTileTokens - in_tile, count - at);
          tiles.push_back({first + done[i] + at, tokens, static_cast<int32_t>(chunks.size())});
          at += tokens;
        }
        ranges.push_back(range);
        chunks.push_back({first + done[i], count});
        places.push_back(PlaceOf(i));
      }
      first += c.lengths[i];
    }
    const auto at = Upload(chunks);
    const auto where = Upload(places);
    const auto device_tiles = Upload(tiles);
    const auto device_ranges = Upload(ranges);
    const auto workspace =
        *DeviceBuffer<std::byte>::Allocate(StateChunkWorkspace(c.spec, c.rows + 1));
    StateArguments args = Arguments();
    args.states = where.data();
    args.chunks = at.data();
    args.batch = static_cast<int>(chunks.size());
    ASSERT_TRUE(LaunchStateChunks(args, tiles, device_tiles.data(), device_ranges.data(),
                                  workspace.data(), out.data(), nullptr)
                    .ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  // All tokens, cut every `most`.
  void RunAll(int most) {
    std::vector<int> done(c.lengths.size(), 0);
    for (bool left = true; left;) {
      Run(done, most);
      left = false;
      for (size_t i = 0; i < done.size(); ++i) {
        done[i] = std::min(c.lengths[i], done[i] + most);
        left = left || done[i] < c.lengths[i];
      }
    }
  }
  std::vector<float> StatesNow() const {
    const std::vector<float> all = *states.ToHost();
    std::vector<float> mine;
    for (size_t i = 0; i < c.lengths.size(); ++i) {
      const auto from = all.begin() + static_cast<ptrdiff_t>(FloatsAt(i));
      mine.insert(mine.end(), from, from + static_cast<ptrdiff_t>(c.state_floats()));
    }
    return mine;
  }
  std::vector<uint16_t> Bits() const {
    std::vector<uint16_t> bits;
    const std::vector<Bf16> values = *out.ToHost();
    for (const Bf16 x : values) bits.push_back(x.bits);
    return bits;
  }
};

double RelativeError(const double* expected, const auto& actual, size_t count) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < count; ++i) {
    error += std::pow(expected[i] - actual(i), 2);
    size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

// An output is rounded to BF16 once, by up to 2^-8 of itself. `spread`: the root mean square of
// rows' errors; a row that is nearly zero before its norm is far off where q, k and v are rounded.
struct Budget {
  double worst_output, spread, worst_state;
};
constexpr Budget kRecurrent = {3.9e-3, 2.5e-3, 1e-6};
void ExpectOutputs(const Case& c, const OnDevice& device, bool rounds, const Budget& budget) {
  const auto [expected, after] = c.Expected(rounds);
  const std::vector<Bf16> out = *device.out.ToHost();
  const auto dim = static_cast<size_t>(c.spec.value_dim);
  double worst = 0.0, worst_state = 0.0, squares = 0.0;
  for (size_t at = 0; at < expected.size(); at += dim) {
    const double error = RelativeError(
        expected.data() + at, [&](size_t i) { return ToFloat(out[at + i]); }, dim);
    worst = std::max(worst, error);
    squares += error * error;
  }
  const double spread =
      std::sqrt(squares * static_cast<double>(dim) / static_cast<double>(expected.size()));
  EXPECT_LE(worst, budget.worst_output);
  EXPECT_LE(spread, budget.spread);
  const std::vector<float> states = device.StatesNow();
  const auto matrix = static_cast<size_t>(c.spec.key_dim) * dim;
  for (size_t item = 0; item < c.lengths.size(); ++item) {
    const size_t base = item * c.state_floats();
    for (size_t at = base; at < base + c.spec.matrix_floats(); at += matrix) {
      worst_state = std::max(
          worst_state, RelativeError(
                           after.data() + at, [&](size_t i) { return states[at + i]; }, matrix));
    }
    for (size_t i = base + c.spec.matrix_floats(); i < base + c.state_floats(); ++i) {
      ASSERT_EQ(states[i], static_cast<float>(after[i])) << "kept input " << i - base;
    }
  }
  EXPECT_LE(worst_state, budget.worst_state);
  std::printf("outputs differ by at most %.2e, rms %.2e, states by %.2e\n", worst, spread,
              worst_state);
  const std::vector<uint32_t> arrivals = *device.arrivals.ToHost();
  EXPECT_EQ(std::ranges::count(arrivals, 0u), static_cast<ptrdiff_t>(arrivals.size()));
  // Nothing beyond the rows.
  for (size_t i = expected.size(); i < out.size(); ++i) ASSERT_EQ(out[i].bits, 0x1111);
}

class StateKernelTest : public testing::TestWithParam<ShapeCase> {};

TEST_P(StateKernelTest, IsTheSpecification) {
  const Case c(GetParam(), {1, 40, 2, 17});
  OnDevice device(c);
  device.RunAll(1000);
  ExpectOutputs(c, device, /*rounds=*/false, kRecurrent);
}

// Cut anywhere, or token by token: the same bits.
TEST_P(StateKernelTest, CutsDoNotShow) {
  const Case c(GetParam(), {35, 3}, 2);
  OnDevice whole(c);
  whole.RunAll(1000);
  for (const int most : {1, 7, 16}) {
    OnDevice cut(c);
    cut.RunAll(most);
    EXPECT_EQ(cut.Bits(), whole.Bits()) << most;
    EXPECT_EQ(cut.StatesNow(), whole.StatesNow()) << most;
  }
}

// A step of generated tokens, as it is recorded: rows by index, padding touches nothing.
TEST_P(StateKernelTest, StepsAreChunksOfOne) {
  const Case c(GetParam(), {1, 1, 1}, 3);
  OnDevice step(c), alone(c);
  const auto places =
      Upload(std::vector<int32_t>{step.PlaceOf(0), step.PlaceOf(1), step.PlaceOf(2), -1});
  StateArguments args = step.Arguments();
  args.states = places.data();
  args.batch = 4;
  ASSERT_TRUE(LaunchStates(args, step.arrivals.data(), step.out.data(), nullptr).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ExpectOutputs(c, step, /*rounds=*/false, kRecurrent);
  alone.RunAll(1);
  EXPECT_EQ(step.Bits(), alone.Bits());
  EXPECT_EQ(step.StatesNow(), alone.StatesNow());
}

constexpr ShapeCase kShapes[] = {{"published", 1, 2, 128, 128, 4, false},
                                 {"grouped", 2, 4, 128, 128, 4, true},
                                 {"small", 2, 6, 32, 24, 4, false},
                                 {"odd", 3, 3, 20, 100, 3, true},
                                 {"wide", 2, 2, 16, 40, 2, false}};
INSTANTIATE_TEST_SUITE_P(Shapes, StateKernelTest, testing::ValuesIn(kShapes),
                         [](const auto& item) { return std::string(item.param.name); });

// Of q, k and v rounded to BF16 once it is the specification; and it is near that of exact ones.
constexpr Budget kRounded = {3.9e-3, 2.5e-3, 1e-4}, kExact = {0.2, 6e-3, 5e-3};
void ExpectChunks(const Case& c, const OnDevice& device) {
  ExpectOutputs(c, device, /*rounds=*/true, kRounded);
  ExpectOutputs(c, device, /*rounds=*/false, kExact);
}

class StateChunkTest : public testing::TestWithParam<ShapeCase> {};

// Tiles that are cut by the grid and by the sequence's end, more of them than the workspace holds.
TEST_P(StateChunkTest, IsTheSpecification) {
  const Case c(GetParam(), {70, 1, 200, 64, 2});
  OnDevice device(c);
  device.RunChunks({63, 5, 10, 0, 62}, {0, 0, 0, 0, 0}, 1000);
  ExpectChunks(c, device);
}

TEST_P(StateChunkTest, LongPromptsTakeSeveralRounds) {
  const Case c(GetParam(), {kStateTileTokens * kStateTilesAtOnce + 70}, 4);
  OnDevice device(c);
  device.RunChunks({0}, {0}, 1 << 20);
  ExpectChunks(c, device);
}

// Cut on the grid: the same bits. Cut elsewhere: within the budget.
TEST_P(StateChunkTest, CutsOnTheGridDoNotShow) {
  const Case c(GetParam(), {150}, 5);
  OnDevice whole(c), cut(c), anywhere(c);
  whole.RunChunks({10}, {0}, 1000);
  cut.RunChunks({10}, {0}, 54);
  cut.RunChunks({10}, {54}, 64);
  cut.RunChunks({10}, {118}, 64);
  EXPECT_EQ(cut.Bits(), whole.Bits());
  EXPECT_EQ(cut.StatesNow(), whole.StatesNow());
  anywhere.RunChunks({10}, {0}, 1);
  anywhere.RunChunks({10}, {1}, 80);
  anywhere.RunChunks({10}, {81}, 1000);
  ExpectChunks(c, anywhere);
}

INSTANTIATE_TEST_SUITE_P(Shapes, StateChunkTest, testing::ValuesIn({kShapes[0], kShapes[1]}),
                         [](const auto& item) { return std::string(item.param.name); });

TEST(LinearAttention, OtherShapesAreRefusedByName) {
  LinearAttentionSpec spec;
  spec.key_heads = spec.value_heads = 1;
  spec.key_dim = spec.value_dim = 128;
  spec.conv_kernel = 4;
  EXPECT_TRUE(CheckLinearAttention(spec).ok());
  spec.key_dim = 256;
  EXPECT_NE(CheckLinearAttention(spec).message().find("256 key dims"), std::string::npos);
  spec.key_dim = 128;
  spec.conv_kernel = 5;
  EXPECT_NE(CheckLinearAttention(spec).message().find("5 taps"), std::string::npos);
}

}  // namespace
}  // namespace oscar::cuda
