#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/attention_decode.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include <algorithm>

#include "simd/attention.h"
#include "simd/attention_amx-inl.h"
#include "simd/attention_channels-inl.h"
#include "simd/attention_codes-inl.h"
#include "simd/attention_rows-inl.h"
#include "simd/attention_words-inl.h"
#include "simd/dispatch.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {
namespace {

using CodePageFunction = void (*)(const BlockLayout&, const std::byte*, int, const std::byte*,
                                  const QueryCodes&, Remainder<QueryCodes>&, float*, float*,
                                  float*);
using RowPageFunction = void (*)(const Bf16*, const Bf16*, const Bf16*, int, int, const QueryRows&,
                                 float*, float*, float*);

template <bool kVnni>
CodePageFunction ChooseCodePage(int heads) {
  constexpr CodePageFunction kTable[kMaxBlockHeads] = {&CodePage<1, kVnni>, &CodePage<2, kVnni>,
                                                       &CodePage<3, kVnni>, &CodePage<4, kVnni>};
  return kTable[heads - 1];
}

// For keys of that many bits.
template <bool kVnni>
auto ChoosePrepare(int bits) {
  return bits == 2   ? &PrepareCodes<2, kVnni>
         : bits == 3 ? &PrepareCodes<3, kVnni>
                     : &PrepareCodes<4, kVnni>;
}

#if HWY_TARGET == HWY_AVX3
using WordPagesFunction = void (*)(const BlockLayout&, const std::byte* const*, int, int, int,
                                   const WordQuery&, Remainder<WordQuery>&, float*, float*, float*);
WordPagesFunction ChooseWordPages(int heads) {
  constexpr WordPagesFunction kTable[kMaxBlockHeads] = {&WordPages<1>, &WordPages<2>, &WordPages<3>,
                                                        &WordPages<4>};
  return kTable[heads - 1];
}
#endif

using FormPageFunction = void (*)(const BlockLayout&, const SealedBlock&, int, const std::byte*,
                                  const ScaledQuery&, float*, float*, float*);
template <bool kVnni>
FormPageFunction ChooseFormPage(int heads) {
  constexpr FormPageFunction kTable[kMaxBlockHeads] = {&FormPage<1, kVnni>, &FormPage<2, kVnni>,
                                                       &FormPage<3, kVnni>, &FormPage<4, kVnni>};
  return kTable[heads - 1];
}

template <bool kBf16>
RowPageFunction ChooseRowPage(int heads) {
  constexpr RowPageFunction kTable[kMaxBlockHeads] = {&RowPage<1, kBf16>, &RowPage<2, kBf16>,
                                                      &RowPage<3, kBf16>, &RowPage<4, kBf16>};
  return kTable[heads - 1];
}

}  // namespace

// How codes meet numbers.
enum class CodePath : uint8_t { kMadd, kVnni, kWords, kTiles };

// The g query heads of one KV head over pages [first_page, end_page): a state for every
// kPagesPerSplit of them, `state_size` floats apart.
template <CodePath kPath, bool kBf16>
void DecodeSplits(const AttentionLayer& layer, const DecodeQuery& query, int kv_head,
                  int64_t first_page, int64_t end_page, float* states, size_t state_size) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr bool kVnni = kPath != CodePath::kMadd;
  const int dims = layer.head_dim(), g = layer.q_heads / layer.kv_heads;
  const BlockLayout& stored = layer.Stored(kv_head);
  const bool has_codes = !stored.is_bf16(), has_rows = stored.is_rows();
  const bool int2 = stored.is_uniform() && stored.kind() == BlockKind::kInt2;
  const float scale = layer.softmax_scale * kLog2E;
  const auto is_sealed = [&](int64_t page) { return query.sequence.is_sealed[page] != 0; };
  const auto block_of = [&](int64_t page) {
    return layer.Block(query.sequence.pages[page], is_sealed(page), kv_head);
  };
  const auto visible_of = [&](int64_t page) {
    const int64_t left = query.num_tokens - page * kPageTokens;
    return left < kPageTokens ? static_cast<int>(left) : kPageTokens;
  };
  // Heads that share one pass: eight where tiles take INT2 pages, whose other pages then go by
  // fours.
  constexpr int kParts4 = kPath == CodePath::kTiles ? 2 : 1;
  constexpr int kHeadsAtOnce = kParts4 * kMaxBlockHeads;
  // Pages that are fetched before their turn.
  constexpr int kAhead = kPath == CodePath::kTiles ? kTilePagesAhead : 2;
  for (int base = 0; base < g; base += kHeadsAtOnce) {
    const int heads = g - base < kHeadsAtOnce ? g - base : kHeadsAtOnce;
    QueryCodes codes[kParts4];
    QueryRows rows[kParts4];
    ScaledQuery scaled[kParts4];
#if HWY_TARGET == HWY_AVX3
    WordQuery words;
    TileQuery tiles;
#endif
    // The first blocks come in while q is prepared; later ones are fetched on the way.
    for (int64_t page = first_page; page < end_page && page < first_page + kAhead; ++page) {
      const std::byte* block = block_of(page);
      const uint32_t bytes = is_sealed(page) ? stored.block_bytes() : 0;
      for (uint32_t at = 0; at < bytes; at += 64) __builtin_prefetch(block + at, 0, 2);
    }
    const float* const block_q = query.q + (kv_head * g + base) * dims;
    const auto prepare_codes = ChoosePrepare<kVnni>(stored.k_bits());
    for (int h = 0; h < heads; ++h) {
      const float* q = block_q + h * dims;
      const int part = h / kMaxBlockHeads, at = h % kMaxBlockHeads;
      PrepareQueryRows(q, dims, scale, at, rows[part]);
      if (!has_codes) continue;
      if (!has_rows) {
        for (int i = 0; i < dims; i += 16) {
          Store(Mul(Load(q + i), Set(scale)), scaled[part].q[at] + i);
        }
        continue;
      }
#if HWY_TARGET == HWY_AVX3
      if (kPath == CodePath::kTiles && int2) {
        PrepareTileQuery(q, stored, scale, h, QueryPart::kRounded, tiles);
        continue;
      }
      if (kPath == CodePath::kWords && int2) {
        PrepareWordQuery(q, stored, scale, h, QueryPart::kRounded, words);
        continue;
      }
#endif
      prepare_codes(q, stored, scale, at, QueryPart::kRounded, codes[part]);
    }
    // The second part, if there is one, is that of four heads and more.
    Remainder<QueryCodes> codes_rest[] = {
        {block_q, std::min(heads, kMaxBlockHeads), scale, prepare_codes},
        {block_q + kMaxBlockHeads * dims, heads - kMaxBlockHeads, scale, prepare_codes}};
#if HWY_TARGET == HWY_AVX3
    Remainder<WordQuery> words_rest(block_q, heads, scale, &PrepareWordQuery);
    Remainder<TileQuery> tiles_rest(block_q, heads, scale, &PrepareTileQuery);
#endif
    for (int64_t first = first_page; first < end_page; first += kPagesPerSplit) {
      const int64_t end = std::min(end_page, first + kPagesPerSplit);
      // On the stack, not in the state: neighbouring states belong to other threads, and the
      // hardware prefetcher that follows each pass over o would fetch their lines away (0.98 us a
      // page of two threads against 0.79 of one).
      alignas(64) float o[kHeadsAtOnce * kMaxPageDims];
      float m[kHeadsAtOnce], d[kHeadsAtOnce];
      std::fill_n(o, heads * dims, 0.0f);
      std::fill_n(m, heads, kEmptyMax);
      std::fill_n(d, heads, 0.0f);
      for (int64_t page = first; page < end; ++page) {
        const bool sealed = is_sealed(page);
        const BlockLayout& layout = sealed ? stored : layer.open;
#if HWY_TARGET == HWY_AVX3
        if constexpr (kPath == CodePath::kWords || kPath == CodePath::kTiles) {
          if (sealed && int2) {
            // The whole run of sealed pages at once, and those after it that are fetched meanwhile.
            const std::byte* run[kPagesPerSplit + kAhead];
            int count = 0, known = 0;
            for (; page + known < end_page && known < count + kAhead && is_sealed(page + known);
                 ++known) {
              run[known] = block_of(page + known);
              if (page + known < end) ++count;
            }
            page += count - 1;
            if constexpr (kPath == CodePath::kTiles) {
              TilePages<AmxTiles>(layout, run, count, known, visible_of(page), heads, tiles,
                                  tiles_rest, m, d, o);
            } else {
              ChooseWordPages(heads)(layout, run, count, known, visible_of(page), words, words_rest,
                                     m, d, o);
            }
            continue;
          }
        }
#endif
        const std::byte* block = block_of(page);
        const std::byte* next = page + 1 < end_page ? block_of(page + 1) : nullptr;
        // Rows of the first page that a window leaves out; it is open, and rows lie in order.
        const auto skip = static_cast<int>(
            std::max<int64_t>(0, layer.FirstSeen(query.num_tokens - 1) - page * kPageTokens));
        for (int part = 0; part * kMaxBlockHeads < heads; ++part) {
          const int head = part * kMaxBlockHeads;
          const int count = heads - head < kMaxBlockHeads ? heads - head : kMaxBlockHeads;
          if (sealed && has_codes && !has_rows) {
            ChooseFormPage<kVnni>(count)(layout, layer.Sealed(query.sequence.pages, page, kv_head),
                                         visible_of(page), next, scaled[part], m + head, d + head,
                                         o + head * dims);
          } else if (sealed && has_codes) {
            ChooseCodePage<kVnni>(count)(layout, block, visible_of(page), next, codes[part],
                                         codes_rest[part], m + head, d + head, o + head * dims);
          } else {
            ChooseRowPage<kBf16>(count)(
                reinterpret_cast<const Bf16*>(block) + skip * dims,
                reinterpret_cast<const Bf16*>(block + layout.v_codes_offset()) + skip * dims,
                reinterpret_cast<const Bf16*>(next), dims, visible_of(page) - skip, rows[part],
                m + head, d + head, o + head * dims);
          }
        }
      }
      const AttentionState state(
          states + static_cast<size_t>((first - first_page) / kPagesPerSplit) * state_size, g);
      std::copy_n(o, heads * dims, state.o + base * dims);
      std::copy_n(m, heads, state.m + base);
      std::copy_n(d, heads, state.d + base);
    }
  }
}

using DecodeFunction = void (*)(const AttentionLayer&, const DecodeQuery&, int, int64_t, int64_t,
                                float*, size_t);
DecodeFunction ChooseDecode([[maybe_unused]] Target target, [[maybe_unused]] bool bf16) {
#if HWY_TARGET == HWY_AVX3
  if (target == Target::kAmxInt8) {
    return bf16 ? &DecodeSplits<CodePath::kTiles, true> : &DecodeSplits<CodePath::kTiles, false>;
  }
  if (target == Target::kAvx512Words) {
    return bf16 ? &DecodeSplits<CodePath::kWords, true> : &DecodeSplits<CodePath::kWords, false>;
  }
  if (HasVnni(target)) {
    return bf16 ? &DecodeSplits<CodePath::kVnni, true> : &DecodeSplits<CodePath::kVnni, false>;
  }
#endif
  return &DecodeSplits<CodePath::kMadd, false>;
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {
namespace {

// Consecutive splits of one (query, KV head) that one thread does in a row: q is prepared once.
struct Task {
  int32_t query;
  int32_t kv_head;
  int64_t first_page;
  int64_t end_page;
  int64_t first_state;  // of this (query, KV head)
  int32_t count;        // of tasks there
};

}  // namespace

bool AttentionLayer::IsValid() const {
  return kv_heads > 0 && q_heads % kv_heads == 0 && open.is_bf16() &&
         open.order() == CodeOrder::kCpu && std::cmp_equal(sealed.size(), kv_heads) &&
         std::ranges::all_of(sealed, [&](const BlockPlace& place) {
           return place.layout.order() == CodeOrder::kCpu &&
                  place.layout.head_dim() == open.head_dim() &&
                  place.layout.num_groups() == num_groups();
         });
}

void DecodeAttention(ThreadPool& pool, AttentionWorkspace& workspace, const AttentionLayer& layer,
                     std::span<const DecodeQuery> batch) {
  OSCAR_CHECK(layer.IsValid());
  const int dims = layer.head_dim(), g = layer.q_heads / layer.kv_heads;
  // Of a window, from the page on that it begins in.
  const auto first_page_of = [&](const DecodeQuery& query) {
    return layer.FirstSeen(query.num_tokens - 1) / kPageTokens;
  };
  const auto pages_of = [&](const DecodeQuery& query) {
    return (query.num_tokens + kPageTokens - 1) / kPageTokens - first_page_of(query);
  };
  const auto splits_of = [](int64_t pages) {
    return (pages + kPagesPerSplit - 1) / kPagesPerSplit;
  };
  int64_t splits = 0;
  for (const DecodeQuery& query : batch) {
    OSCAR_CHECK(query.num_tokens > 0);
    splits += splits_of(pages_of(query)) * layer.kv_heads;
  }
  // Eight tasks a thread keep the threads busy to the end.
  const int64_t task_pages =
      std::clamp<int64_t>(splits / (8 * pool.num_threads()), 1, 8) * kPagesPerSplit;
  std::vector<Task> tasks;
  int64_t states = 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    const int64_t pages = pages_of(batch[i]), begin = first_page_of(batch[i]);
    const auto count = static_cast<int32_t>((pages + task_pages - 1) / task_pages);
    for (int h = 0; h < layer.kv_heads; ++h, states += splits_of(pages)) {
      for (int64_t first = 0; first < pages; first += task_pages) {
        tasks.push_back({static_cast<int32_t>(i), h, begin + first,
                         begin + std::min(pages, first + task_pages), states, count});
      }
    }
  }
  const Target target = ActiveTarget();
  const auto run = target == Target::kAvx2
                       ? N_AVX2::ChooseDecode(target, false)
                       : N_AVX3::ChooseDecode(target, layer.bf16_products && HasAvx512Bf16());
  const size_t state_size = AttentionState::Size(g, dims);
  workspace.states.Grow(static_cast<size_t>(states) * state_size);
  // Tasks done of each (query, KV head); whoever finishes the last one merges all splits, in order.
  const auto done =
      std::make_unique<std::atomic<int32_t>[]>(batch.size() * static_cast<size_t>(layer.kv_heads));
  pool.ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t index, int) {
    const Task& task = tasks[static_cast<size_t>(index)];
    const DecodeQuery& query = batch[static_cast<size_t>(task.query)];
    const auto memory_of = [&](int64_t split) {
      return workspace.states.data() + static_cast<size_t>(task.first_state + split) * state_size;
    };
    run(layer, query, task.kv_head, task.first_page, task.end_page,
        memory_of((task.first_page - first_page_of(query)) / kPagesPerSplit), state_size);
    auto& counter = done[static_cast<size_t>(task.query * layer.kv_heads + task.kv_head)];
    if (counter.fetch_add(1, std::memory_order_acq_rel) + 1 != task.count) return;
    const AttentionState whole(memory_of(0), g);
    for (int64_t s = 1; s < splits_of(pages_of(query)); ++s) {
      whole.Merge(AttentionState(memory_of(s), g), g, dims);
    }
    float* out = query.out + static_cast<ptrdiff_t>(task.kv_head) * g * dims;
    for (int h = 0; h < g; ++h) {
      const float inverse =
          whole.Inverse(h, layer.sinks == nullptr ? nullptr : layer.sinks + task.kv_head * g);
      for (int i = h * dims; i < (h + 1) * dims; ++i) out[i] = whole.o[i] * inverse;
    }
  });
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
