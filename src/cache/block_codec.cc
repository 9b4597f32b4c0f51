#include "cache/block_codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"

namespace oscar {
namespace {

uint32_t LoadWord(std::span<const std::byte> block, uint32_t offset) {
  uint32_t word;
  std::memcpy(&word, block.data() + offset, sizeof(word));
  return word;
}

uint32_t LoadCode(std::span<const std::byte> block, CodePosition at, int bits) {
  return (LoadWord(block, at.offset) >> at.shift) & ((1u << bits) - 1u);
}

// The word's other codes are kept; blocks start zeroed.
void OrCode(std::span<std::byte> block, CodePosition at, uint32_t code) {
  const uint32_t word = LoadWord(block, at.offset) | (code << at.shift);
  std::memcpy(block.data() + at.offset, &word, sizeof(word));
}

Fp16 LoadFp16(std::span<const std::byte> block, uint32_t offset) {
  Fp16 value;
  std::memcpy(&value.bits, block.data() + offset, sizeof(value.bits));
  return value;
}

void StoreFp16(std::span<std::byte> block, uint32_t offset, Fp16 value) {
  std::memcpy(block.data() + offset, &value.bits, sizeof(value.bits));
}

// K and V differ only in where their codes and metadata lie.
struct Side {
  bool is_k;
  int Bits(const BlockLayout& layout) const { return is_k ? layout.k_bits() : layout.v_bits(); }
  CodePosition Code(const BlockLayout& layout, int token, int dim) const {
    return is_k ? layout.KCode(token, dim) : layout.VCode(token, dim);
  }
  CodePosition HighBit(const BlockLayout& layout, int token, int dim) const {
    return is_k ? layout.KHighBit(token, dim) : layout.VHighBit(token, dim);
  }
  uint32_t Scale(const BlockLayout& layout, int token, int group) const {
    return is_k ? layout.KScale(token, group) : layout.VScale(token, group);
  }
  uint32_t Min(const BlockLayout& layout, int token, int group) const {
    return is_k ? layout.KMin(token, group) : layout.VMin(token, group);
  }
};
constexpr Side kSides[2] = {{true}, {false}};

int EncodeSide(const BlockLayout& layout, Side side, const RowSpec& spec,
               std::span<const Bf16> rows, std::span<std::byte> block) {
  const int dims = layout.head_dim();
  std::array<float, kMaxHeadDim> row;
  std::array<uint8_t, kMaxHeadDim> codes;
  std::array<float, kMaxGroups> scale, min;
  int saturated = 0;
  for (int token = 0; token < kPageTokens; ++token) {
    const auto source = rows.subspan(static_cast<size_t>(token * dims), static_cast<size_t>(dims));
    if (layout.is_bf16()) {
      for (int d = 0; d < dims; ++d) OrCode(block, side.Code(layout, token, d), source[d].bits);
      continue;
    }
    for (int d = 0; d < dims; ++d) row[d] = ToFloat(source[d]);
    saturated += QuantizeRow(spec, {row.data(), source.size()}, codes, scale, min);
    const bool split = side.Bits(layout) == 3;
    for (int d = 0; d < dims; ++d) {
      OrCode(block, side.Code(layout, token, d), split ? codes[d] & 3u : codes[d]);
      if (split) OrCode(block, side.HighBit(layout, token, d), codes[d] >> 2);
    }
    for (int g = 0; g < layout.num_groups(); ++g) {
      StoreFp16(block, side.Scale(layout, token, g), ToFp16(scale[g]));
      StoreFp16(block, side.Min(layout, token, g), ToFp16(min[g]));
    }
  }
  return saturated;
}

float DecodeElement(const BlockLayout& layout, Side side, std::span<const std::byte> block,
                    int token, int dim) {
  const int bits = side.Bits(layout);
  uint32_t code = LoadCode(block, side.Code(layout, token, dim), bits == 3 ? 2 : bits);
  if (bits == 3) code |= LoadCode(block, side.HighBit(layout, token, dim), 1) << 2;
  if (layout.is_bf16()) return ToFloat(Bf16{static_cast<uint16_t>(code)});
  const int group = dim / layout.group_dims();
  const float scale = ToFloat(LoadFp16(block, side.Scale(layout, token, group)));
  const float min = ToFloat(LoadFp16(block, side.Min(layout, token, group)));
  return static_cast<float>(code) * scale + min;
}

}  // namespace

Status CheckBlockShape(int head_dim, int group_dims) {
  if (!IsHeadDim(head_dim)) {
    return Unimplemented(fmt::format(
        "head dim {}: cache pages exist for {}{}", head_dim, fmt::join(kHeadDims, ", "),
        (head_dim & (head_dim - 1)) != 0 ? " (no Sylvester Hadamard of another size)" : ""));
  }
  if (!BlockLayout::IsSupported(head_dim, group_dims)) {
    return InvalidArgument(
        fmt::format("group size {}: must be 32, 64, 128 or the head dim and divide it ({})",
                    group_dims, head_dim));
  }
  return {};
}

int EncodeBlock(const BlockLayout& layout, const BlockRules& rules, std::span<const Bf16> k,
                std::span<const Bf16> v, std::span<std::byte> block) {
  const auto rows = static_cast<size_t>(kPageTokens * layout.head_dim());
  OSCAR_CHECK(k.size() == rows && v.size() == rows && block.size() == layout.block_bytes());
  std::fill(block.begin(), block.end(), std::byte{0});
  const RowSpec k_spec{rules.k_rule, layout.k_bits(), layout.group_dims(), rules.k_clip_ratio,
                       MetaType::kFp16};
  const RowSpec v_spec{rules.v_rule, layout.v_bits(), layout.group_dims(), rules.v_clip_ratio,
                       MetaType::kFp16};
  return EncodeSide(layout, kSides[0], k_spec, k, block) +
         EncodeSide(layout, kSides[1], v_spec, v, block);
}

void DecodeBlock(const BlockLayout& layout, std::span<const std::byte> block, std::span<float> k,
                 std::span<float> v) {
  const int dims = layout.head_dim();
  for (int token = 0; token < kPageTokens; ++token) {
    for (int d = 0; d < dims; ++d) {
      k[static_cast<size_t>(token * dims + d)] = DecodeK(layout, block, token, d);
      v[static_cast<size_t>(token * dims + d)] = DecodeV(layout, block, token, d);
    }
  }
}

float DecodeK(const BlockLayout& layout, std::span<const std::byte> block, int token, int dim) {
  return DecodeElement(layout, kSides[0], block, token, dim);
}

float DecodeV(const BlockLayout& layout, std::span<const std::byte> block, int token, int dim) {
  return DecodeElement(layout, kSides[1], block, token, dim);
}

}  // namespace oscar
