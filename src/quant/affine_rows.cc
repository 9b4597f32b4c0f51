#include "quant/affine_rows.h"

#include <fmt/core.h>

#include "quant/byte_stream.h"
#include "quant/uniform_rows.h"

namespace oscar {

std::string AffineRows::description() const {
  return fmt::format("{} rows, {} bits, groups of {}, {} metadata",
                     spec_.rule == RowRule::kRealMin ? "min/max (half to even)" : "integer-zero",
                     spec_.bits, spec_.group_dims, ToString(spec_.meta));
}

Status AffineRows::CheckHeadDim(int head_dim) const {
  return CheckGroupDims(description(), spec_.group_dims, head_dim);
}

size_t AffineRows::RunBytes(int head_dim) const {
  const auto dims = static_cast<size_t>(head_dim);
  return CodeBytes(dims, spec_.bits) +
         dims / static_cast<size_t>(spec_.group_dims) * 2 * MetaBytes(spec_.meta);
}

double AffineRows::BitsPerElement(const TileShape&) const {
  return spec_.bits + 16.0 * static_cast<double>(MetaBytes(spec_.meta)) / spec_.group_dims;
}

void AffineRows::EncodeRun(const TileShape& shape, std::span<const float> rows, int first, int head,
                           ByteWriter& writer) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const auto group = static_cast<size_t>(spec_.group_dims);
  const size_t row = RowAt(shape, first, head);
  std::vector<uint8_t> codes(dims);
  std::vector<float> scale(dims / group), offset(dims / group);
  for (size_t g = 0; g < dims / group; ++g) {
    QuantizeAffine(spec_.rule, spec_.bits, spec_.meta, rows.subspan(row + g * group, group),
                   {codes.data() + g * group, group}, &scale[g], &offset[g]);
  }
  writer.Codes(codes, spec_.bits);
  for (size_t g = 0; g < dims / group; ++g) {
    writer.Meta(scale[g], spec_.meta);
    writer.Meta(offset[g], spec_.meta);
  }
}

Status AffineRows::DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                             std::span<float> rows) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const auto group = static_cast<size_t>(spec_.group_dims);
  const size_t row = RowAt(shape, first, head);
  std::vector<uint8_t> codes(dims);
  reader.Codes(codes, spec_.bits);
  for (size_t g = 0; g < dims / group; ++g) {
    const float scale = reader.Meta(spec_.meta), offset = reader.Meta(spec_.meta);
    for (size_t i = g * group; i < (g + 1) * group; ++i) {
      rows[row + i] = static_cast<float>(codes[i]) * scale + offset;
    }
  }
  return {};
}

}  // namespace oscar
