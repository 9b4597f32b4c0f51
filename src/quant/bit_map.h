// BitMap: how many bits the codes of each KV head have, K and V apart. Some heads carry long-range
// look-up and lose far more to coarse keys than others, so bits are spent where they matter: a map
// is a function of measured sensitivities and of one number, the mean bits per stored number.
// Free functions; plain values.
#pragma once

#include <string>
#include <vector>

#include "oscar/status.h"

namespace oscar {

inline constexpr int kMinMapBits = 2, kMaxMapBits = 4;

struct HeadBits {
  int k = kMinMapBits, v = kMinMapBits;
  friend bool operator==(const HeadBits&, const HeadBits&) = default;
};
using BitMap = std::vector<std::vector<HeadBits>>;  // [layers with a cache][KV heads]

// What 2 bits cost in one head, K and V apart: nats of KL that quantising it adds to the model's
// answers, or a proxy that ranks heads alike. At least 0.
struct HeadSensitivity {
  double k = 0, v = 0;
  friend bool operator==(const HeadSensitivity&, const HeadSensitivity&) = default;
};
using SensitivityMap = std::vector<std::vector<HeadSensitivity>>;  // as BitMap

// The default where sensitivities are known: that much above all heads at 2 bits.
inline constexpr double kDefaultExtraBits = 0.0625;

// Every head alike.
BitMap UniformBits(int num_layers, int kv_heads, int bits);
// Bits per code, averaged over all heads and both sides.
double MeanCodeBits(const BitMap& map);

// The map whose mean is as near below `mean_bits` as whole sides allow (2 to 4 bits per code,
// metadata not counted). Bits are handed out one at a time to the side whose cost falls most. The
// cost of a side is its sensitivity times RelativeCost of its bits. Of equals the first in order
// of layer, head, K before V. REQUIRES: 2 <= mean_bits <= 4, one head at least, all layers alike.
BitMap ChooseBits(const SensitivityMap& sensitivities, double mean_bits);

// What is left of a side's cost, relative to 2 bits: the noise of the optimal uniform quantiser of
// a Gaussian (Max, 1960: distortions 0.1188, 0.03744, 0.01154), its amplitude to the power 1.5. KL
// falls with the square. Answers are lost with the amplitude, where heads serve different tokens:
// one is lost when noise exceeds a margin, and small margins are as frequent as they are wide. On
// the demo model the square gives the first two bits to K and V of one head (13 answers lost and 3
// won of 388) and the amplitude too much to single sides at 2.5 bits; between them both are right:
// its keys at 4 bits lose 4 and win 2 (docs/lab/2026-11-18-bit-map.md).
constexpr double RelativeCost(int bits) { return bits == 2 ? 1.0 : bits == 3 ? 0.4206 : 0.1740; }

// One line per layer, K and V of each head: "layer  6   4/2 2/2".
std::string DrawBits(const BitMap& map, const std::vector<int>& layer_ids);

}  // namespace oscar
