// ld, st, atom, red.
#include <fmt/core.h>

#include <type_traits>

#include "emulator/access.h"
#include "emulator/decoder.h"
#include "emulator/lanes.h"

namespace oscar::emulator {

namespace {

// in.flags: the space; bit 4: the base has 8 bytes.
constexpr uint16_t kSpaceMask = 15, kLongBase = 16;

template <Space kSpace, typename Base>
bool ResolveIn(Warp& w, const Instruction& in, uint32_t bytes, std::byte** at) {
  alignas(64) uint64_t address[kLanes];
  const Base* base = w.R<Base>(in.a);
  const auto offset = static_cast<Base>(in.imm);
  for (uint32_t i = 0; i < kLanes; ++i) {
    address[i] = static_cast<uint64_t>(static_cast<Base>(base[i] + offset));
  }
  if constexpr (kSpace == Space::kGlobal || kSpace == Space::kShared) {
    // Whether every lane is fine, at once.
    uint64_t begin, size, to;
    if constexpr (kSpace == Space::kGlobal) {
      begin = w.last.begin;
      size = w.last.bytes;
      to = 0;
    } else {
      begin = kSharedBase;
      size = w.block->shared_bytes();
      to = reinterpret_cast<uint64_t>(w.block->Shared(kSharedBase, 0)) - kSharedBase;
    }
    if (size >= bytes) {
      const uint64_t room = size - bytes;
      const uint32_t active = w.active;
      uint64_t bad = 0;
      for (uint32_t i = 0; i < kLanes; ++i) {
        const uint64_t counts = uint64_t{0} - ((active >> i) & 1);
        const auto outside = static_cast<uint64_t>(address[i] - begin > room);
        bad |= (outside | (address[i] & (bytes - 1))) & counts;
      }
      if (bad == 0) {
        for (uint32_t i = 0; i < kLanes; ++i) at[i] = reinterpret_cast<std::byte*>(address[i] + to);
        return true;
      }
    }
  }
  for (uint32_t rest = w.active; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<uint32_t>(std::countr_zero(rest));
    at[i] = Access<kSpace>(w, in, address[i], bytes, i, bytes);
    if (at[i] == nullptr) return false;
  }
  return true;
}

// The memory of each active lane, aligned to all that it accesses.
bool Resolve(Warp& w, const Instruction& in, uint32_t bytes, std::byte** at) {
  const bool wide = (in.flags & kLongBase) != 0;
  switch (static_cast<Space>(in.flags & kSpaceMask)) {
    case Space::kGlobal:
      return ResolveIn<Space::kGlobal, uint64_t>(w, in, bytes, at);
    case Space::kShared:
      return wide ? ResolveIn<Space::kShared, uint64_t>(w, in, bytes, at)
                  : ResolveIn<Space::kShared, uint32_t>(w, in, bytes, at);
    case Space::kCluster:
      return wide ? ResolveIn<Space::kCluster, uint64_t>(w, in, bytes, at)
                  : ResolveIn<Space::kCluster, uint32_t>(w, in, bytes, at);
    case Space::kLocal:
      return wide ? ResolveIn<Space::kLocal, uint64_t>(w, in, bytes, at)
                  : ResolveIn<Space::kLocal, uint32_t>(w, in, bytes, at);
    case Space::kParameter:
      return wide ? ResolveIn<Space::kParameter, uint64_t>(w, in, bytes, at)
                  : ResolveIn<Space::kParameter, uint32_t>(w, in, bytes, at);
    default:
      return ResolveIn<Space::kGeneric, uint64_t>(w, in, bytes, at);
  }
}

template <typename T, typename Reg>
OSCAR_INLINE Reg Extend(T x) {
  if constexpr (std::is_signed_v<T>) {
    return static_cast<Reg>(static_cast<std::make_signed_t<Reg>>(x));
  } else {
    return static_cast<Reg>(x);
  }
}

template <typename T, typename Reg>
void Load(Warp& w, const Instruction& in) {
  std::byte* at[kLanes];
  const uint32_t count = in.count;
  if (!Resolve(w, in, static_cast<uint32_t>(sizeof(T)) * count, at)) return;
  for (uint32_t k = 0; k < count; ++k) {
    const uint32_t place = count == 1 ? in.d : in.list[k];
    if (place == 0) continue;
    Reg* d = w.R<Reg>(place);
    const auto one = [&](uint32_t i) {
      T x;
      std::memcpy(&x, at[i] + k * sizeof(T), sizeof(T));
      d[i] = Extend<T, Reg>(x);
    };
    if (w.active == kAllLanes) {
      for (uint32_t i = 0; i < kLanes; ++i) one(i);
    } else {
      ForActive(w, one);
    }
  }
}

template <typename T, typename Reg>
void Store(Warp& w, const Instruction& in) {
  std::byte* at[kLanes];
  const uint32_t count = in.count;
  if (!Resolve(w, in, static_cast<uint32_t>(sizeof(T)) * count, at)) return;
  for (uint32_t k = 0; k < count; ++k) {
    const Reg* s = w.R<Reg>(count == 1 ? in.d : in.list[k]);
    const auto one = [&](uint32_t i) {
      const T x = static_cast<T>(s[i]);
      std::memcpy(at[i] + k * sizeof(T), &x, sizeof(T));
    };
    if (w.active == kAllLanes) {
      for (uint32_t i = 0; i < kLanes; ++i) one(i);
    } else {
      ForActive(w, one);
    }
  }
}

// ---- atomics: any operation as compare and swap, which blocks on several threads need ----

enum class AtomOp : uint8_t { kAdd, kMin, kMax, kAnd, kOr, kXor, kExchange, kCas, kInc, kDec };

template <typename T>
T Apply(AtomOp op, T old, T b, T c) {
  switch (op) {
    case AtomOp::kAdd:
      if constexpr (std::is_integral_v<T>) {
        using U = std::make_unsigned_t<T>;
        return static_cast<T>(static_cast<U>(old) + static_cast<U>(b));
      } else {
        return Canonical(old + b);
      }
    case AtomOp::kMin:
      return b < old ? b : old;
    case AtomOp::kMax:
      return b > old ? b : old;
    case AtomOp::kExchange:
      return b;
    case AtomOp::kCas:
      return old == b ? c : old;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case AtomOp::kAnd:
        return old & b;
      case AtomOp::kOr:
        return old | b;
      case AtomOp::kXor:
        return old ^ b;
      case AtomOp::kInc:
        return old >= b ? T{0} : static_cast<T>(old + 1);
      case AtomOp::kDec:
        return old == 0 || old > b ? b : static_cast<T>(old - 1);
      default:
        break;
    }
  }
  return old;
}

// in.d: the old values' place, or 0. in.b, in.c: operands.
template <typename T>
void Atomic(Warp& w, const Instruction& in) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  std::byte* at[kLanes];
  if (!Resolve(w, in, sizeof(T), at)) return;
  const T* b = w.R<T>(in.b);
  const T* c = in.c != 0 ? w.R<T>(in.c) : b;
  const auto op = static_cast<AtomOp>(in.count);
  ForActive(w, [&](uint32_t i) {
    Bits* p = reinterpret_cast<Bits*>(at[i]);
    Bits old = __atomic_load_n(p, __ATOMIC_RELAXED);
    const T operand = b[i], other = c[i];
    while (!__atomic_compare_exchange_n(p, &old, As<Bits>(Apply<T>(op, As<T>(old), operand, other)),
                                        false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
    if (in.d != 0) w.R<Bits>(in.d)[i] = old;
  });
}

// Sums of in.count numbers at each address, without the old values. in.list: operands.
void AddVector(Warp& w, const Instruction& in) {
  std::byte* at[kLanes];
  if (!Resolve(w, in, 4u * in.count, at)) return;
  ForActive(w, [&](uint32_t i) {
    for (uint32_t k = 0; k < in.count; ++k) {
      uint32_t* p = reinterpret_cast<uint32_t*>(at[i]) + k;
      uint32_t old = __atomic_load_n(p, __ATOMIC_RELAXED);
      const float x = w.R<float>(in.list[k])[i];
      while (!__atomic_compare_exchange_n(p, &old, As<uint32_t>(Canonical(As<float>(old) + x)),
                                          false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
      }
    }
  });
}

// Pairs of 16-bit numbers; only sums.
template <bool kBf16>
void AtomicPair(Warp& w, const Instruction& in) {
  std::byte* at[kLanes];
  if (!Resolve(w, in, 4, at)) return;
  const uint32_t* b = w.R<uint32_t>(in.b);
  const auto one = [](uint32_t x, uint32_t y) -> uint32_t {
    const auto l = static_cast<uint16_t>(x), r = static_cast<uint16_t>(y);
    return kBf16 ? FloatToBf16(Bf16ToFloat(l) + Bf16ToFloat(r))
                 : FloatToHalf(HalfToFloat(l) + HalfToFloat(r));
  };
  ForActive(w, [&](uint32_t i) {
    uint32_t* p = reinterpret_cast<uint32_t*>(at[i]);
    uint32_t old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(p, &old, one(old, b[i]) | one(old >> 16, b[i] >> 16) << 16,
                                        false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
    if (in.d != 0) w.R<uint32_t>(in.d)[i] = old;
  });
}

// ---- decoding ----

Space SpaceOf(Decoder& d, size_t address) {
  for (const std::string_view part : d.statement().op) {
    if (part == "global" || part == "const") return Space::kGlobal;
    if (part == "shared::cluster") return Space::kCluster;
    if (part.starts_with("shared")) return Space::kShared;
    if (part == "local") return Space::kLocal;
    if (part.starts_with("param")) {
      // Arguments of functions that were inlined live in local memory.
      const Operand& o = d.operand_at(address);
      if (!o.symbol.empty() && d.body().places[o.symbol].space == Body::Place::Space::kLocal) {
        return Space::kLocal;
      }
      return Space::kParameter;
    }
  }
  return Space::kGeneric;
}

void SetAddress(Decoder& d, size_t operand) {
  const int bytes = d.Address(operand, &d.in->a);
  Space space = SpaceOf(d, operand);
  if (bytes == 4 && (space == Space::kGlobal || space == Space::kGeneric)) {
    d.Fail("a 32-bit address of global memory");
  }
  d.in->flags = static_cast<uint16_t>(static_cast<int>(space) | (bytes == 8 ? kLongBase : 0));
}

template <typename T>
Handler PickLoad(int reg) {
  if constexpr (sizeof(T) == 8) return reg == 8 ? Load<T, uint64_t> : nullptr;
  if constexpr (sizeof(T) <= 4) {
    if (reg == 8) return Load<T, uint64_t>;
    if (reg == 4) return Load<T, uint32_t>;
    if constexpr (sizeof(T) <= 2) {
      if (reg == 2) return Load<T, uint16_t>;
    }
  }
  return nullptr;
}
template <typename T>
Handler PickStore(int reg) {
  if constexpr (sizeof(T) == 8) return reg == 8 ? Store<T, uint64_t> : nullptr;
  if constexpr (sizeof(T) <= 4) {
    if (reg == 8) return Store<T, uint64_t>;
    if (reg == 4) return Store<T, uint32_t>;
    if constexpr (sizeof(T) <= 2) {
      if (reg == 2) return Store<T, uint16_t>;
    }
  }
  return nullptr;
}

bool DecodeLoadStore(Decoder& d, bool load) {
  Instruction* in = d.in;
  const Type t = d.LastType();
  SetAddress(d, load ? 1 : 0);
  const Operand& value = d.operand_at(load ? 0 : 1);
  int reg = std::max(2, t.bytes());
  in->count = 1;
  if (value.kind == Operand::Kind::kVector) {
    in->count = static_cast<uint8_t>(value.items.size());
    for (const Operand& item : value.items) reg = std::max(reg, d.BytesOf(item, 0));
    std::vector<uint32_t> places;
    for (const Operand& item : value.items) {
      places.push_back(item.kind == Operand::Kind::kSink ? 0 : d.PlaceOf(item, reg));
    }
    in->list = d.List(places);
    if (in->count == 1) in->d = places[0];
  } else {
    reg = d.BytesOf(value, reg);
    in->d = value.kind == Operand::Kind::kSink ? 0 : d.PlaceOf(value, reg);
  }
  const bool is_signed = t.kind == 's';
  if (load) {
    switch (t.bytes()) {
      case 1:
        in->run = is_signed ? PickLoad<int8_t>(reg) : PickLoad<uint8_t>(reg);
        break;
      case 2:
        in->run = is_signed ? PickLoad<int16_t>(reg) : PickLoad<uint16_t>(reg);
        break;
      case 4:
        in->run = is_signed ? PickLoad<int32_t>(reg) : PickLoad<uint32_t>(reg);
        break;
      case 8:
        in->run = PickLoad<uint64_t>(reg);
        break;
      default:
        break;
    }
  } else {
    switch (t.bytes()) {
      case 1:
        in->run = PickStore<uint8_t>(reg);
        break;
      case 2:
        in->run = PickStore<uint16_t>(reg);
        break;
      case 4:
        in->run = PickStore<uint32_t>(reg);
        break;
      case 8:
        in->run = PickStore<uint64_t>(reg);
        break;
      default:
        break;
    }
  }
  return true;
}

bool DecodeAtomic(Decoder& d, bool result) {
  Instruction* in = d.in;
  const Type t = d.LastType();
  const size_t first = result ? 1 : 0;
  SetAddress(d, first);
  const int bytes = t.bytes();
  const Operand& operand = d.operand_at(first + 1);
  if (operand.kind == Operand::Kind::kVector && !result && d.Has("add") && t.is('f', 32)) {
    std::vector<uint32_t> places;
    for (const Operand& item : operand.items) places.push_back(d.PlaceOf(item, bytes));
    in->count = static_cast<uint8_t>(places.size());
    in->list = d.List(places);
    in->run = AddVector;
    return true;
  }
  if (result && d.operand_at(0).kind != Operand::Kind::kSink) in->d = d.Place(0, bytes);
  in->b = d.Place(first + 1, bytes);
  static const std::map<std::string_view, AtomOp> kOps = {
      {"add", AtomOp::kAdd},       {"min", AtomOp::kMin}, {"max", AtomOp::kMax},
      {"and", AtomOp::kAnd},       {"or", AtomOp::kOr},   {"xor", AtomOp::kXor},
      {"exch", AtomOp::kExchange}, {"cas", AtomOp::kCas}, {"inc", AtomOp::kInc},
      {"dec", AtomOp::kDec}};
  const AtomOp* op = nullptr;
  for (const std::string_view part : d.statement().op) {
    if (const auto found = kOps.find(part); found != kOps.end()) op = &found->second;
  }
  if (op == nullptr || d.Has("v2") || d.Has("v4")) return d.Fail("not implemented by the emulator");
  in->count = static_cast<uint8_t>(*op);
  if (*op == AtomOp::kCas) in->c = d.Place(first + 2, bytes);
  if (t.packed) {
    if (*op == AtomOp::kAdd) in->run = t.kind == 'e' ? AtomicPair<true> : AtomicPair<false>;
    return true;
  }
  if (t.kind == 'f') {
    in->run = bytes == 4 ? Atomic<float> : bytes == 8 ? Atomic<double> : Handler(nullptr);
  } else if (t.kind == 's') {
    in->run = bytes == 4 ? Atomic<int32_t> : bytes == 8 ? Atomic<int64_t> : Handler(nullptr);
  } else {
    in->run = bytes == 4 ? Atomic<uint32_t> : bytes == 8 ? Atomic<uint64_t> : Handler(nullptr);
  }
  return true;
}

}  // namespace

bool DecodeMemory(Decoder& d) {
  const std::string_view op = d.part(0);
  if (op == "ld" || op == "ldu") return DecodeLoadStore(d, true);
  if (op == "st") return DecodeLoadStore(d, false);
  if (op == "atom") return DecodeAtomic(d, true);
  if (op == "red" && d.part(1) != "async") return DecodeAtomic(d, false);
  return false;
}

}  // namespace oscar::emulator
