// BlockLayout: where every code and every scale of a block lives. A block is what one (layer, KV
// head) has in a page: 64 consecutive tokens, K and V together, as contiguous bytes, so that one
// bulk copy brings it in. docs/cache-format.md is the normative text; writer, readers, kernels and
// tests use this class and compute no offsets themselves.
//
// A block is   K codes | V codes | K metadata | V metadata.
//
// V is rows: (scale, min) per token and group of dims. K is any SideForm (quant/page_shape.h):
// rows, too, or groups along tokens, with two more bits for some dims or none, or a codebook.
// Groups of 128 tokens span two blocks, of consecutive pages that are sealed together: each has the
// metadata of one half of the dims.
//
// Codes are 2, 3, 4 or 16 (BF16) bits; K and V of a block may differ in 2, 3 and 4. Codes of 3 bits
// are two parts: the low two bits as codes of 2 bits, then the high bits. Two orders exist for the
// same numbers:
//   kTensorCore  fragments of mma.m16n8k16: a lane's 16-byte load is its operand registers
//   kCpu         16-bit SIMD lanes: a 64-byte load is 16 tokens x 2 dims (K) or 16 dims x 2 tokens
//   (V)
// A value type: trivially copyable, constexpr, usable in device code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/half.h"
#include "quant/page_shape.h"

namespace oscar {

enum class BlockKind : uint8_t { kInt2 = 0, kInt4 = 1, kBf16 = 2, kInt3 = 3 };

OSCAR_HD constexpr int BitsOf(BlockKind kind) {
  return kind == BlockKind::kInt2   ? 2
         : kind == BlockKind::kInt3 ? 3
         : kind == BlockKind::kInt4 ? 4
                                    : 16;
}
enum class CodeOrder : uint8_t { kTensorCore = 0, kCpu = 1 };

// Where one code sits: bits [shift, shift + bits) of the little-endian 32-bit word at `offset`.
struct CodePosition {
  uint32_t offset;  // bytes from the start of the block; a multiple of 4
  uint32_t shift;
};

// The keys of a block, where they are not rows with the groups of V.
struct KeyFormat {
  BlockKind kind = BlockKind::kInt2;
  SideForm form = SideForm::kRows;
  int group_tokens = 0;     // kChannels: 32, 64 or 128; kMixed: 128
  bool head_norms = false;  // kChannels: one norm per token, of this KV head
  int boosted_dims = 0;     // kMixed: a multiple of 8, below 128
};

class BlockLayout {
 public:
  // Bumped whenever any byte of any block means something else.
  static constexpr uint32_t kFormatVersion = 1;

  // REQUIRES: IsSupported(head_dim, group_dims). `group_dims` is the number of dims that share one
  // (scale, min); ignored for BF16 blocks.
  OSCAR_HD constexpr BlockLayout(BlockKind kind, CodeOrder order, int head_dim, int group_dims)
      : BlockLayout(kind, kind, order, head_dim, group_dims) {}
  // K and V apart. REQUIRES: both are BF16 or none.
  OSCAR_HD constexpr BlockLayout(BlockKind k_kind, BlockKind v_kind, CodeOrder order, int head_dim,
                                 int group_dims)
      : kind_(k_kind),
        v_kind_(v_kind),
        order_(order),
        head_dim_(static_cast<uint16_t>(head_dim)),
        group_dims_(static_cast<uint16_t>(k_kind == BlockKind::kBf16 ? head_dim : group_dims)) {}

  // K as it says, V in rows.
  OSCAR_HD constexpr BlockLayout(const KeyFormat& k, BlockKind v_kind, CodeOrder order,
                                 int head_dim, int group_dims)
      : BlockLayout(k.kind, v_kind, order, head_dim, group_dims) {
    k_form_ = k.form;
    k_group_tokens_ = static_cast<uint16_t>(k.group_tokens);
    head_norms_ = k.head_norms;
    boosted_dims_ = static_cast<uint8_t>(k.boosted_dims);
  }

  // Head dims of kHeadDims; groups of 32, 64, 128 or the whole head where they divide it.
  OSCAR_HD static constexpr bool IsSupported(int head_dim, int group_dims) {
    const bool group_ok =
        group_dims == 32 || group_dims == 64 || group_dims == 128 || group_dims == head_dim;
    return IsHeadDim(head_dim) && group_ok && head_dim % group_dims == 0;
  }

  OSCAR_HD constexpr BlockKind k_kind() const { return kind_; }
  OSCAR_HD constexpr BlockKind v_kind() const { return v_kind_; }
  OSCAR_HD constexpr bool is_bf16() const { return kind_ == BlockKind::kBf16; }
  OSCAR_HD constexpr CodeOrder order() const { return order_; }
  OSCAR_HD constexpr int head_dim() const { return head_dim_; }
  OSCAR_HD constexpr int group_dims() const { return group_dims_; }
  // Of V, and of K where that is in rows.
  OSCAR_HD constexpr int num_groups() const { return is_bf16() ? 0 : head_dim_ / group_dims_; }
  OSCAR_HD constexpr SideForm k_form() const { return k_form_; }
  OSCAR_HD constexpr bool is_rows() const { return k_form_ == SideForm::kRows; }
  // Consecutive pages whose blocks are sealed together.
  OSCAR_HD constexpr int pages_together() const {
    return k_group_tokens_ > kPageTokens ? k_group_tokens_ / kPageTokens : 1;
  }
  OSCAR_HD constexpr int k_bits() const { return BitsOf(kind_); }
  OSCAR_HD constexpr int v_bits() const { return BitsOf(v_kind_); }

  OSCAR_HD constexpr uint32_t k_code_bytes() const { return SideBytes(k_bits()) + boost_bytes(); }
  OSCAR_HD constexpr uint32_t v_code_bytes() const { return SideBytes(v_bits()); }
  // One metadata plane: (scale, min) in fp16 for the 64 rows of one group.
  static constexpr uint32_t kMetaPlaneBytes = kPageTokens * 4;
  // Metadata of V alone, and of K where it is in rows.
  OSCAR_HD constexpr uint32_t meta_bytes() const {
    return static_cast<uint32_t>(num_groups()) * kMetaPlaneBytes;
  }
  OSCAR_HD constexpr uint32_t k_meta_bytes() const {
    switch (k_form_) {
      case SideForm::kRows:
        break;
      case SideForm::kChannels:
      case SideForm::kMixed:
        return channel_meta_bytes() + norm_bytes();
      case SideForm::kCodebook:
        return kPageTokens * 2;
    }
    return meta_bytes();
  }

  // ---- keys whose groups run along tokens ----

  OSCAR_HD constexpr int group_tokens() const { return k_group_tokens_; }
  // Token groups that begin in this page or hold all of it.
  OSCAR_HD constexpr int channel_groups() const {
    return k_group_tokens_ < kPageTokens ? kPageTokens / k_group_tokens_ : 1;
  }
  // Dims whose metadata this block holds: those from `half` times as many on in block `half` of
  // pages_together().
  OSCAR_HD constexpr int channel_dims() const { return head_dim_ / pages_together(); }
  // Scales, mins and indices of them, one piece from k_meta_offset() on.
  OSCAR_HD constexpr uint32_t channel_meta_bytes() const {
    return static_cast<uint32_t>(channel_groups() * channel_dims() * 4) + index_bytes();
  }
  // fp16 scale and min of the `i`-th of them.
  OSCAR_HD constexpr uint32_t KChannelScale(int group, int i) const {
    return ChannelMeta(group, i, 0);
  }
  OSCAR_HD constexpr uint32_t KChannelMin(int group, int i) const {
    return ChannelMeta(group, i, 1);
  }
  OSCAR_HD constexpr int boosted_dims() const { return boosted_dims_; }
  // The upper two bits of the `i`-th dim that has four: those of token t at bits [2 (t mod 4), ...)
  // of byte t / 4.
  OSCAR_HD constexpr uint32_t KBoost(int i) const {
    return SideBytes(k_bits()) + static_cast<uint32_t>(i * kBoostBytes);
  }
  // Which of those the `i`-th dim of channel_dims() is, one byte; no other value than below
  // boosted_dims(): it has two bits.
  OSCAR_HD constexpr uint32_t KIndex(int i) const {
    return k_meta_offset() + static_cast<uint32_t>(channel_groups() * channel_dims() * 4 + i);
  }
  static constexpr int kBoostBytes = kPageTokens * 2 / 8;
  OSCAR_HD constexpr bool has_head_norms() const { return head_norms_; }
  // fp32 norm of a token.
  OSCAR_HD constexpr uint32_t KNorm(int token) const {
    return v_meta_offset() - norm_bytes() + static_cast<uint32_t>(token * 4);
  }
  // Norms of the 64 tokens of a page.
  static constexpr uint32_t kNormBytes = kPageTokens * 4;

  // ---- keys that name levels ----

  // The fp16 norm of a token's key (CodebookFactor of quant/turboquant.h).
  OSCAR_HD constexpr uint32_t KRowNorm(int token) const {
    return k_meta_offset() + static_cast<uint32_t>(token * 2);
  }

  // ---- blocks whose K and V are of one kind, for readers that know no others ----

  OSCAR_HD constexpr bool is_uniform() const { return kind_ == v_kind_ && is_rows(); }
  OSCAR_HD constexpr BlockKind kind() const { return kind_; }
  OSCAR_HD constexpr int bits() const { return k_bits(); }
  // Codes of K alone (V's are as many).
  OSCAR_HD constexpr uint32_t code_bytes() const { return k_code_bytes(); }
  // Metadata of K in a block of `bytes`, and where V's begins, where the group is data.
  OSCAR_HD constexpr int MetaBytesOf(int bytes) const {
    return bytes / 2 - static_cast<int>(code_bytes());
  }
  OSCAR_HD constexpr int VMetaOffsetOf(int bytes) const {
    return (bytes + 2 * static_cast<int>(code_bytes())) / 2;
  }

  // ---- every block ----

  OSCAR_HD constexpr uint32_t k_codes_offset() const { return 0; }
  OSCAR_HD constexpr uint32_t v_codes_offset() const { return k_code_bytes(); }
  OSCAR_HD constexpr uint32_t k_meta_offset() const { return k_code_bytes() + v_code_bytes(); }
  OSCAR_HD constexpr uint32_t v_meta_offset() const { return k_meta_offset() + k_meta_bytes(); }
  OSCAR_HD constexpr uint32_t block_bytes() const { return v_meta_offset() + meta_bytes(); }
  // Bits per stored number, metadata included, windows not: 2.25 for INT2 with one group of 128.
  OSCAR_HD constexpr double bits_per_element() const {
    return 8.0 * block_bytes() / (2.0 * kPageTokens * head_dim_);
  }

  // Where a code lies; of 3 bits, its low two. The high bit of those is at KHighBit, VHighBit.
  OSCAR_HD constexpr CodePosition KCode(int token, int dim) const {
    return KPart(k_codes_offset(), LowBits(k_bits()), token, dim);
  }
  OSCAR_HD constexpr CodePosition VCode(int token, int dim) const {
    return VPart(v_codes_offset(), LowBits(v_bits()), token, dim);
  }
  // Blocks of 3-bit codes on that side alone.
  OSCAR_HD constexpr CodePosition KHighBit(int token, int dim) const {
    return KPart(k_high_offset(), 1, token, dim);
  }
  OSCAR_HD constexpr CodePosition VHighBit(int token, int dim) const {
    return VPart(v_high_offset(), 1, token, dim);
  }
  // Where the high bits begin: after the low two of all codes of that side.
  OSCAR_HD constexpr uint32_t k_high_offset() const { return k_codes_offset() + SideBytes(2); }
  OSCAR_HD constexpr uint32_t v_high_offset() const { return v_codes_offset() + SideBytes(2); }

  // Byte offsets of one row's fp16 scale and min.
  OSCAR_HD constexpr uint32_t KScale(int token, int group) const {
    return Meta(k_meta_offset(), token, group, 0);
  }
  OSCAR_HD constexpr uint32_t KMin(int token, int group) const {
    return Meta(k_meta_offset(), token, group, 1);
  }
  OSCAR_HD constexpr uint32_t VScale(int token, int group) const {
    return Meta(v_meta_offset(), token, group, 0);
  }
  OSCAR_HD constexpr uint32_t VMin(int token, int group) const {
    return Meta(v_meta_offset(), token, group, 1);
  }

  // One group's metadata plane.
  OSCAR_HD constexpr uint32_t KMetaPlane(int group) const {
    return k_meta_offset() + static_cast<uint32_t>(group) * kMetaPlaneBytes;
  }
  OSCAR_HD constexpr uint32_t VMetaPlane(int group) const {
    return v_meta_offset() + static_cast<uint32_t>(group) * kMetaPlaneBytes;
  }

  // ---- strides of the tensor-core order ----

  // A plane of fragments: 16 bytes per lane. Sub-blocks of at most 128 dims follow each other.
  static constexpr int kFragmentPlaneBytes = 32 * 16;
  OSCAR_HD constexpr int sub_dims() const { return head_dim_ < 128 ? head_dim_ : 128; }
  OSCAR_HD constexpr int sub_bytes() const { return kPageTokens * sub_dims() * bits() / 8; }
  // A metadata plane: the eight pairs of rows r, r + 8, ... lie together, r < 8.
  static constexpr int kMetaPairBytes = 4;
  static constexpr int kMetaRowBytes = 8 * kMetaPairBytes;
  // BF16: planes of 64 dims, whose rows are 128 bytes.
  static constexpr int kBf16PlaneDims = 64;
  static constexpr int kBf16RowBytes = 2 * kBf16PlaneDims;
  static constexpr int kBf16PlaneBytes = kPageTokens * kBf16RowBytes;

  // ---- rows and strides of the CPU order ----

  // BF16: where a token's row of D numbers begins.
  OSCAR_HD constexpr uint32_t KRow(int token) const { return KCode(token, 0).offset; }
  OSCAR_HD constexpr uint32_t VRow(int token) const { return VCode(token, 0).offset; }
  // Codes of 16 tokens of K, of 16 dims of V; of 3-bit codes the low two bits. Their high bits take
  // half as much.
  OSCAR_HD constexpr uint32_t k_tile_bytes() const {
    return SideBytes(LowBits(k_bits())) / (kPageTokens / 16);
  }
  OSCAR_HD constexpr uint32_t v_tile_bytes() const {
    return SideBytes(LowBits(v_bits())) / static_cast<uint32_t>(head_dim_ / 16);
  }

  // Identifies the byte meaning of a block on disk: version, kinds, order, head dim, group, and of
  // keys that are not rows their form, norms, tokens of a group and boosted dims. The kind of V is
  // there as what it differs by, so that blocks of one kind have the ids they had.
  OSCAR_HD constexpr uint64_t id() const {
    const auto k = static_cast<uint64_t>(kind_), v = static_cast<uint64_t>(v_kind_);
    const auto form = static_cast<uint64_t>(k_form_);
    return (uint64_t{kFormatVersion} << 48) | ((k | form << 2 | (k ^ v) << 4) << 40) |
           (uint64_t{head_norms_} << 46) | (static_cast<uint64_t>(order_) << 32) |
           (uint64_t{k_group_tokens_} / 32 << 33) | (uint64_t{boosted_dims_} << 25) |
           (uint64_t{head_dim_} << 16) | group_dims_;
  }
  OSCAR_HD friend constexpr bool operator==(const BlockLayout& a, const BlockLayout& b) {
    return a.id() == b.id();
  }

 private:
  OSCAR_HD constexpr uint32_t SideBytes(int bits) const {
    return static_cast<uint32_t>(kPageTokens * head_dim_ * bits / 8);
  }
  // Bits of a code that lie together.
  OSCAR_HD static constexpr int LowBits(int bits) { return bits == 3 ? 2 : bits; }

  OSCAR_HD constexpr uint32_t boost_bytes() const {
    return static_cast<uint32_t>(boosted_dims_) * kBoostBytes;
  }
  OSCAR_HD constexpr uint32_t index_bytes() const {
    return k_form_ == SideForm::kMixed ? static_cast<uint32_t>(channel_dims()) : 0;
  }
  OSCAR_HD constexpr uint32_t norm_bytes() const { return head_norms_ ? kNormBytes : 0; }
  // A group's plane: all scales, then all mins; in tensor-core order pairs of them.
  OSCAR_HD constexpr uint32_t ChannelMeta(int group, int i, int which) const {
    const int dims = channel_dims();
    const int at = order_ == CodeOrder::kTensorCore ? i * 2 + which : which * dims + i;
    return k_meta_offset() + static_cast<uint32_t>((group * dims * 2 + at) * 2);
  }

  // Codes of `bits` bits from `base` on; all of them, or the parts of codes of 3.
  OSCAR_HD constexpr CodePosition KPart(uint32_t base, int bits, int token, int dim) const {
    if (is_bf16()) return RowMajor(base, token, dim);
    if (order_ == CodeOrder::kTensorCore) {
      const int row = token % 16, col = dim % 16;  // A operand: rows are tokens, columns dims
      return Fragment(base, bits, token, dim, row % 8 * 4 + col % 8 / 2, row / 8 * 2 + col / 8,
                      col & 1);
    }
    // 16 tokens x 2 dims a vector: 32-bit lane = token, its halves = an even and an odd dim.
    return CpuVector(base, bits, (token / 16) * (head_dim_ / 2) + dim / 2, token % 16, dim & 1);
  }
  OSCAR_HD constexpr CodePosition VPart(uint32_t base, int bits, int token, int dim) const {
    if (is_bf16()) return RowMajor(base, token, dim);
    if (order_ == CodeOrder::kTensorCore) {
      const int row = dim % 16, col = token % 16;  // A operand V^T: rows are dims, columns tokens
      return Fragment(base, bits, token, dim, row % 8 * 4 + col % 8 / 2, row / 8 + col / 8 * 2,
                      col & 1);
    }
    // 16 dims x 2 tokens a vector: 32-bit lane = dim, its halves = an even and an odd token.
    return CpuVector(base, bits, (dim / 16) * (kPageTokens / 2) + token / 2, dim % 16, token & 1);
  }

  // BF16. CPU order: row-major [64, D]. Tensor-core order: one plane a 64 dims, [D / 64, 64, 64],
  // whose rows of 128 bytes hold their eight 16-byte chunks XOR-swizzled by token % 8: the 128-byte
  // swizzle that wgmma descriptors name, and without bank conflicts for ldmatrix.
  OSCAR_HD constexpr CodePosition RowMajor(uint32_t base, int token, int dim) const {
    int element = token * head_dim_ + dim;
    if (order_ == CodeOrder::kTensorCore) {
      const int chunk = (dim % kBf16PlaneDims / 8) ^ (token & 7);
      element = (dim / kBf16PlaneDims * kPageTokens + token) * kBf16PlaneDims + chunk * 8 + dim % 8;
    }
    return {base + static_cast<uint32_t>(element / 2) * 4, static_cast<uint32_t>(element & 1) * 16};
  }

  // Position of an element in a plane of 512 bytes (32 lanes x 16 bytes). `step` counts 16-wide
  // slices of dims over the tiles of 16 tokens; 16 / bits of them share a 32-bit word, each a pair
  // of codes 16 bits apart. Heads of 256 are two sub-blocks of 128 dims.
  OSCAR_HD constexpr CodePosition Fragment(uint32_t base, int bits, int token, int dim, int lane,
                                           int word, int odd) const {
    const int steps = sub_dims() / 16;
    const int step = (token / 16) * steps + dim % sub_dims() / 16;
    const int per_word = 16 / bits;
    const int sub_block = dim / sub_dims() * (kPageTokens * sub_dims() * bits / 8);
    return {base + static_cast<uint32_t>(sub_block + step / per_word * kFragmentPlaneBytes +
                                         lane * 16 + word * 4),
            static_cast<uint32_t>(step % per_word * bits + 16 * odd)};
  }
  // CPU order: `pair` counts the pairs that lane `lane` accumulates; 16 / bits of them share the
  // lane's 32-bit word (one code of the pair in each half). High bits are ordered so that a shift
  // and a mask bring those of a word of 2-bit codes to its bytes: pairs 8i + j and 8i + j + 4 are 8
  // bits apart.
  OSCAR_HD constexpr CodePosition CpuVector(uint32_t base, int bits, int pair, int lane,
                                            int odd) const {
    const int per_word = 16 / bits;
    const int shift =
        bits == 1 ? pair / 8 % 2 * 4 + pair % 4 + pair / 4 % 2 * 8 : pair % per_word * bits;
    return {base + static_cast<uint32_t>(pair / per_word * 64 + lane * 4),
            static_cast<uint32_t>(shift + 16 * odd)};
  }
  // Tensor-core order interleaves (scale, min) and keeps the eight rows r, r + 8, ... of a lane
  // together; CPU order keeps 64 scales, then 64 mins.
  OSCAR_HD constexpr uint32_t Meta(uint32_t base, int token, int group, int which) const {
    const uint32_t plane = base + static_cast<uint32_t>(group) * kMetaPlaneBytes;
    if (order_ == CodeOrder::kTensorCore) {
      return plane + static_cast<uint32_t>(token % 8 * kMetaRowBytes + token / 8 * kMetaPairBytes +
                                           which * 2);
    }
    return plane + static_cast<uint32_t>(which * (kPageTokens * 2) + token * 2);
  }

  BlockKind kind_;  // of K
  BlockKind v_kind_;
  CodeOrder order_;
  SideForm k_form_ = SideForm::kRows;
  bool head_norms_ = false;
  uint8_t boosted_dims_ = 0;
  uint16_t k_group_tokens_ = 0;
  uint16_t head_dim_;
  uint16_t group_dims_;
};

// A block as a reader needs it: with those it was sealed with, and the norms its keys were divided
// by.
struct SealedBlock {
  const std::byte* block = nullptr;
  // The first and the second of the pair, `block` being one of them; null where blocks are sealed
  // alone.
  const std::byte* pair[2] = {nullptr, nullptr};
  const std::byte* norms = nullptr;  // PageLayout::NormOffset; null: none, or the head's own

  // Where the (scale, min) of a dim lie: a block, and which of its channel_dims() it is.
  OSCAR_HD const std::byte* MetaBlock(const BlockLayout& layout, int dim) const {
    return pair[0] == nullptr ? block : pair[dim / layout.channel_dims()];
  }
  OSCAR_HD const std::byte* Norms(const BlockLayout& layout) const {
    return layout.has_head_norms() ? block + layout.KNorm(0) : norms;
  }
};

// body.operator()<kDim, kGroup>() for a head dim and group that blocks have, else `otherwise`.
template <typename T, typename Body>
constexpr T DispatchBlockShape(int head_dim, int group_dims, T otherwise, const Body& body) {
  return DispatchHeadDim(head_dim, otherwise, [&]<int kDim>() {
    T result = otherwise;
    const auto match = [&]<int kGroup>() {
      if constexpr (BlockLayout::IsSupported(kDim, kGroup)) {
        if (group_dims == kGroup) result = body.template operator()<kDim, kGroup>();
      }
    };
    match.template operator()<32>();
    match.template operator()<64>();
    match.template operator()<128>();
    if constexpr (kDim > 128) match.template operator()<kDim>();
    return result;
  });
}

// The numbers docs/cache-format.md states.
static_assert(BlockLayout(BlockKind::kInt2, CodeOrder::kTensorCore, 128, 128).block_bytes() ==
              4608);
static_assert(BlockLayout(BlockKind::kInt2, CodeOrder::kTensorCore, 128, 32).block_bytes() == 6144);
static_assert(BlockLayout(BlockKind::kInt3, CodeOrder::kTensorCore, 128, 128).block_bytes() ==
              6656);
static_assert(BlockLayout(BlockKind::kInt4, BlockKind::kInt2, CodeOrder::kCpu, 128, 128)
                  .block_bytes() == 6656);
static_assert(BlockLayout(BlockKind::kInt4, CodeOrder::kTensorCore, 128, 128).block_bytes() ==
              8704);
static_assert(BlockLayout(BlockKind::kBf16, CodeOrder::kTensorCore, 128, 128).block_bytes() ==
              32768);
static_assert(BlockLayout(BlockKind::kInt2, CodeOrder::kCpu, 128, 128).bits_per_element() == 2.25);
static_assert(BlockLayout({.form = SideForm::kChannels, .group_tokens = 32}, BlockKind::kInt2,
                          CodeOrder::kCpu, 128, 32)
                  .bits_per_element() == 3.0);
static_assert(BlockLayout({.form = SideForm::kChannels, .group_tokens = 128}, BlockKind::kInt2,
                          CodeOrder::kCpu, 128, 128)
                  .bits_per_element() == 2.25);
static_assert(BlockLayout({.form = SideForm::kMixed, .group_tokens = 128, .boosted_dims = 16},
                          BlockKind::kInt2, CodeOrder::kCpu, 128, 128)
                  .block_bytes() == 4928);
static_assert(BlockLayout({.kind = BlockKind::kInt3, .form = SideForm::kCodebook}, BlockKind::kInt3,
                          CodeOrder::kCpu, 128, 128)
                  .block_bytes() == 6528);

}  // namespace oscar
