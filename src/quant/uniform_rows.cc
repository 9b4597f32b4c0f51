#include "quant/uniform_rows.h"

#include <fmt/core.h>

#include <array>

#include "quant/byte_stream.h"

namespace oscar {

std::string_view ToString(MetaType type) {
  return type == MetaType::kFp16 ? "fp16" : type == MetaType::kBf16 ? "bf16" : "fp32";
}

Status CheckGroupDims(const std::string& who, int group_dims, int head_dim) {
  if (group_dims < 16 || group_dims % 16 != 0 || head_dim % group_dims != 0) {
    return InvalidArgument(
        fmt::format("{}: groups of {} must be a multiple of 16 and divide the head dim {}", who,
                    group_dims, head_dim));
  }
  return {};
}

void Bf16Rows::EncodeTile(const TileShape&, std::span<const float> rows,
                          std::span<std::byte> bytes) const {
  ByteWriter writer(bytes);
  for (const float v : rows) writer.Meta(v, MetaType::kBf16);
}

Status Bf16Rows::DecodeTile(const TileShape&, std::span<const std::byte> bytes,
                            std::span<float> rows) const {
  ByteReader reader(bytes);
  for (float& v : rows) v = reader.Meta(MetaType::kBf16);
  return {};
}

std::string UniformRows::description() const {
  const std::string_view rule = spec_.rule == RowRule::kMinMax      ? "min/max"
                                : spec_.rule == RowRule::kSymmetric ? "symmetric"
                                : spec_.rule == RowRule::kMseFit    ? "least-squares fit"
                                                                    : "unbiased least-squares fit";
  return fmt::format("{} rows, {} bits, groups of {}, {} metadata{}", rule, spec_.bits,
                     spec_.group_dims, ToString(spec_.meta),
                     spec_.clip_ratio > 0.0f ? fmt::format(", clip {}", spec_.clip_ratio) : "");
}

Status UniformRows::CheckHeadDim(int head_dim) const {
  return CheckGroupDims(description(), spec_.group_dims, head_dim);
}

size_t UniformRows::EncodedBytes(const TileShape& shape) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const size_t numbers = spec_.rule == RowRule::kSymmetric ? 1 : 2;
  return shape.rows() *
         (CodeBytes(dims, spec_.bits) +
          dims / static_cast<size_t>(spec_.group_dims) * numbers * MetaBytes(spec_.meta));
}

double UniformRows::BitsPerElement(const TileShape&) const { return oscar::BitsPerElement(spec_); }

void UniformRows::EncodeTile(const TileShape& shape, std::span<const float> rows,
                             std::span<std::byte> bytes) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const size_t groups = dims / static_cast<size_t>(spec_.group_dims);
  std::vector<uint8_t> codes(dims);
  std::vector<float> scale(groups), min(groups);
  ByteWriter writer(bytes);
  for (size_t r = 0; r < shape.rows(); ++r) {
    QuantizeRow(spec_, rows.subspan(r * dims, dims), codes, scale, min);
    writer.Codes(codes, spec_.bits);
    for (size_t g = 0; g < groups; ++g) {
      writer.Meta(scale[g], spec_.meta);
      if (spec_.rule != RowRule::kSymmetric) writer.Meta(min[g], spec_.meta);
    }
  }
}

Status UniformRows::DecodeTile(const TileShape& shape, std::span<const std::byte> bytes,
                               std::span<float> rows) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const size_t groups = dims / static_cast<size_t>(spec_.group_dims);
  const auto half = static_cast<float>(1 << (spec_.bits - 1));
  std::vector<uint8_t> codes(dims);
  std::vector<float> scale(groups), min(groups);
  ByteReader reader(bytes);
  for (size_t r = 0; r < shape.rows(); ++r) {
    reader.Codes(codes, spec_.bits);
    for (size_t g = 0; g < groups; ++g) {
      scale[g] = reader.Meta(spec_.meta);
      min[g] = spec_.rule == RowRule::kSymmetric ? -half * scale[g] : reader.Meta(spec_.meta);
    }
    DequantizeRow(spec_, codes, scale, min, rows.subspan(r * dims, dims));
  }
  return {};
}

}  // namespace oscar
