// cvt: between integers and floating-point formats.
#include <cmath>
#include <limits>
#include <type_traits>

#include "emulator/decoder.h"
#include "emulator/lanes.h"

namespace oscar::emulator {

namespace {

// Roundings to integers: in.flags. Bits 4 and 5: .sat, .ftz.
enum Rounding : uint16_t { kNone, kNearest, kZero, kDown, kUp };
constexpr uint16_t kRounding = 15, kSat = 16, kFtz = 32;

struct Fp16 {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};
template <typename T>
inline constexpr bool kFloating =
    std::is_floating_point_v<T> || std::is_same_v<T, Fp16> || std::is_same_v<T, Bfloat16>;

template <typename T>
OSCAR_INLINE auto Widen(T x) {
  if constexpr (std::is_same_v<T, Fp16>) {
    return HalfToFloat(x.bits);
  } else if constexpr (std::is_same_v<T, Bfloat16>) {
    return Bf16ToFloat(x.bits);
  } else {
    return x;
  }
}

template <typename F>
OSCAR_INLINE F RoundWhole(F x, uint16_t rounding) {
  switch (rounding) {
    case kNearest:
      return std::nearbyint(x);
    case kZero:
      return std::trunc(x);
    case kDown:
      return std::floor(x);
    case kUp:
      return std::ceil(x);
    default:
      return x;
  }
}

template <typename D, typename F>
OSCAR_INLINE D ToWhole(F x) {
  constexpr F kTop =
      sizeof(D) == 8 ? (std::is_signed_v<D> ? F(9223372036854775808.0) : F(18446744073709551616.0))
      : sizeof(D) == 4 ? (std::is_signed_v<D> ? F(2147483648.0) : F(4294967296.0))
                       : static_cast<F>(std::numeric_limits<D>::max()) + F(1);
  constexpr F kBottom = static_cast<F>(std::numeric_limits<D>::lowest());
  if (x != x) return D{0};
  if (x >= kTop) return std::numeric_limits<D>::max();
  if (x <= kBottom) return std::numeric_limits<D>::lowest();
  return static_cast<D>(x);
}

template <typename D, typename S>
OSCAR_INLINE D Convert(S source, uint16_t rounding, bool sat) {
  const auto x = Widen(source);
  if constexpr (!kFloating<D>) {
    if constexpr (kFloating<S>) {
      return ToWhole<D>(RoundWhole(x, rounding));
    } else {
      if (!sat) return static_cast<D>(x);
      if (std::cmp_less(x, std::numeric_limits<D>::lowest()))
        return std::numeric_limits<D>::lowest();
      if (std::cmp_greater(x, std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
      return static_cast<D>(x);
    }
  } else if constexpr (std::is_same_v<D, Fp16> || std::is_same_v<D, Bfloat16>) {
    // fp64 and integers of 32 bits and more would be rounded twice: decoding refuses them.
    auto f = static_cast<float>(x);
    if (sat) f = Saturate(f);
    return {std::is_same_v<D, Fp16> ? FloatToHalf(f) : FloatToBf16(f)};
  } else {
    if constexpr (std::is_same_v<S, D>) {
      const D y = Canonical(RoundWhole(x, rounding));
      return sat ? (y >= 0 ? (y > 1 ? D{1} : y) : D{0}) : y;
    }
    const auto y = Canonical(static_cast<D>(x));
    return sat ? (y >= 0 ? (y > 1 ? D{1} : y) : D{0}) : y;
  }
}

// The registers may be wider than the types: sources use their low bits, results are extended.
template <typename D, typename S, typename DReg, typename SReg, int kRound>
void Run(Warp& w, const Instruction& in) {
  const SReg* a = w.R<SReg>(in.a);
  const bool sat = (in.flags & kSat) != 0;
  Each(w, w.R<DReg>(in.d), [&](uint32_t i) {
    S source;
    if constexpr (std::is_same_v<S, Fp16> || std::is_same_v<S, Bfloat16>) {
      source = {static_cast<uint16_t>(a[i])};
    } else if constexpr (std::is_floating_point_v<S>) {
      source = As<S>(a[i]);
    } else {
      source = static_cast<S>(a[i]);
    }
    const D result = Convert<D, S>(source, kRound, sat);
    if constexpr (std::is_same_v<D, Fp16> || std::is_same_v<D, Bfloat16>) {
      return static_cast<DReg>(result.bits);
    } else if constexpr (std::is_floating_point_v<D>) {
      return As<DReg>(result);
    } else if constexpr (std::is_signed_v<D>) {
      return static_cast<DReg>(static_cast<std::make_signed_t<DReg>>(result));
    } else {
      return static_cast<DReg>(result);
    }
  });
}

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 8, uint64_t,
                                std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;

template <typename D, typename S, typename DReg, typename SReg>
Handler PickRounding(uint16_t rounding) {
  if constexpr (kFloating<S> && (!kFloating<D> || std::is_same_v<S, D>)) {
    switch (rounding) {
      case kNearest:
        return Run<D, S, DReg, SReg, kNearest>;
      case kZero:
        return Run<D, S, DReg, SReg, kZero>;
      case kDown:
        return Run<D, S, DReg, SReg, kDown>;
      case kUp:
        return Run<D, S, DReg, SReg, kUp>;
      default:
        break;
    }
  }
  return Run<D, S, DReg, SReg, kNone>;
}
template <typename D, typename S, typename DReg>
Handler PickSource(int source_bytes, uint16_t rounding) {
  if constexpr (kFloating<S>) {
    return source_bytes == static_cast<int>(sizeof(S)) ? PickRounding<D, S, DReg, Bits<S>>(rounding)
                                                       : Handler(nullptr);
  } else {
    switch (source_bytes) {
      case 2:
        return PickRounding<D, S, DReg, uint16_t>(rounding);
      case 4:
        return PickRounding<D, S, DReg, uint32_t>(rounding);
      case 8:
        return PickRounding<D, S, DReg, uint64_t>(rounding);
      default:
        return nullptr;
    }
  }
}
template <typename D, typename S>
Handler PickResult(int result_bytes, int source_bytes, uint16_t rounding) {
  if constexpr (kFloating<D>) {
    return result_bytes == static_cast<int>(sizeof(D))
               ? PickSource<D, S, Bits<D>>(source_bytes, rounding)
               : Handler(nullptr);
  } else {
    switch (result_bytes) {
      case 2:
        return PickSource<D, S, uint16_t>(source_bytes, rounding);
      case 4:
        return PickSource<D, S, uint32_t>(source_bytes, rounding);
      case 8:
        return PickSource<D, S, uint64_t>(source_bytes, rounding);
      default:
        return nullptr;
    }
  }
}
template <typename D>
Handler PickSourceType(Type s, int result_bytes, int source_bytes, uint16_t rounding) {
#define OSCAR_FROM(T) PickResult<D, T>(result_bytes, source_bytes, rounding)
  if (s.kind == 'f') {
    return s.bits == 16 ? OSCAR_FROM(Fp16) : s.bits == 32 ? OSCAR_FROM(float) : OSCAR_FROM(double);
  }
  if (s.kind == 'e') return OSCAR_FROM(Bfloat16);
  if (s.kind == 's') {
    return s.bits == 8    ? OSCAR_FROM(int8_t)
           : s.bits == 16 ? OSCAR_FROM(int16_t)
           : s.bits == 32 ? OSCAR_FROM(int32_t)
                          : OSCAR_FROM(int64_t);
  }
  return s.bits == 8    ? OSCAR_FROM(uint8_t)
         : s.bits == 16 ? OSCAR_FROM(uint16_t)
         : s.bits == 32 ? OSCAR_FROM(uint32_t)
                        : OSCAR_FROM(uint64_t);
#undef OSCAR_FROM
}
Handler Pick(Type r, Type s, int result_bytes, int source_bytes, uint16_t rounding) {
#define OSCAR_TO(T) PickSourceType<T>(s, result_bytes, source_bytes, rounding)
  if (r.kind == 'f')
    return r.bits == 16 ? OSCAR_TO(Fp16) : r.bits == 32 ? OSCAR_TO(float) : OSCAR_TO(double);
  if (r.kind == 'e') return OSCAR_TO(Bfloat16);
  if (r.kind == 's') {
    return r.bits == 8    ? OSCAR_TO(int8_t)
           : r.bits == 16 ? OSCAR_TO(int16_t)
           : r.bits == 32 ? OSCAR_TO(int32_t)
                          : OSCAR_TO(int64_t);
  }
  return r.bits == 8    ? OSCAR_TO(uint8_t)
         : r.bits == 16 ? OSCAR_TO(uint16_t)
         : r.bits == 32 ? OSCAR_TO(uint32_t)
                        : OSCAR_TO(uint64_t);
#undef OSCAR_TO
}

// Two fp32 to a pair: the first operand becomes the high half. flags 1: negative numbers to zero.
template <bool kBf16>
void Pack(Warp& w, const Instruction& in) {
  const float *high = w.R<float>(in.a), *low = w.R<float>(in.b);
  const bool relu = in.flags == 1;
  const auto one = [relu](float x) {
    if (relu && x < 0.0f) x = 0.0f;
    return kBf16 ? FloatToBf16(x) : FloatToHalf(x);
  };
  Each(w, w.R<uint32_t>(in.d),
       [&](uint32_t i) { return uint32_t{one(high[i])} << 16 | one(low[i]); });
}

// Through its magnitude, to nearest even, values beyond 448 to 448 (.satfinite).
uint8_t ToE4M3(float x) {
  const auto sign = static_cast<uint8_t>(As<uint32_t>(x) >> 31 << 7);
  if (x != x) return 0x7f;
  const float magnitude = std::fabs(x);
  if (magnitude >= 464.0f) return sign | 0x7e;
  const int exponent = std::max(-6, magnitude == 0.0f ? -6 : std::ilogb(magnitude));
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  // A mantissa that rounds up to the next power carries into the exponent by itself.
  const int code = exponent == -6 ? steps : ((exponent + 6) << 3) + steps;
  return sign | static_cast<uint8_t>(std::min(code, 0x7e));
}
float FromE4M3(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return As<float>(kNanBits);
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}
void PackE4M3(Warp& w, const Instruction& in) {
  const float *high = w.R<float>(in.a), *low = w.R<float>(in.b);
  Each(w, w.R<uint16_t>(in.d),
       [&](uint32_t i) { return static_cast<uint16_t>(ToE4M3(high[i]) << 8 | ToE4M3(low[i])); });
}
void UnpackE4M3(Warp& w, const Instruction& in) {
  const uint16_t* a = w.R<uint16_t>(in.a);
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) {
    return uint32_t{FloatToHalf(FromE4M3(static_cast<uint8_t>(a[i] >> 8)))} << 16 |
           FloatToHalf(FromE4M3(static_cast<uint8_t>(a[i])));
  });
}

bool DecodePacked(Decoder& d, Type r, Type s) {
  Instruction* in = d.in;
  if (s.is('f', 32) && d.operands() == 3 && d.Has("rn")) {
    in->a = d.Place(1, 4);
    in->b = d.Place(2, 4);
    in->d = d.Place(0, r.bytes());
    in->flags = d.Has("relu") ? 1 : 0;
    if (r.bits == 16 && (r.kind == 'f' || r.kind == 'e')) {
      in->run = r.kind == 'e' ? Pack<true> : Pack<false>;
    } else if (r.kind == '4') {
      in->run = PackE4M3;
    }
  } else if (s.kind == '4' && r.kind == 'f' && r.bits == 16) {
    in->a = d.Place(1, 2);
    in->d = d.Place(0, 4);
    in->run = UnpackE4M3;
  }
  return true;
}

}  // namespace

bool DecodeConvert(Decoder& d) {
  if (d.part(0) != "cvt") return false;
  const Type r = d.FirstType(), s = d.LastType();
  if (r.packed || s.packed) return DecodePacked(d, r, s);
  Instruction* in = d.in;
  uint16_t rounding = kNone;
  if (d.Has("rni")) rounding = kNearest;
  if (d.Has("rzi")) rounding = kZero;
  if (d.Has("rmi")) rounding = kDown;
  if (d.Has("rpi")) rounding = kUp;
  if (d.Has("rz") || d.Has("rm") || d.Has("rp") || d.Has("rna") || d.Has("ftz") || d.Has("relu") ||
      d.Has("satfinite")) {
    return d.Fail("not implemented by the emulator");
  }
  const bool to_half = r.bits == 16 && (r.kind == 'f' || r.kind == 'e');
  if (to_half && (s.bits == 64 || (s.whole() && s.bits > 16))) {
    return d.Fail("not implemented by the emulator");
  }
  const int result_bytes = d.BytesOf(d.operand_at(0), r.bytes());
  const int source_bytes = d.BytesOf(d.operand_at(1), std::max(2, s.bytes()));
  in->d = d.Place(0, result_bytes);
  in->a = d.Place(1, source_bytes);
  in->flags = static_cast<uint16_t>(rounding | (d.Has("sat") ? kSat : 0));
  in->run = Pick(r, s, result_bytes, source_bytes, rounding);
  return true;
}

}  // namespace oscar::emulator
