#include "quant/quarot.h"

#include "quant/affine_rows.h"
#include "quant/uniform_rows.h"

namespace oscar {

std::unique_ptr<KvQuantizer> MakeQuarot(QuarotForm form, int bits, int head_dim) {
  if (form == QuarotForm::kIntegerZero) {
    return std::make_unique<AffineRows>(
        AffineRowSpec{RowRule::kIntegerZero, bits, head_dim, MetaType::kFp16});
  }
  const RowRule rule = form == QuarotForm::kSymmetric ? RowRule::kSymmetric : RowRule::kMinMax;
  return std::make_unique<UniformRows>(RowSpec{rule, bits, head_dim, 0.0f, MetaType::kFp16});
}

}  // namespace oscar
