// Arithmetic in fp32 and fp64. Rounding is to nearest; results that are no numbers have the
// device's bits. Approximations (.approx) are computed precisely.
#include <cmath>

#include "emulator/decoder.h"
#include "emulator/lanes.h"

namespace oscar::emulator {

namespace {

constexpr uint16_t kFtz = 1, kSat = 2;

struct Add {
  template <typename T>
  static OSCAR_INLINE T Of(T a, T b) {
    return Canonical(a + b);
  }
};
struct Subtract {
  template <typename T>
  static OSCAR_INLINE T Of(T a, T b) {
    return Canonical(a - b);
  }
};
struct Multiply {
  template <typename T>
  static OSCAR_INLINE T Of(T a, T b) {
    return Canonical(a * b);
  }
};
struct Divide {
  template <typename T>
  static OSCAR_INLINE T Of(T a, T b) {
    return Canonical(a / b);
  }
};
// The one that is a number; -0 lies below +0.
struct Minimum {
  static OSCAR_INLINE float Of(float a, float b) {
    const float r = (a < b || b != b) ? a : b;
    return Canonical(a == b ? As<float>(As<uint32_t>(a) | As<uint32_t>(b)) : r);
  }
  static OSCAR_INLINE double Of(double a, double b) { return std::fmin(a, b); }
};
struct Maximum {
  static OSCAR_INLINE float Of(float a, float b) {
    const float r = (a > b || b != b) ? a : b;
    return Canonical(a == b ? As<float>(As<uint32_t>(a) & As<uint32_t>(b)) : r);
  }
  static OSCAR_INLINE double Of(double a, double b) { return std::fmax(a, b); }
};
struct MinimumNan {
  static OSCAR_INLINE float Of(float a, float b) {
    return a != a || b != b ? As<float>(kNanBits) : Minimum::Of(a, b);
  }
};
struct MaximumNan {
  static OSCAR_INLINE float Of(float a, float b) {
    return a != a || b != b ? As<float>(kNanBits) : Maximum::Of(a, b);
  }
};
struct CopySign {
  static OSCAR_INLINE float Of(float a, float b) {
    return As<float>((As<uint32_t>(a) & 0x80000000u) | (As<uint32_t>(b) & 0x7fffffffu));
  }
  static OSCAR_INLINE double Of(double a, double b) { return std::copysign(b, a); }
};

struct Negate {
  static OSCAR_INLINE float Of(float a) { return As<float>(As<uint32_t>(a) ^ 0x80000000u); }
  static OSCAR_INLINE double Of(double a) { return -a; }
};
struct Absolute {
  static OSCAR_INLINE float Of(float a) { return As<float>(As<uint32_t>(a) & 0x7fffffffu); }
  static OSCAR_INLINE double Of(double a) { return std::fabs(a); }
};
struct Reciprocal {
  template <typename T>
  static OSCAR_INLINE T Of(T a) {
    return Canonical(T{1} / a);
  }
};
struct SquareRoot {
  static OSCAR_INLINE float Of(float a) { return Canonical(std::sqrt(a)); }
  static OSCAR_INLINE double Of(double a) { return std::sqrt(a); }
};
struct ReciprocalRoot {
  static OSCAR_INLINE float Of(float a) {
    return Canonical(static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))));
  }
  static OSCAR_INLINE double Of(double a) { return 1.0 / std::sqrt(a); }
};
// Good to the last bit or so: a series in double precision, which loops over lanes can use.
struct Exp2 {
  static OSCAR_INLINE float Of(float a) {
    const double x = a < -160.0f ? -160.0 : a > 129.0f ? 129.0 : static_cast<double>(a);
    constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adds round to integers
    const double whole = (x + kMagic) - kMagic;
    const double f = (x - whole) * 0.6931471805599453;
    double p = 1.0 / 3628800;
    p = p * f + 1.0 / 362880;
    p = p * f + 1.0 / 40320;
    p = p * f + 1.0 / 5040;
    p = p * f + 1.0 / 720;
    p = p * f + 1.0 / 120;
    p = p * f + 1.0 / 24;
    p = p * f + 1.0 / 6;
    p = p * f + 0.5;
    p = p * f + 1.0;
    p = p * f + 1.0;
    const uint64_t exponent = As<uint64_t>(whole + (kMagic + 1023.0)) << 52;
    return a != a ? As<float>(kNanBits) : static_cast<float>(p * As<double>(exponent));
  }
};
struct Log2 {
  static float Of(float a) {
    return Canonical(static_cast<float>(std::log2(static_cast<double>(a))));
  }
};
struct Sine {
  static float Of(float a) {
    return Canonical(static_cast<float>(std::sin(static_cast<double>(a))));
  }
};
struct Cosine {
  static float Of(float a) {
    return Canonical(static_cast<float>(std::cos(static_cast<double>(a))));
  }
};
struct Tanh {
  static float Of(float a) {
    return Canonical(static_cast<float>(std::tanh(static_cast<double>(a))));
  }
};

template <typename T, typename Op>
void Binary(Warp& w, const Instruction& in) {
  const T *a = w.R<T>(in.a), *b = w.R<T>(in.b);
  Each(w, w.R<T>(in.d), [&](uint32_t i) { return Op::Of(a[i], b[i]); });
}
template <typename T, typename Op>
void Unary(Warp& w, const Instruction& in) {
  const T* a = w.R<T>(in.a);
  Each(w, w.R<T>(in.d), [&](uint32_t i) { return Op::Of(a[i]); });
}
template <typename T>
void MultiplyAdd(Warp& w, const Instruction& in) {
  const T *a = w.R<T>(in.a), *b = w.R<T>(in.b), *c = w.R<T>(in.c);
  Each(w, w.R<T>(in.d), [&](uint32_t i) { return Canonical(std::fma(a[i], b[i], c[i])); });
}
// Subnormal numbers to zero and results into [0, 1], as the flags say.
OSCAR_INLINE float Out(float x, uint16_t flags) {
  if (flags & kFtz) x = Flush(x);
  return flags & kSat ? Saturate(x) : x;
}
OSCAR_INLINE float In(float x, uint16_t flags) { return flags & kFtz ? Flush(x) : x; }
template <typename Op>
void BinaryFlagged(Warp& w, const Instruction& in) {
  const float *a = w.R<float>(in.a), *b = w.R<float>(in.b);
  const uint16_t f = in.flags;
  Each(w, w.R<float>(in.d), [&](uint32_t i) { return Out(Op::Of(In(a[i], f), In(b[i], f)), f); });
}
template <typename Op>
void UnaryFlagged(Warp& w, const Instruction& in) {
  const float* a = w.R<float>(in.a);
  const uint16_t f = in.flags;
  Each(w, w.R<float>(in.d), [&](uint32_t i) { return Out(Op::Of(In(a[i], f)), f); });
}
void MultiplyAddFlagged(Warp& w, const Instruction& in) {
  const float *a = w.R<float>(in.a), *b = w.R<float>(in.b), *c = w.R<float>(in.c);
  const uint16_t f = in.flags;
  Each(w, w.R<float>(in.d), [&](uint32_t i) {
    return Out(Canonical(std::fma(In(a[i], f), In(b[i], f), In(c[i], f))), f);
  });
}

template <typename Op>
Handler PickBinary(Type type, uint16_t flags) {
  if (type.bits == 64) return Binary<double, Op>;
  return flags != 0 ? BinaryFlagged<Op> : Binary<float, Op>;
}
template <typename Op>
Handler PickFloatBinary(Type type, uint16_t flags) {
  if (type.bits == 64) return nullptr;
  return flags != 0 ? BinaryFlagged<Op> : Binary<float, Op>;
}
template <typename Op>
Handler PickUnary(Type type, uint16_t flags) {
  if (type.bits == 64) return Unary<double, Op>;
  return flags != 0 ? UnaryFlagged<Op> : Unary<float, Op>;
}
template <typename Op>
Handler PickFloatUnary(Type type, uint16_t flags) {
  if (type.bits == 64) return nullptr;
  return flags != 0 ? UnaryFlagged<Op> : Unary<float, Op>;
}

Handler BinaryOf(std::string_view op, Type type, uint16_t flags, bool nan) {
  if (op == "add") return PickBinary<Add>(type, flags);
  if (op == "sub") return PickBinary<Subtract>(type, flags);
  if (op == "mul") return PickBinary<Multiply>(type, flags);
  if (op == "div") return PickBinary<Divide>(type, flags);
  if (op == "min") {
    return nan ? PickFloatBinary<MinimumNan>(type, flags) : PickBinary<Minimum>(type, flags);
  }
  if (op == "max") {
    return nan ? PickFloatBinary<MaximumNan>(type, flags) : PickBinary<Maximum>(type, flags);
  }
  if (op == "copysign") return PickBinary<CopySign>(type, flags);
  return nullptr;
}

Handler UnaryOf(std::string_view op, Type type, uint16_t flags) {
  if (op == "neg") return PickUnary<Negate>(type, flags);
  if (op == "abs") return PickUnary<Absolute>(type, flags);
  if (op == "rcp") return PickUnary<Reciprocal>(type, flags);
  if (op == "sqrt") return PickUnary<SquareRoot>(type, flags);
  if (op == "rsqrt") return PickUnary<ReciprocalRoot>(type, flags);
  if (op == "ex2") return PickFloatUnary<Exp2>(type, flags);
  if (op == "lg2") return PickFloatUnary<Log2>(type, flags);
  if (op == "sin") return PickFloatUnary<Sine>(type, flags);
  if (op == "cos") return PickFloatUnary<Cosine>(type, flags);
  if (op == "tanh") return PickFloatUnary<Tanh>(type, flags);
  return nullptr;
}

}  // namespace

bool DecodeFloat(Decoder& d) {
  const Type type = d.LastType();
  if (type.kind != 'f' || type.bits < 32 || type.packed) return false;
  if (d.Has("rz") || d.Has("rm") || d.Has("rp") || d.Has("xorsign")) {
    return d.Fail("roundings other than to nearest are not implemented");
  }
  const std::string_view op = d.part(0);
  const int bytes = type.bytes();
  Instruction* in = d.in;
  in->flags = static_cast<uint16_t>((d.Has("ftz") ? kFtz : 0) | (d.Has("sat") ? kSat : 0));
  const Handler binary = BinaryOf(op, type, in->flags, d.Has("NaN"));
  const Handler unary = UnaryOf(op, type, in->flags);
  if (op == "fma" || op == "mad") {
    in->run = bytes == 8       ? Handler(MultiplyAdd<double>)
              : in->flags != 0 ? Handler(MultiplyAddFlagged)
                               : Handler(MultiplyAdd<float>);
    in->c = d.Place(3, bytes);
  } else if (binary != nullptr) {
    if (d.operands() != 3) return d.Fail("three operands are not implemented");
    in->run = binary;
  } else if (unary != nullptr) {
    in->run = unary;
  } else {
    return false;
  }
  in->d = d.Place(0, bytes);
  in->a = d.Place(1, bytes);
  if (unary == nullptr) in->b = d.Place(2, bytes);
  return true;
}

}  // namespace oscar::emulator
