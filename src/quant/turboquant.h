// TurboQuant keys as vLLM ships them (presets *_nc; the paper is arXiv 2504.19874, and vLLM leaves
// its QJL stage out), on rows that the recipe has rotated by the Hadamard of the whole head.
//
//   n = |k|, u = sqrt(D) k / (n + 1e-8): a random unit vector has coordinates near N(0, 1 / D), so
//   u is near N(0, 1). code = number of Lloyd-Max thresholds (quant/lloyd_max.h) strictly below u.
//   "nc": the vector of levels is brought back to unit length, k^ = n level[code] / |levels|;
//   without it k^ = n level[code] / sqrt(D). "nc" is what cache pages hold: the levels are those of
//   ByteLevel (whole numbers B; quant/page_shape.h), and what is stored is the norm that makes the
//   length right, n' = n u sqrt(D) / |B| with u = ByteLevelUnit, so that k^ = B[code] n' / (u
//   sqrt(D)) and a reader need not know the other codes of the row.
// Each row [D] is   codes [D] | n or n' fp16.   Bits: b + 16 / D; 3.125 at 3 bits and D = 128.
//
// A zero row decodes to 0; a norm beyond 65504 saturates and shortens its row.
// V is plain min/max rows, unrotated (quant/uniform_rows.h): with 3 bits the pair costs 3.19 bits.
// vLLM keeps the first and last two layers in 16 bits; comparisons quote it without that.
#pragma once

#include <cmath>
#include <span>

#include "quant/kv_quantizer.h"
#include "quant/page_shape.h"
#include "quant/row_quantizer.h"

namespace oscar {

// Codes one row of at most kMaxHeadDim finite numbers by the "nc" form; returns n' rounded to fp16.
// Squares are summed by Sum16.
float QuantizeCodebookRow(int bits, std::span<const float> row, std::span<uint8_t> codes);
// What a reader multiplies ByteLevel(code) by: n' / (u sqrt(D)).
OSCAR_HD inline float CodebookFactor(int bits, int head_dim, float norm) {
  return norm * (1.0f / (ByteLevelUnit(bits) * sqrtf(static_cast<float>(head_dim))));
}

class TurboQuantKeys : public GroupedQuantizer {
 public:
  // REQUIRES: bits 2, 3 or 4.
  TurboQuantKeys(int bits, bool renormalize);
  std::string description() const override;
  double BitsPerElement(const TileShape& shape) const override;

 protected:
  size_t RunBytes(int head_dim) const override;
  void EncodeRun(const TileShape& shape, std::span<const float> rows, int first, int head,
                 ByteWriter& writer) const override;
  Status DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                   std::span<float> rows) const override;

 private:
  int bits_;
  bool renormalize_;
  std::vector<float> levels_, thresholds_;
};

}  // namespace oscar
