// Prefill attention: a block of query rows over the pages of a sequence, on vectors or tiles (a
// `Path` of attention_prefill_vectors-inl.h or attention_prefill_amx-inl.h). Included once per
// target.
#if defined(OSCAR_SIMD_ATTENTION_PREFILL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_PREFILL_INL_H_
#undef OSCAR_SIMD_ATTENTION_PREFILL_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_PREFILL_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "simd/attention.h"
#include "simd/attention_codes-inl.h"
#include "simd/attention_prefill_vectors-inl.h"
#include "simd/attention_scratch-inl.h"
#include "simd/attention_tiles-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

enum class PageRows : uint8_t { kAll, kBeforeWindow, kInWindow };

// Floats of scratch that one thread needs.
inline size_t PrefillScratchSize(int dims, int num_groups) {
  return Scratch(nullptr, dims, num_groups).floats;
}
inline int PrefillTokensPerTask(int heads) { return std::max(1, kMaxRows / heads); }

// Query tokens [first, first + count) of `query`, heads [head, head + heads) of one KV head.
template <typename Path>
void PrefillBlock(const AttentionLayer& layer, const PrefillQuery& query, int kv_head, int head,
                  int heads, int first, int count, float* memory) {
  constexpr float kLog2E = 1.4426950408889634f;
  const int dims = layer.head_dim(), rows = heads * count;
  const BlockLayout& stored = layer.Stored(kv_head);
  const int groups = stored.num_groups();
  const float factor = layer.softmax_scale * kLog2E;
  const Scratch s(memory, dims, groups);
  const auto query_of = [&](int r) {
    return query.q + static_cast<size_t>(first + r / heads) * query.q_stride +
           (head + r % heads) * dims;
  };
  for (int r = 0; r < rows; ++r) {
    const float* source = query_of(r);
    for (int j = 0; j < dims; j += 16) {
      const F16x scaled = Mul(Load(source + j), Set(factor));
      if constexpr (Path::kRoundsRows) {
        StoreBf16(scaled, reinterpret_cast<Bf16*>(s.q_bf16) + r * dims + j);
      }
      if (!Path::kRoundsRows || !stored.is_rows()) Store(scaled, s.q + r * dims + j);
    }
    if (stored.is_rows()) {
      Path::template PrepareQuery<QueryPart::kRounded>(source, stored, factor, r, s);
    } else {
      Path::PrepareFloatQuery(dims, r, s);
    }
  }
  // Rows for which 16 bits of q are not enough on a page, and those whose remainder is ready. Each
  // row for itself: its numbers depend on no other.
  bool needed[kMaxRows], ready[kMaxRows] = {};
  const auto find_needed = [&](int first_row) HWY_ATTR {
    bool any = false;
    for (int g = 0; g < groups; ++g) {
      const float* k_scale = s.meta.k_scale + g * kPageTokens;
      const float largest = ReduceMax(
          Max(Max(Load(k_scale), Load(k_scale + 16)), Max(Load(k_scale + 32), Load(k_scale + 48))));
      for (int r = first_row; r < rows; ++r) {
        const bool exceeds = largest > s.scale_limit[r * groups + g];
        needed[r] = g == 0 ? exceeds : needed[r] || exceeds;
        any = any || exceeds;
      }
    }
    for (int r = first_row; any && r < rows; ++r) {
      if (!needed[r] || ready[r]) continue;
      Path::template PrepareQuery<QueryPart::kRemainder>(query_of(r), stored, factor, r, s);
      ready[r] = true;
    }
    return any;
  };
  Path::Begin(rows);
  std::fill_n(s.m, rows, kEmptyMax);
  std::fill_n(s.d, rows, 0.0f);
  std::fill_n(s.o, rows * dims, 0.0f);

  const int64_t block_start = query.first_position + first;
  const int64_t last_position = block_start + count - 1;
  // Rows of one page, in one of its forms. Token p sees positions of it up to p, less those that
  // `window` gives to the other form.
  const auto read_page = [&](int64_t page, const SealedBlock& from, const BlockLayout& layout,
                             PageRows seen) HWY_ATTR {
    const std::byte* const block = from.block;
    const int64_t page_start = page * kPageTokens;
    // Tokens before this page's start see nothing of it.
    const int skip = static_cast<int>(std::clamp<int64_t>(page_start - block_start, 0, count));
    const int first_row = skip * heads;
    // Nor do those whose window begins behind it; a row of any other sees some of it.
    const int end_row =
        layer.window == 0
            ? rows
            : heads * static_cast<int>(std::clamp<int64_t>(
                          page_start + kPageTokens + layer.window - 1 - block_start, 0, count));
    // What a row does not see of it, where there is a window.
    const auto for_unseen = [&](int r, const auto& body) {
      const int64_t position = block_start + r / heads;
      const int64_t begin = std::min<int64_t>(layer.FirstSeen(position) - page_start, kPageTokens);
      for (int64_t t = 0; t < begin; ++t) body(t);
      for (int64_t t = position + 1 - page_start; t < kPageTokens; ++t) body(t);
    };
    // Tokens before its end see a part of it.
    const auto mask = [&](int row, int end) {
      for (int r = row; r < end; ++r) {
        const int64_t visible = block_start + r / heads + 1 - page_start;
        float* const p = s.p + r * kPageTokens;
        if (layer.window > 0) {
          for_unseen(r, [&](int64_t t) { p[t] = kEmptyMax; });
          continue;
        }
        if (seen == PageRows::kAll) {
          if (visible >= kPageTokens) return;
          for (int64_t t = visible; t < kPageTokens; ++t) p[t] = kEmptyMax;
          continue;
        }
        const auto end_of_page = static_cast<int>(std::min<int64_t>(visible, kPageTokens));
        const auto end_of_old =
            static_cast<int>(std::clamp<int64_t>(visible - query.window.tokens, 0, kPageTokens));
        const auto end_of_sink =
            static_cast<int>(std::clamp<int64_t>(query.window.sink - page_start, 0, end_of_old));
        const bool is_old = seen == PageRows::kBeforeWindow;
        for (int t = 0; t < kPageTokens; ++t) {
          const bool old = t >= end_of_sink && t < end_of_old;
          if (old != is_old || t >= end_of_page) p[t] = kUnseen;
        }
      }
    };
    if (layout.is_bf16()) {
      const auto* k = reinterpret_cast<const Bf16*>(block);
      const auto* v = reinterpret_cast<const Bf16*>(block + layout.v_codes_offset());
      if (last_position + 1 - page_start < kPageTokens) {
        // What lies behind the last token is not a number yet.
        const auto used =
            static_cast<size_t>(last_position + 1 - page_start) * static_cast<size_t>(dims);
        const auto all = static_cast<size_t>(kPageTokens * dims);
        std::memset(s.page, 0, 2 * all * sizeof(Bf16));
        k = std::copy_n(k, used, s.page) - used;
        v = std::copy_n(v, used, s.page + all) - used;
      }
      Path::PrepareRows(k, v, dims, s);
      // Their weights are 2^-126 so far, of rows that other chunks may not have read.
      const auto clear = [&](int row, int end) {
        for (int r = row; layer.window > 0 && r < end; ++r) {
          for_unseen(r, [&](int64_t t) { Path::ClearWeight(s, r, t); });
        }
      };
      Path::ReadRows(dims, s, first_row, end_row, mask, clear);
      return;
    }
    ReadMeta(layout, block, s.meta);
    Path::PrepareValues(layout, block, s);
    bool any_needed = false;
    if (layout.is_rows()) {
      Path::PrepareKeys(layout, block, s);
      any_needed = find_needed(first_row);
    } else {
      FloatKeys(layout, from, s.k_pairs, s.k);
      Path::PrepareFloatKeys(dims, s);
    }
    Path::ReadCodes(layout, s, any_needed ? needed : nullptr, first_row, rows, mask);
  };
  for (int64_t page = layer.FirstSeen(block_start) / kPageTokens;
       page * kPageTokens <= last_position; ++page) {
    const bool sealed = query.sequence.is_sealed[page] != 0;
    const BlockLayout& layout = sealed ? stored : layer.open;
    const SealedBlock block =
        sealed ? layer.Sealed(query.sequence.pages, page, kv_head)
               : SealedBlock{.block = layer.Block(query.sequence.pages[page], false, kv_head)};
    const std::byte* const twin = page < query.window.count ? query.window.pages[page] : nullptr;
    if (twin == nullptr) {
      read_page(page, block, layout, PageRows::kAll);
      continue;
    }
    const size_t in_twin =
        layer.sealed[static_cast<size_t>(kv_head)].offset - layer.sealed[0].offset;
    SealedBlock old{.block = twin + in_twin};
    if (stored.pages_together() > 1) {
      const std::byte* const first =
          old.block - static_cast<size_t>(layer.IndexInRun(page)) * query.window.stride;
      old.pair[0] = first;
      old.pair[1] = first + query.window.stride;
    }
    if (layer.has_norms) old.norms = twin + (layer.norm_offset - layer.sealed[0].offset);
    read_page(page, old, stored, PageRows::kBeforeWindow);
    read_page(page, block, layout, PageRows::kInWindow);
  }
  Path::End();
  for (int r = 0; r < rows; ++r) {
    float* target = query.out + static_cast<size_t>(first + r / heads) * query.out_stride +
                    (head + r % heads) * dims;
    const float sink = layer.sinks == nullptr ? kEmptyMax : layer.sinks[head + r % heads];
    const F16x inverse = Set(AttentionState::InverseOf(s.m[r], s.d[r], sink));
    for (int j = 0; j < dims; j += 16) Store(Mul(Load(s.o + r * dims + j), inverse), target + j);
  }
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
