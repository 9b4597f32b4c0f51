// FormSeal: quantises full BF16 window pages of methods whose keys are not rows, or whose rows have
// a rule of quant/affine_group.h; bit-equal to EncodeBlocks on the same rows. PageSeal seals the
// others. Holds only numbers; create it once a layout and rule, outside graph capture.
#pragma once

#include <cstdint>

#include "cache/block_codec.h"
#include "cuda/kv/page_seal.h"
#include "oscar/status.h"

namespace oscar::cuda {

class FormSeal {
 public:
  // Whether PageSeal does not take such blocks.
  static bool Takes(const BlockLayout& layout, const BlockRules& rules);

  // `layout`: of all heads of the layers it will be launched for; BF16 blocks are copied.
  // `norm_offset`: bytes from the block of head 0 to the norms of a page's tokens over all heads,
  // or 0 where there are none.
  static Result<FormSeal> Create(const BlockLayout& layout, const BlockRules& rules,
                                 int num_kv_heads, int64_t norm_offset);
  // As PageSeal's, but for heads that differ in bits. Jobs that follow each other are sealed
  // together where the layout says so, and are then whole runs.
  Status Launch(const SealArguments& args, Stream stream) const;

 private:
  FormSeal(const BlockLayout& layout, const BlockRules& rules) : layout_(layout), rules_(rules) {}

  BlockLayout layout_;
  BlockRules rules_;
  int num_kv_heads_ = 1;
  int64_t norm_offset_ = 0;
  const void *kernel_ = nullptr, *norms_ = nullptr;
  int shared_bytes_ = 0;
};

}  // namespace oscar::cuda
