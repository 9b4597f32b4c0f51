// What lanes and warps do together: barriers, votes, shuffles.
#include <fmt/core.h>

#include <bit>

#include "emulator/decoder.h"
#include "emulator/lanes.h"

namespace oscar::emulator {

namespace {

uint32_t FirstOf(const Warp& w, uint32_t place) {
  return w.R<uint32_t>(place)[std::countr_zero(w.active)];
}

// ---- barriers among warps: in.a the barrier, in.b the threads or 0, flags 1: wait ----

void BarrierSync(Warp& w, const Instruction& in) {
  if (!w.Gather(kAllLanes)) return;
  const uint32_t id = FirstOf(w, in.a);
  const uint32_t threads = in.b == 0 ? 0 : FirstOf(w, in.b);
  if (id >= 16) {
    w.Fault(in, fmt::format("barrier {} of 16", id));
    return;
  }
  if (threads % kLanes != 0) {
    w.Fault(in, fmt::format("a barrier of {} threads, not a multiple of 32", threads));
    return;
  }
  if (in.c != 0) {  // bar.red
    Block::Barrier& b = w.block->barrier(static_cast<int>(id));
    const uint32_t votes = (in.flags & 2 ? ~w.P(in.c) : w.P(in.c)) & w.active;
    b.any |= votes;
    b.all = b.all && votes == w.active;
    b.count += static_cast<uint32_t>(std::popcount(votes));
    w.reduce = &in;
  }
  w.block->Arrive(w, in, static_cast<int>(id), threads, (in.flags & 1) != 0);
}

// ---- the barrier of a cluster's blocks ----

void ArriveAtCluster(Warp& w, const Instruction& in) {
  if (w.Gather(kAllLanes)) w.block->cluster().Arrive(w, in);
}
void WaitForCluster(Warp& w, const Instruction&) {
  if (w.Gather(kAllLanes)) w.block->cluster().Wait(w);
}

void WarpSync(Warp& w, const Instruction& in) { w.Gather(FirstOf(w, in.a)); }

// ---- votes: count 0 all, 1 any, 2 uniform, 3 ballot; flags 1: of the negation ----

void Vote(Warp& w, const Instruction& in) {
  const uint32_t members = FirstOf(w, in.b);
  if (!w.Gather(members)) return;
  const uint32_t voters = members & w.active;
  const uint32_t votes = (in.flags & 1 ? ~w.P(in.a) : w.P(in.a)) & voters;
  if (in.count == 3) {
    Each(w, w.R<uint32_t>(in.d), [&](uint32_t) { return votes; });
    return;
  }
  const bool holds = in.count == 0   ? votes == voters
                     : in.count == 1 ? votes != 0
                                     : votes == 0 || votes == voters;
  w.SetP(in.d, holds ? kAllLanes : 0);
}

void ActiveMask(Warp& w, const Instruction& in) {
  const uint32_t lanes = w.active;
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t) { return lanes; });
}

// ---- shuffles: in.list: clamp, members, the predicate or 0 ----

enum Shuffle { kUp, kDown, kButterfly, kIndex };

template <int kMode>
void Shuffled(Warp& w, const Instruction& in) {
  if (!w.Gather(FirstOf(w, in.list[1]))) return;
  const uint32_t *b = w.R<uint32_t>(in.b), *c = w.R<uint32_t>(in.list[0]);
  alignas(64) uint32_t a[kLanes];
  std::memcpy(a, w.R<uint32_t>(in.a), sizeof(a));
  uint32_t inside = 0;
  alignas(64) uint32_t out[kLanes];
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const uint32_t by = b[lane] & 31, clamp = c[lane] & 31, segment = (c[lane] >> 8) & 31;
    const uint32_t last = (lane & segment) | (clamp & ~segment);
    int32_t from;
    bool ok;
    if constexpr (kMode == kUp) {
      from = static_cast<int32_t>(lane) - static_cast<int32_t>(by);
      ok = from >= static_cast<int32_t>(last);
    } else {
      from = static_cast<int32_t>(kMode == kDown        ? lane + by
                                  : kMode == kButterfly ? lane ^ by
                                                        : (lane & segment) | (by & ~segment));
      ok = from <= static_cast<int32_t>(last);
    }
    if (!ok) from = static_cast<int32_t>(lane);
    out[lane] = a[from & 31];
    inside |= static_cast<uint32_t>(ok) << lane;
  }
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) { return out[i]; });
  if (in.list[2] != 0) w.SetP(in.list[2], inside);
}

// ---- match, redux, elect ----

template <typename T>
void MatchAny(Warp& w, const Instruction& in) {
  if (!w.Gather(FirstOf(w, in.b))) return;
  const T* a = w.R<T>(in.a);
  alignas(64) uint32_t out[kLanes] = {};
  ForActive(w, [&](uint32_t i) {
    ForActive(w, [&](uint32_t j) { out[i] |= static_cast<uint32_t>(a[i] == a[j]) << j; });
  });
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t i) { return out[i]; });
}

// count: 0 add, 1 min, 2 max, 3 and, 4 or, 5 xor; flags 1: signed.
void Reduce(Warp& w, const Instruction& in) {
  if (!w.Gather(FirstOf(w, in.b))) return;
  const uint32_t* a = w.R<uint32_t>(in.a);
  uint32_t sum = a[std::countr_zero(w.active)];
  bool first = true;
  ForActive(w, [&](uint32_t i) {
    if (first) {
      first = false;
      return;
    }
    const bool less =
        in.flags & 1 ? static_cast<int32_t>(a[i]) < static_cast<int32_t>(sum) : a[i] < sum;
    switch (in.count) {
      case 0:
        sum += a[i];
        break;
      case 1:
        sum = less ? a[i] : sum;
        break;
      case 2:
        sum = less ? sum : a[i];
        break;
      case 3:
        sum &= a[i];
        break;
      case 4:
        sum |= a[i];
        break;
      default:
        sum ^= a[i];
        break;
    }
  });
  Each(w, w.R<uint32_t>(in.d), [&](uint32_t) { return sum; });
}

void Elect(Warp& w, const Instruction& in) {
  const uint32_t members = FirstOf(w, in.a);
  if (!w.Gather(members)) return;
  const auto leader = static_cast<uint32_t>(std::countr_zero(members & w.active));
  if (in.d != 0) Each(w, w.R<uint32_t>(in.d), [&](uint32_t) { return leader; });
  w.SetP(in.b, 1u << leader);
}

uint32_t SecondPlace(Decoder& d, const Operand& operand) {
  if (operand.second < 0) return 0;
  Operand second;
  second.kind = Operand::Kind::kRegister;
  second.reg = operand.second;
  return d.PlaceOf(second, 0);
}

bool DecodeBarrier(Decoder& d) {
  Instruction* in = d.in;
  if (d.part(1) == "cluster") {
    in->run = d.Has("wait") ? WaitForCluster : ArriveAtCluster;
    return true;
  }
  const bool warp = d.part(1) == "warp";
  if (warp) {
    in->a = d.Place(0, 4);
    in->run = WarpSync;
    return true;
  }
  in->run = BarrierSync;
  in->flags = d.Has("arrive") ? 0 : 1;
  if (!d.Has("red")) {
    in->a = d.Place(0, 4);
    if (d.operands() > 1) in->b = d.Place(1, 4);
    return true;
  }
  in->count = d.Has("popc") ? 2 : d.Has("and") ? 1 : 0;
  in->d = in->count == 2 ? d.Place(0, 4) : d.Predicate(0);
  in->a = d.Place(1, 4);
  if (d.operands() > 3) in->b = d.Place(2, 4);
  Operand vote = d.operand_at(d.operands() - 1);
  if (vote.negated) in->flags |= 2;
  vote.negated = false;
  in->c = d.PlaceOf(vote, 0);
  return true;
}

bool DecodeShuffle(Decoder& d) {
  Instruction* in = d.in;
  const Operand& result = d.operand_at(0);
  in->d = d.PlaceOf(result, 4);
  in->a = d.Place(1, 4);
  in->b = d.Place(2, 4);
  if (d.part(1) != "sync") return d.Fail("only .sync is implemented by the emulator");
  in->list = d.List({d.Place(3, 4), d.Place(4, 4), SecondPlace(d, result)});
  const std::string_view mode = d.part(2);
  in->run = mode == "up"     ? Shuffled<kUp>
            : mode == "down" ? Shuffled<kDown>
            : mode == "bfly" ? Shuffled<kButterfly>
                             : Shuffled<kIndex>;
  return true;
}

}  // namespace

bool DecodeWarp(Decoder& d) {
  const std::string_view op = d.part(0);
  Instruction* in = d.in;
  if (op == "bar" || op == "barrier") return DecodeBarrier(d);
  if (op == "shfl") return DecodeShuffle(d);
  if (op == "vote" && d.part(1) == "sync") {
    const std::string_view mode = d.part(2);
    in->count = mode == "all" ? 0 : mode == "any" ? 1 : mode == "uni" ? 2 : 3;
    in->d = in->count == 3 ? d.Place(0, 4) : d.Predicate(0);
    Operand vote = d.operand_at(1);
    in->flags = vote.negated ? 1 : 0;
    vote.negated = false;
    in->a = d.PlaceOf(vote, 0);
    in->b = d.Place(2, 4);
    in->run = Vote;
    return true;
  }
  if (op == "activemask") {
    in->d = d.Place(0, 4);
    in->run = ActiveMask;
    return true;
  }
  if (op == "match" && d.part(1) == "any") {
    const int bytes = d.LastType().bytes();
    in->d = d.Place(0, 4);
    in->a = d.Place(1, bytes);
    in->b = d.Place(2, 4);
    in->run = bytes == 4 ? MatchAny<uint32_t> : MatchAny<uint64_t>;
    return true;
  }
  if (op == "redux" && d.LastType().whole()) {
    const std::string_view mode = d.part(2);
    in->count = mode == "add"   ? 0
                : mode == "min" ? 1
                : mode == "max" ? 2
                : mode == "and" ? 3
                : mode == "or"  ? 4
                                : 5;
    in->flags = d.LastType().kind == 's' ? 1 : 0;
    in->d = d.Place(0, 4);
    in->a = d.Place(1, 4);
    in->b = d.Place(2, 4);
    in->run = Reduce;
    return true;
  }
  if (op == "elect") {
    const Operand& result = d.operand_at(0);
    in->b = SecondPlace(d, result);
    in->d = result.kind == Operand::Kind::kRegister ? d.PlaceOf(result, 4) : 0;
    in->a = d.Place(1, 4);
    in->run = Elect;
    return true;
  }
  return false;
}

}  // namespace oscar::emulator
