#include "quant/kivi.h"

#include <fmt/core.h>

#include "quant/affine_rows.h"
#include "quant/channel_runs.h"
#include "quant/uniform_rows.h"

namespace oscar {

std::string KiviKeys::description() const {
  return fmt::format("KIVI keys, {} bits, {} tokens a channel, {} metadata", bits_, group_tokens_,
                     ToString(meta_));
}

size_t KiviKeys::EncodedBytes(const TileShape& shape) const {
  const ChannelSpec spec{AffineRule::kRealMin, bits_, group_tokens_, meta_};
  return shape.rows() / static_cast<size_t>(group_tokens_) * ChannelRunBytes(spec, shape.head_dim);
}

double KiviKeys::BitsPerElement(const TileShape&) const {
  return bits_ + 16.0 * static_cast<double>(MetaBytes(meta_)) / group_tokens_;
}

void KiviKeys::EncodeTile(const TileShape& shape, std::span<const float> rows,
                          std::span<std::byte> bytes) const {
  const ChannelSpec spec{AffineRule::kRealMin, bits_, group_tokens_, meta_};
  ByteWriter writer(bytes);
  for (int first = 0; first < shape.tokens; first += group_tokens_) {
    for (int h = 0; h < shape.kv_heads; ++h) EncodeChannels(spec, shape, rows, first, h, &writer);
  }
}

Status KiviKeys::DecodeTile(const TileShape& shape, std::span<const std::byte> bytes,
                            std::span<float> rows) const {
  const ChannelSpec spec{AffineRule::kRealMin, bits_, group_tokens_, meta_};
  ByteReader reader(bytes);
  for (int first = 0; first < shape.tokens; first += group_tokens_) {
    for (int h = 0; h < shape.kv_heads; ++h) DecodeChannels(spec, shape, first, h, &reader, rows);
  }
  return {};
}

std::unique_ptr<KvQuantizer> MakeKiviValues(int bits, int group_dims, MetaType meta) {
  return std::make_unique<AffineRows>(AffineRowSpec{AffineRule::kRealMin, bits, group_dims, meta});
}

}  // namespace oscar
