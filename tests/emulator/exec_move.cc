// mov with its packings, and addresses between state spaces.
#include "emulator/decoder.h"
#include "emulator/lanes.h"

namespace oscar::emulator {

namespace {

template <typename T>
void Move(Warp& w, const Instruction& in) {
  const T* a = w.R<T>(in.a);
  Each(w, w.R<T>(in.d), [&](uint32_t i) { return a[i]; });
}
void MovePredicate(Warp& w, const Instruction& in) { w.SetP(in.d, w.P(in.a)); }

// Two halves from or into one register of twice their width.
template <typename T, typename Half>
void Join(Warp& w, const Instruction& in) {
  const Half *low = w.R<Half>(in.a), *high = w.R<Half>(in.b);
  Each(w, w.R<T>(in.d),
       [&](uint32_t i) { return static_cast<T>(T{high[i]} << (8 * sizeof(Half)) | low[i]); });
}
template <typename T, typename Half>
void Split(Warp& w, const Instruction& in) {
  alignas(64) T a[kLanes];
  std::memcpy(a, w.R<T>(in.a), sizeof(a));
  if (in.d != 0) Each(w, w.R<Half>(in.d), [&](uint32_t i) { return static_cast<Half>(a[i]); });
  if (in.b != 0) {
    Each(w, w.R<Half>(in.b),
         [&](uint32_t i) { return static_cast<Half>(a[i] >> (8 * sizeof(Half))); });
  }
}
// Four parts of 16 bits.
void Join4(Warp& w, const Instruction& in) {
  alignas(64) uint64_t out[kLanes] = {};
  for (uint32_t k = 0; k < 4; ++k) {
    const uint16_t* part = w.R<uint16_t>(in.list[k]);
    for (uint32_t i = 0; i < kLanes; ++i) out[i] |= uint64_t{part[i]} << (16 * k);
  }
  Each(w, w.R<uint64_t>(in.d), [&](uint32_t i) { return out[i]; });
}
void Split4(Warp& w, const Instruction& in) {
  const uint64_t* a = w.R<uint64_t>(in.a);
  for (uint32_t k = 0; k < 4; ++k) {
    if (in.list[k] == 0) continue;
    Each(w, w.R<uint16_t>(in.list[k]),
         [&](uint32_t i) { return static_cast<uint16_t>(a[i] >> (16 * k)); });
  }
}

void AddWindow(Warp& w, const Instruction& in) {
  const auto window = static_cast<uint64_t>(in.imm);
  uint64_t* out = w.R<uint64_t>(in.d);
  if (in.count == 4) {
    const uint32_t* a = w.R<uint32_t>(in.a);
    Each(w, out, [&](uint32_t i) { return a[i] + window; });
  } else {
    const uint64_t* a = w.R<uint64_t>(in.a);
    Each(w, out, [&](uint32_t i) { return a[i] + window; });
  }
}
template <typename Out>
void TakeWindow(Warp& w, const Instruction& in) {
  const auto window = static_cast<uint64_t>(in.imm);
  const uint64_t* a = w.R<uint64_t>(in.a);
  Each(w, w.R<Out>(in.d), [&](uint32_t i) { return static_cast<Out>(a[i] - window); });
}
// 1: shared, 2: local, 3: global.
void IsIn(Warp& w, const Instruction& in) {
  const uint64_t* a = w.R<uint64_t>(in.a);
  w.SetP(in.d, Where([&](uint32_t i) {
           const bool shared = a[i] - kSharedWindow < kWindowBytes;
           const bool local = a[i] - kLocalWindow < kWindowBytes;
           return in.count == 1 ? shared : in.count == 2 ? local : !shared && !local;
         }));
}

// Where what lies at a shared address lies in another block of the cluster.
void MapAddress(Warp& w, const Instruction& in) {
  const uint32_t *a = w.R<uint32_t>(in.a), *rank = w.R<uint32_t>(in.b);
  Each(w, w.R<uint32_t>(in.d),
       [&](uint32_t i) { return (a[i] & ((1u << kRankShift) - 1)) | (rank[i] + 1) << kRankShift; });
}

uint64_t WindowOf(Decoder& d) {
  if (d.Has("shared") || d.Has("shared::cta") || d.Has("shared::cluster")) return kSharedWindow;
  return d.Has("local") ? kLocalWindow : 0;
}

bool DecodeVectorMove(Decoder& d, Type t) {
  Instruction* in = d.in;
  const bool split = d.operand_at(0).kind == Operand::Kind::kVector;
  const auto& items = d.operand_at(split ? 0 : 1).items;
  const int bytes = t.bytes();
  const auto place = [&](const Operand& o, int width) {
    return split && o.kind == Operand::Kind::kSink ? 0u : d.PlaceOf(o, width);
  };
  if (split) {
    in->a = d.Place(1, bytes);
  } else {
    in->d = d.Place(0, bytes);
  }
  if (items.size() == 4 && bytes == 8) {
    in->list =
        d.List({place(items[0], 2), place(items[1], 2), place(items[2], 2), place(items[3], 2)});
    in->run = split ? Split4 : Join4;
    return true;
  }
  if (items.size() != 2 || (bytes != 4 && bytes != 8))
    return d.Fail("a form of mov that is not implemented");
  const uint32_t low = place(items[0], bytes / 2), high = place(items[1], bytes / 2);
  (split ? in->d : in->a) = low;
  in->b = high;
  in->run = split ? (bytes == 4 ? Split<uint32_t, uint16_t> : Split<uint64_t, uint32_t>)
                  : (bytes == 4 ? Join<uint32_t, uint16_t> : Join<uint64_t, uint32_t>);
  return true;
}

}  // namespace

bool DecodeMove(Decoder& d) {
  const std::string_view op = d.part(0);
  Instruction* in = d.in;
  const Type t = d.LastType();
  if (op == "mov") {
    if (d.operand_at(0).kind == Operand::Kind::kVector ||
        d.operand_at(1).kind == Operand::Kind::kVector) {
      return DecodeVectorMove(d, t);
    }
    const int bytes = t.kind == 'p' ? 0 : t.bytes();
    in->d = d.Place(0, bytes);
    in->a = d.Place(1, bytes);
    in->run = bytes == 0   ? MovePredicate
              : bytes == 2 ? Move<uint16_t>
              : bytes == 4 ? Move<uint32_t>
              : bytes == 8 ? Move<uint64_t>
                           : Handler(nullptr);
    return true;
  }
  if (op == "cvta") {
    const bool to = d.part(1) == "to";
    in->imm = static_cast<int64_t>(WindowOf(d));
    if (to) {
      const int out = d.BytesOf(d.operand_at(0), 8);
      in->d = d.Place(0, out);
      in->a = d.Place(1, 8);
      in->run = out == 4 ? TakeWindow<uint32_t> : TakeWindow<uint64_t>;
    } else {
      in->count = static_cast<uint8_t>(d.BytesOf(d.operand_at(1), 8));
      in->d = d.Place(0, 8);
      in->a = d.Place(1, in->count);
      in->run = AddWindow;
    }
    return true;
  }
  if (op == "mapa" && d.Has("u32")) {
    in->d = d.Place(0, 4);
    in->a = d.Place(1, 4);
    in->b = d.Place(2, 4);
    in->run = MapAddress;
    return true;
  }
  if (op == "isspacep") {
    in->d = d.Predicate(0);
    in->a = d.Place(1, 8);
    in->count = d.Has("global") ? 3 : d.Has("local") ? 2 : 1;
    in->run = IsIn;
    return true;
  }
  return false;
}

}  // namespace oscar::emulator
