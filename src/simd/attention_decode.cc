#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/attention_decode.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include <algorithm>

#include "simd/attention.h"
#include "simd/attention_codes-inl.h"
#include "simd/attention_rows-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {
namespace {

using CodePageFunction = void (*)(const PageLayout&, const std::byte*, int, const std::byte*,
                                  const QueryCodes&, float*, float*, float*);
using RowPageFunction = void (*)(const Bf16*, const Bf16*, const Bf16*, int, int, const QueryRows&,
                                 float*, float*, float*);

template <int kBits, bool kVnni>
CodePageFunction ChooseCodePage(int heads) {
  constexpr CodePageFunction kTable[kMaxBlockHeads] = {
      &CodePage<kBits, 1, kVnni>, &CodePage<kBits, 2, kVnni>, &CodePage<kBits, 3, kVnni>,
      &CodePage<kBits, 4, kVnni>};
  return kTable[heads - 1];
}

template <bool kBf16>
RowPageFunction ChooseRowPage(int heads) {
  constexpr RowPageFunction kTable[kMaxBlockHeads] = {&RowPage<1, kBf16>, &RowPage<2, kBf16>,
                                                      &RowPage<3, kBf16>, &RowPage<4, kBf16>};
  return kTable[heads - 1];
}

}  // namespace

// The g query heads of one KV head over pages [first_page, end_page).
template <bool kVnni, bool kBf16>
void DecodeSplit(const AttentionLayer& layer, const DecodeQuery& query, int kv_head,
                 int64_t first_page, int64_t end_page, const AttentionState& state) {
  constexpr float kLog2E = 1.4426950408889634f;
  const int dims = layer.head_dim(), g = layer.q_heads / layer.kv_heads;
  const bool has_codes = layer.sealed.kind() != PageKind::kBf16;
  const float scale = layer.softmax_scale * kLog2E;
  const auto block_of = [&](int64_t page) {
    const bool sealed = query.sequence.is_sealed[page] != 0;
    const PageLayout& layout = sealed ? layer.sealed : layer.open;
    return query.sequence.pages[page] + (sealed ? layer.sealed_offset : layer.open_offset) +
           static_cast<size_t>(kv_head) * layout.block_bytes();
  };
  for (int base = 0; base < g; base += kMaxBlockHeads) {
    const int heads = g - base < kMaxBlockHeads ? g - base : kMaxBlockHeads;
    QueryCodes codes;
    QueryRows rows;
    for (int h = 0; h < heads; ++h) {
      const float* q = query.q + (kv_head * g + base + h) * dims;
      PrepareQueryRows(q, dims, scale, h, rows);
      if (layer.sealed.kind() == PageKind::kInt2) {
#if HWY_TARGET == HWY_AVX3
        if constexpr (kVnni) {
          PrepareQueryTables(q, layer.sealed, scale, h, codes.tables);
        } else {
          PrepareQuery<2>(q, layer.sealed, scale, h, codes);
        }
#else
        PrepareQuery<2>(q, layer.sealed, scale, h, codes);
#endif
      } else if (layer.sealed.kind() == PageKind::kInt4) {
        PrepareQuery<4>(q, layer.sealed, scale, h, codes);
      }
    }
    const CodePageFunction code_page = layer.sealed.kind() == PageKind::kInt4
                                           ? ChooseCodePage<4, kVnni>(heads)
                                           : ChooseCodePage<2, kVnni>(heads);
    const RowPageFunction row_page = ChooseRowPage<kBf16>(heads);
    // On the stack, not in `state`: neighbouring states belong to other threads, and the hardware
    // prefetcher that follows each pass over o would fetch their lines away (0.98 us a page of two
    // threads against 0.79 of one).
    alignas(64) float o[kMaxBlockHeads * kMaxPageDims];
    float m[kMaxBlockHeads], d[kMaxBlockHeads];
    std::fill_n(o, heads * dims, 0.0f);
    std::fill_n(m, heads, kEmptyMax);
    std::fill_n(d, heads, 0.0f);
    for (int64_t page = first_page; page < end_page; ++page) {
      const bool sealed = query.sequence.is_sealed[page] != 0;
      const PageLayout& layout = sealed ? layer.sealed : layer.open;
      const std::byte* block = block_of(page);
      const int64_t left = query.num_tokens - page * kPageTokens;
      const int visible = left < kPageTokens ? static_cast<int>(left) : kPageTokens;
      const std::byte* next = page + 1 < end_page ? block_of(page + 1) : nullptr;
      if (sealed && has_codes) {
        code_page(layout, block, visible, next, codes, m, d, o);
      } else {
        row_page(reinterpret_cast<const Bf16*>(block),
                 reinterpret_cast<const Bf16*>(block + layout.v_codes_offset()),
                 reinterpret_cast<const Bf16*>(next), dims, visible, rows, m, d, o);
      }
    }
    std::copy_n(o, heads * dims, state.o + base * dims);
    std::copy_n(m, heads, state.m + base);
    std::copy_n(d, heads, state.d + base);
  }
}

using DecodeFunction = void (*)(const AttentionLayer&, const DecodeQuery&, int, int64_t, int64_t,
                                const AttentionState&);
DecodeFunction ChooseDecode([[maybe_unused]] bool vnni, [[maybe_unused]] bool bf16) {
#if HWY_TARGET == HWY_AVX3
  if (vnni) return bf16 ? &DecodeSplit<true, true> : &DecodeSplit<true, false>;
#endif
  return &DecodeSplit<false, false>;
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
#include <atomic>
#include <memory>
#include <vector>

#include "base/check.h"
#include "simd/dispatch.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {
namespace {

// 4096 tokens: enough to repay the tables of q (4% of 12 pages) and the merge, small enough
// that 64 cores share one 128K-token sequence of 8 KV heads (256 splits).
constexpr int64_t kPagesPerSplit = 64;

struct Split {
  int32_t query;
  int32_t kv_head;
  int32_t index;  // of this split in its (query, KV head)
  int32_t count;  // of splits there
};

void CheckLayer(const AttentionLayer& layer) {
  OSCAR_CHECK(layer.kv_heads > 0 && layer.q_heads % layer.kv_heads == 0);
  OSCAR_CHECK(layer.open.kind() == PageKind::kBf16 && layer.open.order() == CodeOrder::kCpu);
  OSCAR_CHECK(layer.sealed.order() == CodeOrder::kCpu &&
              layer.sealed.head_dim() == layer.open.head_dim());
}

}  // namespace

void DecodeAttention(ThreadPool& pool, AttentionWorkspace& workspace, const AttentionLayer& layer,
                     std::span<const DecodeQuery> batch) {
  CheckLayer(layer);
  const int dims = layer.head_dim(), g = layer.q_heads / layer.kv_heads;
  std::vector<Split> splits;
  for (size_t i = 0; i < batch.size(); ++i) {
    OSCAR_CHECK(batch[i].num_tokens > 0);
    const int64_t pages = (batch[i].num_tokens + kPageTokens - 1) / kPageTokens;
    const auto count = static_cast<int32_t>((pages + kPagesPerSplit - 1) / kPagesPerSplit);
    for (int h = 0; h < layer.kv_heads; ++h) {
      for (int32_t s = 0; s < count; ++s) splits.push_back({static_cast<int32_t>(i), h, s, count});
    }
  }
  const Target target = ActiveTarget();
  const auto run = target == Target::kAvx2
                       ? N_AVX2::ChooseDecode(false, false)
                       : N_AVX3::ChooseDecode(target == Target::kAvx512Vnni,
                                              layer.bf16_products && HasAvx512Bf16());
  const size_t state_size = AttentionState::Size(g, dims);
  workspace.states.Grow(splits.size() * state_size);
  // Splits done of each (query, KV head); whoever finishes the last one merges all, in order.
  const auto done =
      std::make_unique<std::atomic<int32_t>[]>(batch.size() * static_cast<size_t>(layer.kv_heads));
  pool.ParallelFor(static_cast<int64_t>(splits.size()), [&](int64_t task, int) {
    const Split& split = splits[static_cast<size_t>(task)];
    const DecodeQuery& query = batch[static_cast<size_t>(split.query)];
    const auto state_of = [&](int64_t index) {
      return AttentionState(workspace.states.data() + static_cast<size_t>(index) * state_size, g);
    };
    const int64_t pages = (query.num_tokens + kPageTokens - 1) / kPageTokens;
    const int64_t first = split.index * kPagesPerSplit;
    run(layer, query, split.kv_head, first, std::min(pages, first + kPagesPerSplit),
        state_of(task));
    auto& counter = done[static_cast<size_t>(split.query * layer.kv_heads + split.kv_head)];
    if (counter.fetch_add(1, std::memory_order_acq_rel) + 1 != split.count) return;
    const int64_t first_task = task - split.index;
    const AttentionState whole = state_of(first_task);
    for (int32_t s = 1; s < split.count; ++s) whole.Merge(state_of(first_task + s), g, dims);
    float* out = query.out + static_cast<ptrdiff_t>(split.kv_head) * g * dims;
    for (int h = 0; h < g; ++h) {
      const float inverse = 1.0f / whole.d[h];
      for (int i = h * dims; i < (h + 1) * dims; ++i) out[i] = whole.o[i] * inverse;
    }
  });
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
