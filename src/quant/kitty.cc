#include "quant/kitty.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "quant/affine_group.h"
#include "quant/byte_stream.h"

namespace oscar {
namespace {

// Of each channel over the block, tokens in order.
std::vector<float> ChannelSums(const TileShape& shape, std::span<const float> rows, int first,
                               int head) {
  const auto dims = static_cast<size_t>(shape.head_dim);
  std::vector<float> sums(dims);
  for (size_t d = 0; d < dims; ++d) {
    for (const float v :
         GatherChannel(shape, rows, first, KittyKeys::kPage, head, static_cast<int>(d))) {
      sums[d] += std::fabs(v);
    }
  }
  return sums;
}

}  // namespace

std::vector<uint8_t> RankChannels(std::span<const float> sums, int boosted) {
  std::vector<size_t> order(sums.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&sums](size_t a, size_t b) { return sums[a] > sums[b]; });
  std::sort(order.begin(), order.begin() + boosted);
  std::vector<uint8_t> index(sums.size(), kNotBoosted);
  for (int i = 0; i < boosted; ++i) {
    index[order[static_cast<size_t>(i)]] = static_cast<uint8_t>(i);
  }
  return index;
}

KittyKeys::KittyKeys(double boosted_fraction) : boosted_fraction_(boosted_fraction) {
  OSCAR_CHECK(boosted_fraction >= 0.0 && boosted_fraction < 1.0);
}

int KittyKeys::Boosted(int head_dim) const {
  return static_cast<int>(std::lround(boosted_fraction_ * head_dim));
}

std::string KittyKeys::description() const {
  return fmt::format("Kitty keys, pages of {} tokens, {} of the channels at 4 bits", kPage,
                     boosted_fraction_);
}

Status KittyKeys::CheckHeadDim(int head_dim) const {
  if (Boosted(head_dim) >= kNotBoosted) {
    return InvalidArgument(fmt::format("{}: {} boosted channels; an index byte names 254 at most",
                                       description(), Boosted(head_dim)));
  }
  return {};
}

size_t KittyKeys::RunBytes(int head_dim) const {
  const auto dims = static_cast<size_t>(head_dim);
  const auto boosted = static_cast<size_t>(Boosted(head_dim));
  return CodeBytes((dims + boosted) * kPage, 2) + dims + 2 * 2 * dims;
}

double KittyKeys::BitsPerElement(const TileShape& shape) const {
  return 2.0 + 2.0 * Boosted(shape.head_dim) / shape.head_dim + (8.0 + 32.0) / kPage;
}

void KittyKeys::EncodeRun(const TileShape& shape, std::span<const float> rows, int first, int head,
                          ByteWriter& writer) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const int boosted = Boosted(shape.head_dim);
  std::vector<uint8_t> low(dims * kPage), high(static_cast<size_t>(boosted) * kPage);
  std::vector<float> scale(dims), min(dims);
  const auto index = RankChannels(ChannelSums(shape, rows, first, head), boosted);
  std::vector<uint8_t> codes(kPage);
  for (size_t d = 0; d < dims; ++d) {
    const auto x = GatherChannel(shape, rows, first, kPage, head, static_cast<int>(d));
    QuantizeAffine(RowRule::kMinMax, index[d] == kNotBoosted ? 2 : 4, MetaType::kFp16, x, codes,
                   &scale[d], &min[d]);
    for (size_t t = 0; t < kPage; ++t) {
      low[d * kPage + t] = codes[t] & 3;
      if (index[d] != kNotBoosted) high[index[d] * size_t{kPage} + t] = codes[t] >> 2;
    }
  }
  writer.Codes(low, 2);
  writer.Codes(high, 2);
  for (const uint8_t i : index) writer.Byte(i);
  for (const float s : scale) writer.Meta(s, MetaType::kFp16);
  for (const float m : min) writer.Meta(m, MetaType::kFp16);
}

Status KittyKeys::DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                            std::span<float> rows) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const auto boosted = static_cast<size_t>(Boosted(shape.head_dim));
  std::vector<uint8_t> low(dims * kPage), high(boosted * kPage), index(dims);
  std::vector<float> scale(dims), min(dims), channel(kPage);
  reader.Codes(low, 2);
  reader.Codes(high, 2);
  size_t next = 0;  // the plane keeps channel order, so positions count up
  for (size_t d = 0; d < dims; ++d) {
    index[d] = reader.Byte();
    if (index[d] == kNotBoosted) continue;
    if (index[d] != next || next >= boosted) {
      return DataLoss(
          fmt::format("{}: block at token {}, head {}: channel {} names position "
                      "{} of the high plane where {} comes next",
                      description(), first, head, d, index[d], next));
    }
    ++next;
  }
  if (next != boosted) {
    return DataLoss(fmt::format("{}: block at token {}, head {}: {} of {} boosted channels",
                                description(), first, head, next, boosted));
  }
  for (float& s : scale) s = reader.Meta(MetaType::kFp16);
  for (float& m : min) m = reader.Meta(MetaType::kFp16);
  for (size_t d = 0; d < dims; ++d) {
    for (size_t t = 0; t < kPage; ++t) {
      int code = low[d * kPage + t];
      if (index[d] != kNotBoosted) code |= high[index[d] * size_t{kPage} + t] << 2;
      channel[t] = static_cast<float>(code) * scale[d] + min[d];
    }
    ScatterChannel(shape, channel, first, head, static_cast<int>(d), rows);
  }
  return {};
}

}  // namespace oscar
