// mbarriers and asynchronous copies. Copies are made at once, which shows what is missing in front
// of them, or (bulk copies, Launch::late_copies) as late as can be, which shows what is missing
// behind.
#include <fmt/core.h>

#include "emulator/access.h"
#include "emulator/decoder.h"
#include "emulator/lanes.h"
#include "emulator/tensor_map.h"

namespace oscar::emulator {

namespace {

// An mbarrier's 64 bits: the phase, arrivals still expected, arrivals of every phase, and bytes
// that copies have yet to bring, which may arrive before they are announced.
struct Mbarrier {
  explicit Mbarrier(const std::byte* at) { std::memcpy(&bits, at, 8); }
  uint64_t bits;
  uint32_t phase() const { return bits & 1; }
  uint32_t pending() const { return (bits >> 1) & 0xfffff; }
  uint32_t expected() const { return (bits >> 21) & 0xfffff; }
  // Fresh shared memory has all bits set.
  bool initialised() const { return expected() != 0 && expected() != 0xfffff; }
  int32_t bytes() const {
    return static_cast<int32_t>(static_cast<uint32_t>(bits >> 41) << 10) >> 10;
  }
  static uint64_t Make(uint32_t phase, uint32_t pending, uint32_t expected, int32_t bytes) {
    return phase | uint64_t{pending} << 1 | uint64_t{expected} << 21 |
           uint64_t{static_cast<uint32_t>(bytes) & 0x3fffff} << 41;
  }
};

// Counts arrivals and bytes; the phase ends when nothing is missing.
void Update(Warp& w, const Instruction& in, std::byte* at, uint32_t arrivals, int32_t bytes) {
  const Mbarrier old(at);
  if (!old.initialised()) {
    w.Fault(in, "an mbarrier that was not initialised");
    return;
  }
  if (arrivals > old.pending()) {
    w.Fault(in, fmt::format("{} arrivals at an mbarrier that expects {} more of {}", arrivals,
                            old.pending(), old.expected()));
    return;
  }
  uint32_t phase = old.phase(), pending = old.pending() - arrivals;
  const int32_t missing = old.bytes() + bytes;
  if (pending == 0 && missing == 0) {
    phase ^= 1;
    pending = old.expected();
    w.block->Event();
  }
  const uint64_t bits = Mbarrier::Make(phase, pending, old.expected(), missing);
  std::memcpy(at, &bits, 8);
}

// flags 2: in any block of the cluster.
std::byte* BarrierAt(Warp& w, const Instruction& in, uint64_t address, uint32_t lane,
                     bool cluster = false) {
  return cluster ? Access<Space::kCluster>(w, in, address, 8, lane, 8)
                 : Access<Space::kShared>(w, in, address, 8, lane, 8);
}
// A shared address in a register of 4 or 8 bytes; generic ones are translated.
uint64_t SharedOf(const Warp& w, uint32_t place, bool wide, int64_t offset, uint32_t lane) {
  if (!wide) return w.R<uint32_t>(place)[lane] + static_cast<uint32_t>(offset);
  const uint64_t address = w.R<uint64_t>(place)[lane] + static_cast<uint64_t>(offset);
  return address - kSharedWindow < kWindowBytes ? address - kSharedWindow : address;
}

// in.a: the barrier's address, flags 1: of 8 bytes.
uint64_t BarrierAddress(const Warp& w, const Instruction& in, uint32_t lane) {
  return SharedOf(w, in.a, (in.flags & 1) != 0, in.imm, lane);
}

void Init(Warp& w, const Instruction& in) {
  ForActive(w, [&](uint32_t i) {
    std::byte* at = BarrierAt(w, in, BarrierAddress(w, in, i), i);
    if (at == nullptr) return;
    const uint32_t count = w.R<uint32_t>(in.b)[i];
    if (count == 0 || count >= 0xfffff) {
      w.Fault(in, fmt::format("an mbarrier of {} arrivals", count));
      return;
    }
    const uint64_t bits = Mbarrier::Make(0, count, count, 0);
    std::memcpy(at, &bits, 8);
  });
}
void Invalidate(Warp& w, const Instruction& in) {
  ForActive(w, [&](uint32_t i) {
    if (std::byte* at = BarrierAt(w, in, BarrierAddress(w, in, i), i)) std::memset(at, 0xff, 8);
  });
}
// in.d: the state before, or 0. in.b: a count, or 0 for one. in.c: bytes to expect, or 0.
void Arrive(Warp& w, const Instruction& in) {
  ForActive(w, [&](uint32_t i) {
    std::byte* at = BarrierAt(w, in, BarrierAddress(w, in, i), i, (in.flags & 2) != 0);
    if (at == nullptr) return;
    if (in.d != 0) std::memcpy(&w.R<uint64_t>(in.d)[i], at, 8);
    const uint32_t arrivals = in.count == 0 ? 0 : in.b == 0 ? 1 : w.R<uint32_t>(in.b)[i];
    const int32_t bytes = in.c == 0 ? 0 : static_cast<int32_t>(w.R<uint32_t>(in.c)[i]);
    Update(w, in, at, arrivals, bytes);
  });
}
// in.b: the parity (count 1) or a state.
void Wait(Warp& w, const Instruction& in) {
  uint32_t over = 0;
  ForActive(w, [&](uint32_t i) {
    const std::byte* at = BarrierAt(w, in, BarrierAddress(w, in, i), i);
    if (at == nullptr) return;
    const Mbarrier barrier(at);
    if (!barrier.initialised()) {
      w.Fault(in, "an mbarrier that was not initialised");
      return;
    }
    const uint32_t parity = in.count == 1 ? w.R<uint32_t>(in.b)[i] & 1
                                          : static_cast<uint32_t>(w.R<uint64_t>(in.b)[i] & 1);
    over |= static_cast<uint32_t>(barrier.phase() != parity) << i;
  });
  w.SetP(in.d, over);
  if ((over & w.active) != w.active) w.Yield();
}

// Operands of copies, in in.list: places, offsets and widths of addresses.
enum CopyField {
  kTo,
  kToOffset,
  kToWide,
  kFrom,
  kFromOffset,
  kSize,
  kLimit,
  kBar,
  kBarOffset,
  kBarWide
};

std::byte* GlobalAt(Warp& w, const Instruction& in, uint64_t address, uint32_t bytes, uint32_t lane,
                    uint32_t align) {
  return Access<Space::kGlobal>(w, in, address, bytes, lane, align);
}

// cp.async: in.imm bytes, of which the rest beyond kLimit's are zeros.
void CopySmall(Warp& w, const Instruction& in) {
  const auto bytes = static_cast<uint32_t>(in.imm);
  ForActive(w, [&](uint32_t i) {
    const uint64_t to = SharedOf(w, in.list[kTo], in.list[kToWide] != 0,
                                 static_cast<int32_t>(in.list[kToOffset]), i);
    const uint64_t from = w.R<uint64_t>(in.list[kFrom])[i] +
                          static_cast<uint64_t>(static_cast<int32_t>(in.list[kFromOffset]));
    std::byte* shared = Access<Space::kShared>(w, in, to, bytes, i, bytes);
    if (shared == nullptr) return;
    uint32_t taken = bytes;
    if (in.list[kLimit] != 0) taken = std::min(bytes, w.R<uint32_t>(in.list[kLimit])[i]);
    if (taken > 0) {
      const std::byte* global = GlobalAt(w, in, from, taken, i, bytes);
      if (global == nullptr) return;
      std::memcpy(shared, global, taken);
    }
    std::memset(shared + taken, 0, bytes - taken);
  });
}

// cp.async.bulk; flags 1: from shared to global memory.
void CopyBulk(Warp& w, const Instruction& in) {
  const bool out = in.flags == 1;
  ForActive(w, [&](uint32_t i) {
    const uint32_t bytes = w.R<uint32_t>(in.list[kSize])[i];
    const uint32_t shared_place = in.list[out ? kFrom : kTo];
    const auto shared_offset = static_cast<int32_t>(in.list[out ? kFromOffset : kToOffset]);
    const uint64_t shared_address =
        SharedOf(w, shared_place, in.list[kToWide] != 0, shared_offset, i);
    const uint64_t global_address =
        w.R<uint64_t>(in.list[out ? kTo : kFrom])[i] +
        static_cast<uint64_t>(static_cast<int32_t>(in.list[out ? kToOffset : kFromOffset]));
    if (bytes % 16 != 0) {
      w.Fault(in, fmt::format("a bulk copy of {} bytes, not a multiple of 16", bytes));
      return;
    }
    if (bytes == 0 && out) return;
    std::byte* shared = Access<Space::kShared>(w, in, shared_address, bytes, i, 16);
    if (shared == nullptr) return;
    std::byte* global = GlobalAt(w, in, global_address, bytes, i, 16);
    if (global == nullptr) return;
    if (out) {
      std::memcpy(global, shared, bytes);
      return;
    }
    const uint64_t bar = SharedOf(w, in.list[kBar], in.list[kBarWide] != 0,
                                  static_cast<int32_t>(in.list[kBarOffset]), i);
    if (std::byte* at = BarrierAt(w, in, bar, i)) {
      w.block->Begin({shared, global, bytes, at, &w, &in});
    }
  });
}

// cp.async.bulk.tensor from global memory: boxes of two dimensions. kSize: the first coordinate,
// kLimit: the second; kFrom: the map; flags 1: kMask's blocks of the cluster get it.
constexpr int kMask = kBarWide + 1, kTensorFields = kMask + 1;

const TensorMap* MapAt(Warp& w, const Instruction& in, uint64_t address, uint32_t lane) {
  const std::byte* at = address < w.block->parameter_bytes()
                            ? Access<Space::kParameter>(w, in, address, sizeof(TensorMap), lane, 64)
                            : Access<Space::kGlobal>(w, in, address, sizeof(TensorMap), lane, 64);
  if (at == nullptr) return nullptr;
  const auto* map = reinterpret_cast<const TensorMap*>(at);
  if (map->magic == TensorMap::kMagic) return map;
  w.Fault(in, "a tensor map that cuTensorMapEncodeTiled did not make");
  return nullptr;
}

void CopyTensor(Warp& w, const Instruction& in) {
  ForActive(w, [&](uint32_t i) {
    const uint64_t map_at = w.R<uint64_t>(in.list[kFrom])[i] +
                            static_cast<uint64_t>(static_cast<int32_t>(in.list[kFromOffset]));
    const TensorMap* map = MapAt(w, in, map_at, i);
    if (map == nullptr) return;
    const uint64_t to = SharedOf(w, in.list[kTo], in.list[kToWide] != 0,
                                 static_cast<int32_t>(in.list[kToOffset]), i);
    const uint64_t bar = SharedOf(w, in.list[kBar], in.list[kBarWide] != 0,
                                  static_cast<int32_t>(in.list[kBarOffset]), i);
    const int64_t column = w.R<int32_t>(in.list[kSize])[i], row = w.R<int32_t>(in.list[kLimit])[i];
    const uint32_t bytes = map->box[0] * map->box[1] * map->element_bytes;
    const auto width = static_cast<uint32_t>(map->size[0] * map->element_bytes);
    const uint64_t last_row = map->base + (map->size[1] - 1) * map->pitch;
    if (GlobalAt(w, in, map->base, width, i, 16) == nullptr ||
        GlobalAt(w, in, last_row, width, i, 16) == nullptr) {
      return;
    }
    const bool many = in.flags == 1;
    const uint32_t blocks = many ? w.R<uint16_t>(in.list[kMask])[i] : 1;
    for (uint32_t rank = 0; blocks >> rank != 0; ++rank) {
      if ((blocks >> rank & 1) == 0) continue;
      const uint64_t block = many ? uint64_t{rank + 1} << kRankShift : 0;
      std::byte* shared = Access<Space::kCluster>(w, in, block | to, bytes, i, 128);
      std::byte* barrier = BarrierAt(w, in, block | bar, i, true);
      if (shared == nullptr || barrier == nullptr) return;
      PendingCopy copy{shared, nullptr, bytes, barrier, &w, &in};
      copy.move = [map = *map, shared, to, column, row] {
        const uint32_t pitch = map.box[0] * map.element_bytes;
        for (uint32_t r = 0; r < map.box[1]; ++r) {
          for (uint32_t c = 0; c < map.box[0]; ++c) {
            const uint64_t byte = uint64_t{r} * pitch + uint64_t{c} * map.element_bytes;
            const uint64_t at =
                map.swizzled ? (to + byte) ^ (((to + byte) >> 7 & 7) << 4) : to + byte;
            const int64_t x = column + c, y = row + r;
            const bool inside = x >= 0 && y >= 0 && static_cast<uint64_t>(x) < map.size[0] &&
                                static_cast<uint64_t>(y) < map.size[1];
            std::byte* d = shared + (at - to);
            if (!inside) {
              std::memset(d, 0, map.element_bytes);
              continue;
            }
            std::memcpy(d,
                        reinterpret_cast<const std::byte*>(map.base) +
                            static_cast<uint64_t>(y) * map.pitch +
                            static_cast<uint64_t>(x) * map.element_bytes,
                        map.element_bytes);
          }
        }
      };
      w.block->Begin(copy);
    }
  });
}

void Nothing(Warp&, const Instruction&) {}

uint32_t AddressPlace(Decoder& d, size_t operand, uint32_t* offset, uint32_t* wide) {
  uint32_t place = 0;
  *wide = d.Address(operand, &place) == 8 ? 1 : 0;
  *offset = static_cast<uint32_t>(static_cast<int32_t>(d.in->imm));
  return place;
}

bool DecodeTensorCopy(Decoder& d) {
  Instruction* in = d.in;
  const Operand& map = d.operand_at(1);
  if (!d.Has("2d") || d.part(5) != "shared::cluster" || d.part(6) != "global" ||
      map.items.size() != 1 || map.items[0].items.size() != 2) {
    return d.Fail("not implemented by the emulator");
  }
  uint32_t f[kTensorFields] = {};
  uint32_t from_wide = 0;
  f[kTo] = AddressPlace(d, 0, &f[kToOffset], &f[kToWide]);
  f[kFrom] = AddressPlace(d, 1, &f[kFromOffset], &from_wide);
  if (from_wide == 0) return d.Fail("a 32-bit address of a tensor map");
  f[kSize] = d.PlaceOf(map.items[0].items[0], 4);
  f[kLimit] = d.PlaceOf(map.items[0].items[1], 4);
  f[kBar] = AddressPlace(d, 2, &f[kBarOffset], &f[kBarWide]);
  if (d.Has("multicast::cluster")) {
    in->flags = 1;
    f[kMask] = d.Place(3, 2);
  }
  in->list = d.List({f, f + kTensorFields});
  in->run = CopyTensor;
  return true;
}

bool DecodeCopy(Decoder& d) {
  Instruction* in = d.in;
  const bool bulk = d.part(2) == "bulk";
  if (d.Has("commit_group") || d.Has("wait_group") || d.Has("wait_all") || d.Has("prefetch")) {
    in->run = Nothing;
    return true;
  }
  if (d.Has("tensor")) return DecodeTensorCopy(d);
  if (d.Has("multicast::cluster") || d.Has("reduce")) {
    return d.Fail("not implemented by the emulator");
  }
  if (d.part(2) == "mbarrier") {  // cp.async.mbarrier.arrive
    if (!d.Has("noinc")) return d.Fail("only .noinc is implemented by the emulator");
    in->flags = d.Address(0, &in->a) == 8 ? 1 : 0;
    in->count = 1;
    in->run = Arrive;
    return true;
  }
  uint32_t f[10] = {};
  uint32_t from_wide = 0;
  f[kTo] = AddressPlace(d, 0, &f[kToOffset], &f[kToWide]);
  f[kFrom] = AddressPlace(d, 1, &f[kFromOffset], &from_wide);
  if (!bulk) {
    uint64_t bytes = 0;
    if (!d.Immediate(2, &bytes)) return d.Fail("a size that is no number");
    size_t extra = d.operands() - 3;
    if (d.Has("L2::cache_hint")) --extra;
    if (extra > 0) f[kLimit] = d.Place(3, 4);
    in->list = d.List({f, f + 10});
    in->imm = static_cast<int64_t>(bytes);
    in->run = CopySmall;
    return true;
  }
  f[kSize] = d.Place(2, 4);
  if (d.part(3).starts_with("global")) {
    in->flags = 1;
    f[kToWide] = from_wide;  // the shared address's
  } else {
    f[kBar] = AddressPlace(d, 3, &f[kBarOffset], &f[kBarWide]);
  }
  in->list = d.List({f, f + 10});
  in->run = CopyBulk;
  return true;
}

}  // namespace

void FinishCopy(const PendingCopy& copy) {
  if (copy.move != nullptr) {
    copy.move();
  } else {
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
  Update(*copy.warp, *copy.at, copy.barrier, 0, -static_cast<int32_t>(copy.bytes));
}

bool DecodeAsync(Decoder& d) {
  const std::string_view op = d.part(0);
  if (op == "cp") return DecodeCopy(d);
  if (op != "mbarrier") return false;
  Instruction* in = d.in;
  const std::string_view what = d.part(1);
  const bool has_result =
      what == "arrive" || what == "test_wait" || what == "try_wait" || what == "arrive_drop";
  const size_t address = has_result ? 1 : 0;
  in->flags = d.Address(address, &in->a) == 8 ? 1 : 0;
  const int64_t offset = in->imm;
  if (what == "init") {
    in->b = d.Place(1, 4);
    in->run = Init;
  } else if (what == "inval") {
    in->run = Invalidate;
  } else if (what == "arrive") {
    if (d.Has("shared::cluster")) in->flags |= 2;
    if (d.operand_at(0).kind != Operand::Kind::kSink) in->d = d.Place(0, 8);
    in->count = 1;
    if (d.Has("expect_tx")) {
      in->c = d.Place(2, 4);
    } else if (d.operands() > 2) {
      in->b = d.Place(2, 4);
    }
    in->run = Arrive;
  } else if (what == "expect_tx") {
    in->c = d.Place(1, 4);
    in->run = Arrive;
  } else if (what == "test_wait" || what == "try_wait") {
    const bool parity = d.Has("parity");
    in->d = d.Predicate(0);
    in->b = d.Place(2, parity ? 4 : 8);
    in->count = parity ? 1 : 0;
    in->run = Wait;
  }
  in->imm = offset;
  return true;
}

}  // namespace oscar::emulator
