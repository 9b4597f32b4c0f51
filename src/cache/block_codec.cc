#include "cache/block_codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "quant/affine_group.h"
#include "quant/kitty.h"
#include "quant/oscar_su.h"
#include "quant/turboquant.h"

namespace oscar {
namespace {

uint32_t LoadWord(const std::byte* block, uint32_t offset) {
  uint32_t word;
  std::memcpy(&word, block + offset, sizeof(word));
  return word;
}

uint32_t LoadCode(const std::byte* block, CodePosition at, int bits) {
  return (LoadWord(block, at.offset) >> at.shift) & ((1u << bits) - 1u);
}

// The word's other codes are kept; blocks start zeroed.
void OrCode(std::byte* block, CodePosition at, uint32_t code) {
  const uint32_t word = LoadWord(block, at.offset) | (code << at.shift);
  std::memcpy(block + at.offset, &word, sizeof(word));
}

float LoadFp16(const std::byte* block, uint32_t offset) {
  Fp16 value;
  std::memcpy(&value.bits, block + offset, sizeof(value.bits));
  return ToFloat(value);
}

void StoreFp16(std::byte* block, uint32_t offset, float value) {
  const Fp16 rounded = ToFp16(value);
  std::memcpy(block + offset, &rounded.bits, sizeof(rounded.bits));
}

float LoadFloat(const std::byte* p) {
  float value;
  std::memcpy(&value, p, sizeof(value));
  return value;
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

  // A code of Bits() bits; the rest of `code` is left out.
  void Store(const BlockLayout& layout, std::byte* block, int token, int dim, uint32_t code) const {
    const int bits = Bits(layout);
    OrCode(block, Code(layout, token, dim), code & (bits == 3 ? 3u : (1u << bits) - 1u));
    if (bits == 3) OrCode(block, HighBit(layout, token, dim), code >> 2 & 1u);
  }
  uint32_t Load(const BlockLayout& layout, const std::byte* block, int token, int dim) const {
    const int bits = Bits(layout);
    uint32_t code = LoadCode(block, Code(layout, token, dim), bits == 3 ? 2 : bits);
    if (bits == 3) code |= LoadCode(block, HighBit(layout, token, dim), 1) << 2;
    return code;
  }
};
constexpr Side kKeys{true}, kValues{false};

// `rows` [64, D].
int EncodeRows(const BlockLayout& layout, Side side, const RowSpec& spec, const Bf16* rows,
               std::byte* block) {
  const int dims = layout.head_dim();
  const auto width = static_cast<size_t>(dims);
  std::array<float, kMaxHeadDim> row;
  std::array<uint8_t, kMaxHeadDim> codes;
  std::array<float, kMaxGroups> scale, min;
  int saturated = 0;
  for (int token = 0; token < kPageTokens; ++token) {
    const std::span<const Bf16> source(rows + static_cast<size_t>(token) * width, width);
    for (int d = 0; d < dims; ++d) row[d] = ToFloat(source[d]);
    saturated += QuantizeRow(spec, {row.data(), width}, codes, scale, min);
    for (int d = 0; d < dims; ++d) side.Store(layout, block, token, d, codes[d]);
    for (int g = 0; g < layout.num_groups(); ++g) {
      StoreFp16(block, side.Scale(layout, token, g), scale[g]);
      StoreFp16(block, side.Min(layout, token, g), min[g]);
    }
  }
  return saturated;
}

void CopyBf16(const BlockLayout& layout, Side side, const Bf16* rows, std::byte* block) {
  for (int token = 0; token < kPageTokens; ++token) {
    for (int d = 0; d < layout.head_dim(); ++d) {
      OrCode(block, side.Code(layout, token, d), rows[token * layout.head_dim() + d].bits);
    }
  }
}

int EncodeCodebook(const BlockLayout& layout, const Bf16* rows, std::byte* block) {
  const auto width = static_cast<size_t>(layout.head_dim());
  std::array<float, kMaxHeadDim> row;
  std::array<uint8_t, kMaxHeadDim> codes;
  int saturated = 0;
  for (int token = 0; token < kPageTokens; ++token) {
    const std::span<float> x(row.data(), width);
    saturated += FiniteRow({rows + static_cast<size_t>(token) * width, width}, x);
    StoreFp16(block, layout.KRowNorm(token), QuantizeCodebookRow(layout.k_bits(), x, codes));
    for (size_t d = 0; d < width; ++d) {
      kKeys.Store(layout, block, token, static_cast<int>(d), codes[d]);
    }
  }
  return saturated;
}

// Keys whose groups run along tokens, of all pages of a run.
int EncodeChannels(const BlockLayout& layout, RowRule rule, const BlockRun& run) {
  const auto dims = static_cast<size_t>(layout.head_dim());
  const size_t tokens = run.k.size() * kPageTokens;
  const size_t group = std::min(tokens, static_cast<size_t>(layout.group_tokens()));
  std::vector<float> x(tokens * dims);
  int saturated = 0;
  for (size_t t = 0; t < tokens; ++t) {
    const std::span<float> row{x.data() + t * dims, dims};
    saturated += FiniteRow({run.k[t / kPageTokens] + t % kPageTokens * dims, dims}, row);
    float norm = run.norms != nullptr ? run.norms[t] : 1.0f;
    if (layout.has_head_norms()) {
      norm = TokenNormOf(row, layout.head_dim());
      std::memcpy(run.blocks[t / kPageTokens] + layout.KNorm(static_cast<int>(t % kPageTokens)),
                  &norm, sizeof(norm));
    }
    for (float& v : row) v /= norm;
  }
  std::vector<uint8_t> index(dims, kNotBoosted);
  if (layout.k_form() == SideForm::kMixed) {
    std::vector<float> sums(dims);
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t d = 0; d < dims; ++d) sums[d] += std::fabs(x[t * dims + d]);
    }
    index = RankChannels(sums, layout.boosted_dims());
    for (size_t d = 0; d < dims; ++d) {
      const size_t page = d / static_cast<size_t>(layout.channel_dims());
      const int at = static_cast<int>(d) % layout.channel_dims();
      run.blocks[page][layout.KIndex(at)] = std::byte{index[d]};
    }
  }
  std::array<float, kMaxGroupTokens> channel;
  std::array<uint8_t, kMaxGroupTokens> codes;
  for (size_t first = 0; first < tokens; first += group) {
    for (size_t d = 0; d < dims; ++d) {
      for (size_t t = 0; t < group; ++t) channel[t] = x[(first + t) * dims + d];
      float scale = 0.0f, min = 0.0f;
      const bool boosted = index[d] != kNotBoosted;
      QuantizeAffine(rule, boosted ? 4 : layout.k_bits(), MetaType::kFp16, {channel.data(), group},
                     codes, &scale, &min);
      const int dim = static_cast<int>(d);
      for (size_t t = 0; t < group; ++t) {
        std::byte* const block = run.blocks[(first + t) / kPageTokens];
        const int token = static_cast<int>((first + t) % kPageTokens);
        kKeys.Store(layout, block, token, dim, codes[t]);
        if (!boosted) continue;
        block[layout.KBoost(index[d]) + static_cast<size_t>(token / 4)] |=
            static_cast<std::byte>(codes[t] >> 2 << token % 4 * 2);
      }
      // A group of the page it begins in, or the half of a pair that has this dim.
      const int at = dim % layout.channel_dims();
      const size_t page = layout.pages_together() > 1
                              ? d / static_cast<size_t>(layout.channel_dims())
                              : first / kPageTokens;
      const int g = static_cast<int>(first % kPageTokens / group);
      StoreFp16(run.blocks[page], layout.KChannelScale(g, at), scale);
      StoreFp16(run.blocks[page], layout.KChannelMin(g, at), min);
    }
  }
  return saturated;
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

int FiniteRow(std::span<const Bf16> source, std::span<float> row) {
  int changed = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    const float v = ToFloat(source[i]);
    row[i] = std::isnan(v) ? 0.0f : std::clamp(v, -kFp16Max, kFp16Max);
    changed += row[i] == v ? 0 : 1;
  }
  return changed;
}

void TokenNorms(std::span<const Bf16* const> rows, int head_dim, std::span<float> norms) {
  const auto dims = static_cast<size_t>(head_dim);
  std::vector<float> k(rows.size() * dims);
  for (size_t t = 0; t < kPageTokens; ++t) {
    for (size_t h = 0; h < rows.size(); ++h) {
      FiniteRow({rows[h] + t * dims, dims}, {k.data() + h * dims, dims});
    }
    norms[t] = TokenNormOf(k, head_dim);
  }
}

int EncodeBlocks(const BlockLayout& layout, const BlockRules& rules, const BlockRun& run) {
  OSCAR_CHECK(std::cmp_equal(run.blocks.size(), layout.pages_together()) &&
              run.k.size() == run.blocks.size() && run.v.size() == run.blocks.size());
  const RowSpec k_spec{rules.k_rule, layout.k_bits(), layout.group_dims(), rules.k_clip_ratio,
                       MetaType::kFp16};
  const RowSpec v_spec{rules.v_rule, layout.v_bits(), layout.group_dims(), rules.v_clip_ratio,
                       MetaType::kFp16};
  int saturated = 0;
  for (size_t i = 0; i < run.blocks.size(); ++i) {
    std::byte* const block = run.blocks[i];
    std::fill_n(block, layout.block_bytes(), std::byte{0});
    if (layout.is_bf16()) {
      CopyBf16(layout, kKeys, run.k[i], block);
      CopyBf16(layout, kValues, run.v[i], block);
      continue;
    }
    if (layout.is_rows()) saturated += EncodeRows(layout, kKeys, k_spec, run.k[i], block);
    if (layout.k_form() == SideForm::kCodebook) {
      saturated += EncodeCodebook(layout, run.k[i], block);
    }
    saturated += EncodeRows(layout, kValues, v_spec, run.v[i], block);
  }
  if (layout.k_form() == SideForm::kChannels || layout.k_form() == SideForm::kMixed) {
    saturated += EncodeChannels(layout, rules.k_rule, run);
  }
  return saturated;
}

int EncodeBlock(const BlockLayout& layout, const BlockRules& rules, std::span<const Bf16> k,
                std::span<const Bf16> v, std::span<std::byte> block) {
  const auto rows = static_cast<size_t>(kPageTokens * layout.head_dim());
  OSCAR_CHECK(k.size() == rows && v.size() == rows && block.size() == layout.block_bytes());
  const Bf16 *const k_rows = k.data(), *const v_rows = v.data();
  std::byte* const out = block.data();
  return EncodeBlocks(layout, rules, {{&k_rows, 1}, {&v_rows, 1}, {&out, 1}});
}

void DecodeBlock(const BlockLayout& layout, const SealedBlock& block, std::span<float> k,
                 std::span<float> v) {
  const int dims = layout.head_dim();
  for (int token = 0; token < kPageTokens; ++token) {
    for (int d = 0; d < dims; ++d) {
      k[static_cast<size_t>(token * dims + d)] = DecodeK(layout, block, token, d);
      v[static_cast<size_t>(token * dims + d)] = DecodeV(layout, block, token, d);
    }
  }
}

void DecodeBlock(const BlockLayout& layout, std::span<const std::byte> block, std::span<float> k,
                 std::span<float> v) {
  OSCAR_CHECK(block.size() == layout.block_bytes() && layout.pages_together() == 1);
  DecodeBlock(layout, SealedBlock{.block = block.data()}, k, v);
}

float DecodeK(const BlockLayout& layout, const SealedBlock& from, int token, int dim) {
  uint32_t code = kKeys.Load(layout, from.block, token, dim);
  if (layout.is_bf16()) return ToFloat(Bf16{static_cast<uint16_t>(code)});
  if (layout.k_form() == SideForm::kCodebook) {
    const float norm = LoadFp16(from.block, layout.KRowNorm(token));
    return static_cast<float>(ByteLevel(layout.k_bits(), static_cast<int>(code))) *
           CodebookFactor(layout.k_bits(), layout.head_dim(), norm);
  }
  if (layout.is_rows()) {
    const int group = dim / layout.group_dims();
    return static_cast<float>(code) * LoadFp16(from.block, layout.KScale(token, group)) +
           LoadFp16(from.block, layout.KMin(token, group));
  }
  const std::byte* const meta = from.MetaBlock(layout, dim);
  const int at = dim % layout.channel_dims();
  if (layout.k_form() == SideForm::kMixed) {
    const int index = static_cast<int>(meta[layout.KIndex(at)]);
    if (index < layout.boosted_dims()) {
      const std::byte high = from.block[layout.KBoost(index) + static_cast<size_t>(token / 4)];
      code |= (static_cast<uint32_t>(high) >> token % 4 * 2 & 3u) << 2;
    }
  }
  const int group = token / std::min(layout.group_tokens(), kPageTokens);
  const float x = static_cast<float>(code) * LoadFp16(meta, layout.KChannelScale(group, at)) +
                  LoadFp16(meta, layout.KChannelMin(group, at));
  const std::byte* const norms = from.Norms(layout);
  return norms == nullptr ? x : x * LoadFloat(norms + static_cast<ptrdiff_t>(token) * 4);
}

float DecodeV(const BlockLayout& layout, const SealedBlock& from, int token, int dim) {
  const uint32_t code = kValues.Load(layout, from.block, token, dim);
  if (layout.is_bf16()) return ToFloat(Bf16{static_cast<uint16_t>(code)});
  const int group = dim / layout.group_dims();
  return static_cast<float>(code) * LoadFp16(from.block, layout.VScale(token, group)) +
         LoadFp16(from.block, layout.VMin(token, group));
}

}  // namespace oscar
