// Integer arithmetic and bits.
#include <bit>
#include <type_traits>

#include "emulator/decoder.h"
#include "emulator/lanes.h"

namespace oscar::emulator {

namespace {

template <typename T>
using Wide = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;
template <typename T>
using Unsigned = std::make_unsigned_t<T>;

// Sums and products wrap, which signed ones must not in C++.
template <typename T>
OSCAR_INLINE T Wrap(Unsigned<T> x) {
  return static_cast<T>(x);
}

struct Add {
  template <typename T>
  static T Of(T a, T b) {
    return Wrap<T>(
        static_cast<Unsigned<T>>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b)));
  }
};
struct Subtract {
  template <typename T>
  static T Of(T a, T b) {
    return Wrap<T>(
        static_cast<Unsigned<T>>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b)));
  }
};
struct MultiplyLow {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(static_cast<Unsigned<Wide<T>>>(static_cast<Unsigned<T>>(a)) *
                          static_cast<Unsigned<Wide<T>>>(static_cast<Unsigned<T>>(b)));
  }
};
struct MultiplyLow64 {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
struct MultiplyHigh {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>((static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)) >> (8 * sizeof(T)));
  }
};
struct Divide {
  template <typename T>
  static T Of(T a, T b) {
    if (b == 0) return static_cast<T>(~T{0});
    if constexpr (std::is_signed_v<T>) {
      if (b == -1) return Subtract::Of<T>(0, a);
    }
    return static_cast<T>(a / b);
  }
};
struct Remainder {
  template <typename T>
  static T Of(T a, T b) {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>) {
      if (b == -1) return 0;
    }
    return static_cast<T>(a % b);
  }
};
struct Minimum {
  template <typename T>
  static T Of(T a, T b) {
    return a < b ? a : b;
  }
};
struct Maximum {
  template <typename T>
  static T Of(T a, T b) {
    return a > b ? a : b;
  }
};
struct And {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};
struct Negate {
  template <typename T>
  static T Of(T a) {
    return Subtract::Of<T>(0, a);
  }
};
struct Absolute {
  template <typename T>
  static T Of(T a) {
    return a < 0 ? Subtract::Of<T>(0, a) : a;
  }
};
struct Not {
  template <typename T>
  static T Of(T a) {
    return static_cast<T>(~a);
  }
};
struct LogicalNot {
  template <typename T>
  static T Of(T a) {
    return a == 0 ? 1 : 0;
  }
};
struct Reverse {
  template <typename T>
  static T Of(T a) {
    T out = 0;
    for (unsigned i = 0; i < 8 * sizeof(T); ++i) {
      out = static_cast<T>(out << 1 | ((a >> i) & 1));
    }
    return out;
  }
};

template <typename T, typename Op>
void Binary(Warp& w, const Instruction& in) {
  const T *a = w.R<T>(in.a), *b = w.R<T>(in.b);
  Each(w, w.R<T>(in.d), [&](uint32_t i) { return Op::template Of<T>(a[i], b[i]); });
}
template <typename T, typename Op>
void Unary(Warp& w, const Instruction& in) {
  const T* a = w.R<T>(in.a);
  Each(w, w.R<T>(in.d), [&](uint32_t i) { return Op::template Of<T>(a[i]); });
}
template <typename T, typename Op>
void MultiplyAdd(Warp& w, const Instruction& in) {
  const T *a = w.R<T>(in.a), *b = w.R<T>(in.b), *c = w.R<T>(in.c);
  Each(w, w.R<T>(in.d),
       [&](uint32_t i) { return Add::Of<T>(Op::template Of<T>(a[i], b[i]), c[i]); });
}
template <typename T>
void MultiplyWide(Warp& w, const Instruction& in) {
  const T *a = w.R<T>(in.a), *b = w.R<T>(in.b);
  Each(w, w.R<Wide<T>>(in.d),
       [&](uint32_t i) { return static_cast<Wide<T>>(a[i]) * static_cast<Wide<T>>(b[i]); });
}
template <typename T>
void MultiplyAddWide(Warp& w, const Instruction& in) {
  using W = Wide<T>;
  const T *a = w.R<T>(in.a), *b = w.R<T>(in.b);
  const W* c = w.R<W>(in.c);
  Each(w, w.R<W>(in.d),
       [&](uint32_t i) { return Add::Of<W>(static_cast<W>(a[i]) * static_cast<W>(b[i]), c[i]); });
}

// Shifts beyond the width give zeros, or the sign.
template <typename T>
void ShiftLeft(Warp& w, const Instruction& in) {
  const T* a = w.R<T>(in.a);
  const uint32_t* b = w.R<uint32_t>(in.b);
  constexpr uint32_t kBits = 8 * sizeof(T);
  Each(w, w.R<T>(in.d), [&](uint32_t i) {
    return b[i] < kBits ? static_cast<T>(a[i] << (b[i] & (kBits - 1))) : T{0};
  });
}
template <typename T>
void ShiftRight(Warp& w, const Instruction& in) {
  const T* a = w.R<T>(in.a);
  const uint32_t* b = w.R<uint32_t>(in.b);
  constexpr uint32_t kBits = 8 * sizeof(T);
  Each(w, w.R<T>(in.d), [&](uint32_t i) {
    const uint32_t by = b[i] < kBits ? b[i] : kBits - 1;
    const T shifted = static_cast<T>(a[i] >> by);
    return std::is_signed_v<T> || b[i] < kBits ? shifted : T{0};
  });
}

template <bool kLeft, bool kClamp>
void Funnel(Warp& w, const Instruction& in) {
  const uint32_t *a = w.R<uint32_t>(in.a), *b = w.R<uint32_t>(in.b), *c = w.R<uint32_t>(in.c);
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) {
    const uint32_t by = kClamp ? (c[i] < 32 ? c[i] : 32) : (c[i] & 31);
    const uint64_t both = uint64_t{b[i]} << 32 | a[i];
    return static_cast<uint32_t>(kLeft ? (both << by) >> 32 : both >> by);
  });
}

void Lop3(Warp& w, const Instruction& in) {
  const uint32_t *a = w.R<uint32_t>(in.a), *b = w.R<uint32_t>(in.b), *c = w.R<uint32_t>(in.c);
  uint32_t table[8];
  for (uint32_t k = 0; k < 8; ++k) table[k] = (in.imm >> k) & 1 ? ~0u : 0u;
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) {
    const uint32_t x = a[i], y = b[i], z = c[i];
    return (table[0] & ~x & ~y & ~z) | (table[1] & ~x & ~y & z) | (table[2] & ~x & y & ~z) |
           (table[3] & ~x & y & z) | (table[4] & x & ~y & ~z) | (table[5] & x & ~y & z) |
           (table[6] & x & y & ~z) | (table[7] & x & y & z);
  });
}

void Permute(Warp& w, const Instruction& in) {
  const uint32_t *a = w.R<uint32_t>(in.a), *b = w.R<uint32_t>(in.b), *c = w.R<uint32_t>(in.c);
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) {
    const uint64_t both = uint64_t{b[i]} << 32 | a[i];
    uint32_t out = 0;
    for (uint32_t k = 0; k < 4; ++k) {
      const uint32_t select = c[i] >> (4 * k);
      auto byte = static_cast<uint32_t>(both >> (8 * (select & 7))) & 0xff;
      if ((select & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
      out |= byte << (8 * k);
    }
    return out;
  });
}

template <typename T>
void ExtractField(Warp& w, const Instruction& in) {
  using U = Unsigned<T>;
  constexpr uint32_t kBits = 8 * sizeof(T);
  const T* a = w.R<T>(in.a);
  const uint32_t *b = w.R<uint32_t>(in.b), *c = w.R<uint32_t>(in.c);
  Each(w, w.R<T>(in.d), [&](uint32_t i) {
    const uint32_t at = b[i] & 0xff, length = c[i] & 0xff;
    if (length == 0) return T{0};
    const uint32_t last = at + length - 1 < kBits - 1 ? at + length - 1 : kBits - 1;
    const bool sign = std::is_signed_v<T> && ((static_cast<U>(a[i]) >> last) & 1) != 0;
    U field = at < kBits ? static_cast<U>(static_cast<U>(a[i]) >> at) : U{0};
    if (length < kBits) {
      const U mask = static_cast<U>((U{1} << length) - 1);
      field = static_cast<U>(field & mask);
      const bool cut = at + length > kBits;  // fewer bits than asked for: the sign fills them
      if (sign)
        field = static_cast<U>(field | ~mask | (cut && at < kBits ? ~(~U{0} >> at) : U{0}) |
                               (at >= kBits ? ~U{0} : U{0}));
    } else if (sign) {
      field = at < kBits ? static_cast<U>(field | (at > 0 ? ~(~U{0} >> at) : U{0})) : ~U{0};
    }
    return static_cast<T>(field);
  });
}

template <typename T>
void InsertField(Warp& w, const Instruction& in) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  const T *a = w.R<T>(in.a), *b = w.R<T>(in.b);
  const uint32_t *at = w.R<uint32_t>(in.c), *length = w.R<uint32_t>(in.list[0]);
  Each(w, w.R<T>(in.d), [&](uint32_t i) {
    const uint32_t from = at[i] & 0xff, n = length[i] & 0xff;
    if (from >= kBits || n == 0) return b[i];
    const T ones = n >= kBits ? ~T{0} : (T{1} << n) - 1;
    const T mask = ones << from;
    return static_cast<T>((b[i] & ~mask) | ((a[i] << from) & mask));
  });
}

template <typename T>
void CountOnes(Warp& w, const Instruction& in) {
  const T* a = w.R<T>(in.a);
  Each(w, w.R<uint32_t>(in.d),
       [&](uint32_t i) { return static_cast<uint32_t>(std::popcount(a[i])); });
}
template <typename T>
void LeadingZeros(Warp& w, const Instruction& in) {
  const T* a = w.R<T>(in.a);
  Each(w, w.R<uint32_t>(in.d),
       [&](uint32_t i) { return static_cast<uint32_t>(std::countl_zero(a[i])); });
}
// The highest bit that differs from the sign; flags 1: as a shift from the top.
template <typename T>
void FindBit(Warp& w, const Instruction& in) {
  using U = Unsigned<T>;
  const T* a = w.R<T>(in.a);
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) {
    const U x = static_cast<U>(a[i] < 0 ? ~a[i] : a[i]);
    if (x == 0) return ~0u;
    const auto zeros = static_cast<uint32_t>(std::countl_zero(x));
    return in.flags == 1 ? zeros : static_cast<uint32_t>(8 * sizeof(T)) - 1 - zeros;
  });
}

// dp4a, dp2a: flags: 1 a signed, 2 b signed, 4 the high half of b (dp2a).
void Dot4(Warp& w, const Instruction& in) {
  const uint32_t *a = w.R<uint32_t>(in.a), *b = w.R<uint32_t>(in.b), *c = w.R<uint32_t>(in.c);
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) {
    uint32_t sum = c[i];
    for (uint32_t k = 0; k < 4; ++k) {
      const auto x = static_cast<uint8_t>(a[i] >> (8 * k)),
                 y = static_cast<uint8_t>(b[i] >> (8 * k));
      const int32_t p = (in.flags & 1 ? static_cast<int8_t>(x) : static_cast<int32_t>(x)) *
                        (in.flags & 2 ? static_cast<int8_t>(y) : static_cast<int32_t>(y));
      sum += static_cast<uint32_t>(p);
    }
    return sum;
  });
}
void Dot2(Warp& w, const Instruction& in) {
  const uint32_t *a = w.R<uint32_t>(in.a), *b = w.R<uint32_t>(in.b), *c = w.R<uint32_t>(in.c);
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) {
    uint32_t sum = c[i];
    const uint32_t from = in.flags & 4 ? 16 : 0;
    for (uint32_t k = 0; k < 2; ++k) {
      const auto x = static_cast<uint16_t>(a[i] >> (16 * k));
      const auto y = static_cast<uint8_t>(b[i] >> (from + 8 * k));
      const int32_t p = (in.flags & 1 ? static_cast<int16_t>(x) : static_cast<int32_t>(x)) *
                        (in.flags & 2 ? static_cast<int8_t>(y) : static_cast<int32_t>(y));
      sum += static_cast<uint32_t>(p);
    }
    return sum;
  });
}

void PredicateAnd(Warp& w, const Instruction& in) { w.SetP(in.d, w.P(in.a) & w.P(in.b)); }
void PredicateOr(Warp& w, const Instruction& in) { w.SetP(in.d, w.P(in.a) | w.P(in.b)); }
void PredicateXor(Warp& w, const Instruction& in) { w.SetP(in.d, w.P(in.a) ^ w.P(in.b)); }
void PredicateNot(Warp& w, const Instruction& in) { w.SetP(in.d, ~w.P(in.a)); }

// The instance of a handler for an integer type.
#define OSCAR_PICK(type, make)                                                 \
  ((type).bits == 16   ? ((type).kind == 's' ? make(int16_t) : make(uint16_t)) \
   : (type).bits == 32 ? ((type).kind == 's' ? make(int32_t) : make(uint32_t)) \
   : (type).bits == 64 ? ((type).kind == 's' ? make(int64_t) : make(uint64_t)) \
                       : Handler(nullptr))

template <typename Op>
Handler PickBinary(Type type) {
#define OSCAR_MAKE(T) Handler(Binary<T, Op>)
  return OSCAR_PICK(type, OSCAR_MAKE);
#undef OSCAR_MAKE
}
template <typename Op>
Handler PickUnary(Type type) {
#define OSCAR_MAKE(T) Handler(Unary<T, Op>)
  return OSCAR_PICK(type, OSCAR_MAKE);
#undef OSCAR_MAKE
}
template <typename Op>
Handler PickMultiplyAdd(Type type) {
#define OSCAR_MAKE(T) Handler(MultiplyAdd<T, Op>)
  return OSCAR_PICK(type, OSCAR_MAKE);
#undef OSCAR_MAKE
}
#define OSCAR_LEFT(T) Handler(ShiftLeft<T>)
#define OSCAR_RIGHT(T) Handler(ShiftRight<T>)

Handler PickWide(Type type, bool add) {
  if (type.bits == 16) {
    return type.kind == 's' ? (add ? Handler(MultiplyAddWide<int16_t>) : MultiplyWide<int16_t>)
                            : (add ? Handler(MultiplyAddWide<uint16_t>) : MultiplyWide<uint16_t>);
  }
  if (type.bits == 32) {
    return type.kind == 's' ? (add ? Handler(MultiplyAddWide<int32_t>) : MultiplyWide<int32_t>)
                            : (add ? Handler(MultiplyAddWide<uint32_t>) : MultiplyWide<uint32_t>);
  }
  return nullptr;
}

bool Operands2(Decoder& d, int bytes, Handler run) {
  d.in->d = d.Place(0, bytes);
  d.in->a = d.Place(1, bytes);
  d.in->b = d.Place(2, bytes);
  if (d.in->run == nullptr) d.in->run = run;
  return true;
}

bool DecodeLogic(Decoder& d, Type type) {
  const std::string_view op = d.part(0);
  if (type.kind == 'p') {
    d.in->d = d.Predicate(0);
    d.in->a = d.Predicate(1);
    d.in->run = PredicateNot;
    if (op == "not") return true;
    d.in->b = d.Predicate(2);
    d.in->run = op == "and" ? PredicateAnd : op == "or" ? PredicateOr : PredicateXor;
    return true;
  }
  if (op == "not") {
    d.in->d = d.Place(0, type.bytes());
    d.in->a = d.Place(1, type.bytes());
    d.in->run = PickUnary<Not>(type);
    return true;
  }
  return Operands2(d, type.bytes(),
                   op == "and"  ? PickBinary<And>(type)
                   : op == "or" ? PickBinary<Or>(type)
                                : PickBinary<Xor>(type));
}

bool DecodeMultiply(Decoder& d, Type type) {
  const bool add = d.part(0) == "mad";
  const int bytes = type.bytes();
  const bool wide = d.Has("wide"), high = d.Has("hi");
  if (d.Has("sat") || d.Has("cc")) return d.Fail("not implemented by the emulator");
  d.in->d = d.Place(0, wide ? 2 * bytes : bytes);
  d.in->a = d.Place(1, bytes);
  d.in->b = d.Place(2, bytes);
  if (add) d.in->c = d.Place(3, wide ? 2 * bytes : bytes);
  if (wide) {
    d.in->run = PickWide(type, add);
  } else if (high) {
    d.in->run = add ? PickMultiplyAdd<MultiplyHigh>(type) : PickBinary<MultiplyHigh>(type);
  } else if (type.bits == 64) {
    d.in->run = add ? Handler(MultiplyAdd<uint64_t, MultiplyLow64>)
                    : Handler(Binary<uint64_t, MultiplyLow64>);
  } else {
    d.in->run = add ? PickMultiplyAdd<MultiplyLow>(type) : PickBinary<MultiplyLow>(type);
  }
  return true;
}

}  // namespace

bool DecodeInteger(Decoder& d) {
  const std::string_view op = d.part(0);
  const Type type = d.LastType();
  Instruction* in = d.in;
  if (op == "and" || op == "or" || op == "xor" || op == "not") return DecodeLogic(d, type);
  if (op == "lop3") {
    uint64_t table = 0;
    if (!d.Immediate(4, &table)) return d.Fail("a table that is no number");
    in->d = d.Place(0, 4);
    in->a = d.Place(1, 4);
    in->b = d.Place(2, 4);
    in->c = d.Place(3, 4);
    in->imm = static_cast<int64_t>(table);
    in->run = Lop3;
    return true;
  }
  if (!type.whole() || type.packed) return false;
  const int bytes = type.bytes();
  if ((op == "add" || op == "sub") && (d.Has("sat") || d.Has("cc"))) return false;
  if (op == "add") return Operands2(d, bytes, PickBinary<Add>(type));
  if (op == "sub") return Operands2(d, bytes, PickBinary<Subtract>(type));
  if (op == "mul" || op == "mad") return DecodeMultiply(d, type);
  if (op == "div") return Operands2(d, bytes, PickBinary<Divide>(type));
  if (op == "rem") return Operands2(d, bytes, PickBinary<Remainder>(type));
  if ((op == "min" || op == "max") && d.Has("relu")) return false;
  if (op == "min") return Operands2(d, bytes, PickBinary<Minimum>(type));
  if (op == "max") return Operands2(d, bytes, PickBinary<Maximum>(type));
  if (op == "shl" || op == "shr") {
    in->d = d.Place(0, bytes);
    in->a = d.Place(1, bytes);
    in->b = d.Place(2, 4);
    in->run = op == "shl" ? OSCAR_PICK(type, OSCAR_LEFT) : OSCAR_PICK(type, OSCAR_RIGHT);
    return true;
  }
  if (op == "neg" || op == "abs" || op == "cnot" || op == "brev") {
    in->d = d.Place(0, bytes);
    in->a = d.Place(1, bytes);
    in->run = op == "neg"    ? PickUnary<Negate>(type)
              : op == "abs"  ? PickUnary<Absolute>(type)
              : op == "cnot" ? PickUnary<LogicalNot>(type)
              : bytes == 4   ? Handler(Unary<uint32_t, Reverse>)
                             : Handler(Unary<uint64_t, Reverse>);
    return true;
  }
  if (op == "popc" || op == "clz" || op == "bfind") {
    in->d = d.Place(0, 4);
    in->a = d.Place(1, bytes);
    in->flags = d.Has("shiftamt") ? 1 : 0;
    if (op == "popc") in->run = bytes == 4 ? CountOnes<uint32_t> : CountOnes<uint64_t>;
    if (op == "clz") in->run = bytes == 4 ? LeadingZeros<uint32_t> : LeadingZeros<uint64_t>;
    if (op == "bfind") {
      in->run = type.kind == 's' ? (bytes == 4 ? FindBit<int32_t> : FindBit<int64_t>)
                                 : (bytes == 4 ? FindBit<uint32_t> : FindBit<uint64_t>);
    }
    return true;
  }
  if (op == "bfe") {
    in->d = d.Place(0, bytes);
    in->a = d.Place(1, bytes);
    in->b = d.Place(2, 4);
    in->c = d.Place(3, 4);
    in->run = type.kind == 's' ? (bytes == 4 ? ExtractField<int32_t> : ExtractField<int64_t>)
                               : (bytes == 4 ? ExtractField<uint32_t> : ExtractField<uint64_t>);
    return true;
  }
  if (op == "bfi") {
    in->d = d.Place(0, bytes);
    in->a = d.Place(1, bytes);
    in->b = d.Place(2, bytes);
    in->c = d.Place(3, 4);
    in->list = d.List({d.Place(4, 4)});
    in->run = bytes == 4 ? InsertField<uint32_t> : InsertField<uint64_t>;
    return true;
  }
  if (op == "prmt" || op == "shf" || op == "dp4a" || op == "dp2a") {
    in->d = d.Place(0, 4);
    in->a = d.Place(1, 4);
    in->b = d.Place(2, 4);
    in->c = d.Place(3, 4);
    if (op == "prmt") {
      if (d.part(1) != "b32") return d.Fail("modes of prmt are not implemented");
      in->run = Permute;
    } else if (op == "shf") {
      const bool left = d.part(1) == "l", clamp = d.part(2) == "clamp";
      in->run = left ? (clamp ? Funnel<true, true> : Funnel<true, false>)
                     : (clamp ? Funnel<false, true> : Funnel<false, false>);
    } else {
      const size_t first = op == "dp4a" ? 1 : 2;
      in->flags =
          static_cast<uint16_t>((d.part(first) == "s32" ? 1 : 0) |
                                (d.part(first + 1) == "s32" ? 2 : 0) | (d.Has("hi") ? 4 : 0));
      in->run = op == "dp4a" ? Dot4 : Dot2;
    }
    return true;
  }
  return false;
}

}  // namespace oscar::emulator
