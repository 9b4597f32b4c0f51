// Lloyd-Max: the scalar quantiser of least mean squared error for a Gaussian (Lloyd 1957, Max
// 1960).
//
// The codebook for N(0, 1) and 2^b levels is the fixed point of two conditions: a threshold is the
// midpoint of its levels, a level is the mean of the Gaussian between its thresholds,
// (phi(a) - phi(b)) / (Phi(b) - Phi(a)). Iterated here to double precision. At 2 bits: levels
// +-0.45278, +-1.51042, thresholds 0, +-0.98160, distortion 0.11748.
//
// LloydMaxRows, per group of G dims of a row (clip first, as the row quantiser does, where asked):
// m = mean, sd = population standard deviation, both rounded to the metadata type; code = number of
// thresholds t with x - m >= t sd;  x^ = m + sd level[code]. Stored: codes | sd, mean of each
// group. Bits: b + 2 * 16 / G in fp16. A constant group decodes to its mean.
// OSCAR's Lloyd-Max switch stores equally spaced levels instead: RowRule::kLloydMax.
#pragma once

#include "quant/kv_quantizer.h"
#include "quant/row_quantizer.h"

namespace oscar {

struct GaussianCodebook {
  std::vector<double> levels;      // 2^bits, ascending, symmetric about 0
  std::vector<double> thresholds;  // 2^bits - 1, ascending; the middle one is 0
  double distortion = 0.0;         // mean squared error on N(0, 1)
};

// Computed once per width and kept. REQUIRES: bits in 1..4.
const GaussianCodebook& LloydMaxCodebook(int bits);

struct LloydMaxSpec {
  int bits = 2;  // 2, 3 or 4
  int group_dims = 128;
  float clip_ratio = 0.0f;
  MetaType meta = MetaType::kFp16;
};

class LloydMaxRows : public KvQuantizer {
 public:
  explicit LloydMaxRows(const LloydMaxSpec& spec);
  std::string description() const override;
  size_t EncodedBytes(const TileShape& shape) const override;
  double BitsPerElement(const TileShape& shape) const override;

 protected:
  Status CheckHeadDim(int head_dim) const override;
  void EncodeTile(const TileShape& shape, std::span<const float> rows,
                  std::span<std::byte> bytes) const override;
  Status DecodeTile(const TileShape& shape, std::span<const std::byte> bytes,
                    std::span<float> rows) const override;

 private:
  LloydMaxSpec spec_;
  std::vector<float> levels_, thresholds_;
};

}  // namespace oscar
