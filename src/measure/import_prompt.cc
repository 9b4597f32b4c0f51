#include "measure/import_prompt.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"
#include "simd/vec_ops.h"

namespace oscar {
namespace {

void RotateHead(const SideTransform& rotation, int kv_head, std::span<float> row) {
  switch (rotation.kind) {
    case RotationKind::kHadamard:
      simd::FastHadamardRow(row);
      break;
    case RotationKind::kCalibrated: {
      std::array<float, kMaxHeadDim> rotated;
      const std::span<float> out(rotated.data(), row.size());
      simd::RotateRow(row, rotation.MatrixOf(kv_head, static_cast<int>(row.size())), out);
      std::copy(out.begin(), out.end(), row.begin());
      break;
    }
    default:
      rotation.Apply(kv_head, row);
  }
}

// A row of a BF16 page, wherever its layout puts it: 8 numbers lie together in every order.
template <typename Copy>
void EachChunk(const BlockLayout& layout, int token, bool is_v, const Copy& copy) {
  for (int d = 0; d < layout.head_dim(); d += 8) {
    copy(static_cast<size_t>(d), (is_v ? layout.VCode(token, d) : layout.KCode(token, d)).offset);
  }
}

}  // namespace

// Pages travel through host memory, so that either cache may lie on a device. Page by page, sealing
// as it goes, so that no more of it is open than a generation holds.
Status ImportPrompt(const SequenceCache& from, const KvPlan& plan, int num_layers, int kv_heads,
                    int head_dim, ThreadPool& threads, SequenceCache& to) {
  OSCAR_CHECK(to.length() == 0);
  const auto dim = static_cast<size_t>(head_dim);
  // Rows lie in open pages, or in sealed ones of BF16 that lack layers with a window.
  const PageLayout& target = to.config().open;
  std::vector<std::byte> read, written(target.bytes());
  for (int64_t start = 0; start < from.length(); start += kPageTokens) {
    const int64_t count = std::min<int64_t>(kPageTokens, from.length() - start);
    OSCAR_RETURN_IF_ERROR(to.SealForGeneration(threads));
    OSCAR_RETURN_IF_ERROR(to.Reserve(count));
    const PageRef& page = from.page(start / kPageTokens);
    const PageLayout& source = page.layout();
    read.resize(source.bytes());
    OSCAR_RETURN_IF_ERROR(from.pool().Read(page, read));
    threads.ParallelFor(num_layers, [&](int64_t unit, int) {
      const int layer = static_cast<int>(unit);
      if (!source.Holds(layer)) return;
      OSCAR_CHECK(source.block(layer, 0).is_bf16());
      std::array<float, kMaxHeadDim> buffer;
      std::array<Bf16, kMaxHeadDim> rounded;
      const std::span<float> row(buffer.data(), dim);
      for (int head = 0; head < kv_heads; ++head) {
        const std::byte* in = read.data() + source.BlockOffset(layer, head);
        std::byte* out = written.data() + target.BlockOffset(layer, head);
        for (int token = 0; token < count; ++token) {
          for (const bool is_v : {false, true}) {
            EachChunk(source.block(layer, head), token, is_v, [&](size_t d, uint32_t at) {
              std::memcpy(rounded.data() + d, in + at, 8 * sizeof(Bf16));
            });
            simd::ToFloatRow(std::span<const Bf16>(rounded.data(), dim), row);
            RotateHead(is_v ? plan.v(layer) : plan.k(layer), head, row);
            simd::ToBf16Row(row, {rounded.data(), dim});
            EachChunk(target.block(layer, head), token, is_v, [&](size_t d, uint32_t at) {
              std::memcpy(out + at, rounded.data() + d, 8 * sizeof(Bf16));
            });
          }
        }
      }
    });
    OSCAR_RETURN_IF_ERROR(to.pool().Write(to.page(start / kPageTokens), written));
    to.Advance(count);
  }
  return to.config().has_state() && to.length() > 0 ? to.ImportState(from) : Status();
}

}  // namespace oscar
