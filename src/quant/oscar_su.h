// OScaR of Su et al. (ZunhaiSu/OScaR-KV-Quant, arXiv 2605.19660): keys rotated by a Hadamard, each
// token divided by its norm, then coded per channel; values in groups of 32 channels.
//
// K, after RoPE and the orthonormal Hadamard of the whole head (the recipe's part):
//   n_t = TokenNormOf(k): sqrt(sum of k^2 over all KV heads and dims of token t), 1 where that is
//   not positive; the ablation kPerHead takes one norm per (token, head), kNone none. k / n_t is
//   coded per channel over blocks of 32 tokens by the kIntegerZero rule of quant/affine_group.h;
//   decoding multiplies by n_t.
// Block of 32 tokens:   norm fp32 [32] or [32, heads] | for each head: codes [D, 32] | scale [D] |
//   offset [D]
// Bits of K: 2 + 32 / 32 and 32 / (heads D) for the norm (32 / D per head); 3.03 with 8 heads of
// 128. V, Hadamard folded into the weights: AffineRows with kIntegerZero, groups of 32; 3.0 bits.
//
// Published: scale and offset in the activation type, BF16 or FP16; fp16 here, the finer one. The
// published kernel rounds k / n_t twice to 16 bits; this does not. A norm over all heads
// makes the codes depend on how heads are split over devices; that is the method's own property.
#pragma once

#include <memory>

#include "quant/kv_quantizer.h"
#include "quant/page_shape.h"
#include "quant/row_quantizer.h"

namespace oscar {

// The norm of the keys of one token, [heads, D] numbers: squares in fp32, each head summed by
// Sum16, heads in order; 1 where that is not positive. REQUIRES: finite numbers within +-65504.
float TokenNormOf(std::span<const float> k, int head_dim);

struct OscarSuSpec {
  int bits = 2;
  int group_tokens = 32;
  TokenNorm norm = TokenNorm::kAllHeads;
  MetaType meta = MetaType::kFp16;
};

class OscarSuKeys : public KvQuantizer {
 public:
  explicit OscarSuKeys(const OscarSuSpec& spec) : spec_(spec) {}
  std::string description() const override;
  int tokens_per_run() const override { return spec_.group_tokens; }
  size_t EncodedBytes(const TileShape& shape) const override;
  double BitsPerElement(const TileShape& shape) const override;

 protected:
  void EncodeTile(const TileShape& shape, std::span<const float> rows,
                  std::span<std::byte> bytes) const override;
  Status DecodeTile(const TileShape& shape, std::span<const std::byte> bytes,
                    std::span<float> rows) const override;

 private:
  // Norms per token: 0, 1 or one per head.
  size_t NormsPerToken(const TileShape& shape) const;

  OscarSuSpec spec_;
};

std::unique_ptr<KvQuantizer> MakeOscarSuValues(int bits, int group_dims, MetaType meta);

}  // namespace oscar
