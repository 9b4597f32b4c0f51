#include "quant/lloyd_max.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "base/check.h"
#include "quant/byte_stream.h"
#include "quant/uniform_rows.h"

namespace oscar {
namespace {

double Density(double x) {
  return std::isinf(x) ? 0.0 : std::exp(-0.5 * x * x) / std::sqrt(2.0 * std::numbers::pi);
}

// Probability above x; erfc keeps its digits in the tail, where 1 - Phi would lose them.
double Above(double x) { return 0.5 * std::erfc(x / std::numbers::sqrt2); }

GaussianCodebook Solve(int bits) {
  // Only the positive half is iterated, which makes the symmetry exact. level[i] lies between
  // edge[i] and edge[i + 1]; edge[0] = 0.
  const size_t half = size_t{1} << (bits - 1);
  std::vector<double> level(half), edge(half + 1);
  for (size_t i = 0; i < half; ++i) {
    level[i] = (static_cast<double>(i) + 0.5) * 3.0 / static_cast<double>(half);
  }
  edge[half] = std::numeric_limits<double>::infinity();
  // Linear convergence: 16 levels take a few hundred rounds, and the bound is never met.
  for (int round = 0; round < 100000; ++round) {
    for (size_t i = 1; i < half; ++i) edge[i] = 0.5 * (level[i - 1] + level[i]);
    double moved = 0.0;
    for (size_t i = 0; i < half; ++i) {
      const double mass = Above(edge[i]) - Above(edge[i + 1]);
      const double next = (Density(edge[i]) - Density(edge[i + 1])) / mass;
      moved = std::max(moved, std::fabs(next - level[i]));
      level[i] = next;
    }
    if (moved < 1e-15) break;
  }
  GaussianCodebook book;
  double kept = 0.0;  // E[level^2] = E[x level] at the fixed point
  for (size_t i = half; i > 0; --i) book.levels.push_back(-level[i - 1]);
  for (size_t i = 0; i < half; ++i) {
    book.levels.push_back(level[i]);
    kept += 2.0 * level[i] * level[i] * (Above(edge[i]) - Above(edge[i + 1]));
  }
  for (size_t i = half - 1; i > 0; --i) book.thresholds.push_back(-edge[i]);
  for (size_t i = 0; i < half; ++i) book.thresholds.push_back(edge[i]);
  book.distortion = 1.0 - kept;
  return book;
}

}  // namespace

const GaussianCodebook& LloydMaxCodebook(int bits) {
  OSCAR_CHECK(bits >= 1 && bits <= 4, "{} bits", bits);
  static const std::array<GaussianCodebook, 4> books = {Solve(1), Solve(2), Solve(3), Solve(4)};
  return books[static_cast<size_t>(bits - 1)];
}

LloydMaxRows::LloydMaxRows(const LloydMaxSpec& spec) : spec_(spec) {
  OSCAR_CHECK(spec.bits >= 2 && spec.bits <= 4);
  const GaussianCodebook& book = LloydMaxCodebook(spec.bits);
  levels_.assign(book.levels.begin(), book.levels.end());
  thresholds_.assign(book.thresholds.begin(), book.thresholds.end());
}

std::string LloydMaxRows::description() const {
  return fmt::format("Lloyd-Max rows, {} bits, groups of {}, {} metadata{}", spec_.bits,
                     spec_.group_dims, ToString(spec_.meta),
                     spec_.clip_ratio > 0.0f ? fmt::format(", clip {}", spec_.clip_ratio) : "");
}

Status LloydMaxRows::CheckHeadDim(int head_dim) const {
  return CheckGroupDims(description(), spec_.group_dims, head_dim);
}

size_t LloydMaxRows::EncodedBytes(const TileShape& shape) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  return shape.rows() * (CodeBytes(dims, spec_.bits) +
                         dims / static_cast<size_t>(spec_.group_dims) * 2 * MetaBytes(spec_.meta));
}

double LloydMaxRows::BitsPerElement(const TileShape&) const {
  return spec_.bits + 16.0 * static_cast<double>(MetaBytes(spec_.meta)) / spec_.group_dims;
}

void LloydMaxRows::EncodeTile(const TileShape& shape, std::span<const float> rows,
                              std::span<std::byte> bytes) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const auto group = static_cast<size_t>(spec_.group_dims);
  std::vector<uint8_t> codes(dims);
  std::vector<float> deviations(dims / group), means(dims / group);
  ByteWriter writer(bytes);
  for (size_t r = 0; r < shape.rows(); ++r) {
    std::vector<float> x(rows.begin() + static_cast<ptrdiff_t>(r * dims),
                         rows.begin() + static_cast<ptrdiff_t>((r + 1) * dims));
    if (spec_.clip_ratio > 0.0f) ClipRow(spec_.clip_ratio, x);
    for (size_t g = 0; g < dims / group; ++g) {
      const std::span<const float> part{x.data() + g * group, group};
      double sum = 0.0, squares = 0.0;
      for (const float v : part) sum += v;
      const double mean = sum / static_cast<double>(group);
      for (const float v : part) squares += (v - mean) * (v - mean);
      const double variance = squares / static_cast<double>(group);
      deviations[g] = RoundMeta(static_cast<float>(std::sqrt(variance)), spec_.meta);
      means[g] = RoundMeta(static_cast<float>(mean), spec_.meta);
      for (size_t i = 0; i < group; ++i) {
        uint8_t code = 0;
        for (const float t : thresholds_) code += part[i] - means[g] >= t * deviations[g] ? 1 : 0;
        codes[g * group + i] = code;
      }
    }
    writer.Codes(codes, spec_.bits);
    for (size_t g = 0; g < means.size(); ++g) {
      writer.Meta(deviations[g], spec_.meta);
      writer.Meta(means[g], spec_.meta);
    }
  }
}

Status LloydMaxRows::DecodeTile(const TileShape& shape, std::span<const std::byte> bytes,
                                std::span<float> rows) const {
  const auto dims = static_cast<size_t>(shape.head_dim);
  const auto group = static_cast<size_t>(spec_.group_dims);
  std::vector<uint8_t> codes(dims);
  ByteReader reader(bytes);
  for (size_t r = 0; r < shape.rows(); ++r) {
    reader.Codes(codes, spec_.bits);
    for (size_t g = 0; g < dims / group; ++g) {
      const float deviation = reader.Meta(spec_.meta), mean = reader.Meta(spec_.meta);
      for (size_t i = g * group; i < (g + 1) * group; ++i) {
        rows[r * dims + i] = levels_[codes[i]] * deviation + mean;
      }
    }
  }
  return {};
}

}  // namespace oscar
