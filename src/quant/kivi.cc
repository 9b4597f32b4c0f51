#include "quant/kivi.h"

#include <fmt/core.h>

#include "quant/affine_rows.h"
#include "quant/uniform_rows.h"

namespace oscar {

std::string KiviKeys::description() const {
  return fmt::format("KIVI keys, {} bits, {} tokens per channel, {} metadata", bits_, group_tokens_,
                     ToString(meta_));
}

size_t KiviKeys::RunBytes(int head_dim) const { return ChannelRunBytes(Channels(), head_dim); }

double KiviKeys::BitsPerElement(const TileShape&) const {
  return bits_ + 16.0 * static_cast<double>(MetaBytes(meta_)) / group_tokens_;
}

ChannelSpec KiviKeys::Channels() const {
  return {RowRule::kRealMin, bits_, group_tokens_, meta_};
}

void KiviKeys::EncodeRun(const TileShape& shape, std::span<const float> rows, int first, int head,
                         ByteWriter& writer) const {
  EncodeChannels(Channels(), shape, rows, first, head, &writer);
}

Status KiviKeys::DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                           std::span<float> rows) const {
  DecodeChannels(Channels(), shape, first, head, &reader, rows);
  return {};
}

std::unique_ptr<KvQuantizer> MakeKiviValues(int bits, int group_dims, MetaType meta) {
  return std::make_unique<AffineRows>(AffineRowSpec{RowRule::kRealMin, bits, group_dims, meta});
}

}  // namespace oscar
