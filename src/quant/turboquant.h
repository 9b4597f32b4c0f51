// TurboQuant keys as vLLM ships them (presets *_nc; the paper is arXiv 2504.19874, and vLLM leaves
// its QJL stage out), on rows that the recipe has rotated by the Hadamard of the whole head.
//
//   n = |k|, u = sqrt(D) k / (n + 1e-8): a random unit vector has coordinates near N(0, 1 / D), so
//   u is near N(0, 1). code = number of Lloyd-Max thresholds (quant/lloyd_max.h) strictly below u.
//   "nc": the decoder brings the vector of levels back to unit length, k^ = n level[code] /
//   |levels|; without it k^ = n level[code] / sqrt(D).
// Each row [D] is   codes [D] | n fp16.   Bits: b + 16 / D; 3.125 at 3 bits and D = 128.
//
// A zero row decodes to 0; a norm beyond 65504 saturates and shortens its row.
// V is plain min/max rows, unrotated (quant/uniform_rows.h): with 3 bits the pair costs 3.19 bits.
// vLLM keeps the first and last two layers in 16 bits; comparisons quote it without that.
#pragma once

#include "quant/kv_quantizer.h"
#include "quant/row_quantizer.h"

namespace oscar {

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
