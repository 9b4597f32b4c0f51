#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/attention_decode.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include <algorithm>

#include "simd/attention.h"
#include "simd/attention_amx-inl.h"
#include "simd/attention_codes-inl.h"
#include "simd/attention_rows-inl.h"
#include "simd/attention_words-inl.h"
#include "simd/dispatch.h"

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

#if HWY_TARGET == HWY_AVX3
using WordPagesFunction = void (*)(const PageLayout&, const std::byte* const*, int, int,
                                   const WordQuery&, float*, float*, float*);
WordPagesFunction ChooseWordPages(int heads) {
  constexpr WordPagesFunction kTable[kMaxBlockHeads] = {&WordPages<1>, &WordPages<2>, &WordPages<3>,
                                                        &WordPages<4>};
  return kTable[heads - 1];
}
#endif

template <bool kBf16>
RowPageFunction ChooseRowPage(int heads) {
  constexpr RowPageFunction kTable[kMaxBlockHeads] = {&RowPage<1, kBf16>, &RowPage<2, kBf16>,
                                                      &RowPage<3, kBf16>, &RowPage<4, kBf16>};
  return kTable[heads - 1];
}

}  // namespace

// How codes meet numbers.
enum class CodePath : uint8_t { kMadd, kVnni, kWords, kTiles };

// The g query heads of one KV head over pages [first_page, end_page), at most kPagesPerSplit.
template <CodePath kPath, bool kBf16>
void DecodeSplit(const AttentionLayer& layer, const DecodeQuery& query, int kv_head,
                 int64_t first_page, int64_t end_page, const AttentionState& state) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr bool kVnni = kPath != CodePath::kMadd;
  const int dims = layer.head_dim(), g = layer.q_heads / layer.kv_heads;
  const bool has_codes = layer.sealed.kind() != PageKind::kBf16;
  const float scale = layer.softmax_scale * kLog2E;
  const auto block_of = [&](int64_t page) {
    const bool sealed = query.sequence.is_sealed[page] != 0;
    const PageLayout& layout = sealed ? layer.sealed : layer.open;
    return query.sequence.pages[page] + (sealed ? layer.sealed_offset : layer.open_offset) +
           static_cast<size_t>(kv_head) * layout.block_bytes();
  };
  // Heads that share one pass: eight where tiles take INT2 pages, whose other pages then go by
  // fours.
  constexpr int kParts4 = kPath == CodePath::kTiles ? 2 : 1;
  constexpr int kHeadsAtOnce = kParts4 * kMaxBlockHeads;
  for (int base = 0; base < g; base += kHeadsAtOnce) {
    const int heads = g - base < kHeadsAtOnce ? g - base : kHeadsAtOnce;
    QueryCodes codes[kParts4];
    QueryRows rows[kParts4];
#if HWY_TARGET == HWY_AVX3
    WordQuery words;
    TileQuery tiles;
#endif
    // The first blocks come in while q is prepared; later ones are fetched on the way.
    for (int64_t page = first_page; page < end_page && page < first_page + 2; ++page) {
      const std::byte* block = block_of(page);
      const uint32_t bytes = query.sequence.is_sealed[page] != 0 ? layer.sealed.block_bytes() : 0;
      for (uint32_t at = 0; at < bytes; at += 64) __builtin_prefetch(block + at, 0, 2);
    }
    for (int h = 0; h < heads; ++h) {
      const float* q = query.q + (kv_head * g + base + h) * dims;
      const int part = h / kMaxBlockHeads, at = h % kMaxBlockHeads;
      PrepareQueryRows(q, dims, scale, at, rows[part]);
      if (layer.sealed.kind() == PageKind::kInt2) {
#if HWY_TARGET == HWY_AVX3
        if constexpr (kPath == CodePath::kTiles) {
          PrepareTileQuery(q, layer.sealed, scale, h, tiles);
        } else if constexpr (kPath == CodePath::kWords) {
          PrepareWordQuery(q, layer.sealed, scale, h, words);
        } else if constexpr (kVnni) {
          PrepareQueryTables(q, layer.sealed, scale, h, codes[0].tables);
        } else {
          PrepareQuery<2>(q, layer.sealed, scale, h, codes[0]);
        }
#else
        PrepareQuery<2>(q, layer.sealed, scale, h, codes[0]);
#endif
      } else if (layer.sealed.kind() == PageKind::kInt4) {
        PrepareQuery<4>(q, layer.sealed, scale, at, codes[part]);
      }
    }
    // On the stack, not in `state`: neighbouring states belong to other threads, and the hardware
    // prefetcher that follows each pass over o would fetch their lines away (0.98 us a page of two
    // threads against 0.79 of one).
    alignas(64) float o[kHeadsAtOnce * kMaxPageDims];
    float m[kHeadsAtOnce], d[kHeadsAtOnce];
    std::fill_n(o, heads * dims, 0.0f);
    std::fill_n(m, heads, kEmptyMax);
    std::fill_n(d, heads, 0.0f);
    for (int64_t page = first_page; page < end_page; ++page) {
      const bool sealed = query.sequence.is_sealed[page] != 0;
      const PageLayout& layout = sealed ? layer.sealed : layer.open;
      const auto visible_of = [&](int64_t p) {
        const int64_t left = query.num_tokens - p * kPageTokens;
        return left < kPageTokens ? static_cast<int>(left) : kPageTokens;
      };
#if HWY_TARGET == HWY_AVX3
      if constexpr (kPath == CodePath::kWords || kPath == CodePath::kTiles) {
        if (sealed && layer.sealed.kind() == PageKind::kInt2) {
          // The whole run of sealed pages at once.
          const std::byte* run[kPagesPerSplit];
          int count = 0;
          for (; page + count < end_page && query.sequence.is_sealed[page + count] != 0; ++count) {
            run[count] = block_of(page + count);
          }
          page += count - 1;
          if constexpr (kPath == CodePath::kTiles) {
            TilePages<AmxTiles>(layout, run, count, visible_of(page), heads, tiles, m, d, o);
          } else {
            ChooseWordPages(heads)(layout, run, count, visible_of(page), words, m, d, o);
          }
          continue;
        }
      }
#endif
      const std::byte* block = block_of(page);
      const std::byte* next = page + 1 < end_page ? block_of(page + 1) : nullptr;
      for (int part = 0; part * kMaxBlockHeads < heads; ++part) {
        const int first = part * kMaxBlockHeads;
        const int count = heads - first < kMaxBlockHeads ? heads - first : kMaxBlockHeads;
        if (sealed && has_codes) {
          const CodePageFunction code_page = layer.sealed.kind() == PageKind::kInt4
                                                 ? ChooseCodePage<4, kVnni>(count)
                                                 : ChooseCodePage<2, kVnni>(count);
          code_page(layout, block, visible_of(page), next, codes[part], m + first, d + first,
                    o + first * dims);
        } else {
          ChooseRowPage<kBf16>(count)(
              reinterpret_cast<const Bf16*>(block),
              reinterpret_cast<const Bf16*>(block + layout.v_codes_offset()),
              reinterpret_cast<const Bf16*>(next), dims, visible_of(page), rows[part], m + first,
              d + first, o + first * dims);
        }
      }
    }
    std::copy_n(o, heads * dims, state.o + base * dims);
    std::copy_n(m, heads, state.m + base);
    std::copy_n(d, heads, state.d + base);
  }
}

using DecodeFunction = void (*)(const AttentionLayer&, const DecodeQuery&, int, int64_t, int64_t,
                                const AttentionState&);
DecodeFunction ChooseDecode([[maybe_unused]] Target target, [[maybe_unused]] bool bf16) {
#if HWY_TARGET == HWY_AVX3
  if (target == Target::kAmxInt8) {
    return bf16 ? &DecodeSplit<CodePath::kTiles, true> : &DecodeSplit<CodePath::kTiles, false>;
  }
  if (target == Target::kAvx512Words) {
    return bf16 ? &DecodeSplit<CodePath::kWords, true> : &DecodeSplit<CodePath::kWords, false>;
  }
  if (HasVnni(target)) {
    return bf16 ? &DecodeSplit<CodePath::kVnni, true> : &DecodeSplit<CodePath::kVnni, false>;
  }
#endif
  return &DecodeSplit<CodePath::kMadd, false>;
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
#include <atomic>
#include <memory>
#include <vector>

#include "base/check.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {
namespace {

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
                       ? N_AVX2::ChooseDecode(target, false)
                       : N_AVX3::ChooseDecode(target, layer.bf16_products && HasAvx512Bf16());
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
