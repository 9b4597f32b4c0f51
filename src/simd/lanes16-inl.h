// Sixteen fp32 or int32 lanes on every target: one AVX-512 register or two of AVX2. Kernels written
// on these types sum in the same order everywhere, so all targets give the same bits.
// Included once per target by foreach_target.
//
// Two targets are compiled, AVX2 and AVX3. Highway's AVX3_DL is not: it lets the compiler use the
// VEX-coded AVX-VNNI, which Zen 4 lacks though it reports AVX3_DL. The few kernels that gain from
// AVX512-VNNI name its instruction themselves, in a variant of the AVX3 code.
#if defined(OSCAR_SIMD_LANES16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_LANES16_INL_H_
#undef OSCAR_SIMD_LANES16_INL_H_
#else
#define OSCAR_SIMD_LANES16_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "base/half.h"

// The scalar baseline that Highway insists on compiling gets no kernels: CheckCpu refuses it.
#undef OSCAR_SIMD_TARGET
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
#define OSCAR_SIMD_TARGET 1
#else
#define OSCAR_SIMD_TARGET 0
#endif

// Before a loop over an array of vectors: only when every index is a constant do all stay in
// registers, and the compiler's own limit is too low for 24 of them.
#ifndef OSCAR_UNROLL
#ifdef __clang__
#define OSCAR_UNROLL _Pragma("unroll")
#else
#define OSCAR_UNROLL _Pragma("GCC unroll 32")
#endif
#endif

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::ScalableTag<int32_t>;
using DU = hn::ScalableTag<uint32_t>;
using DH = hn::Rebind<uint16_t, DF>;  // as many 16-bit lanes as DF has of 32 bits
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
using VM = hn::Mask<DF>;

inline constexpr size_t kWidth = HWY_LANES(float);  // 16 or 8
inline constexpr int kParts = static_cast<int>(16 / kWidth);

struct F16x {
  VF v[kParts];
};
struct I16x {
  VI v[kParts];
};
struct M16x {
  VM v[kParts];
};

#define OSCAR_LANES_BINARY(Type, name, expr)           \
  HWY_INLINE Type name(const Type& a, const Type& b) { \
    Type r;                                            \
    for (int i = 0; i < kParts; ++i) r.v[i] = (expr);  \
    return r;                                          \
  }
OSCAR_LANES_BINARY(F16x, Add, hn::Add(a.v[i], b.v[i]))
OSCAR_LANES_BINARY(F16x, Sub, hn::Sub(a.v[i], b.v[i]))
OSCAR_LANES_BINARY(F16x, Mul, hn::Mul(a.v[i], b.v[i]))
OSCAR_LANES_BINARY(F16x, Div, hn::Div(a.v[i], b.v[i]))
OSCAR_LANES_BINARY(F16x, Min, hn::Min(a.v[i], b.v[i]))
OSCAR_LANES_BINARY(F16x, Max, hn::Max(a.v[i], b.v[i]))
OSCAR_LANES_BINARY(I16x, Add, hn::Add(a.v[i], b.v[i]))
OSCAR_LANES_BINARY(I16x, Or, hn::Or(a.v[i], b.v[i]))
OSCAR_LANES_BINARY(I16x, And, hn::And(a.v[i], b.v[i]))
OSCAR_LANES_BINARY(I16x, Mul, hn::Mul(a.v[i], b.v[i]))
#undef OSCAR_LANES_BINARY

#define OSCAR_LANES_UNARY(Out, In, name, expr)        \
  HWY_INLINE Out name(const In& a) {                  \
    Out r;                                            \
    for (int i = 0; i < kParts; ++i) r.v[i] = (expr); \
    return r;                                         \
  }
OSCAR_LANES_UNARY(F16x, F16x, Floor, hn::Floor(a.v[i]))
OSCAR_LANES_UNARY(F16x, F16x, Round, hn::Round(a.v[i]))  // ties to even
OSCAR_LANES_UNARY(F16x, F16x, Abs, hn::Abs(a.v[i]))
OSCAR_LANES_UNARY(F16x, F16x, Neg, hn::Neg(a.v[i]))
OSCAR_LANES_UNARY(F16x, F16x, Sqrt, hn::Sqrt(a.v[i]))
OSCAR_LANES_UNARY(I16x, F16x, ToInt, hn::ConvertTo(DI(), a.v[i]))  // truncates
OSCAR_LANES_UNARY(I16x, F16x, NearestInt, hn::NearestInt(a.v[i]))
OSCAR_LANES_UNARY(F16x, I16x, ToFloat, hn::ConvertTo(DF(), a.v[i]))
OSCAR_LANES_UNARY(F16x, I16x, BitsToFloat, hn::BitCast(DF(), a.v[i]))
OSCAR_LANES_UNARY(I16x, F16x, FloatBits, hn::BitCast(DI(), a.v[i]))
#undef OSCAR_LANES_UNARY

template <int kBits>
HWY_INLINE I16x Shl(const I16x& a) {
  I16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::ShiftLeft<kBits>(a.v[i]);
  return r;
}
HWY_INLINE I16x ShlSame(const I16x& a, int bits) {
  I16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::ShiftLeftSame(a.v[i], bits);
  return r;
}

HWY_INLINE F16x Set(float x) {
  F16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::Set(DF(), x);
  return r;
}
HWY_INLINE I16x SetInt(int32_t x) {
  I16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::Set(DI(), x);
  return r;
}
HWY_INLINE F16x Load(const float* p) {
  F16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::LoadU(DF(), p + i * kWidth);
  return r;
}
HWY_INLINE void Store(const F16x& a, float* p) {
  for (int i = 0; i < kParts; ++i) hn::StoreU(a.v[i], DF(), p + i * kWidth);
}
HWY_INLINE void StoreInt(const I16x& a, int32_t* p) {
  for (int i = 0; i < kParts; ++i) hn::StoreU(a.v[i], DI(), p + i * kWidth);
}
HWY_INLINE I16x LoadInt(const int32_t* p) {
  I16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::LoadU(DI(), p + i * kWidth);
  return r;
}
// The first `count` lanes (0 to 16); the rest are `pad`.
HWY_INLINE F16x LoadPart(const float* p, size_t count, float pad) {
  HWY_ALIGN float lanes[16];
  for (size_t i = 0; i < 16; ++i) lanes[i] = i < count ? p[i] : pad;
  return Load(lanes);
}
HWY_INLINE void StorePart(const F16x& a, float* p, size_t count) {
  HWY_ALIGN float lanes[16];
  Store(a, lanes);
  for (size_t i = 0; i < count; ++i) p[i] = lanes[i];
}
// fma(a, b, c), one rounding.
HWY_INLINE F16x MulAdd(const F16x& a, const F16x& b, const F16x& c) {
  F16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::MulAdd(a.v[i], b.v[i], c.v[i]);
  return r;
}

HWY_INLINE M16x Less(const F16x& a, const F16x& b) {
  M16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::Lt(a.v[i], b.v[i]);
  return r;
}
HWY_INLINE M16x GreaterEqual(const F16x& a, const F16x& b) {
  M16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::Ge(a.v[i], b.v[i]);
  return r;
}
HWY_INLINE M16x Equal(const F16x& a, const F16x& b) {
  M16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::Eq(a.v[i], b.v[i]);
  return r;
}
HWY_INLINE F16x IfThenElse(const M16x& m, const F16x& yes, const F16x& no) {
  F16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::IfThenElse(m.v[i], yes.v[i], no.v[i]);
  return r;
}
HWY_INLINE F16x IfThenElseZero(const M16x& m, const F16x& yes) {
  F16x r;
  for (int i = 0; i < kParts; ++i) r.v[i] = hn::IfThenElseZero(m.v[i], yes.v[i]);
  return r;
}
HWY_INLINE size_t CountTrue(const M16x& m) {
  size_t count = 0;
  for (int i = 0; i < kParts; ++i) count += hn::CountTrue(DF(), m.v[i]);
  return count;
}
// 1 where true.
HWY_INLINE I16x OneIf(const M16x& m) {
  I16x r;
  for (int i = 0; i < kParts; ++i) {
    r.v[i] = hn::IfThenElseZero(hn::RebindMask(DI(), m.v[i]), hn::Set(DI(), 1));
  }
  return r;
}

// Folds 8, 4, 2, 1: Sum16's order.
HWY_INLINE float ReduceSum(const F16x& a) {
  const hn::Full128<float> d4;
#if HWY_TARGET == HWY_AVX2
  const hn::Vec256<float> s8 = hn::Add(a.v[0], a.v[1]);
#else
  const hn::Full256<float> d8;
  const hn::Vec256<float> s8 = hn::Add(hn::LowerHalf(d8, a.v[0]), hn::UpperHalf(d8, a.v[0]));
#endif
  hn::Vec128<float> s4 = hn::Add(hn::LowerHalf(d4, s8), hn::UpperHalf(d4, s8));
  s4 = hn::Add(s4, hn::Shuffle1032(s4));
  s4 = hn::Add(s4, hn::Shuffle2301(s4));
  return hn::GetLane(s4);
}
HWY_INLINE float ReduceMax(const F16x& a) {
  VF m = a.v[0];
  for (int i = 1; i < kParts; ++i) m = hn::Max(m, a.v[i]);
  return hn::GetLane(hn::MaxOfLanes(DF(), m));
}
HWY_INLINE float ReduceMin(const F16x& a) {
  VF m = a.v[0];
  for (int i = 1; i < kParts; ++i) m = hn::Min(m, a.v[i]);
  return hn::GetLane(hn::MinOfLanes(DF(), m));
}
HWY_INLINE int32_t ReduceAddInt(const I16x& a) {
  VI s = a.v[0];
  for (int i = 1; i < kParts; ++i) s = hn::Add(s, a.v[i]);
  return hn::GetLane(hn::SumOfLanes(DI(), s));
}

HWY_INLINE F16x LoadBf16(const Bf16* p) {
  F16x r;
  for (int i = 0; i < kParts; ++i) {
    const auto half = hn::LoadU(DH(), &p->bits + i * kWidth);
    r.v[i] = hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), half)));
  }
  return r;
}
// ToBf16's rounding, NaN included.
HWY_INLINE void StoreBf16(const F16x& a, Bf16* p) {
  for (int i = 0; i < kParts; ++i) {
    const auto bits = hn::BitCast(DU(), a.v[i]);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(DU(), 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(DU(), 0x7fff))));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(DU(), 0x40));
    const auto is_nan = hn::RebindMask(DU(), hn::IsNaN(a.v[i]));
    const auto word = hn::IfThenElse(is_nan, quiet, rounded);
    hn::StoreU(hn::DemoteTo(DH(), hn::BitCast(DI(), word)), DH(), &p->bits + i * kWidth);
  }
}
HWY_INLINE F16x LoadFp16(const uint16_t* p) {
  F16x r;
  for (int i = 0; i < kParts; ++i) {
    const hn::Rebind<hwy::float16_t, DF> d;
    r.v[i] =
        hn::PromoteTo(DF(), hn::LoadU(d, reinterpret_cast<const hwy::float16_t*>(p) + i * kWidth));
  }
  return r;
}

// 2^x to about 1 ulp for x in [-126, 127]; 0 below (also for -infinity). REQUIRES: x <= 127.
HWY_INLINE F16x Exp2(const F16x& x) {
  const F16x lowest = Set(-126.0f);
  const F16x clamped = Max(x, lowest);
  const F16x n = Round(clamped);
  const F16x f = Sub(clamped, n);
  // Taylor of 2^f on [-1/2, 1/2]; the first dropped term is below 2^-23.
  F16x p = Set(1.5403530393381608e-4f);
  p = MulAdd(p, f, Set(1.3333558146428443e-3f));
  p = MulAdd(p, f, Set(9.6181291076284772e-3f));
  p = MulAdd(p, f, Set(5.5504108664821580e-2f));
  p = MulAdd(p, f, Set(2.4022650695910071e-1f));
  p = MulAdd(p, f, Set(6.9314718055994531e-1f));
  p = MulAdd(p, f, Set(1.0f));
  const F16x scaled = BitsToFloat(Add(FloatBits(p), Shl<23>(NearestInt(n))));
  return IfThenElseZero(GreaterEqual(x, lowest), scaled);
}

// 2^x for x <= 0 to 1.6e-7; 2^-126 below that, so -infinity weighs nothing beside a sum of at least
// 1. Half the steps of Exp2: the softmax of a page waits for it.
HWY_INLINE F16x Exp2NotAbove0(const F16x& x) {
  const F16x clamped = Max(x, Set(-126.0f));
  // The sum's last bit is 1: it rounds, and its low bits are the integer.
  const F16x magic = Set(12582912.0f);
  const F16x shifted = Add(clamped, magic);
  const F16x f = Sub(clamped, Sub(shifted, magic));
  // Minimax on [-1/2, 1/2] with 2^0 = 1.
  F16x p = Set(1.3264727246960714e-3f);
  p = MulAdd(p, f, Set(9.67151268820033e-3f));
  p = MulAdd(p, f, Set(5.550733743575124e-2f));
  p = MulAdd(p, f, Set(2.402224208463437e-1f));
  p = MulAdd(p, f, Set(6.93146977598715e-1f));
  p = MulAdd(p, f, Set(1.0f));
  return BitsToFloat(Add(FloatBits(p), Shl<23>(FloatBits(shifted))));
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
