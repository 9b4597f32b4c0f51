#include "quant/bit_map.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace oscar {

BitMap UniformBits(int num_layers, int kv_heads, int bits) {
  return BitMap(static_cast<size_t>(num_layers),
                std::vector<HeadBits>(static_cast<size_t>(kv_heads), HeadBits{bits, bits}));
}

double MeanCodeBits(const BitMap& map) {
  int64_t sum = 0, sides = 0;
  for (const auto& layer : map) {
    for (const HeadBits& head : layer) {
      sum += head.k + head.v;
      sides += 2;
    }
  }
  OSCAR_CHECK(sides > 0);
  return static_cast<double>(sum) / static_cast<double>(sides);
}

BitMap ChooseBits(const SensitivityMap& sensitivities, double mean_bits) {
  OSCAR_CHECK(!sensitivities.empty() && !sensitivities[0].empty());
  OSCAR_CHECK(mean_bits >= kMinMapBits && mean_bits <= kMaxMapBits);
  BitMap map = UniformBits(static_cast<int>(sensitivities.size()),
                           static_cast<int>(sensitivities[0].size()), kMinMapBits);
  // A step takes a side from one number of bits to the next.
  struct Step {
    double gain;
    int* bits;
  };
  std::vector<Step> steps;
  for (size_t layer = 0; layer < map.size(); ++layer) {
    OSCAR_CHECK(sensitivities[layer].size() == map[layer].size());
    for (size_t head = 0; head < map[layer].size(); ++head) {
      const HeadSensitivity& cost = sensitivities[layer][head];
      for (const auto& [value, bits] :
           {std::pair{cost.k, &map[layer][head].k}, std::pair{cost.v, &map[layer][head].v}}) {
        for (int b = kMinMapBits; b < kMaxMapBits; ++b) {
          steps.push_back({value * (RelativeCost(b) - RelativeCost(b + 1)), bits});
        }
      }
    }
  }
  // The first step of a side gains more than its second, so the order of gains keeps theirs. Every
  // step costs the same.
  std::stable_sort(steps.begin(), steps.end(),
                   [](const Step& a, const Step& b) { return a.gain > b.gain; });
  const double sides = static_cast<double>(steps.size()) / (kMaxMapBits - kMinMapBits);
  const auto count = static_cast<size_t>(std::floor((mean_bits - kMinMapBits) * sides + 1e-6));
  for (size_t i = 0; i < std::min(count, steps.size()); ++i) ++*steps[i].bits;
  return map;
}

std::string DrawBits(const BitMap& map, const std::vector<int>& layer_ids) {
  OSCAR_CHECK(map.size() == layer_ids.size());
  std::string out;
  for (size_t layer = 0; layer < map.size(); ++layer) {
    out += fmt::format("layer {:>3}  ", layer_ids[layer]);
    for (const HeadBits& head : map[layer]) out += fmt::format(" {}/{}", head.k, head.v);
    out += "\n";
  }
  return out;
}

}  // namespace oscar
