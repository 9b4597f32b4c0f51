#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/attention_prefill.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include <algorithm>
#include <cstring>

#include "simd/attention.h"
#include "simd/attention_codes-inl.h"
#include "simd/attention_rows-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {
namespace {

// Query rows (token, head) that share a decoded page: 64 tokens of 4 heads repay the decoding 256
// times over, and state and tiles (256 x 130 + 2 x 64 x 128 floats) stay in 1 MiB of L2.
constexpr int kMaxRows = 256;
// Register block of c = a b: 6 rows x 4 vectors, or 3 x 2 pairs of AVX2.
constexpr int kBlockRows = kParts == 1 ? 6 : 3;
constexpr int kBlockVectors = kParts == 1 ? 4 : 2;

// c[r, :] (= or +=) a[r, 0..depth) b[0..depth, :], depth ascending, one fused chain an element.
template <int kRows>
HWY_INLINE void BlockProduct(const float* HWY_RESTRICT a, size_t a_stride,
                             const float* HWY_RESTRICT b, size_t b_stride, int depth,
                             float* HWY_RESTRICT c, size_t c_stride, bool accumulate) {
  F16x sum[kRows][kBlockVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kBlockVectors; ++v) {
      sum[r][v] = accumulate ? Load(c + static_cast<size_t>(r) * c_stride + v * 16) : Set(0.0f);
    }
  }
  for (int k = 0; k < depth; ++k) {
    F16x right[kBlockVectors];
    for (int v = 0; v < kBlockVectors; ++v)
      right[v] = Load(b + static_cast<size_t>(k) * b_stride + v * 16);
    for (int r = 0; r < kRows; ++r) {
      const F16x left = Set(a[static_cast<size_t>(r) * a_stride + static_cast<size_t>(k)]);
      for (int v = 0; v < kBlockVectors; ++v) sum[r][v] = MulAdd(left, right[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kBlockVectors; ++v) {
      Store(sum[r][v], c + static_cast<size_t>(r) * c_stride + v * 16);
    }
  }
}

// rows x columns; columns a multiple of 16 * kBlockVectors.
HWY_NOINLINE void Product(const float* a, size_t a_stride, const float* b, size_t b_stride,
                          int rows, int columns, int depth, float* c, size_t c_stride,
                          bool accumulate) {
  for (int j = 0; j < columns; j += 16 * kBlockVectors) {
    int r = 0;
    for (; r + kBlockRows <= rows; r += kBlockRows) {
      BlockProduct<kBlockRows>(a + static_cast<size_t>(r) * a_stride, a_stride, b + j, b_stride,
                               depth, c + static_cast<size_t>(r) * c_stride + j, c_stride,
                               accumulate);
    }
    for (; r < rows; ++r) {
      BlockProduct<1>(a + static_cast<size_t>(r) * a_stride, a_stride, b + j, b_stride, depth,
                      c + static_cast<size_t>(r) * c_stride + j, c_stride, accumulate);
    }
  }
}

// One page as fp32 tiles: K transposed, [D, 64], and V, [64, D]. Rows from `visible` on are zero.
struct Tiles {
  float* k;
  float* v;
};

HWY_NOINLINE void DecodeRows(const PageLayout& layout, const std::byte* block, int visible,
                             const Tiles& tiles) {
  const int dims = layout.head_dim();
  const auto* k = reinterpret_cast<const Bf16*>(block);
  const auto* v = reinterpret_cast<const Bf16*>(block + layout.v_codes_offset());
  for (int t = 0; t < visible; ++t) {
    for (int d = 0; d < dims; ++d) tiles.k[d * kPageTokens + t] = oscar::ToFloat(k[t * dims + d]);
    for (int d = 0; d < dims; d += 16) Store(LoadBf16(v + t * dims + d), tiles.v + t * dims + d);
  }
  for (int t = visible; t < kPageTokens; ++t) {
    for (int d = 0; d < dims; ++d) tiles.k[d * kPageTokens + t] = 0.0f;
    std::memset(tiles.v + t * dims, 0, static_cast<size_t>(dims) * sizeof(float));
  }
}

template <int kBits>
HWY_NOINLINE void DecodeCodes(const PageLayout& layout, const std::byte* block,
                              const Tiles& tiles) {
  constexpr int kPerHalf = 16 / kBits;  // codes in each half of a word
  const I16x mask = SetInt((1 << kBits) - 1);
  const int dims = layout.head_dim();
  // x^ = code * scale + min, unfused, as the format defines it.
  const int k_vectors = dims * kBits / 32;
  for (int tile = 0; tile < 4; ++tile) {
    for (int v = 0; v < k_vectors; ++v) {
      const I16x words =
          LoadInt(reinterpret_cast<const int32_t*>(block) + (tile * k_vectors + v) * 16);
      const int first = v * 2 * kPerHalf, group = first / layout.group_dims();
      const F16x s =
          LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.KScale(tile * 16, group)));
      const F16x m =
          LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.KMin(tile * 16, group)));
      for (int i = 0; i < 2 * kPerHalf; ++i) {
        I16x code;
        for (int part = 0; part < kParts; ++part) {
          code.v[part] = hn::ShiftRightSame(words.v[part], i / 2 * kBits + 16 * (i & 1));
        }
        Store(Add(Mul(ToFloat(And(code, mask)), s), m),
              tiles.k + (first + i) * kPageTokens + tile * 16);
      }
    }
  }
  constexpr int kVVectors = kPageTokens * kBits / 32;
  const auto* v_codes = reinterpret_cast<const int32_t*>(block + layout.v_codes_offset());
  float scale[kPageTokens], min[kPageTokens];
  for (int tile = 0; tile < dims / 16; ++tile) {
    const int group = tile * 16 / layout.group_dims();
    if (tile * 16 % layout.group_dims() == 0) {
      for (int t = 0; t < kPageTokens; t += 16) {
        Store(LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.VScale(t, group))),
              scale + t);
        Store(LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.VMin(t, group))), min + t);
      }
    }
    for (int v = 0; v < kVVectors; ++v) {
      const I16x words = LoadInt(v_codes + (tile * kVVectors + v) * 16);
      for (int i = 0; i < 2 * kPerHalf; ++i) {
        const int token = v * 2 * kPerHalf + i;
        I16x code;
        for (int part = 0; part < kParts; ++part) {
          code.v[part] = hn::ShiftRightSame(words.v[part], i / 2 * kBits + 16 * (i & 1));
        }
        Store(Add(Mul(ToFloat(And(code, mask)), Set(scale[token])), Set(min[token])),
              tiles.v + token * dims + tile * 16);
      }
    }
  }
}

}  // namespace

// Floats of scratch that one thread needs.
size_t PrefillScratchSize(int dims) {
  return static_cast<size_t>(2 * kPageTokens * dims + kMaxRows * (2 * dims + kPageTokens + 2));
}
int PrefillTokensPerTask(int heads) { return std::max(1, kMaxRows / heads); }

// Query tokens [first, first + count) of `query`, heads [head, head + heads) of one KV head.
void PrefillBlock(const AttentionLayer& layer, const PrefillQuery& query, int kv_head, int head,
                  int heads, int first, int count, float* scratch) {
  constexpr float kLog2E = 1.4426950408889634f;
  const int dims = layer.head_dim(), rows = heads * count;
  const float factor = layer.softmax_scale * kLog2E;
  const Tiles tiles{scratch, scratch + kPageTokens * dims};
  float* q = tiles.v + kPageTokens * dims;  // [rows, D], row = token * heads + head
  float* o = q + kMaxRows * dims;           // [rows, D]
  float* p = o + kMaxRows * dims;           // [rows, 64]
  float* m = p + kMaxRows * kPageTokens;
  float* d = m + kMaxRows;
  for (int i = 0; i < count; ++i) {
    const float* source = query.q + static_cast<size_t>(first + i) * query.q_stride + head * dims;
    for (int j = 0; j < heads * dims; j += 16) {
      Store(Mul(Load(source + j), Set(factor)), q + i * heads * dims + j);
    }
  }
  std::fill_n(m, rows, kEmptyMax);
  std::fill_n(d, rows, 0.0f);
  std::fill_n(o, rows * dims, 0.0f);

  const int64_t last_position = query.first_position + first + count - 1;
  for (int64_t page = 0; page * kPageTokens <= last_position; ++page) {
    const bool sealed = query.sequence.is_sealed[page] != 0;
    const PageLayout& layout = sealed ? layer.sealed : layer.open;
    const std::byte* block = query.sequence.pages[page] +
                             (sealed ? layer.sealed_offset : layer.open_offset) +
                             static_cast<size_t>(kv_head) * layout.block_bytes();
    const int64_t page_start = page * kPageTokens;
    if (layout.kind() == PageKind::kInt2) {
      DecodeCodes<2>(layout, block, tiles);
    } else if (layout.kind() == PageKind::kInt4) {
      DecodeCodes<4>(layout, block, tiles);
    } else {
      DecodeRows(layout, block,
                 static_cast<int>(std::min<int64_t>(kPageTokens, last_position + 1 - page_start)),
                 tiles);
    }
    // Tokens before this page's start see nothing of it.
    const int64_t block_start = query.first_position + first;
    const int skip = static_cast<int>(std::clamp<int64_t>(page_start - block_start, 0, count));
    const int first_row = skip * heads, used = rows - first_row;
    Product(q + first_row * dims, static_cast<size_t>(dims), tiles.k, kPageTokens, used,
            kPageTokens, dims, p + first_row * kPageTokens, kPageTokens, false);
    for (int r = first_row; r < rows; ++r) {
      const int64_t position = block_start + r / heads;
      const int visible =
          static_cast<int>(std::min<int64_t>(kPageTokens, position + 1 - page_start));
      const float alpha = SoftmaxTile(p + r * kPageTokens, visible, m + r, d + r);
      if (alpha != 1.0f) {
        for (int j = 0; j < dims; j += 16) {
          Store(Mul(Load(o + r * dims + j), Set(alpha)), o + r * dims + j);
        }
      }
    }
    Product(p + first_row * kPageTokens, kPageTokens, tiles.v, static_cast<size_t>(dims), used,
            dims, kPageTokens, o + first_row * dims, static_cast<size_t>(dims), true);
  }
  for (int i = 0; i < count; ++i) {
    float* target = query.out + static_cast<size_t>(first + i) * query.out_stride + head * dims;
    for (int h = 0; h < heads; ++h) {
      const int r = i * heads + h;
      const F16x inverse = Set(1.0f / d[r]);
      for (int j = 0; j < dims; j += 16) {
        Store(Mul(Load(o + r * dims + j), inverse), target + h * dims + j);
      }
    }
  }
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
#include <vector>

#include "base/check.h"
#include "simd/dispatch.h"

namespace oscar::simd {

void PrefillAttention(ThreadPool& pool, AttentionWorkspace& workspace, const AttentionLayer& layer,
                      std::span<const PrefillQuery> batch) {
  OSCAR_CHECK(layer.kv_heads > 0 && layer.q_heads % layer.kv_heads == 0);
  OSCAR_CHECK(layer.open.kind() == PageKind::kBf16 && layer.open.order() == CodeOrder::kCpu &&
              layer.sealed.order() == CodeOrder::kCpu);
  const int dims = layer.head_dim(), g = layer.q_heads / layer.kv_heads;
  const bool avx2 = ActiveTarget() == Target::kAvx2;
  const auto run = avx2 ? &N_AVX2::PrefillBlock : &N_AVX3::PrefillBlock;
  const int tokens_per_task =
      avx2 ? N_AVX2::PrefillTokensPerTask(g) : N_AVX3::PrefillTokensPerTask(g);
  struct Task {
    const PrefillQuery* query;
    int kv_head, first, count;
  };
  std::vector<Task> tasks;
  for (const PrefillQuery& query : batch) {
    // The last tokens see most; taking them first keeps the threads busy to the end. Fewer tokens
    // a task where the chunk alone would not occupy the threads: rows do not depend on it.
    const int wanted =
        (query.num_tokens * layer.kv_heads + pool.num_threads() * 2 - 1) / (pool.num_threads() * 2);
    const int step = std::clamp(wanted, 1, tokens_per_task);
    const int blocks = (query.num_tokens + step - 1) / step;
    for (int b = blocks - 1; b >= 0; --b) {
      for (int h = 0; h < layer.kv_heads; ++h) {
        tasks.push_back({&query, h, b * step, std::min(step, query.num_tokens - b * step)});
      }
    }
  }
  const size_t scratch = avx2 ? N_AVX2::PrefillScratchSize(dims) : N_AVX3::PrefillScratchSize(dims);
  workspace.scratch.Grow(scratch * static_cast<size_t>(pool.num_threads()));
  pool.ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t i, int thread) {
    const Task& task = tasks[static_cast<size_t>(i)];
    run(layer, *task.query, task.kv_head, task.kv_head * g, g, task.first, task.count,
        workspace.scratch.data() + static_cast<size_t>(thread) * scratch);
  });
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
