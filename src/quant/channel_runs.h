// Per-channel coding of one head of one block of tokens, shared by the methods that group along
// tokens (KIVI, OScaR):   codes [D, T] | scale [D] | offset [D].
#pragma once

#include <span>

#include "quant/affine_group.h"
#include "quant/byte_stream.h"
#include "quant/kv_quantizer.h"

namespace oscar {

struct ChannelSpec {
  RowRule rule = RowRule::kRealMin;
  int bits = 2;
  int group_tokens = 32;  // a multiple of 16
  MetaType meta = MetaType::kFp16;
};

size_t ChannelRunBytes(const ChannelSpec& spec, int head_dim);
// Tokens [first, first + group_tokens) of `head`.
void EncodeChannels(const ChannelSpec& spec, const TileShape& shape, std::span<const float> rows,
                    int first, int head, ByteWriter* writer);
void DecodeChannels(const ChannelSpec& spec, const TileShape& shape, int first, int head,
                    ByteReader* reader, std::span<float> rows);

}  // namespace oscar
