#include "quant/turboquant.h"

#include <fmt/core.h>

#include <array>
#include <cmath>

#include "base/check.h"
#include "quant/byte_stream.h"
#include "quant/lloyd_max.h"

namespace oscar {

float QuantizeCodebookRow(int bits, std::span<const float> row, std::span<uint8_t> codes) {
  const size_t dims = row.size();
  std::array<float, kMaxHeadDim> squares;
  for (size_t i = 0; i < dims; ++i) squares[i] = row[i] * row[i];
  const float norm = std::sqrt(Sum16({squares.data(), dims}));
  const float root = std::sqrt(static_cast<float>(dims));
  const GaussianCodebook& book = LloydMaxCodebook(bits);
  int length = 0;  // |B|^2
  for (size_t i = 0; i < dims; ++i) {
    const float u = row[i] / (norm + 1e-8f) * root;
    int code = 0;
    for (const double t : book.thresholds) code += u > static_cast<float>(t) ? 1 : 0;
    codes[i] = static_cast<uint8_t>(code);
    length += ByteLevel(bits, code) * ByteLevel(bits, code);
  }
  const float fit = norm * (ByteLevelUnit(bits) * root) / std::sqrt(static_cast<float>(length));
  return RoundMeta(fit, MetaType::kFp16);
}

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
  if (renormalize_) {
    const float norm = QuantizeCodebookRow(bits_, row, codes);
    writer.Codes(codes, bits_);
    writer.Meta(norm, MetaType::kFp16);
    return;
  }
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
  const float norm = reader.Meta(MetaType::kFp16);
  if (renormalize_) {
    const float factor = CodebookFactor(bits_, shape.head_dim, norm);
    for (size_t i = 0; i < dims; ++i) {
      row[i] = static_cast<float>(ByteLevel(bits_, codes[i])) * factor;
    }
    return {};
  }
  const auto factor = static_cast<float>(norm / std::sqrt(shape.head_dim));
  for (size_t i = 0; i < dims; ++i) row[i] = levels_[codes[i]] * factor;
  return {};
}

}  // namespace oscar
