#include "quant/uniform_rows.h"

#include <fmt/core.h>

#include <array>

#include "quant/byte_stream.h"

namespace oscar {
namespace {

std::string_view NameOf(RowRule rule) {
  switch (rule) {
    case RowRule::kMinMax:
      return "min/max";
    case RowRule::kSymmetric:
      return "symmetric";
    case RowRule::kMseFit:
      return "least-squares fit";
    case RowRule::kMseFitUnbiased:
      return "unbiased least-squares fit";
    case RowRule::kRealMin:
      return "real-min";
    case RowRule::kIntegerZero:
      return "integer-zero";
    case RowRule::kLloydMax:
      return "equally spaced Lloyd-Max";
  }
  return "";
}

}  // namespace

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

size_t Bf16Rows::RunBytes(int head_dim) const { return 2 * static_cast<size_t>(head_dim); }

void Bf16Rows::EncodeRun(const TileShape& shape, std::span<const float> rows, int first, int head,
                         ByteWriter& writer) const {
  const auto row = rows.subspan(RowAt(shape, first, head), static_cast<size_t>(shape.head_dim));
  for (const float v : row) writer.Meta(v, MetaType::kBf16);
}

Status Bf16Rows::DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                           std::span<float> rows) const {
  const auto row = rows.subspan(RowAt(shape, first, head), static_cast<size_t>(shape.head_dim));
  for (float& v : row) v = reader.Meta(MetaType::kBf16);
  return {};
}

std::string UniformRows::description() const {
  return fmt::format("{} rows, {} bits, groups of {}, {} metadata{}", NameOf(spec_.rule),
                     spec_.bits, spec_.group_dims, ToString(spec_.meta),
                     spec_.clip_ratio > 0.0f ? fmt::format(", clip {}", spec_.clip_ratio) : "");
}

Status UniformRows::CheckHeadDim(int head_dim) const {
  return CheckGroupDims(description(), spec_.group_dims, head_dim);
}

size_t UniformRows::RunBytes(int head_dim) const {
  const auto dims = static_cast<size_t>(head_dim);
  const size_t numbers = spec_.rule == RowRule::kSymmetric ? 1 : 2;
  return CodeBytes(dims, spec_.bits) +
         dims / static_cast<size_t>(spec_.group_dims) * numbers * MetaBytes(spec_.meta);
}

double UniformRows::BitsPerElement(const TileShape&) const { return oscar::BitsPerElement(spec_); }

void UniformRows::EncodeRun(const TileShape& shape, std::span<const float> rows, int first,
                            int head, ByteWriter& writer) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const size_t groups = dims / static_cast<size_t>(spec_.group_dims);
  std::vector<uint8_t> codes(dims);
  std::vector<float> scale(groups), min(groups);
  QuantizeRow(spec_, rows.subspan(RowAt(shape, first, head), dims), codes, scale, min);
  writer.Codes(codes, spec_.bits);
  for (size_t g = 0; g < groups; ++g) {
    writer.Meta(scale[g], spec_.meta);
    if (spec_.rule != RowRule::kSymmetric) writer.Meta(min[g], spec_.meta);
  }
}

Status UniformRows::DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                              std::span<float> rows) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const size_t groups = dims / static_cast<size_t>(spec_.group_dims);
  const auto half = static_cast<float>(1 << (spec_.bits - 1));
  std::vector<uint8_t> codes(dims);
  std::vector<float> scale(groups), min(groups);
  reader.Codes(codes, spec_.bits);
  for (size_t g = 0; g < groups; ++g) {
    scale[g] = reader.Meta(spec_.meta);
    min[g] = spec_.rule == RowRule::kSymmetric ? -half * scale[g] : reader.Meta(spec_.meta);
  }
  DequantizeRow(spec_, codes, scale, min, rows.subspan(RowAt(shape, first, head), dims));
  return {};
}

}  // namespace oscar
