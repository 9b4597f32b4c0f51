// KIVI (jy-yuan/KIVI): keys per channel along tokens, values per token along channels.
//
// K, after RoPE: the G tokens of one block and one channel share (scale, min) by the kRealMin rule
// of quant/affine_group.h. Block of G tokens, for each head:
//     codes [D, G] | scale [D] | min [D]          bits: b + 2 m / G
// V: AffineRows with kRealMin and groups of consecutive channels.
// Published: G = 32, residual 128 (3.0 bits). KIVI-KV2*, the variant in Kitty's scripts: G = 128,
// the first 32 tokens unquantised (2.25 bits). Metadata in the model's type there, fp16 here.
//
// The residual of newest tokens is the cache's geometry, not the codec's. Published KIVI empties
// its K buffer whenever it reaches 128 tokens; our geometry keeps at least 128, so ours is never
// coarser.
#pragma once

#include <memory>

#include "quant/channel_runs.h"
#include "quant/kv_quantizer.h"
#include "quant/row_quantizer.h"

namespace oscar {

class KiviKeys : public GroupedQuantizer {
 public:
  KiviKeys(int bits, int group_tokens, MetaType meta)
      : bits_(bits), group_tokens_(group_tokens), meta_(meta) {}
  std::string description() const override;
  int tokens_per_run() const override { return group_tokens_; }
  double BitsPerElement(const TileShape& shape) const override;

 protected:
  size_t RunBytes(int head_dim) const override;
  void EncodeRun(const TileShape& shape, std::span<const float> rows, int first, int head,
                 ByteWriter& writer) const override;
  Status DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                   std::span<float> rows) const override;

 private:
  ChannelSpec Channels() const;

  int bits_;
  int group_tokens_;  // a multiple of 16
  MetaType meta_;
};

std::unique_ptr<KvQuantizer> MakeKiviValues(int bits, int group_dims, MetaType meta);

}  // namespace oscar
