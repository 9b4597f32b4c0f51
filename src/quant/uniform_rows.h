// Rows as they are, and rows by the row quantiser (quant/row_quantizer.h has the arithmetic).
//
// Bf16Rows: each number rounds to BF16 (to nearest even). NaN and infinities are kept. 16 bits.
//
// UniformRows: each row [D] is   codes [D] | scale, min of each group (symmetric: scale alone).
// Bits: b + 2 m / G, symmetric b + m / G, with m the bits of a metadata number and G the group.
// The methods built on it:
//   naive        kMinMax, 2 bits, no rotation
//   OSCAR        kMinMax with clip .96 (K) and .92 (V) on calibrated rotations, groups of 128
//   oscar+       kMseFitUnbiased (K), kMseFit or clip .92 (V)
//   Saw-INT4     kMinMax, 4 bits, block Hadamard on K (togethercomputer/saw-int4: order 16 to 128)
//   QuaRot       quant/quarot.h says which rules
//   lloyd-max    kLloydMax with clip .96 (K) and .92 (V) on a Hadamard
//   TurboQuant V kMinMax, 3 bits, no rotation. Published: s at least 1e-8, which its fp16 rounds
//                to 0; here at least 2^-24.
#pragma once

#include "quant/kv_quantizer.h"
#include "quant/row_quantizer.h"

namespace oscar {

class Bf16Rows : public GroupedQuantizer {
 public:
  std::string description() const override { return "BF16"; }
  double BitsPerElement(const TileShape&) const override { return 16.0; }

 protected:
  size_t RunBytes(int head_dim) const override;
  void EncodeRun(const TileShape& shape, std::span<const float> rows, int first, int head,
                 ByteWriter& writer) const override;
  Status DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                   std::span<float> rows) const override;
  bool saturates() const override { return false; }
};

class UniformRows : public GroupedQuantizer {
 public:
  explicit UniformRows(const RowSpec& spec) : spec_(spec) {}
  const RowSpec& spec() const { return spec_; }
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
  RowSpec spec_;
};

// "fp16", "bf16", "fp32".
std::string_view ToString(MetaType type);
// The one complaint about groups that do not divide a head, worded once for every row method.
Status CheckGroupDims(const std::string& who, int group_dims, int head_dim);

}  // namespace oscar
