// The kernels of FormSeal. Built without contraction (CMakeLists.txt): they do the arithmetic of
// the scalar encoders (cache/block_codec.cc, quant/affine_group.cc, quant/turboquant.cc) in their
// order, so their bytes are the same.
//
// Norms      Grid (jobs, layers), 256 threads: 16 lanes sum the squares of one (token, head).
// Seal       Grid (runs x KV heads, layers), 256 threads; a run is the pages that are sealed
//            together. Threads first take a group each (a dim over its tokens, or a row's dims)
//            and leave its scale and min in shared memory, then a word's worth of codes each.
// Bytes      the open page twice or three times, from global memory once and from the L1 then.
// Bound      instruction issue; not measured on a card.
#include "cuda/device/ptx.cuh"
#include "cuda/kv/form_seal_params.h"
#include "quant/kitty.h"

namespace oscar::cuda {
namespace {

// What codes of a group are made with.
struct GroupCode {
  float scale, offset;  // as stored
  float slope, zero;    // kIntegerZero: of the exact scale
};

__device__ float RoundFp16(float x) {
  const float held = x < -kFp16Max ? -kFp16Max : x > kFp16Max ? kFp16Max : x;
  return __half2float(__float2half_rn(held));
}

// A number of an open block as quantisers see it (FiniteRow).
struct OpenSide {
  const uint8_t* rows;  // one side of a BF16 block, [D / 64][64][64] swizzled

  __device__ float Raw(int token, int dim) const {
    const int chunk = (dim % 64 / 8) ^ (token & 7);
    const int at = ((dim / 64 * kPageTokens + token) * 64 + chunk * 8 + dim % 8) * 2;
    return __uint_as_float(
        static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(rows + at))) << 16);
  }
  __device__ static float Finite(float x) {
    return x != x ? 0.0f : x < -kFp16Max ? -kFp16Max : x > kFp16Max ? kFp16Max : x;
  }
  __device__ float operator()(int token, int dim) const { return Finite(Raw(token, dim)); }
  // Dims 8 chunk to 8 chunk + 7 of a token.
  __device__ void Chunk(int token, int chunk, float (&x)[8]) const {
    const int at = (chunk / 8 * kPageTokens + token) * 128 + ((chunk % 8) ^ (token & 7)) * 16;
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(rows + at));
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = Finite(Bf16Low(pairs[i]));
      x[2 * i + 1] = Finite(Bf16High(pairs[i]));
    }
  }
  // Dims `dim` and `dim` + 1 as they are; `dim` is even.
  __device__ float2 RawPair(int token, int dim) const {
    const int at = (dim / 64 * kPageTokens + token) * 128 + ((dim % 64 / 8) ^ (token & 7)) * 16;
    const uint32_t pair = __ldg(reinterpret_cast<const uint32_t*>(rows + at + dim % 8 * 2));
    return {Bf16Low(pair), Bf16High(pair)};
  }
};

// Sum16 of the squares of a row, by 16 neighbouring lanes, the first of which returns it. Whole
// warps.
template <int kDim>
__device__ float SumOfSquares(const OpenSide& side, int token, int lane16) {
  float sum = 0.0f;
#pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    const float x = side(token, d + lane16);
    sum = sum + x * x;
  }
#pragma unroll
  for (int width = 8; width > 0; width /= 2) sum = sum + __shfl_down_sync(~0u, sum, width);
  return sum;
}
__device__ float NormOfSum(float sum) {
  const float norm = sqrtf(sum);
  return norm > 0.0f ? norm : 1.0f;
}

// The least and largest of some numbers, of equal ones (0 and -0) the first.
struct Range {
  float lo, hi;
  __device__ void Add(float x) {
    lo = x < lo ? x : lo;
    hi = x < hi ? hi : x;
  }
  // Numbers that come after those.
  __device__ void Append(const Range& next) {
    lo = next.lo < lo ? next.lo : lo;
    hi = next.hi < hi ? hi : next.hi;
  }
};

// The group whose numbers have that range. `signed_zero`: a least number of -0 stays one (rows by
// min/max).
__device__ GroupCode CodeOf(RowRule rule, int bits, bool signed_zero, Range range_of) {
  float lo = range_of.lo, hi = range_of.hi;
  if (!signed_zero) {
    lo = lo + 0.0f;
    hi = hi + 0.0f;
  }
  const auto levels = static_cast<float>((1 << bits) - 1);
  if (rule == RowRule::kIntegerZero) {
    if (lo == 0.0f && hi == 0.0f) {
      lo = -1.0f;
      hi = 1.0f;
    }
    const float range = hi - lo;
    if (!(range > 1e-30f)) return {0.0f, RoundFp16(lo), 0.0f, 0.0f};
    const float step = range / levels;
    const float zero = nearbyintf(-lo / step);
    return {RoundFp16(step), RoundFp16(-zero * step), levels / range, zero};
  }
  const float range = hi - lo;
  const float wide = rule == RowRule::kMinMax && range < kMinRange ? kMinRange : range;
  const float scale = RoundFp16(wide / levels);
  return {scale < kMinScale ? kMinScale : scale, RoundFp16(lo), 0.0f, 0.0f};
}

__device__ uint32_t CodeIn(const GroupCode& group, RowRule rule, int bits, float x) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  const auto clamp = [levels](float q) { return q < 0.0f ? 0.0f : levels < q ? levels : q; };
  float q;
  if (rule == RowRule::kIntegerZero) {
    q = clamp(nearbyintf(x * group.slope + group.zero));
  } else if (rule == RowRule::kRealMin) {
    q = nearbyintf(clamp((x - group.offset) / group.scale));
  } else {
    q = clamp(floorf((x - group.offset) / group.scale + 0.5f));
  }
  return static_cast<uint32_t>(q);
}

// The word of a block that a thread's codes go to, written when the next code lies elsewhere.
class WordWriter {
 public:
  __device__ explicit WordWriter(uint8_t* block) : block_(block) {}
  __device__ void Or(CodePosition at, uint32_t code) {
    if (at.offset != offset_) {
      Flush();
      offset_ = at.offset;
    }
    word_ |= code << at.shift;
  }
  // Two tiles share words at D 64, hence the atomic.
  __device__ void Flush() {
    if (word_ != 0) atomicOr(reinterpret_cast<uint32_t*>(block_ + offset_), word_);
    word_ = 0;
  }

 private:
  uint8_t* block_;
  uint32_t offset_ = 0, word_ = 0;
};

template <int kDim>
class FormSealer {
 public:
  static constexpr int kOpenSideBytes = kPageTokens * kDim * 2;
  static constexpr int kMostRowGroups = kPageTokens * kDim / 32;  // of a side of a page
  // Behind the block in shared memory.
  struct Shared {
    GroupCode k[kMostRowGroups];  // of channels [groups of the run, D], of rows [64, groups]
    GroupCode v[kMostRowGroups];
    float norms[kMaxGroupTokens];    // of the run
    float row_clip[2][kPageTokens];  // largest |x| of a row; K, V
    float lengths[kPageTokens];      // codebook: norm of a row
    int levels[kPageTokens];         // codebook: sum of squared levels
    float sums[kDim];                // mixed: of |k|
    uint8_t index[kDim];             // mixed: the plane of a dim's upper bits
  };

  __device__ FormSealer(const FormSealParams& p, uint8_t* shared)
      : p_(p),
        layout_(p.layout),
        block_(shared),
        s_(*reinterpret_cast<Shared*>(shared + (p.layout.block_bytes() + 15) / 16 * 16)),
        thread_(static_cast<int>(threadIdx.x)),
        head_(static_cast<int>(blockIdx.x) % p.num_kv_heads),
        first_(static_cast<int>(blockIdx.x) / p.num_kv_heads * p.layout.pages_together()),
        first_keys_(Open(0, false)),
        last_keys_(Open(p.layout.pages_together() - 1, false)) {}

  __device__ void Run() {
    if (p_.source_pages[first_] < 0) return;
    divides_ = layout_.has_head_norms() || p_.norm_offset != 0;
    if (layout_.is_bf16()) {
      const auto* from = reinterpret_cast<const uint4*>(Open(0, false).rows);
      auto* to = reinterpret_cast<uint4*>(Target(0));
      for (int i = thread_; i < 2 * kOpenSideBytes / 16; i += kFormSealThreads) to[i] = from[i];
      return;
    }
    const int pages = layout_.pages_together();
    const bool channels = IsChannels();
    if (channels) Channels(pages);
    for (int page = 0; page < pages; ++page) {
      __syncthreads();  // the block of the page before is written
      for (uint32_t i = static_cast<uint32_t>(thread_); i < layout_.block_bytes() / 4;
           i += kFormSealThreads) {
        reinterpret_cast<uint32_t*>(block_)[i] = 0u;
      }
      for (int t = thread_; t < kPageTokens; t += kFormSealThreads) s_.levels[t] = 0;
      if (layout_.is_rows()) Rows(page, false);
      if (layout_.k_form() == SideForm::kCodebook) RowNorms(page);
      Rows(page, true);
      __syncthreads();
      ForKind(layout_.k_kind(), [&]<BlockKind kK>() { KeyCodes<kK>(page); });
      ForKind(layout_.v_kind(), [&]<BlockKind kV>() { ValueCodes<kV>(page); });
      if (channels) ChannelMeta(page, pages);
      if (layout_.is_rows()) RowMeta(false);
      RowMeta(true);
      __syncthreads();
      if (layout_.k_form() == SideForm::kCodebook) CodebookMeta();
      __syncthreads();
      auto* to = reinterpret_cast<uint4*>(Target(page));
      for (uint32_t i = static_cast<uint32_t>(thread_); i < layout_.block_bytes() / 16;
           i += kFormSealThreads) {
        to[i] = reinterpret_cast<const uint4*>(block_)[i];
      }
    }
    if (changed_ > 0 && p_.saturated != nullptr) {
      atomicAdd(p_.saturated, static_cast<unsigned long long>(changed_));
    }
  }

 private:
  __device__ bool IsChannels() const {
    return layout_.k_form() == SideForm::kChannels || layout_.k_form() == SideForm::kMixed;
  }
  __device__ OpenSide Open(int page, bool is_v) const {
    return {reinterpret_cast<const uint8_t*>(
        p_.window_pool + static_cast<int64_t>(blockIdx.y) * p_.window_layer_stride +
        p_.source_pages[first_ + page] * p_.window_page_stride +
        int64_t{head_} * (2 * kOpenSideBytes) + (is_v ? kOpenSideBytes : 0))};
  }
  __device__ std::byte* TargetPage(int page) const {
    return p_.history_pool + static_cast<int64_t>(blockIdx.y) * p_.history_layer_stride +
           p_.target_pages[first_ + page] * p_.history_page_stride;
  }
  __device__ std::byte* Target(int page) const {
    return TargetPage(page) + int64_t{head_} * layout_.block_bytes();
  }
  // Keys of a page of the run.
  __device__ OpenSide Keys(int page) const { return page == 0 ? first_keys_ : last_keys_; }
  // A number that goes into a code, counted if it changes.
  __device__ float Counted(float raw) {
    const float x = OpenSide::Finite(raw);
    changed_ += x == raw ? 0 : 1;
    return x;
  }
  // body.operator()<kKind>() of 2, 3 or 4 bits: where codes lie is known at compile time then.
  template <typename Body>
  __device__ static void ForKind(BlockKind kind, const Body& body) {
    if (kind == BlockKind::kInt2) {
      body.template operator()<BlockKind::kInt2>();
    } else if (kind == BlockKind::kInt3) {
      body.template operator()<BlockKind::kInt3>();
    } else {
      body.template operator()<BlockKind::kInt4>();
    }
  }
  // By the token's norm, where there are any.
  __device__ float Divided(float x, int token) const { return divides_ ? x / s_.norms[token] : x; }

  // ---- groups ----

  // Norms, boosted dims, then (scale, min) of every dim and token group of the run.
  __device__ void Channels(int pages) {
    const int tokens = pages * kPageTokens;
    if (layout_.has_head_norms()) {
      for (int i = thread_; i < tokens * 16; i += kFormSealThreads) {
        const int t = i / 16, page = t / kPageTokens, token = t % kPageTokens;
        const float norm = NormOfSum(0.0f + SumOfSquares<kDim>(Keys(page), token, i % 16));
        if (i % 16 == 0) s_.norms[t] = norm;
      }
    } else if (divides_) {
      for (int t = thread_; t < tokens; t += kFormSealThreads) {
        s_.norms[t] = reinterpret_cast<const float*>(TargetPage(t / kPageTokens) +
                                                     p_.norm_offset)[t % kPageTokens];
      }
    }
    for (int d = thread_; d < kDim; d += kFormSealThreads) s_.index[d] = kNotBoosted;
    __syncthreads();
    if (layout_.k_form() == SideForm::kMixed) Boosted(tokens);
    const int group = layout_.group_tokens();
    for (int i = thread_; i < tokens / group * kDim; i += kFormSealThreads) {
      const int first = i / kDim * group, dim = i % kDim;
      Range range = RangeOf(first, dim);
      for (int t = kRun; t < group; t += kRun) range.Append(RangeOf(first + t, dim));
      s_.k[i] = CodeOf(p_.k_rule, ChannelBits(dim), false, range);
    }
  }
  // Of a dim, kRun tokens from `first` on, all of one page.
  static constexpr int kRun = 16;
  __device__ Range RangeOf(int first, int dim) const {
    const OpenSide side = Keys(first / kPageTokens);
    float x[kRun];
#pragma unroll
    for (int t = 0; t < kRun; ++t) {
      x[t] = Divided(side(first % kPageTokens + t, dim), first + t);
    }
    Range range{x[0], x[0]};
#pragma unroll
    for (int t = 1; t < kRun; ++t) range.Add(x[t]);
    return range;
  }
  __device__ int ChannelBits(int dim) const {
    return s_.index[dim] == kNotBoosted ? layout_.k_bits() : 4;
  }
  // RankChannels: the dims with the largest sums, the lower of equals; planes in order of dims.
  __device__ void Boosted(int tokens) {
    for (int d = thread_; d < kDim; d += kFormSealThreads) {
      float sum = 0.0f;
      for (int first = 0; first < tokens; first += kRun) {
        const OpenSide side = Keys(first / kPageTokens);
        float x[kRun];
#pragma unroll
        for (int t = 0; t < kRun; ++t) {
          x[t] = fabsf(Divided(side(first % kPageTokens + t, d), first + t));
        }
#pragma unroll
        for (int t = 0; t < kRun; ++t) sum = sum + x[t];
      }
      s_.sums[d] = sum;
    }
    __syncthreads();
    const auto is_boosted = [&](int d) {
      int before = 0;
      for (int e = 0; e < kDim; ++e) {
        before += s_.sums[e] > s_.sums[d] || (s_.sums[e] == s_.sums[d] && e < d) ? 1 : 0;
      }
      return before < layout_.boosted_dims();
    };
    for (int d = thread_; d < kDim; d += kFormSealThreads)
      s_.index[d] = is_boosted(d) ? 0 : kNotBoosted;
    __syncthreads();
    int plane[(kDim + kFormSealThreads - 1) / kFormSealThreads] = {};
    for (int d = thread_, i = 0; d < kDim; d += kFormSealThreads, ++i) {
      for (int e = 0; e < d; ++e) plane[i] += s_.index[e] != kNotBoosted ? 1 : 0;
    }
    __syncthreads();
    for (int d = thread_, i = 0; d < kDim; d += kFormSealThreads, ++i) {
      if (s_.index[d] != kNotBoosted) s_.index[d] = static_cast<uint8_t>(plane[i]);
    }
    __syncthreads();
  }

  // Groups of dims of one side.
  __device__ void Rows(int page, bool is_v) {
    const OpenSide side = Open(page, is_v);
    const int index = is_v ? p_.v_clip_index : p_.k_clip_index;
    float* const clip = s_.row_clip[is_v ? 1 : 0];
    const RowRule rule = is_v ? p_.v_rule : p_.k_rule;
    const int groups = layout_.num_groups(), dims = layout_.group_dims();
    for (int t = thread_; t < kPageTokens; t += kFormSealThreads) clip[t] = kFp16Max;
    __syncthreads();
    if (index >= 0) {
      // The value at `index` of the ascending |row|: as many are below it, or equal and before it.
      for (int i = thread_; i < kPageTokens * kDim; i += kFormSealThreads) {
        const int t = i / kDim, d = i % kDim;
        const float x = fabsf(side(t, d));
        int before = 0;
        for (int e = 0; e < kDim; ++e) {
          const float y = fabsf(side(t, e));
          before += y < x || (y == x && e < d) ? 1 : 0;
        }
        if (before == index) clip[t] = x;
      }
    }
    __syncthreads();
    // Neighbouring lanes have the chunks of a row, those of a group in order.
    const int lanes = dims / 8;
    for (int i = thread_; i < kPageTokens * kChunks; i += kFormSealThreads) {
      const int t = i / kChunks, chunk = i % kChunks;
      float x[8];
      side.Chunk(t, chunk, x);
      const float most = clip[t];
      Range range{Clamp(x[0], most), Clamp(x[0], most)};
#pragma unroll
      for (int d = 1; d < 8; ++d) range.Add(Clamp(x[d], most));
      for (int step = 1; step < lanes; step *= 2) {
        range.Append(
            {__shfl_down_sync(~0u, range.lo, step), __shfl_down_sync(~0u, range.hi, step)});
      }
      if (chunk % lanes == 0) {
        (is_v ? s_.v : s_.k)[t * groups + chunk / lanes] = CodeOf(
            rule, is_v ? layout_.v_bits() : layout_.k_bits(), rule == RowRule::kMinMax, range);
      }
    }
  }
  static constexpr int kChunks = kDim / 8;  // of a row
  __device__ static float Clamp(float x, float most) {
    return x < -most ? -most : most < x ? most : x;
  }
  __device__ void RowNorms(int page) {
    const OpenSide side = Keys(page);
    for (int i = thread_; i < kPageTokens * 16; i += kFormSealThreads) {
      const float length = sqrtf(SumOfSquares<kDim>(side, i / 16, i % 16));
      if (i % 16 == 0) s_.lengths[i / 16] = length;
    }
  }

  // ---- codes ----

  // A thread has dims 16 s + {0, 1} of a token, from one of eight places on: whole words.
  template <BlockKind kK>
  __device__ void KeyCodes(int page) {
    const OpenSide side = Keys(page);
    constexpr int kBits = BitsOf(kK);
    constexpr BlockLayout kCodes(kK, CodeOrder::kTensorCore, kDim, kDim);
    const bool channels = IsChannels(), rows = layout_.is_rows();
    const int groups = layout_.num_groups(), group_shift = __ffs(layout_.group_dims()) - 1;
    for (int i = thread_; i < kPageTokens * 8; i += kFormSealThreads) {
      const int t = i / 8, column = i % 8 / 4 * 8 + i % 4 * 2, token = page * kPageTokens + t;
      const GroupCode* const of_channels =
          s_.k + (channels ? token / layout_.group_tokens() * kDim : 0);
      const float norm = divides_ && channels ? s_.norms[token] : 1.0f;
      const float most = rows ? s_.row_clip[0][t] : kFp16Max;
      WordWriter low(block_), high(block_);
      int squares = 0;
#pragma unroll 2
      for (int d = column; d < kDim; d += 16) {
        const float2 pair = side.RawPair(t, d);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int dim = d + odd;
          const float x = Counted(odd == 0 ? pair.x : pair.y);
          uint32_t code;
          if (channels) {
            code = CodeIn(of_channels[dim], p_.k_rule, ChannelBits(dim), divides_ ? x / norm : x);
          } else if (rows) {
            code =
                CodeIn(s_.k[t * groups + (dim >> group_shift)], p_.k_rule, kBits, Clamp(x, most));
          } else {
            code = Level(kBits, x, s_.lengths[t]);
            const int level = ByteLevel(kBits, static_cast<int>(code));
            squares += level * level;
          }
          low.Or(kCodes.KCode(t, dim), code & (kBits == 4 ? 15u : 3u));
          if constexpr (kBits == 3) high.Or(kCodes.KHighBit(t, dim), code >> 2 & 1u);
          if (channels && s_.index[dim] != kNotBoosted) {
            const uint32_t at = layout_.KBoost(s_.index[dim]) + static_cast<uint32_t>(t / 4);
            atomicOr(reinterpret_cast<uint32_t*>(block_ + at / 4 * 4),
                     (code >> 2) << (at % 4 * 8 + t % 4 * 2));
          }
        }
      }
      low.Flush();
      high.Flush();
      if (squares > 0) atomicAdd(&s_.levels[t], squares);
    }
  }
  // Of a codebook (QuantizeCodebookRow).
  __device__ uint32_t Level(int bits, float x, float length) const {
    const float u = x / (length + 1e-8f) * sqrtf(static_cast<float>(kDim));
    uint32_t code = 0;
    for (int i = 0; i < (1 << bits) - 1; ++i) code += u > p_.thresholds[i] ? 1u : 0u;
    return code;
  }
  // A thread has two tokens of dims 16 s + r: whole words. Lanes as in a fragment, so that a warp
  // reads 16 bytes of each of eight rows.
  template <BlockKind kV>
  __device__ void ValueCodes(int page) {
    const OpenSide side = Open(page, true);
    constexpr int kBits = BitsOf(kV);
    constexpr BlockLayout kCodes(kV, CodeOrder::kTensorCore, kDim, kDim);
    const uint32_t base = layout_.v_codes_offset() - kCodes.v_codes_offset();
    const int groups = layout_.num_groups(), group_shift = __ffs(layout_.group_dims()) - 1;
    for (int i = thread_; i < kPageTokens / 2 * 16; i += kFormSealThreads) {
      const int lane = i % 32, row = lane / 4 + i / 32 % 2 * 8;
      const int first = (i / 64 * 4 + lane % 4) * 2;
      const float most[2] = {s_.row_clip[1][first], s_.row_clip[1][first + 1]};
      WordWriter low(block_ + base), high(block_ + base);
#pragma unroll 2
      for (int d = row; d < kDim; d += 16) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int t = first + odd;
          const float x = Clamp(Counted(side.Raw(t, d)), most[odd]);
          const uint32_t code = CodeIn(s_.v[t * groups + (d >> group_shift)], p_.v_rule, kBits, x);
          low.Or(kCodes.VCode(t, d), code & (kBits == 4 ? 15u : 3u));
          if constexpr (kBits == 3) high.Or(kCodes.VHighBit(t, d), code >> 2 & 1u);
        }
      }
      low.Flush();
      high.Flush();
    }
  }

  // ---- metadata ----

  __device__ void StoreFp16(uint32_t at, float x) const {
    *reinterpret_cast<__half*>(block_ + at) = __float2half_rn(x);
  }
  __device__ void ChannelMeta(int page, int pages) const {
    const int dims = layout_.channel_dims(), groups = layout_.channel_groups();
    // Groups of this page, or of the run the half of the dims that the page has.
    const int first_group = pages > 1 ? 0 : page * groups, first_dim = pages > 1 ? page * dims : 0;
    for (int i = thread_; i < groups * dims; i += kFormSealThreads) {
      const int g = i / dims, at = i % dims;
      const GroupCode& group = s_.k[(first_group + g) * kDim + first_dim + at];
      StoreFp16(layout_.KChannelScale(g, at), group.scale);
      StoreFp16(layout_.KChannelMin(g, at), group.offset);
    }
    if (layout_.k_form() == SideForm::kMixed) {
      for (int i = thread_; i < dims; i += kFormSealThreads) {
        block_[layout_.KIndex(i)] = s_.index[first_dim + i];
      }
    }
    if (layout_.has_head_norms()) {
      for (int t = thread_; t < kPageTokens; t += kFormSealThreads) {
        *reinterpret_cast<float*>(block_ + layout_.KNorm(t)) = s_.norms[page * kPageTokens + t];
      }
    }
  }
  __device__ void RowMeta(bool is_v) const {
    const int groups = layout_.num_groups();
    for (int i = thread_; i < kPageTokens * groups; i += kFormSealThreads) {
      const int t = i / groups, g = i % groups;
      const GroupCode& group = (is_v ? s_.v : s_.k)[i];
      StoreFp16(is_v ? layout_.VScale(t, g) : layout_.KScale(t, g), group.scale);
      StoreFp16(is_v ? layout_.VMin(t, g) : layout_.KMin(t, g), group.offset);
    }
  }
  __device__ void CodebookMeta() const {
    const float unit = ByteLevelUnit(layout_.k_bits()) * sqrtf(static_cast<float>(kDim));
    for (int t = thread_; t < kPageTokens; t += kFormSealThreads) {
      const float fit = s_.lengths[t] * unit / sqrtf(static_cast<float>(s_.levels[t]));
      StoreFp16(layout_.KRowNorm(t), RoundFp16(fit));
    }
  }

  const FormSealParams& p_;
  const BlockLayout layout_;
  uint8_t* const block_;
  Shared& s_;
  const int thread_, head_, first_;  // first_: job of the run
  const OpenSide first_keys_, last_keys_;
  int changed_ = 0;
  bool divides_ = false;  // keys, by norms
};

template <int kDim>
__global__ void __launch_bounds__(kFormSealThreads)
    FormSealKernel(const __grid_constant__ FormSealParams p) {
  extern __shared__ __align__(16) uint8_t shared[];
  FormSealer<kDim>(p, shared).Run();
}

// One norm per token over all heads, summed in their order.
template <int kDim>
__global__ void __launch_bounds__(kFormSealThreads)
    TokenNormKernel(const __grid_constant__ FormSealParams p) {
  __shared__ float sums[kMaxNormHeads][kPageTokens];
  const auto thread = static_cast<int>(threadIdx.x), job = static_cast<int>(blockIdx.x);
  constexpr int kOpenSideBytes = kPageTokens * kDim * 2;
  if (p.source_pages[job] < 0) return;
  const std::byte* page = p.window_pool + static_cast<int64_t>(blockIdx.y) * p.window_layer_stride +
                          p.source_pages[job] * p.window_page_stride;
  for (int i = thread; i < p.num_kv_heads * kPageTokens * 16; i += kFormSealThreads) {
    const int head = i / (kPageTokens * 16), token = i / 16 % kPageTokens;
    const OpenSide side{
        reinterpret_cast<const uint8_t*>(page + int64_t{head} * (2 * kOpenSideBytes))};
    const float sum = SumOfSquares<kDim>(side, token, i % 16);
    if (i % 16 == 0) sums[head][token] = sum;
  }
  __syncthreads();
  auto* norms = reinterpret_cast<float*>(
      p.history_pool + static_cast<int64_t>(blockIdx.y) * p.history_layer_stride +
      p.target_pages[job] * p.history_page_stride + p.norm_offset);
  for (int token = thread; token < kPageTokens; token += kFormSealThreads) {
    float sum = 0.0f;
    for (int head = 0; head < p.num_kv_heads; ++head) sum = sum + sums[head][token];
    norms[token] = NormOfSum(sum);
  }
}

}  // namespace

FormSealKernels FindFormSealKernels(int head_dim) {
  return DispatchHeadDim<FormSealKernels>(head_dim, {}, [&]<int kDim>() -> FormSealKernels {
    return {reinterpret_cast<const void*>(&FormSealKernel<kDim>),
            reinterpret_cast<const void*>(&TokenNormKernel<kDim>),
            static_cast<int>(sizeof(typename FormSealer<kDim>::Shared))};
  });
}

}  // namespace oscar::cuda
