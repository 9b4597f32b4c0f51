#include "quant/turboquant.h"

#include <fmt/core.h>

#include <cmath>

#include "base/check.h"
#include "quant/byte_stream.h"
#include "quant/lloyd_max.h"

namespace oscar {

TurboQuantKeys::TurboQuantKeys(int bits, bool renormalize)
    : bits_(bits), renormalize_(renormalize) {
  OSCAR_CHECK(bits >= 2 && bits <= 4);
  const GaussianCodebook& book = LloydMaxCodebook(bits);
  levels_.assign(book.levels.begin(), book.levels.end());
  thresholds_.assign(book.thresholds.begin(), book.thresholds.end());
}

std::string TurboQuantKeys::description() const {
  return fmt::format("TurboQuant keys, {} bits{}", bits_, renormalize_ ? ", renormalised" : "");
}

size_t TurboQuantKeys::RunBytes(int head_dim) const {
  return CodeBytes(static_cast<size_t>(head_dim), bits_) + 2;
}

double TurboQuantKeys::BitsPerElement(const TileShape& shape) const {
  return bits_ + 16.0 / shape.head_dim;
}

void TurboQuantKeys::EncodeRun(const TileShape& shape, std::span<const float> rows, int first,
                               int head, ByteWriter& writer) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const float root = std::sqrt(static_cast<float>(shape.head_dim));
  const auto row = rows.subspan(RowAt(shape, first, head), dims);
  std::vector<uint8_t> codes(dims);
  double squares = 0.0;
  for (const float v : row) squares += static_cast<double>(v) * v;
  const auto norm = static_cast<float>(std::sqrt(squares));
  for (size_t i = 0; i < dims; ++i) {
    const float u = row[i] / (norm + 1e-8f) * root;
    uint8_t code = 0;
    for (const float t : thresholds_) code += u > t ? 1 : 0;
    codes[i] = code;
  }
  writer.Codes(codes, bits_);
  writer.Meta(norm, MetaType::kFp16);
}

Status TurboQuantKeys::DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                                 std::span<float> rows) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const auto row = rows.subspan(RowAt(shape, first, head), dims);
  std::vector<uint8_t> codes(dims);
  reader.Codes(codes, bits_);
  double squares = 0.0;
  for (const uint8_t c : codes) squares += static_cast<double>(levels_[c]) * levels_[c];
  const double length = renormalize_ ? std::sqrt(squares) : std::sqrt(shape.head_dim);
  // No level is 0, so the length is positive.
  const auto factor = static_cast<float>(reader.Meta(MetaType::kFp16) / length);
  for (size_t i = 0; i < dims; ++i) row[i] = levels_[codes[i]] * factor;
  return {};
}

}  // namespace oscar
