// Rows in groups of consecutive dims, coded by quant/affine_group.h: the V side of KIVI (kRealMin,
// groups of 32 or 128 channels of one token) and of OScaR (kIntegerZero, groups of 32), and
// QuaRot's asymmetric form (kIntegerZero, the whole head).
//
// Each row [D] is   codes [D] | scale, offset of each group.   Bits: b + 2 m / G.
#pragma once

#include "quant/affine_group.h"
#include "quant/kv_quantizer.h"

namespace oscar {

struct AffineRowSpec {
  RowRule rule = RowRule::kRealMin;
  int bits = 2;  // 2, 3, 4 or 8
  int group_dims = 32;
  MetaType meta = MetaType::kFp16;
};

class AffineRows : public GroupedQuantizer {
 public:
  explicit AffineRows(const AffineRowSpec& spec) : spec_(spec) {}
  std::string description() const override;
  double BitsPerElement(const TileShape& shape) const override;

 protected:
  Status CheckHeadDim(int head_dim) const override;
  size_t RunBytes(int head_dim) const override;
  void EncodeRun(const TileShape& shape, std::span<const float> rows, int first, int head,
                 ByteWriter& writer) const override;
  Status DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                   std::span<float> rows) const override;

 private:
  AffineRowSpec spec_;
};

}  // namespace oscar
