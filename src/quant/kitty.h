// Kitty keys (Summer-Summer/Kitty): pages of 128 tokens, 2 bits for every channel and two more for
// the channels that matter.
//
// Per page and head: channels are ranked by mean |k| over the 128 tokens (sums in fp32, tokens in
// order; ties: the lower channel);
// the first round(f D) get 4 bits, the rest 2. Per channel over the page, L = 3 or 15:
//   s = max(max - min, 1e-8) / L, at least 2^-24;  q = clamp(floor((x - min) / s + 1/2), 0, L)
// with s and min rounded to fp16 first (kMinMax of quant/affine_group.h). A 4-bit code is split
// into its low and high two bits. Each page of each head is
//   low plane [D, 128] | high plane [boosted, 128] | index bytes [D] | scale [D] | min [D]
// index byte: position of the channel in the high plane, 255 for a channel without one.
// Bits: 2 + 2 round(f D) / D + 8 / 128 + 32 / 128; 2.5625 at f = 1/8.
// V is INT2 min/max rows (quant/uniform_rows.h).
//
// The published range of a constant channel is 1e-6. The published kernel fixes f = 1/4, its
// scripts use 0.2 and 0.1, and the 2.39 bits that comparisons quote are nearest to 1/8; so f is a
// parameter. Decode refuses index bytes that no encoder writes (positions that do not count up from
// 0 to the last).
#pragma once

#include <span>
#include <vector>

#include "quant/kv_quantizer.h"
#include "quant/page_shape.h"

namespace oscar {

// The position of each channel in the high plane, or kNotBoosted, from the sums of |k| of each: the
// `boosted` largest, in the order of channels.
inline constexpr uint8_t kNotBoosted = 255;
std::vector<uint8_t> RankChannels(std::span<const float> sums, int boosted);

class KittyKeys : public GroupedQuantizer {
 public:
  static constexpr int kPage = kMaxGroupTokens;
  // REQUIRES: boosted_fraction in [0, 1).
  explicit KittyKeys(double boosted_fraction);
  std::string description() const override;
  int tokens_per_run() const override { return kPage; }
  double BitsPerElement(const TileShape& shape) const override;

 protected:
  Status CheckHeadDim(int head_dim) const override;
  size_t RunBytes(int head_dim) const override;
  void EncodeRun(const TileShape& shape, std::span<const float> rows, int first, int head,
                 ByteWriter& writer) const override;
  Status DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                   std::span<float> rows) const override;

 private:
  int Boosted(int head_dim) const;

  double boosted_fraction_;
};

}  // namespace oscar
