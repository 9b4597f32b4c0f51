// Arithmetic in fp16 and BF16, alone and in pairs. Each result is rounded once.
#include <cmath>

#include "emulator/decoder.h"
#include "emulator/lanes.h"

namespace oscar::emulator {

namespace {

struct Fp16 {
  static OSCAR_INLINE float Widen(uint16_t x) { return HalfToFloat(x); }
  static OSCAR_INLINE uint16_t Round(float x) { return FloatToHalf(x); }
};
struct Bfloat16 {
  static OSCAR_INLINE float Widen(uint16_t x) { return Bf16ToFloat(x); }
  static OSCAR_INLINE uint16_t Round(float x) { return FloatToBf16(x); }
};

// a * b + c rounded to odd: a later rounding to a narrower format is then as if of the exact sum.
OSCAR_INLINE float FusedOdd(float a, float b, float c) {
  const double p = static_cast<double>(a) * static_cast<double>(b);  // exact
  const double s = p + static_cast<double>(c);
  const double back = s - p;
  const double rest = (p - (s - back)) + (static_cast<double>(c) - back);
  uint64_t bits = As<uint64_t>(s);
  if (rest != 0.0 && (bits & 1) == 0 && s - s == 0.0) {
    bits += (rest > 0.0) == (s > 0.0) ? 1 : ~uint64_t{0};
  }
  const double odd = As<double>(bits);
  // To fp32, to odd again: it has more than twice the bits of what comes next.
  const auto f = static_cast<float>(odd);
  uint32_t fbits = As<uint32_t>(f);
  const double error = odd - static_cast<double>(f);
  if (error != 0.0 && (fbits & 1) == 0 && f - f == 0.0f) {
    fbits += f == 0.0f ? 1u : ((error > 0.0) == (f > 0.0f) ? 1u : ~0u);
  }
  return As<float>(fbits);
}

struct Add {
  static OSCAR_INLINE float Of(float a, float b) { return a + b; }
};
struct Subtract {
  static OSCAR_INLINE float Of(float a, float b) { return a - b; }
};
struct Multiply {
  static OSCAR_INLINE float Of(float a, float b) { return a * b; }
};
struct Minimum {
  static OSCAR_INLINE float Of(float a, float b) {
    const float r = (a < b || b != b) ? a : b;
    return a == b ? As<float>(As<uint32_t>(a) | As<uint32_t>(b)) : r;
  }
};
struct Maximum {
  static OSCAR_INLINE float Of(float a, float b) {
    const float r = (a > b || b != b) ? a : b;
    return a == b ? As<float>(As<uint32_t>(a) & As<uint32_t>(b)) : r;
  }
};
struct MinimumNan {
  static OSCAR_INLINE float Of(float a, float b) {
    return a != a ? a : b != b ? b : Minimum::Of(a, b);
  }
};
struct MaximumNan {
  static OSCAR_INLINE float Of(float a, float b) {
    return a != a ? a : b != b ? b : Maximum::Of(a, b);
  }
};
struct Fused {
  static OSCAR_INLINE float Of(float a, float b, float c) { return FusedOdd(a, b, c); }
};
struct FusedRelu {
  static OSCAR_INLINE float Of(float a, float b, float c) {
    const float x = FusedOdd(a, b, c);
    return x < 0.0f ? 0.0f : x;
  }
};

template <typename F, typename Op>
void Binary(Warp& w, const Instruction& in) {
  const uint16_t *a = w.R<uint16_t>(in.a), *b = w.R<uint16_t>(in.b);
  Each(w, w.R<uint16_t>(in.d),
       [&](uint32_t i) { return F::Round(Op::Of(F::Widen(a[i]), F::Widen(b[i]))); });
}
OSCAR_INLINE uint16_t Low(uint32_t x) { return static_cast<uint16_t>(x); }
OSCAR_INLINE uint16_t High(uint32_t x) { return static_cast<uint16_t>(x >> 16); }
OSCAR_INLINE uint32_t Pair(uint16_t low, uint16_t high) { return uint32_t{high} << 16 | low; }

template <typename F, typename Op>
void BinaryPair(Warp& w, const Instruction& in) {
  const uint32_t *a = w.R<uint32_t>(in.a), *b = w.R<uint32_t>(in.b);
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) {
    return Pair(F::Round(Op::Of(F::Widen(Low(a[i])), F::Widen(Low(b[i])))),
                F::Round(Op::Of(F::Widen(High(a[i])), F::Widen(High(b[i])))));
  });
}
template <typename F, typename Op>
void Ternary(Warp& w, const Instruction& in) {
  const uint16_t *a = w.R<uint16_t>(in.a), *b = w.R<uint16_t>(in.b), *c = w.R<uint16_t>(in.c);
  Each(w, w.R<uint16_t>(in.d), [&](uint32_t i) {
    return F::Round(Op::Of(F::Widen(a[i]), F::Widen(b[i]), F::Widen(c[i])));
  });
}
template <typename F, typename Op>
void TernaryPair(Warp& w, const Instruction& in) {
  const uint32_t *a = w.R<uint32_t>(in.a), *b = w.R<uint32_t>(in.b), *c = w.R<uint32_t>(in.c);
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) {
    return Pair(F::Round(Op::Of(F::Widen(Low(a[i])), F::Widen(Low(b[i])), F::Widen(Low(c[i])))),
                F::Round(Op::Of(F::Widen(High(a[i])), F::Widen(High(b[i])), F::Widen(High(c[i])))));
  });
}
// Signs: in.imm is flipped or, with flags 1, taken away.
template <typename T>
void Sign(Warp& w, const Instruction& in) {
  const T* a = w.R<T>(in.a);
  const T mask = static_cast<T>(in.imm);
  const bool away = in.flags == 1;
  Each(w, w.R<T>(in.d),
       [&](uint32_t i) { return static_cast<T>(away ? a[i] & ~mask : a[i] ^ mask); });
}
template <typename F, bool kExp>
void HalfFunction(Warp& w, const Instruction& in) {
  ForActive(w, [&](uint32_t i) {
    const auto of = [](uint16_t x) {
      const auto v = static_cast<double>(F::Widen(x));
      return F::Round(static_cast<float>(kExp ? std::exp2(v) : std::tanh(v)));
    };
    if (in.count == 2) {
      const uint32_t x = w.R<uint32_t>(in.a)[i];
      w.R<uint32_t>(in.d)[i] = Pair(of(Low(x)), of(High(x)));
    } else {
      w.R<uint16_t>(in.d)[i] = of(w.R<uint16_t>(in.a)[i]);
    }
  });
}

template <typename Op>
Handler PickBinary(Type t) {
  if (t.kind == 'f') return t.packed ? BinaryPair<Fp16, Op> : Binary<Fp16, Op>;
  return t.packed ? BinaryPair<Bfloat16, Op> : Binary<Bfloat16, Op>;
}
template <typename Op>
Handler PickTernary(Type t) {
  if (t.kind == 'f') return t.packed ? TernaryPair<Fp16, Op> : Ternary<Fp16, Op>;
  return t.packed ? TernaryPair<Bfloat16, Op> : Ternary<Bfloat16, Op>;
}

}  // namespace

bool DecodeHalf(Decoder& d) {
  const Type t = d.LastType();
  if ((t.kind != 'f' && t.kind != 'e') || t.bits != 16) return false;
  const std::string_view op = d.part(0);
  Instruction* in = d.in;
  const int bytes = t.bytes();
  if (d.Has("ftz") || d.Has("sat") || d.Has("xorsign") || (d.Has("relu") && op != "fma")) {
    return d.Fail("not implemented by the emulator");
  }
  const bool nan = d.Has("NaN");
  if (op == "add") in->run = PickBinary<Add>(t);
  if (op == "sub") in->run = PickBinary<Subtract>(t);
  if (op == "mul") in->run = PickBinary<Multiply>(t);
  if (op == "min") in->run = nan ? PickBinary<MinimumNan>(t) : PickBinary<Minimum>(t);
  if (op == "max") in->run = nan ? PickBinary<MaximumNan>(t) : PickBinary<Maximum>(t);
  if (op == "fma") in->run = d.Has("relu") ? PickTernary<FusedRelu>(t) : PickTernary<Fused>(t);
  if (in->run != nullptr) {
    in->d = d.Place(0, bytes);
    in->a = d.Place(1, bytes);
    in->b = d.Place(2, bytes);
    if (op == "fma") in->c = d.Place(3, bytes);
    return true;
  }
  if (op == "neg" || op == "abs") {
    in->flags = op == "abs" ? 1 : 0;
    in->imm = t.packed ? 0x80008000 : 0x8000;
    in->run = t.packed ? Sign<uint32_t> : Sign<uint16_t>;
  } else if (op == "ex2" || op == "tanh") {
    in->count = t.packed ? 2 : 1;
    in->run = t.kind == 'f'
                  ? (op == "ex2" ? HalfFunction<Fp16, true> : HalfFunction<Fp16, false>)
                  : (op == "ex2" ? HalfFunction<Bfloat16, true> : HalfFunction<Bfloat16, false>);
  } else {
    return false;
  }
  in->d = d.Place(0, bytes);
  in->a = d.Place(1, bytes);
  return true;
}

}  // namespace oscar::emulator
