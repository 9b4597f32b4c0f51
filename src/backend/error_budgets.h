// How far two correct runs of a model may be from one another: other devices, other batch buckets,
// BF16 or fp32 activations. Rounding to BF16 is a step: a last-bit difference in fp32 now and then
// becomes one in BF16, and one in BF16 now and then a whole step of a 2-bit code, so after a few
// layers any difference, however small, has grown to the size given here and grows no further.
// docs/lab/2026-11-16-accuracy.md has the measurements; engine_test holds the CPU's own two
// arithmetics to these numbers, from both sides, and gpu_test the GPU.
#pragma once

#include <string_view>

namespace oscar {

// Twice what the CPU's two arithmetics (BF16 and fp32 activations) were measured to be apart.
struct SamenessBudget {
  double rms;  // of a row of logits, the worst of 200 generated ones
  double gap;  // greedy ids may part only where the two largest logits are closer than this, which
               // is how far those rows let two logits move against one another
  // Share of an evaluation's items on which the first wrong tokens may differ. Items live on
  // looking far back, and a code that moved can turn what is found there: then the margin at the
  // parting says nothing, and how often it happens is all there is to hold to.
  double diverged;
};

// By cache method (a --kv name). The coarser its codes, the more of them lie at a boundary.
constexpr SamenessBudget BudgetOf(std::string_view method) {
  if (method == "bf16") return {0.04, 0.16, 0.01};
  if (method == "oscar" || method == "oscar+") return {0.10, 0.40, 0.06};
  if (method == "int4" || method == "saw-int4") return {0.20, 0.80, 0.06};
  return {0.80, 3.20, 1.0};  // two bits without windows: most items fail, each in its own way
}

}  // namespace oscar
