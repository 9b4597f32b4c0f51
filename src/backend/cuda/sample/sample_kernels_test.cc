// Samples on the GPU against the scalar sampler, on logits made for it.
#include "cuda/sample/sample_kernels.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "cuda/device/device_buffer.h"
#include "engine/sampler.h"

namespace oscar::cuda {
namespace {

std::vector<int32_t> Sampled(const std::vector<std::vector<float>>& rows,
                             std::vector<SampleParams> sampling) {
  const size_t vocab = rows[0].size();
  std::vector<float> logits;
  std::vector<int32_t> sources;
  // Rows lie in another order than they are sampled in.
  for (size_t i = rows.size(); i-- > 0;) {
    logits.insert(logits.end(), rows[i].begin(), rows[i].end());
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    sources.push_back(static_cast<int32_t>(rows.size() - 1 - i));
  }
  // Masks lie behind each other, as the backend has them.
  std::vector<uint32_t> masks;
  const size_t words = (vocab + 31) / 32;
  for (const SampleParams& sample : sampling) {
    if (sample.mask != nullptr) masks.insert(masks.end(), sample.mask, sample.mask + words);
  }
  masks.push_back(0);
  const auto device_masks = *DeviceBuffer<uint32_t>::Copy(masks);
  const uint32_t* next_mask = device_masks.data();
  for (SampleParams& sample : sampling) {
    if (sample.mask != nullptr) sample.mask = std::exchange(next_mask, next_mask + words);
  }
  const auto device_logits = *DeviceBuffer<float>::Copy(logits);
  const auto device_sources = *DeviceBuffer<int32_t>::Copy(sources);
  const auto device_sampling = *DeviceBuffer<SampleParams>::Copy(sampling);
  auto ids = *DeviceBuffer<int32_t>::Allocate(rows.size());
  const Status status =
      LaunchSample(device_logits.data(), device_sources.data(), device_sampling.data(), ids.data(),
                   static_cast<int>(rows.size()), static_cast<int>(vocab), nullptr);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return *ids.ToHost();
}

// Near to Gaussian.
std::vector<float> Logits(uint64_t seed, size_t vocab, float spread) {
  const Philox rng(seed, 0);
  std::vector<float> logits(vocab);
  for (size_t i = 0; i < vocab; ++i) {
    const auto bits = rng.Block(i);
    float sum = 0.0f;
    for (const uint32_t word : bits) sum += static_cast<float>(word) * 0x1p-32f - 0.5f;
    logits[i] = sum * 1.7f * spread;
  }
  return logits;
}

struct Case {
  float temperature;
  int top_k;
  float top_p, min_p;
  bool is_sure;  // never left to the host
};
constexpr Case kCases[] = {
    {0.0f, 0, 1.0f, 0.0f, true},     {0.6f, 20, 0.95f, 0.0f, true},   {1.0f, 1, 1.0f, 0.0f, true},
    {1.3f, 200, 0.99f, 0.02f, true}, {1.0f, 1024, 0.9f, 0.0f, true},  {1.0f, 0, 1.0f, 0.0f, true},
    {1.7f, 0, 1.0f, 0.01f, true},    {0.05f, 0, 1.0f, 0.0f, true},    {3.0f, 0, 1.0f, 1.0f, true},
    {0.8f, 0, 0.5f, 0.1f, false},    {1.0f, 0, 0.9f, 0.0f, false},    {5.0f, 0, 0.99f, 0.0f, false},
    {1.0f, 1500, 0.9f, 0.0f, false}, {1.0f, 1500, 1.0f, 0.0f, false},
};

class SampleTest : public testing::TestWithParam<size_t> {};

TEST_P(SampleTest, AsTheSamplerDoes) {
  const size_t vocab = GetParam();
  int undecided = 0, compared = 0;
  for (const Case& c : kCases) {
    std::vector<std::vector<float>> rows;
    std::vector<SampleParams> sampling;
    std::vector<int32_t> expected;
    for (uint64_t seed = 0; seed < 24; ++seed) {
      std::vector<float> logits = Logits(seed, vocab, seed % 2 == 0 ? 0.5f : 4.0f);
      if (seed % 6 == 5) {  // many equal ones, zeros of both signs among them
        for (float& x : logits) x = std::round(x);
      }
      SamplingOptions options;
      options.temperature = c.temperature;
      options.top_k = c.top_k;
      options.top_p = c.top_p;
      options.min_p = c.min_p;
      options.seed = seed;
      Sampler sampler(options);
      sampling.push_back(*sampler.NextSample());
      EXPECT_EQ(sampling.back().IsSureOnDevice(), c.is_sure);
      expected.push_back(sampler.Sample(logits));
      rows.push_back(std::move(logits));
    }
    const auto ids = Sampled(rows, sampling);
    for (size_t i = 0; i < ids.size(); ++i) {
      ++compared;
      // Of thousands of equal logits more than fit the device's list.
      const bool may_be_left = !c.is_sure || (c.top_k > 0 && i % 6 == 5);
      if (ids[i] == SampleParams::kUndecided && may_be_left) {
        ++undecided;
        continue;
      }
      EXPECT_EQ(ids[i], expected[i])
          << "temperature " << c.temperature << " top_k " << c.top_k << " top_p " << c.top_p
          << " min_p " << c.min_p << " row " << i;
    }
  }
  std::printf("vocabulary of %zu: %d of %d sampling left to the host\n", vocab, undecided,
              compared);
  EXPECT_LE(undecided, compared / 2);
}
INSTANTIATE_TEST_SUITE_P(Vocabularies, SampleTest,
                         testing::Values(37, 1023, 1025, 8192, 50257, 151936));

// Of one token, of a few, of half and of all but a few: the same samples as the host's.
TEST_P(SampleTest, MaskedRowsAsTheSamplerDoes) {
  const size_t vocab = GetParam(), words = (vocab + 31) / 32;
  for (const Case& c : kCases) {
    std::vector<std::vector<float>> rows;
    std::vector<SampleParams> sampling;
    std::vector<int32_t> expected;
    std::vector<std::vector<uint32_t>> masks;
    for (uint64_t seed = 0; seed < 24; ++seed) {
      std::vector<uint32_t>& mask = masks.emplace_back(words);
      const Philox rng(seed, 1);
      for (size_t i = 0; i < vocab; ++i) {
        const uint32_t bits = rng.Block(i)[0];
        const bool allowed = seed % 4 == 0   ? i == seed * 7919 % vocab
                             : seed % 4 == 1 ? bits % 97 == 0
                             : seed % 4 == 2 ? bits % 2 == 0
                                             : bits % 97 != 0;
        if (allowed) mask[i / 32] |= uint32_t{1} << (i % 32);
      }
      mask[vocab / 64] |= 1;                                             // never empty
      if (vocab % 32 != 0) mask.back() |= ~uint32_t{0} << (vocab % 32);  // beyond the vocabulary
      SamplingOptions options;
      options.temperature = c.temperature;
      options.top_k = c.top_k;
      options.top_p = c.top_p;
      options.min_p = c.min_p;
      options.seed = seed;
      Sampler sampler(options);
      std::vector<float> logits = Logits(seed, vocab, seed % 2 == 0 ? 0.5f : 4.0f);
      sampling.push_back(*sampler.NextSample());
      expected.push_back(sampler.Sample(logits, {}, mask.data()));
      rows.push_back(std::move(logits));
    }
    for (size_t i = 0; i < sampling.size(); ++i) {
      if (i % 5 != 4) sampling[i].mask = masks[i].data();  // among rows without
    }
    const auto ids = Sampled(rows, sampling);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (i % 5 == 4 || (ids[i] == SampleParams::kUndecided && !c.is_sure)) continue;
      EXPECT_EQ(ids[i], expected[i])
          << "temperature " << c.temperature << " top_k " << c.top_k << " top_p " << c.top_p
          << " min_p " << c.min_p << " row " << i;
    }
  }
}

// The ends of [0, 1) take the first and the last token that has any weight.
TEST(Sample, EndsOfTheRange) {
  std::vector<float> logits(4099, -1000.0f);
  logits[700] = logits[701] = logits[3500] = 1.0f;
  SampleParams lowest, highest;
  lowest.temperature = highest.temperature = 1.0f;
  lowest.uniform = 0.0;
  highest.uniform = std::nextafter(1.0, 0.0);
  EXPECT_EQ(Sampled({logits, logits}, {lowest, highest}), (std::vector<int32_t>{700, 3500}));
}

TEST(Sample, TellsOfEveryValueThatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<std::vector<float>> rows;
  std::vector<SampleParams> sampling;
  std::vector<int32_t> expected;
  for (const float broken :
       {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity, 2.0f}) {
    for (const auto& [temperature, top_k] : {std::pair{0.0f, 0}, {1.0f, 0}, {1.0f, 20}}) {
      rows.push_back(Logits(1, 5003, 1.0f));
      rows.back()[4321] = broken;
      SampleParams& sample = sampling.emplace_back();
      sample.temperature = temperature;
      sample.top_k = top_k;
      expected.push_back(std::isfinite(broken) ? 0 : SampleParams::kNotFinite);
    }
  }
  const auto ids = Sampled(rows, sampling);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (expected[i] == 0) {
      EXPECT_GE(ids[i], 0) << i;
    } else {
      EXPECT_EQ(ids[i], expected[i]) << i;
    }
  }
}

}  // namespace
}  // namespace oscar::cuda
