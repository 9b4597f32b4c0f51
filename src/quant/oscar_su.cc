#include "quant/oscar_su.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "quant/affine_rows.h"
#include "quant/channel_runs.h"
#include "quant/uniform_rows.h"

namespace oscar {
namespace {

ChannelSpec Channels(const OscarSuSpec& spec) {
  return {RowRule::kIntegerZero, spec.bits, spec.group_tokens, spec.meta};
}

}  // namespace

float TokenNormOf(std::span<const float> k, int head_dim) {
  const auto dims = static_cast<size_t>(head_dim);
  std::array<float, kMaxHeadDim> squares;
  float sum = 0.0f;
  for (size_t head = 0; head < k.size(); head += dims) {
    for (size_t d = 0; d < dims; ++d) squares[d] = k[head + d] * k[head + d];
    sum += Sum16({squares.data(), dims});
  }
  const float norm = std::sqrt(sum);
  return norm > 0.0f ? norm : 1.0f;
}

std::string OscarSuKeys::description() const {
  const std::string_view norm = spec_.norm == TokenNorm::kNone       ? "no norm"
                                : spec_.norm == TokenNorm::kAllHeads ? "norm over all heads"
                                                                     : "norm per head";
  return fmt::format("OScaR keys, {} bits, {} tokens per channel, {}, {} metadata", spec_.bits,
                     spec_.group_tokens, norm, ToString(spec_.meta));
}

size_t OscarSuKeys::NormsPerToken(const TileShape& shape) const {
  if (spec_.norm == TokenNorm::kNone) return 0;
  return spec_.norm == TokenNorm::kAllHeads ? 1 : static_cast<size_t>(shape.kv_heads);
}

size_t OscarSuKeys::EncodedBytes(const TileShape& shape) const {
  return static_cast<size_t>(shape.tokens) * NormsPerToken(shape) * sizeof(float) +
         shape.rows() / static_cast<size_t>(spec_.group_tokens) *
             ChannelRunBytes(Channels(spec_), shape.head_dim);
}

double OscarSuKeys::BitsPerElement(const TileShape& shape) const {
  const double norm_bits = spec_.norm == TokenNorm::kNone ? 0.0
                           : spec_.norm == TokenNorm::kAllHeads
                               ? 32.0 / (static_cast<double>(shape.kv_heads) * shape.head_dim)
                               : 32.0 / shape.head_dim;
  return spec_.bits + 16.0 * static_cast<double>(MetaBytes(spec_.meta)) / spec_.group_tokens +
         norm_bits;
}

void OscarSuKeys::EncodeTile(const TileShape& shape, std::span<const float> rows,
                             std::span<std::byte> bytes) const {
  const size_t norms = NormsPerToken(shape);
  const size_t token_size = shape.elements() / static_cast<size_t>(std::max(shape.tokens, 1));
  std::vector<float> scaled(rows.begin(), rows.end());
  std::vector<float> norm(static_cast<size_t>(shape.tokens) * norms);
  for (size_t i = 0; i < norm.size(); ++i) {
    const std::span<float> part{scaled.data() + i * (token_size / norms), token_size / norms};
    norm[i] = TokenNormOf(part, shape.head_dim);
    for (float& v : part) v /= norm[i];
  }
  ByteWriter writer(bytes);
  for (int first = 0; first < shape.tokens; first += spec_.group_tokens) {
    const size_t begin = static_cast<size_t>(first) * norms;
    for (size_t i = 0; i < static_cast<size_t>(spec_.group_tokens) * norms; ++i) {
      writer.Meta(norm[begin + i], MetaType::kFp32);
    }
    for (int h = 0; h < shape.kv_heads; ++h) {
      EncodeChannels(Channels(spec_), shape, scaled, first, h, &writer);
    }
  }
}

Status OscarSuKeys::DecodeTile(const TileShape& shape, std::span<const std::byte> bytes,
                               std::span<float> rows) const {
  const size_t norms = NormsPerToken(shape);
  const size_t token_size = shape.elements() / static_cast<size_t>(std::max(shape.tokens, 1));
  ByteReader reader(bytes);
  for (int first = 0; first < shape.tokens; first += spec_.group_tokens) {
    std::vector<float> norm(static_cast<size_t>(spec_.group_tokens) * norms);
    for (float& n : norm) n = reader.Meta(MetaType::kFp32);
    for (int h = 0; h < shape.kv_heads; ++h) {
      DecodeChannels(Channels(spec_), shape, first, h, &reader, rows);
    }
    for (size_t i = 0; i < norm.size(); ++i) {
      const size_t at = static_cast<size_t>(first) * token_size + i * (token_size / norms);
      for (float& v : rows.subspan(at, token_size / norms)) v *= norm[i];
    }
  }
  return {};
}

std::unique_ptr<KvQuantizer> MakeOscarSuValues(int bits, int group_dims, MetaType meta) {
  return std::make_unique<AffineRows>(AffineRowSpec{RowRule::kIntegerZero, bits, group_dims, meta});
}

}  // namespace oscar
