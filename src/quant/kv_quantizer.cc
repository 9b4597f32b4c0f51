#include "quant/kv_quantizer.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "quant/byte_stream.h"
#include "quant/row_quantizer.h"

namespace oscar {

Status KvQuantizer::CheckShape(const TileShape& shape) const {
  if (shape.tokens < 0 || shape.kv_heads <= 0) {
    return InvalidArgument(fmt::format("{}: a tile of {} tokens and {} KV heads", description(),
                                       shape.tokens, shape.kv_heads));
  }
  if (shape.tokens % tokens_per_run() != 0) {
    return InvalidArgument(fmt::format("{}: {} tokens are not whole blocks of {}", description(),
                                       shape.tokens, tokens_per_run()));
  }
  if (shape.head_dim <= 0 || shape.head_dim > kMaxHeadDim || shape.head_dim % 16 != 0) {
    return Unimplemented(fmt::format("{}: head dim {}: must be a multiple of 16 and at most {}",
                                     description(), shape.head_dim, kMaxHeadDim));
  }
  return CheckHeadDim(shape.head_dim);
}

Status KvQuantizer::CheckHeadDim(int) const { return {}; }

int KvQuantizer::Encode(const TileShape& shape, std::span<const float> rows,
                        std::span<std::byte> bytes) const {
  OSCAR_CHECK(CheckShape(shape).ok(), "{}", CheckShape(shape).message());
  OSCAR_CHECK(rows.size() == shape.elements() && bytes.size() == EncodedBytes(shape));
  if (!saturates()) {
    EncodeTile(shape, rows, bytes);
    return 0;
  }
  std::vector<float> clean(rows.size());
  int changed = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    clean[i] = std::isnan(rows[i]) ? 0.0f : std::clamp(rows[i], -kFp16Max, kFp16Max);
    changed += clean[i] == rows[i] ? 0 : 1;
  }
  EncodeTile(shape, clean, bytes);
  return changed;
}

Status KvQuantizer::Decode(const TileShape& shape, std::span<const std::byte> bytes,
                           std::span<float> rows) const {
  OSCAR_RETURN_IF_ERROR(CheckShape(shape));
  if (bytes.size() != EncodedBytes(shape)) {
    return DataLoss(fmt::format("{}: {} bytes where a tile of {} tokens takes {}", description(),
                                bytes.size(), shape.tokens, EncodedBytes(shape)));
  }
  OSCAR_CHECK(rows.size() == shape.elements());
  return DecodeTile(shape, bytes, rows);
}

void GroupedQuantizer::EncodeTile(const TileShape& shape, std::span<const float> rows,
                                  std::span<std::byte> bytes) const {
  ByteWriter writer(bytes);
  for (int first = 0; first < shape.tokens; first += tokens_per_run()) {
    for (int head = 0; head < shape.kv_heads; ++head) EncodeRun(shape, rows, first, head, writer);
  }
}

Status GroupedQuantizer::DecodeTile(const TileShape& shape, std::span<const std::byte> bytes,
                                    std::span<float> rows) const {
  ByteReader reader(bytes);
  for (int first = 0; first < shape.tokens; first += tokens_per_run()) {
    for (int head = 0; head < shape.kv_heads; ++head) {
      OSCAR_RETURN_IF_ERROR(DecodeRun(shape, first, head, reader, rows));
    }
  }
  return {};
}

std::vector<float> GatherChannel(const TileShape& shape, std::span<const float> rows, int first,
                                 int count, int head, int dim) {
  std::vector<float> channel(static_cast<size_t>(count));
  for (int t = 0; t < count; ++t) {
    channel[static_cast<size_t>(t)] =
        rows[RowAt(shape, first + t, head) + static_cast<size_t>(dim)];
  }
  return channel;
}

void ScatterChannel(const TileShape& shape, std::span<const float> channel, int first, int head,
                    int dim, std::span<float> rows) {
  for (size_t t = 0; t < channel.size(); ++t) {
    rows[RowAt(shape, first + static_cast<int>(t), head) + static_cast<size_t>(dim)] = channel[t];
  }
}

}  // namespace oscar
