// setp, set, selp.
#include <map>
#include <type_traits>

#include "emulator/decoder.h"
#include "emulator/lanes.h"

namespace oscar::emulator {

namespace {

enum Test : uint16_t {
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kEqu,
  kNeu,
  kLtu,
  kLeu,
  kGtu,
  kGeu,
  kNum,
  kNan
};

template <int kTest, typename T>
OSCAR_INLINE bool Holds(T a, T b) {
  const bool nan = a != a || b != b;
  switch (kTest) {
    case kEq:
      return a == b;
    case kNe:
      return !nan && a != b;
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    case kGe:
      return a >= b;
    case kEqu:
      return nan || a == b;
    case kNeu:
      return a != b;
    case kLtu:
      return !(a >= b);
    case kLeu:
      return !(a > b);
    case kGtu:
      return !(a <= b);
    case kGeu:
      return !(a < b);
    case kNum:
      return !nan;
    default:
      return nan;
  }
}

// What setp does with a third predicate: flags.
constexpr uint16_t kAnd = 1, kOr = 2, kXor = 3;
OSCAR_INLINE uint32_t Combine(uint32_t lanes, uint32_t with, uint16_t how) {
  return how == kAnd ? lanes & with : how == kOr ? lanes | with : lanes ^ with;
}

template <typename T, int kTest>
void SetPredicate(Warp& w, const Instruction& in) {
  const T *a = w.R<T>(in.a), *b = w.R<T>(in.b);
  const uint32_t lanes = Where([&](uint32_t i) { return Holds<kTest, T>(a[i], b[i]); });
  if (in.flags == 0 && in.count == 0) {
    w.SetP(in.d, lanes);
    return;
  }
  const uint32_t with = in.flags != 0 ? (in.count & 2 ? ~w.P(in.c) : w.P(in.c)) : 0;
  const uint32_t first = in.flags != 0 ? Combine(lanes, with, in.flags) : lanes;
  const uint32_t second = in.flags != 0 ? Combine(~lanes, with, in.flags) : ~lanes;
  w.SetP(in.d, first);
  if (in.count & 1) w.SetP(in.list[0], second);
}

// For formats of 16 bits, whose numbers are widened first. d gets the low one's, list[0] the high
// one's of a pair.
template <bool kBf16>
OSCAR_INLINE float Widen(uint16_t x) {
  return kBf16 ? Bf16ToFloat(x) : HalfToFloat(x);
}
template <bool kBf16, int kTest>
void SetPredicateHalf(Warp& w, const Instruction& in) {
  if (in.count == 2) {
    const uint32_t *a = w.R<uint32_t>(in.a), *b = w.R<uint32_t>(in.b);
    for (const uint32_t shift : {0u, 16u}) {
      const uint32_t lanes = Where([&](uint32_t i) {
        return Holds<kTest>(Widen<kBf16>(static_cast<uint16_t>(a[i] >> shift)),
                            Widen<kBf16>(static_cast<uint16_t>(b[i] >> shift)));
      });
      w.SetP(shift == 0 ? in.d : in.list[0], lanes);
    }
    return;
  }
  const uint16_t *a = w.R<uint16_t>(in.a), *b = w.R<uint16_t>(in.b);
  w.SetP(in.d,
         Where([&](uint32_t i) { return Holds<kTest>(Widen<kBf16>(a[i]), Widen<kBf16>(b[i])); }));
}
// in.imm: what a half is where the test holds (1.0, or all bits).
template <bool kBf16, int kTest>
void SetHalfPair(Warp& w, const Instruction& in) {
  const uint32_t *a = w.R<uint32_t>(in.a), *b = w.R<uint32_t>(in.b);
  const auto yes = static_cast<uint32_t>(in.imm);
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) {
    const bool low = Holds<kTest>(Widen<kBf16>(static_cast<uint16_t>(a[i])),
                                  Widen<kBf16>(static_cast<uint16_t>(b[i])));
    const bool high = Holds<kTest>(Widen<kBf16>(static_cast<uint16_t>(a[i] >> 16)),
                                   Widen<kBf16>(static_cast<uint16_t>(b[i] >> 16)));
    return (low ? yes : 0u) | (high ? yes << 16 : 0u);
  });
}
// set.cmp.{u32,s32,f32}.T
template <typename T, int kTest>
void SetWord(Warp& w, const Instruction& in) {
  const T *a = w.R<T>(in.a), *b = w.R<T>(in.b);
  const auto yes = static_cast<uint32_t>(in.imm);
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) { return Holds<kTest, T>(a[i], b[i]) ? yes : 0u; });
}

template <typename T>
void Select(Warp& w, const Instruction& in) {
  const T *a = w.R<T>(in.a), *b = w.R<T>(in.b);
  const uint32_t p = w.P(in.c);
  Each(w, w.R<T>(in.d), [&](uint32_t i) { return ((p >> i) & 1) != 0 ? a[i] : b[i]; });
}

// A table of handlers over the tests.
#define OSCAR_TESTS(H, ...)                                                                     \
  {                                                                                             \
    H<__VA_ARGS__, kEq>, H<__VA_ARGS__, kNe>, H<__VA_ARGS__, kLt>, H<__VA_ARGS__, kLe>,         \
        H<__VA_ARGS__, kGt>, H<__VA_ARGS__, kGe>, H<__VA_ARGS__, kEqu>, H<__VA_ARGS__, kNeu>,   \
        H<__VA_ARGS__, kLtu>, H<__VA_ARGS__, kLeu>, H<__VA_ARGS__, kGtu>, H<__VA_ARGS__, kGeu>, \
        H<__VA_ARGS__, kNum>, H<__VA_ARGS__, kNan>                                              \
  }

template <typename T>
Handler PickPredicate(int test) {
  static constexpr Handler kHandlers[] = OSCAR_TESTS(SetPredicate, T);
  return kHandlers[test];
}
template <typename T>
Handler PickWord(int test) {
  static constexpr Handler kHandlers[] = OSCAR_TESTS(SetWord, T);
  return kHandlers[test];
}

int TestOf(std::string_view name, bool* is_unsigned) {
  static const std::map<std::string_view, int> kTests = {
      {"eq", kEq},   {"ne", kNe},   {"lt", kLt},   {"le", kLe},   {"gt", kGt},   {"ge", kGe},
      {"equ", kEqu}, {"neu", kNeu}, {"ltu", kLtu}, {"leu", kLeu}, {"gtu", kGtu}, {"geu", kGeu},
      {"num", kNum}, {"nan", kNan}, {"lo", kLt},   {"ls", kLe},   {"hi", kGt},   {"hs", kGe}};
  *is_unsigned = name == "lo" || name == "ls" || name == "hi" || name == "hs";
  const auto found = kTests.find(name);
  return found == kTests.end() ? -1 : found->second;
}

Handler WholeOrFloat(Type t, int test, bool word) {
#define OSCAR_ONE(T) (word ? PickWord<T>(test) : PickPredicate<T>(test))
  if (t.kind == 'f') return t.bits == 32 ? OSCAR_ONE(float) : OSCAR_ONE(double);
  if (t.kind == 's') {
    return t.bits == 16   ? OSCAR_ONE(int16_t)
           : t.bits == 32 ? OSCAR_ONE(int32_t)
                          : OSCAR_ONE(int64_t);
  }
  return t.bits == 16   ? OSCAR_ONE(uint16_t)
         : t.bits == 32 ? OSCAR_ONE(uint32_t)
                        : OSCAR_ONE(uint64_t);
#undef OSCAR_ONE
}

bool DecodeSelect(Decoder& d) {
  const Type t = d.LastType();
  const int bytes = t.bytes();
  Instruction* in = d.in;
  in->d = d.Place(0, bytes);
  in->a = d.Place(1, bytes);
  in->b = d.Place(2, bytes);
  in->c = d.Predicate(3);
  in->run = bytes == 2   ? Select<uint16_t>
            : bytes == 4 ? Select<uint32_t>
            : bytes == 8 ? Select<uint64_t>
                         : Handler(nullptr);
  return true;
}

}  // namespace

bool DecodeCompare(Decoder& d) {
  const std::string_view op = d.part(0);
  if (op == "selp") return DecodeSelect(d);
  if (op != "setp" && op != "set") return false;
  bool is_unsigned = false;
  const int test = TestOf(d.part(1), &is_unsigned);
  Type t = d.LastType();
  if (test < 0 || d.Has("ftz")) return d.Fail("a test the emulator does not know");
  if (is_unsigned && t.kind == 's') t.kind = 'u';
  Instruction* in = d.in;
  const int bytes = t.bytes();
  const bool half = t.bits == 16 && (t.kind == 'f' || t.kind == 'e');
  in->a = d.Place(1, bytes);
  in->b = d.Place(2, bytes);
  if (op == "set") {
    const Type result = d.FirstType();
    if (d.operands() != 3 || result.bytes() != 4)
      return d.Fail("a form of set that is not implemented");
    in->d = d.Place(0, 4);
    if (half && t.packed) {
      in->imm = result.kind == 'f' ? 0x3c00 : result.kind == 'e' ? 0x3f80 : 0xffff;
      static constexpr Handler kFp16[] = OSCAR_TESTS(SetHalfPair, false);
      static constexpr Handler kBf16[] = OSCAR_TESTS(SetHalfPair, true);
      in->run = t.kind == 'e' ? kBf16[test] : kFp16[test];
    } else if (!half) {
      in->imm = result.kind == 'f' ? 0x3f800000 : -1;
      in->run = WholeOrFloat(t, test, true);
    }
    return true;
  }
  const Operand& result = d.operand_at(0);
  in->d = d.PlaceOf(result, 0);
  if (half) {
    if (d.operands() != 3) return d.Fail("a form of setp that is not implemented");
    in->count = t.packed ? 2 : 1;
    if (t.packed) {
      Operand second;
      second.kind = Operand::Kind::kRegister;
      second.reg = result.second;
      in->list = d.List({d.PlaceOf(second, 0)});
    }
    static constexpr Handler kFp16[] = OSCAR_TESTS(SetPredicateHalf, false);
    static constexpr Handler kBf16[] = OSCAR_TESTS(SetPredicateHalf, true);
    in->run = t.kind == 'e' ? kBf16[test] : kFp16[test];
    return true;
  }
  if (result.second >= 0) {
    Operand second;
    second.kind = Operand::Kind::kRegister;
    second.reg = result.second;
    in->list = d.List({d.PlaceOf(second, 0)});
    in->count |= 1;
  }
  if (d.operands() == 4) {
    in->flags = d.part(2) == "and" ? kAnd : d.part(2) == "or" ? kOr : kXor;
    Operand with = d.operand_at(3);
    if (with.negated) in->count |= 2;
    with.negated = false;
    in->c = d.PlaceOf(with, 0);
  }
  in->run = WholeOrFloat(t, test, false);
  return true;
}

}  // namespace oscar::emulator
