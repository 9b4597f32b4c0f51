#include "quant/affine_rows.h"

#include <fmt/core.h>

#include "quant/byte_stream.h"
#include "quant/uniform_rows.h"

namespace oscar {

std::string AffineRows::description() const {
  return fmt::format("{} rows, {} bits, groups of {}, {} metadata",
                     spec_.rule == AffineRule::kRealMin ? "min/max (half to even)" : "integer-zero",
                     spec_.bits, spec_.group_dims, ToString(spec_.meta));
}

Status AffineRows::CheckHeadDim(int head_dim) const {
  return CheckGroupDims(description(), spec_.group_dims, head_dim);
}

size_t AffineRows::EncodedBytes(const TileShape& shape) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  return shape.rows() * (CodeBytes(dims, spec_.bits) +
                         dims / static_cast<size_t>(spec_.group_dims) * 2 * MetaBytes(spec_.meta));
}

double AffineRows::BitsPerElement(const TileShape&) const {
  return spec_.bits + 16.0 * static_cast<double>(MetaBytes(spec_.meta)) / spec_.group_dims;
}

void AffineRows::EncodeTile(const TileShape& shape, std::span<const float> rows,
                            std::span<std::byte> bytes) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const auto group = static_cast<size_t>(spec_.group_dims);
  std::vector<uint8_t> codes(dims);
  std::vector<float> scale(dims / group), offset(dims / group);
  ByteWriter writer(bytes);
  for (size_t r = 0; r < shape.rows(); ++r) {
    for (size_t g = 0; g < dims / group; ++g) {
      QuantizeAffine(spec_.rule, spec_.bits, spec_.meta, rows.subspan(r * dims + g * group, group),
                     {codes.data() + g * group, group}, &scale[g], &offset[g]);
    }
    writer.Codes(codes, spec_.bits);
    for (size_t g = 0; g < dims / group; ++g) {
      writer.Meta(scale[g], spec_.meta);
      writer.Meta(offset[g], spec_.meta);
    }
  }
}

Status AffineRows::DecodeTile(const TileShape& shape, std::span<const std::byte> bytes,
                              std::span<float> rows) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const auto group = static_cast<size_t>(spec_.group_dims);
  std::vector<uint8_t> codes(dims);
  ByteReader reader(bytes);
  for (size_t r = 0; r < shape.rows(); ++r) {
    reader.Codes(codes, spec_.bits);
    for (size_t g = 0; g < dims / group; ++g) {
      const float scale = reader.Meta(spec_.meta), offset = reader.Meta(spec_.meta);
      for (size_t i = g * group; i < (g + 1) * group; ++i) {
        rows[r * dims + i] = static_cast<float>(codes[i]) * scale + offset;
      }
    }
  }
  return {};
}

}  // namespace oscar
