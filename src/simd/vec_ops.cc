#include "simd/vec_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/vec_ops.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include <bit>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "simd/dispatch.h"
#include "simd/lanes16-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {
namespace {

// Rows may have any length: the last, partial step is padded.
HWY_INLINE F16x LoadAt(const float* x, size_t i, size_t size, float pad) {
  return i + 16 <= size ? Load(x + i) : LoadPart(x + i, size - i, pad);
}
HWY_INLINE void StoreAt(const F16x& v, float* x, size_t i, size_t size) {
  if (i + 16 <= size) {
    Store(v, x + i);
  } else {
    StorePart(v, x + i, size - i);
  }
}

void AddRow(float* x, const float* y, size_t size) {
  for (size_t i = 0; i < size; i += 16) {
    StoreAt(Add(LoadAt(x, i, size, 0.0f), LoadAt(y, i, size, 0.0f)), x, i, size);
  }
}

void RmsNormRow(const float* x, const float* weight, float epsilon, float* out, size_t size) {
  F16x sum = Set(0.0f);
  for (size_t i = 0; i < size; i += 16) {
    const F16x v = LoadAt(x, i, size, 0.0f);
    sum = MulAdd(v, v, sum);
  }
  const float mean = ReduceSum(sum) / static_cast<float>(size);
  const F16x scale = Set(1.0f / std::sqrt(mean + epsilon));
  for (size_t i = 0; i < size; i += 16) {
    const F16x v = Mul(LoadAt(x, i, size, 0.0f), scale);
    StoreAt(Mul(v, LoadAt(weight, i, size, 0.0f)), out, i, size);
  }
}

constexpr float kLog2E = 1.4426950408889634f;

void SiluMulRow(const float* gate, const float* up, float* out, size_t size) {
  const F16x one = Set(1.0f);
  for (size_t i = 0; i < size; i += 16) {
    // Below -87 silu is 0 to 36 digits; the operand order lets NaN through.
    const F16x g = Max(Set(-87.0f), LoadAt(gate, i, size, 0.0f));
    const F16x e = Exp2(Mul(g, Set(-kLog2E)));
    StoreAt(Mul(Div(g, Add(one, e)), LoadAt(up, i, size, 0.0f)), out, i, size);
  }
}

void ClampedGateMulRow(const float* gate_up, float limit, float slope, float* out, size_t size) {
  const F16x one = Set(1.0f), most = Set(limit), least = Set(-limit), lowest = Set(-87.0f / slope);
  for (size_t i = 0; i < size; i += 16) {
    const size_t count = size - i < 16 ? size - i : 16;
    HWY_ALIGN float gates[16] = {}, ups[16] = {};
    for (size_t j = 0; j < count; ++j) {
      gates[j] = gate_up[2 * (i + j)];
      ups[j] = gate_up[2 * (i + j) + 1];
    }
    // Below that the result is 0 to 36 digits; the operand order lets NaN through.
    const F16x gate = Max(lowest, Min(most, Load(gates)));
    const F16x up = Max(least, Min(most, Load(ups)));
    const F16x e = Exp2(Mul(gate, Set(-slope * kLog2E)));
    StoreAt(Mul(Add(up, one), Div(gate, Add(one, e))), out, i, size);
  }
}

void SigmoidRow(float* x, size_t size) {
  const F16x one = Set(1.0f);
  for (size_t i = 0; i < size; i += 16) {
    const F16x v = Max(Set(-87.0f), LoadAt(x, i, size, 0.0f));
    StoreAt(Div(one, Add(one, Exp2(Mul(v, Set(-kLog2E))))), x, i, size);
  }
}

void AddScaledRow(float* x, float factor, const float* y, size_t size) {
  const F16x f = Set(factor);
  for (size_t i = 0; i < size; i += 16) {
    StoreAt(MulAdd(f, LoadAt(y, i, size, 0.0f), LoadAt(x, i, size, 0.0f)), x, i, size);
  }
}

void AddMulRow(float* x, const float* a, const float* b, size_t size) {
  for (size_t i = 0; i < size; i += 16) {
    const F16x sum = LoadAt(x, i, size, 0.0f);
    StoreAt(MulAdd(LoadAt(a, i, size, 0.0f), LoadAt(b, i, size, 0.0f), sum), x, i, size);
  }
}

float DotRow(const float* x, const float* y, size_t size) {
  F16x sum = Set(0.0f);
  for (size_t i = 0; i < size; i += 16) {
    sum = MulAdd(LoadAt(x, i, size, 0.0f), LoadAt(y, i, size, 0.0f), sum);
  }
  return ReduceSum(sum);
}

void RopeRow(float* x, const float* cos, const float* sin, size_t half) {
  for (size_t i = 0; i < half; i += 16) {
    const F16x a = LoadAt(x, i, half, 0.0f), b = LoadAt(x + half, i, half, 0.0f);
    const F16x c = LoadAt(cos, i, half, 0.0f), s = LoadAt(sin, i, half, 0.0f);
    StoreAt(Sub(Mul(a, c), Mul(b, s)), x, i, half);
    StoreAt(Add(Mul(b, c), Mul(a, s)), x + half, i, half);
  }
}

// Strides 1, 2, 4, 8 stay inside a register of 8 or 16 lanes: the partner comes by a shuffle, and
// the upper lane's a - b is -(b) + a, which rounds alike.
template <int kStride>
HWY_INLINE F16x Butterfly(const F16x& a, const F16x& sign) {
  F16x r;
  for (int i = 0; i < kParts; ++i) {
    VF partner;
    if constexpr (kStride == 1) {
      partner = hn::Shuffle2301(a.v[i]);
    } else if constexpr (kStride == 2) {
      partner = hn::Shuffle1032(a.v[i]);
    } else if constexpr (kStride == 4) {
      partner = hn::SwapAdjacentBlocks(a.v[i]);
    } else {
      partner = kParts == 2 ? a.v[1 - i] : hn::ConcatLowerUpper(DF(), a.v[i], a.v[i]);
    }
    r.v[i] = hn::Add(partner, hn::Xor(a.v[i], sign.v[i]));
  }
  return r;
}

HWY_INLINE F16x SignPattern(size_t stride) {
  HWY_ALIGN float lanes[16];
  for (size_t l = 0; l < 16; ++l) lanes[l] = (l & stride) != 0 ? -0.0f : 0.0f;
  return Load(lanes);
}

void HadamardRow(float* x, float scale, size_t size) {
  const F16x s1 = SignPattern(1), s2 = SignPattern(2), s4 = SignPattern(4), s8 = SignPattern(8);
  const F16x factor = Set(scale);
  for (size_t i = 0; i < size; i += 16) {
    F16x v = Butterfly<1>(Load(x + i), s1);
    v = Butterfly<2>(v, s2);
    v = Butterfly<4>(v, s4);
    v = Butterfly<8>(v, s8);
    Store(size == 16 ? Mul(v, factor) : v, x + i);
  }
  for (size_t stride = 16; stride < size; stride *= 2) {
    const bool last = stride * 2 == size;
    for (size_t base = 0; base < size; base += 2 * stride) {
      for (size_t i = base; i < base + stride; i += 16) {
        const F16x a = Load(x + i), b = Load(x + i + stride);
        F16x sum = Add(a, b), difference = Sub(a, b);
        if (last) {
          sum = Mul(sum, factor);
          difference = Mul(difference, factor);
        }
        Store(sum, x + i);
        Store(difference, x + i + stride);
      }
    }
  }
}

void RotateRowBy(const float* x, const float* rotation, float* out, size_t dims) {
  // Four column blocks at a time: enough independent chains to hide the latency.
  for (size_t c = 0; c < dims; c += 64) {
    const size_t blocks = dims - c < 64 ? (dims - c) / 16 : 4;
    F16x sum[4] = {Set(0.0f), Set(0.0f), Set(0.0f), Set(0.0f)};
    for (size_t r = 0; r < dims; ++r) {
      const F16x factor = Set(x[r]);
      const float* row = rotation + r * dims + c;
      if (blocks == 4) {
        for (size_t j = 0; j < 4; ++j) sum[j] = MulAdd(factor, Load(row + j * 16), sum[j]);
      } else {
        for (size_t j = 0; j < blocks; ++j) sum[j] = MulAdd(factor, Load(row + j * 16), sum[j]);
      }
    }
    for (size_t j = 0; j < blocks; ++j) Store(sum[j], out + c + j * 16);
  }
}

void FloatToBf16(const float* x, Bf16* out, size_t size) {
  size_t i = 0;
  for (; i + 16 <= size; i += 16) StoreBf16(Load(x + i), out + i);
  for (; i < size; ++i) out[i] = ToBf16(x[i]);
}
void Bf16ToFloat(const Bf16* x, float* out, size_t size) {
  size_t i = 0;
  for (; i + 16 <= size; i += 16) Store(LoadBf16(x + i), out + i);
  for (; i < size; ++i) out[i] = oscar::ToFloat(x[i]);
}
void Fp16ToFloat(const Fp16* x, float* out, size_t size) {
  size_t i = 0;
  for (; i + 16 <= size; i += 16) Store(LoadFp16(&x[i].bits), out + i);
  for (; i < size; ++i) out[i] = oscar::ToFloat(x[i]);
}

// A comparison with NaN is false, so a NaN never replaces the largest so far.
float MaxRow(const float* x, size_t size) {
  const float lowest = -std::numeric_limits<float>::infinity();
  F16x largest = Set(lowest);
  for (size_t i = 0; i < size; i += 16) {
    const F16x v = LoadAt(x, i, size, lowest);
    largest = IfThenElse(Less(largest, v), v, largest);
  }
  return ReduceMax(largest);
}

// Sum of 2^((x - largest) log2 e), stored too where `out` is given.
float SumExpRow(const float* x, float largest, float* out, size_t size) {
  const F16x shift = Set(largest), log2e = Set(kLog2E);
  F16x sum = Set(0.0f);
  for (size_t i = 0; i < size; i += 16) {
    const F16x v = LoadAt(x, i, size, -std::numeric_limits<float>::infinity());
    const F16x e = Exp2(Mul(Sub(v, shift), log2e));
    sum = Add(sum, e);
    if (out != nullptr) StoreAt(e, out, i, size);
  }
  return ReduceSum(sum);
}

void ScaleRow(float* x, float factor, size_t size) {
  const F16x f = Set(factor);
  for (size_t i = 0; i < size; i += 16) StoreAt(Mul(LoadAt(x, i, size, 0.0f), f), x, i, size);
}

int64_t FindRow(const float* x, float value, size_t size) {
  const F16x wanted = Set(value);
  size_t i = 0;
  for (; i + 16 <= size; i += 16) {
    if (CountTrue(Equal(Load(x + i), wanted)) != 0) break;
  }
  for (; i < size; ++i) {
    if (x[i] == value) return static_cast<int64_t>(i);
  }
  return 0;  // every element is NaN
}

}  // namespace

struct VecOpsKernels {
  static constexpr auto kAdd = &AddRow;
  static constexpr auto kRmsNorm = &RmsNormRow;
  static constexpr auto kSiluMul = &SiluMulRow;
  static constexpr auto kClampedGateMul = &ClampedGateMulRow;
  static constexpr auto kSigmoid = &SigmoidRow;
  static constexpr auto kAddScaled = &AddScaledRow;
  static constexpr auto kAddMul = &AddMulRow;
  static constexpr auto kDot = &DotRow;
  static constexpr auto kRope = &RopeRow;
  static constexpr auto kHadamard = &HadamardRow;
  static constexpr auto kRotate = &RotateRowBy;
  static constexpr auto kToBf16 = &FloatToBf16;
  static constexpr auto kFromBf16 = &Bf16ToFloat;
  static constexpr auto kFromFp16 = &Fp16ToFloat;
  static constexpr auto kMax = &MaxRow;
  static constexpr auto kSumExp = &SumExpRow;
  static constexpr auto kScale = &ScaleRow;
  static constexpr auto kFind = &FindRow;
};

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
#include "numeric/hadamard.h"

namespace oscar::simd {

#define OSCAR_VEC_OP(member) \
  (ActiveTarget() == Target::kAvx2 ? N_AVX2::VecOpsKernels::member : N_AVX3::VecOpsKernels::member)

void RmsNorm(std::span<const float> x, std::span<const float> weight, float epsilon,
             std::span<float> out) {
  OSCAR_DCHECK(x.size() == weight.size() && x.size() == out.size());
  OSCAR_VEC_OP(kRmsNorm)(x.data(), weight.data(), epsilon, out.data(), x.size());
}

void AddRmsNorm(std::span<float> residual, std::span<const float> x, std::span<const float> weight,
                float epsilon, std::span<float> out) {
  Add(residual, x);
  RmsNorm(residual, weight, epsilon, out);
}

void Add(std::span<float> x, std::span<const float> y) {
  OSCAR_DCHECK(x.size() == y.size());
  OSCAR_VEC_OP(kAdd)(x.data(), y.data(), x.size());
}

void SiluMul(std::span<const float> gate, std::span<const float> up, std::span<float> out) {
  OSCAR_DCHECK(gate.size() == up.size() && gate.size() == out.size());
  OSCAR_VEC_OP(kSiluMul)(gate.data(), up.data(), out.data(), gate.size());
}

void ClampedGateMul(std::span<const float> gate_up, float limit, float slope,
                    std::span<float> out) {
  OSCAR_DCHECK(gate_up.size() == 2 * out.size());
  OSCAR_VEC_OP(kClampedGateMul)(gate_up.data(), limit, slope, out.data(), out.size());
}

void AddScaled(std::span<float> x, float factor, std::span<const float> y) {
  OSCAR_DCHECK(x.size() == y.size());
  OSCAR_VEC_OP(kAddScaled)(x.data(), factor, y.data(), x.size());
}

void AddMul(std::span<float> x, std::span<const float> a, std::span<const float> b) {
  OSCAR_DCHECK(x.size() == a.size() && x.size() == b.size());
  OSCAR_VEC_OP(kAddMul)(x.data(), a.data(), b.data(), x.size());
}

float Dot(std::span<const float> x, std::span<const float> y) {
  OSCAR_DCHECK(x.size() == y.size());
  return OSCAR_VEC_OP(kDot)(x.data(), y.data(), x.size());
}

void Sigmoid(std::span<float> x) { OSCAR_VEC_OP(kSigmoid)(x.data(), x.size()); }

void ApplyRope(std::span<float> x, std::span<const float> cos, std::span<const float> sin) {
  OSCAR_DCHECK(x.size() == 2 * cos.size() && cos.size() == sin.size());
  OSCAR_VEC_OP(kRope)(x.data(), cos.data(), sin.data(), cos.size());
}

void FastHadamardRow(std::span<float> x) {
  OSCAR_DCHECK(x.size() >= 16 && IsPowerOfTwo(static_cast<int64_t>(x.size())));
  OSCAR_VEC_OP(kHadamard)(x.data(), HadamardScale(static_cast<int>(x.size())), x.size());
}

void RotateRow(std::span<const float> x, std::span<const float> rotation, std::span<float> out) {
  OSCAR_DCHECK(rotation.size() == x.size() * x.size() && out.size() == x.size());
  OSCAR_DCHECK(x.size() % 16 == 0 && x.data() != out.data());
  OSCAR_VEC_OP(kRotate)(x.data(), rotation.data(), out.data(), x.size());
}

void ToBf16Row(std::span<const float> x, std::span<Bf16> out) {
  OSCAR_DCHECK(x.size() == out.size());
  OSCAR_VEC_OP(kToBf16)(x.data(), out.data(), x.size());
}

void ToFloatRow(std::span<const Bf16> x, std::span<float> out) {
  OSCAR_DCHECK(x.size() == out.size());
  OSCAR_VEC_OP(kFromBf16)(x.data(), out.data(), x.size());
}

void ToFloatRow(std::span<const Fp16> x, std::span<float> out) {
  OSCAR_DCHECK(x.size() == out.size());
  OSCAR_VEC_OP(kFromFp16)(x.data(), out.data(), x.size());
}

int64_t ArgMax(std::span<const float> x) {
  OSCAR_DCHECK(!x.empty());
  return OSCAR_VEC_OP(kFind)(x.data(), MaxElement(x), x.size());
}

float MaxElement(std::span<const float> x) { return OSCAR_VEC_OP(kMax)(x.data(), x.size()); }

float LogSumExp(std::span<const float> x) {
  const float largest = MaxElement(x);
  if (std::isinf(largest)) return largest;
  return largest + std::log(OSCAR_VEC_OP(kSumExp)(x.data(), largest, nullptr, x.size()));
}

void Softmax(std::span<float> x) {
  const float largest = MaxElement(x);
  const float sum = OSCAR_VEC_OP(kSumExp)(x.data(), largest, x.data(), x.size());
  OSCAR_VEC_OP(kScale)(x.data(), 1.0f / sum, x.size());
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
