// What launcher and decode kernel agree on: the parameters, and how lengths become work items.
// Host and device.
#pragma once

#include <vector_types.h>

#include <cstdint>

#include "cuda/attention/cache_view.h"
#include "cuda/attention/mixed_split.h"

namespace oscar::cuda {

struct DecodeKernelParams {
  CacheView cache;
  const SequenceView* sequences;  // [batch]
  const uint16_t* q;              // [batch, q_heads, D] BF16, rotated
  void* out;                      // [batch, q_heads, D] BF16 or fp32
  float* partial_o;               // [batch, kv_heads, head_blocks, slots, heads, D]
  float2* partial_ml;             // the same without D: (R, l)
  uint32_t* arrived;              // [batch, kv_heads, head_blocks], zero between launches
  uint32_t* queue;                // [2]: items taken, blocks left; zero between launches
  float scale_log2;               // softmax scale * log2(e)
  int32_t batch;
  int32_t num_kv_heads;
  int32_t group_size;   // query heads a KV head
  int32_t head_blocks;  // ceil(group_size / heads a block handles)
  int32_t slots;        // partial states a (sequence, head) may have
  int32_t stages;
  int32_t split_pages;
  int32_t max_splits;
  bool out_fp32;
};

inline constexpr int kUnitTokens = 16;  // BF16 rows are dealt to warps in units of 16 tokens
inline constexpr int kUnitsPerPage = kPageTokens / kUnitTokens;
inline constexpr int kUnitsPerItem = 32;

// Items of one sequence, from its lengths alone.
struct DecodeItems {
  int window;       // items of up to kUnitsPerItem window units
  int history;      // splits
  int split_pages;  // pages a split
};
// As many splits as have `split_pages` pages, up to `max_splits`; a split is a whole number of
// rounds of the block's `warps`.
OSCAR_HD inline DecodeItems ItemsOf(const SequenceView& sequence, int split_pages, int max_splits,
                                    int warps) {
  const int units = (sequence.sink_tokens + kUnitTokens - 1) / kUnitTokens +
                    (sequence.recent_tokens + kUnitTokens - 1) / kUnitTokens;
  int splits = sequence.history_pages / split_pages;
  splits = splits < 1 ? 1 : splits > max_splits ? max_splits : splits;
  int pages = (sequence.history_pages + splits - 1) / splits;
  pages = (pages + warps - 1) / warps * warps;
  return {(units + kUnitsPerItem - 1) / kUnitsPerItem,
          pages == 0 ? 0 : (sequence.history_pages + pages - 1) / pages, pages};
}

// Units of BF16 rows that lie whole before a sliding window. `window`: 0, or of a sequence whose
// history lies before it.
OSCAR_HD inline int UnitsBefore(const SequenceView& sequence, int window) {
  const int64_t begin = sequence.length() - window;
  if (window == 0 || begin <= 0) return 0;
  const int64_t before_recent = sequence.length() - sequence.recent_tokens;
  const auto of_region = static_cast<int>(begin < before_recent ? begin : begin - before_recent);
  const int units_before =
      begin < before_recent ? 0 : (sequence.sink_tokens + kUnitTokens - 1) / kUnitTokens;
  return units_before + of_region / kUnitTokens;
}

// Of layers whose heads differ in bits.
struct MixedDecodeParams : DecodeKernelParams {
  MixedSplit split;
  int32_t stage_bytes;  // times `stages`: what a warp's ring has, however it is cut
  HeadBlock heads[kMaxMixedHeads];
};

// Of layers whose keys are not rows.
struct FormDecodeParams : DecodeKernelParams {
  explicit FormDecodeParams(const DecodeKernelParams& common, const FormBlocks& blocks)
      : DecodeKernelParams(common), form(blocks), at(blocks) {}

  // What follows from the form, which a kernel would work out again for every page.
  struct Places {
    explicit Places(const FormBlocks& of)
        : block_bytes(of.layout.block_bytes()),
          copied_bytes(of.copied_bytes()),
          mate(of.mate_at()),
          mate_bytes(of.mate_bytes()),
          norms_over_heads(of.norms_at()),
          norm_bytes(of.norm_bytes()),
          k_meta(of.layout.k_meta_offset()),
          v_codes(of.layout.v_codes_offset()),
          v_meta(of.layout.v_meta_offset()),
          norms(of.layout.has_head_norms() ? of.layout.KNorm(0)
                : of.norm_offset != 0      ? of.norms_at()
                                           : 0),
          boosts(of.layout.KBoost(0)),
          boosted(of.layout.boosted_dims()),
          form(of.layout.k_form()),
          k(of.layout.k_kind()),
          v(of.layout.v_kind()),
          two_groups(of.layout.group_tokens() == 32) {
      const auto half_bytes = static_cast<uint32_t>(of.layout.head_dim() / 2 * 4);
      for (uint32_t page = 0; page < 2; ++page) {
        for (uint32_t half = 0; half < 2; ++half) {
          metas[page][half] = !of.is_paired() ? k_meta + half * half_bytes
                              : page == half  ? k_meta
                                              : mate;
          indices[page][half] = metas[page][half] + half_bytes;  // of mixed keys, always in pairs
        }
      }
    }
    // Bytes to copy, and where they go in a stage.
    uint32_t block_bytes, copied_bytes, mate, mate_bytes, norms_over_heads, norm_bytes;
    uint32_t k_meta, v_codes, v_meta, norms, boosts;  // norms: 0, none
    int32_t boosted;
    SideForm form;
    BlockKind k, v;
    bool two_groups;       // of tokens
    uint32_t metas[2][2];  // FormBlocks::ChannelMeta, by which page of a pair and half of the dims
    uint32_t indices[2][2];  // likewise ChannelIndex
  };

  FormBlocks form;
  Places at;
  int32_t stage_bytes;
};

}  // namespace oscar::cuda
