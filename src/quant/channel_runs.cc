#include "quant/channel_runs.h"

#include <vector>

namespace oscar {

size_t ChannelRunBytes(const ChannelSpec& spec, int head_dim) {
  const auto dims = static_cast<size_t>(head_dim);
  return CodeBytes(dims * static_cast<size_t>(spec.group_tokens), spec.bits) +
         2 * dims * MetaBytes(spec.meta);
}

void EncodeChannels(const ChannelSpec& spec, const TileShape& shape, std::span<const float> rows,
                    int first, int head, ByteWriter* writer) {
  std::vector<uint8_t> codes(static_cast<size_t>(spec.group_tokens));
  std::vector<float> scale(static_cast<size_t>(shape.head_dim)), offset(scale.size());
  for (int d = 0; d < shape.head_dim; ++d) {
    const auto channel = GatherChannel(shape, rows, first, spec.group_tokens, head, d);
    const auto at = static_cast<size_t>(d);
    QuantizeAffine(spec.rule, spec.bits, spec.meta, channel, codes, &scale[at], &offset[at]);
    writer->Codes(codes, spec.bits);
  }
  for (const float s : scale) writer->Meta(s, spec.meta);
  for (const float o : offset) writer->Meta(o, spec.meta);
}

void DecodeChannels(const ChannelSpec& spec, const TileShape& shape, int first, int head,
                    ByteReader* reader, std::span<float> rows) {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const auto tokens = static_cast<size_t>(spec.group_tokens);
  std::vector<uint8_t> codes(dims * tokens);
  std::vector<float> scale(dims), offset(dims), channel(tokens);
  reader->Codes(codes, spec.bits);
  for (float& s : scale) s = reader->Meta(spec.meta);
  for (float& o : offset) o = reader->Meta(spec.meta);
  for (size_t d = 0; d < dims; ++d) {
    for (size_t t = 0; t < tokens; ++t) {
      channel[t] = static_cast<float>(codes[d * tokens + t]) * scale[d] + offset[d];
    }
    ScatterChannel(shape, channel, first, head, static_cast<int>(d), rows);
  }
}

}  // namespace oscar
