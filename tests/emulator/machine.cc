#include "emulator/machine.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace oscar::emulator {

namespace {

constexpr uint32_t kNever = ~0u;
// Instructions until another warp, or another group of this one, has its turn.
constexpr int kSlice = 1 << 14;
// Rounds of a block in which warps only asked for what did not happen.
constexpr int kIdleRounds = 1000;
constexpr uint64_t kMaxBlockInstructions = uint64_t{1} << 34;
constexpr int kClusterBarrier = 16;  // behind those of a block

std::byte* AllocateAligned(size_t bytes) {
  void* p = nullptr;
  if (::posix_memalign(&p, 4096, std::max<size_t>(bytes, 64)) != 0) std::abort();
  return static_cast<std::byte*>(p);
}

template <typename T>
void Fill(std::byte* at, T value) {
  T* lanes = reinterpret_cast<T*>(at);
  for (int i = 0; i < kLanes; ++i) lanes[i] = value;
}

}  // namespace

// ---- warps ----

void Warp::Fault(const Instruction& at, const std::string& what) {
  const Program& program = block->program();
  const auto pc_of = static_cast<size_t>(&at - program.code.data());
  const uint64_t b = block->index();
  const Dim3& grid = block->launch().grid;
  block->faults().Set(
      fmt::format("{}\n  in {}\n  block ({}, {}, {}), warp {}, instruction {}: {} (PTX line {})",
                  what, program.name, b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y, index,
                  pc_of, program.names[pc_of], at.line));
  stopped_ = true;
  limit_ = 0;
}

void Warp::Park(uint32_t at, Wait wait, uint32_t need) {
  for (Group& g : parked_) {
    if (g.pc == at && g.wait == wait) {
      g.lanes |= group;
      g.need |= need;
      group = active = 0;
      return;
    }
  }
  parked_.push_back({at, group, need, wait});
  group = active = 0;
}

bool Warp::Gather(uint32_t need) {
  need &= live;
  if ((need & ~group) == 0) return true;
  Park(pc - 1, Wait::kMembers, need);
  limit_ = 0;
  return false;
}

void Warp::Yield() {
  Park(pc, Wait::kTurn, 0);
  limit_ = 0;
}

void Warp::Diverge(uint32_t taken, uint32_t target) {
  const uint32_t stay = group & ~taken;
  if (stay == 0) {
    pc = target;
    return;
  }
  // Both ways are parked; the lower one is chosen next.
  const uint32_t next = pc;
  group = taken;
  Park(target, Wait::kNone, 0);
  group = stay;
  Park(next, Wait::kNone, 0);
  limit_ = 0;
}

void Warp::Exit() {
  live &= ~active;
  group &= ~active;
  active = 0;
  if (group != 0) return;  // a guarded exit
  limit_ = 0;
  if (live == 0) block->WarpExited();
}

void Warp::BlockOn(int barrier) {
  barrier_ = barrier;
  limit_ = 0;
}

bool Warp::Runnable() const { return live != 0 && barrier_ < 0; }

bool Warp::Choose() {
  // Groups that stand at the same place become one, whatever they waited for.
  for (size_t i = 0; i < parked_.size(); ++i) {
    for (size_t j = parked_.size() - 1; j > i; --j) {
      if (parked_[j].pc != parked_[i].pc) continue;
      parked_[i].lanes |= parked_[j].lanes;
      parked_[i].need |= parked_[j].need;
      // Who waits for lanes still does; a turn that has come is over.
      const bool members = parked_[i].wait == Wait::kMembers || parked_[j].wait == Wait::kMembers;
      parked_[i].wait = members ? Wait::kMembers : Wait::kNone;
      parked_.erase(parked_.begin() + static_cast<long>(j));
    }
  }
  size_t best = parked_.size();
  for (size_t i = 0; i < parked_.size(); ++i) {
    const Group& g = parked_[i];
    if (g.wait == Wait::kTurn) continue;
    if (g.wait == Wait::kMembers && (g.need & live & ~g.lanes) != 0) continue;
    if (best == parked_.size() || g.pc < parked_[best].pc) best = i;
  }
  if (best == parked_.size()) return false;
  pc = parked_[best].pc;
  group = parked_[best].lanes;
  parked_.erase(parked_.begin() + static_cast<long>(best));
  // It stops where another group stands that it may join.
  limit_ = kNever;
  for (const Group& g : parked_) {
    if (g.pc > pc) limit_ = std::min(limit_, g.pc);
  }
  return true;
}

bool Warp::Run() {
  for (Group& g : parked_) {
    if (g.wait == Wait::kTurn) g.wait = Wait::kNone;
  }
  if (group == 0 && !Choose()) return false;
  const Instruction* const code = block->program().code.data();
  int budget = kSlice;
  for (;;) {
    const Instruction& in = code[pc];
    ++pc;
    --budget;
    if (in.guarded == 0) {
      active = group;
      in.run(*this, in);
    } else {
      const uint32_t p = P(in.guard);
      active = group & (in.guarded == 1 ? p : ~p);
      if (active != 0) in.run(*this, in);
    }
    if (pc < limit_ && budget > 0) continue;
    if (stopped_ || live == 0 || block->faults().set()) break;
    if (barrier_ >= 0) break;
    if (budget <= 0) {
      // A group that spins must not keep the others of its warp from running.
      if (group != 0) Park(pc, Wait::kTurn, 0);
      block->instructions += kSlice;
      budget = kSlice;
      if (!Choose()) break;
      continue;
    }
    if (group != 0) Park(pc, Wait::kNone, 0);
    if (!Choose()) break;
  }
  block->instructions += static_cast<uint64_t>(kSlice - budget);
  return true;
}

// ---- blocks ----

void Block::Free::operator()(std::byte* p) const { std::free(p); }

Block::Block(const Launch& launch, Memory& memory, FaultLog& faults, Cluster& cluster,
             uint32_t rank)
    : launch_(launch), memory_(memory), faults_(faults), cluster_(cluster), rank_(rank) {
  const Program& p = *launch.program;
  const auto threads = static_cast<size_t>(launch.block.count());
  warps_.resize((threads + kLanes - 1) / kLanes);
  register_stride_ = (p.register_bytes + 4095) / 4096 * 4096 + 64;
  registers_.reset(AllocateAligned(register_stride_ * warps_.size()));
  std::memset(registers_.get(), 0xff, register_stride_ * warps_.size());
  shared_bytes_ = p.static_shared + launch.dynamic_shared;
  shared_memory_.reset(AllocateAligned(shared_bytes_ + 64));
  shared_ = shared_memory_.get();
  const size_t local = static_cast<size_t>(p.local_bytes) * kLanes;
  local_.reset(AllocateAligned(local * warps_.size()));
  for (size_t w = 0; w < warps_.size(); ++w) {
    Warp& warp = warps_[w];
    warp.block = this;
    warp.index = static_cast<int>(w);
    warp.registers_ = registers_.get() + register_stride_ * w;
    warp.local_ = local_.get() + local * w;
    warp.local_bytes_ = p.local_bytes;
    for (const Constant& c : p.constants) {
      std::byte* at = warp.registers_ + c.place;
      switch (c.bytes) {
        case 0:
          *reinterpret_cast<uint32_t*>(at) = c.bits != 0 ? kAllLanes : 0;
          break;
        case 2:
          Fill(at, static_cast<uint16_t>(c.bits));
          break;
        case 4:
          Fill(at, static_cast<uint32_t>(c.bits));
          break;
        default:
          Fill(at, c.bits);
          break;
      }
    }
  }
}

void Block::Start(uint64_t index) {
  index_ = index;
  std::memset(shared_, 0xff, shared_bytes_);
  for (Barrier& b : barriers_) b = {};
  copies_.clear();
  const Program& p = *launch_.program;
  const Dim3 &grid = launch_.grid, &block = launch_.block;
  const auto threads = static_cast<uint32_t>(block.count());
  for (Warp& warp : warps_) {
    const uint32_t first = static_cast<uint32_t>(warp.index) * kLanes;
    const uint32_t lanes = std::min<uint32_t>(kLanes, threads - first);
    warp.live = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
    warp.group = 0;
    warp.pc = 0;
    warp.parked_.clear();
    warp.parked_.push_back({0, warp.live, 0, Warp::Wait::kNone});
    warp.barrier_ = -1;
    warp.stopped_ = false;
    warp.reduce = nullptr;
    warp.last = {};
    warp.at_cluster = false;
    const auto set = [&](Special which, auto value) {
      const uint32_t place = p.special[static_cast<int>(which)];
      if (place == 0) return;
      uint32_t* at = warp.R<uint32_t>(place);
      for (uint32_t lane = 0; lane < kLanes; ++lane) at[lane] = value(lane, first + lane);
    };
    const auto same = [&](Special which, uint64_t value) {
      set(which, [&](uint32_t, uint32_t) { return static_cast<uint32_t>(value); });
    };
    set(Special::kTidX, [&](uint32_t, uint32_t t) { return t % block.x; });
    set(Special::kTidY, [&](uint32_t, uint32_t t) { return t / block.x % block.y; });
    set(Special::kTidZ, [&](uint32_t, uint32_t t) { return t / block.x / block.y; });
    set(Special::kLaneId, [&](uint32_t lane, uint32_t) { return lane; });
    set(Special::kLaneMaskEq, [&](uint32_t lane, uint32_t) { return 1u << lane; });
    set(Special::kLaneMaskLt, [&](uint32_t lane, uint32_t) { return (1u << lane) - 1; });
    set(Special::kLaneMaskLe,
        [&](uint32_t lane, uint32_t) { return (1u << lane) | ((1u << lane) - 1); });
    set(Special::kLaneMaskGe, [&](uint32_t lane, uint32_t) { return ~((1u << lane) - 1); });
    set(Special::kLaneMaskGt,
        [&](uint32_t lane, uint32_t) { return ~((1u << lane) | ((1u << lane) - 1)); });
    same(Special::kNtidX, block.x);
    same(Special::kNtidY, block.y);
    same(Special::kNtidZ, block.z);
    same(Special::kCtaidX, index % grid.x);
    same(Special::kCtaidY, index / grid.x % grid.y);
    same(Special::kCtaidZ, index / grid.x / grid.y);
    same(Special::kNctaidX, grid.x);
    same(Special::kNctaidY, grid.y);
    same(Special::kNctaidZ, grid.z);
    same(Special::kWarpId, static_cast<uint64_t>(warp.index));
    same(Special::kNwarpId, warps_.size());
    same(Special::kSmId, index % 132);
    same(Special::kNsmId, 132);
    same(Special::kDynamicSharedBytes, launch_.dynamic_shared);
    same(Special::kClusterRank, rank_);
    same(Special::kClusterSize, launch_.cluster);
  }
}

std::byte* Block::SharedInCluster(uint64_t address, uint32_t bytes) const {
  const uint64_t rank = address >> kRankShift;
  if (rank == 0) return Shared(address, bytes);
  if (rank > cluster_.size()) return nullptr;
  return cluster_.block(static_cast<uint32_t>(rank - 1))
      .Shared(address & ((uint64_t{1} << kRankShift) - 1), bytes);
}

std::string Block::Describe() const {
  std::string text;
  for (const Warp& warp : warps_) {
    if (warp.done()) {
      text += fmt::format("\n  warp {}: has ended", warp.index);
      continue;
    }
    const auto add = [&](uint32_t pc, uint32_t lanes, const char* state) {
      const size_t at = std::min<size_t>(pc, program().code.size() - 1);
      text +=
          fmt::format("\n  warp {}, lanes {:08x}: {} at instruction {}: {} (PTX line {})",
                      warp.index, lanes, state, at, program().names[at], program().code[at].line);
    };
    if (warp.barrier_ >= 0) {
      add(warp.pc - 1, warp.group, fmt::format("waits for barrier {}", warp.barrier_).c_str());
    } else if (warp.group != 0) {
      add(warp.pc, warp.group, "stands");
    }
    for (const Warp::Group& g : warp.parked_) {
      if (g.wait == Warp::Wait::kMembers) {
        add(g.pc, g.lanes, fmt::format("waits for lanes {:08x}", g.need).c_str());
      } else {
        add(g.pc > 0 ? g.pc - 1 : 0, g.lanes, "spins");  // what let it wait lies before
      }
    }
  }
  return text;
}

void Block::Arrive(Warp& warp, const Instruction& at, int i, uint32_t threads, bool wait) {
  Barrier& b = barriers_[i];
  if (b.arrived > 0 && b.expected != threads) {
    warp.Fault(at, fmt::format("barrier {}: {} threads here, {} where others arrived", i, threads,
                               b.expected));
    return;
  }
  b.expected = threads;
  b.arrived += kLanes;
  if (threads != 0 && b.arrived > threads) {
    warp.Fault(at, fmt::format("barrier {}: more than {} threads arrive", i, threads));
    return;
  }
  if (wait) warp.BlockOn(i);
  Release(i);
}

// Where all have arrived. Warps that have ended count as arrived at barriers of the whole block.
void Block::Release(int i) {
  Barrier& b = barriers_[i];
  if (b.arrived == 0) return;
  uint32_t expected = b.expected;
  if (expected == 0) {
    for (const Warp& warp : warps_) expected += warp.done() ? 0 : kLanes;
  }
  if (b.arrived < expected) return;
  b.result_any = b.any;
  b.result_all = b.all;
  b.result_count = b.count;
  b.any = b.count = 0;
  b.all = true;
  b.arrived = 0;
  Event();
  for (Warp& warp : warps_) {
    if (warp.barrier_ != i) continue;
    warp.barrier_ = -1;
    if (warp.reduce == nullptr) continue;
    // count 0: any, 1: all, 2: how many.
    const Instruction& in = *std::exchange(warp.reduce, nullptr);
    warp.active = warp.group;
    if (in.count == 2) {
      uint32_t* d = warp.R<uint32_t>(in.d);
      for (int lane = 0; lane < kLanes; ++lane) {
        if ((warp.group >> lane & 1) != 0) d[lane] = b.result_count;
      }
    } else {
      const bool holds = in.count == 0 ? b.result_any != 0 : b.result_all;
      warp.SetP(in.d, holds ? kAllLanes : 0);
    }
  }
}

void Block::WarpExited() {
  Event();
  for (int i = 0; i < 16; ++i) {
    if (barriers_[i].expected == 0) Release(i);
  }
  cluster_.Release();
}

// ---- clusters ----

Cluster::Cluster(const Launch& launch, Memory& memory, FaultLog& faults)
    : launch_(launch), faults_(faults) {
  for (uint32_t rank = 0; rank < launch.cluster; ++rank) {
    blocks_.push_back(std::make_unique<Block>(launch, memory, faults, *this, rank));
  }
}

uint64_t Cluster::instructions() const {
  uint64_t sum = 0;
  for (const auto& block : blocks_) sum += block->instructions;
  return sum;
}
uint64_t Cluster::events() const {
  uint64_t sum = 0;
  for (const auto& block : blocks_) sum += block->events_;
  return sum;
}

void Cluster::Arrive(Warp& warp, const Instruction& at) {
  if (warp.at_cluster) {
    warp.Fault(at, "arrives at the cluster's barrier twice");
    return;
  }
  warp.at_cluster = true;
  Release();
}
void Cluster::Wait(Warp& warp) {
  if (warp.at_cluster) warp.BlockOn(kClusterBarrier);
}
void Cluster::Release() {
  bool any = false;
  for (const auto& block : blocks_) {
    for (const Warp& warp : block->warps_) {
      if (!warp.done() && !warp.at_cluster) return;
      any |= warp.at_cluster;
    }
  }
  if (!any) return;
  for (const auto& block : blocks_) {
    block->Event();
    for (Warp& warp : block->warps_) {
      warp.at_cluster = false;
      if (warp.barrier_ == kClusterBarrier) warp.barrier_ = -1;
    }
  }
}

void Cluster::Run(uint64_t index) {
  size_t warps = 0;
  for (const auto& block : blocks_) {
    block->Start(index * blocks_.size() + block->rank_);
    warps += block->warps_.size();
  }
  const auto describe = [&] {
    std::string text;
    for (const auto& block : blocks_) {
      text += fmt::format("\n  block {}{}", block->index(), block->Describe());
    }
    return text;
  };
  int idle = 0;
  const uint64_t begin = instructions();
  for (;;) {
    bool any = false, ran = false;
    const uint64_t before = events(), executed = instructions();
    Block* copying = nullptr;
    for (const auto& block : blocks_) {
      for (Warp& warp : block->warps_) {
        if (warp.done()) continue;
        any = true;
        if (warp.Runnable()) ran |= warp.Run();
        if (faults_.set()) return;
      }
      if (!block->copies_.empty()) copying = block.get();
    }
    if (!any) {
      if (copying != nullptr) {
        const PendingCopy& copy = copying->copies_.back();
        copy.warp->Fault(*copy.at, "the block ends while this copy is under way");
      }
      return;
    }
    // Spinning warps execute a handful of instructions each in a round.
    const bool spun = events() == before && instructions() - executed < 64 * warps;
    idle = spun ? idle + 1 : 0;
    if ((spun || !ran) && copying != nullptr) {
      const PendingCopy copy = copying->copies_.back();
      copying->copies_.pop_back();
      FinishCopy(copy);
      if (faults_.set()) return;
      idle = 0;
      continue;
    }
    if (!ran || idle > kIdleRounds) {
      faults_.Set(
          fmt::format("deadlock: every warp waits\n  in {}{}", launch_.program->name, describe()));
      return;
    }
    if (instructions() - begin > kMaxBlockInstructions) {
      faults_.Set(
          fmt::format("a block of {} does not end; blocks run one after another, so one that waits "
                      "for a later one never does{}",
                      launch_.program->name, describe()));
      return;
    }
  }
}

std::string RunLaunch(const Launch& launch, Memory& memory, int threads, uint64_t* instructions) {
  FaultLog faults;
  std::atomic<uint64_t> next = 0, executed = 0;
  const uint64_t clusters = launch.grid.count() / launch.cluster;
  const auto work = [&] {
    Cluster cluster(launch, memory, faults);
    for (;;) {
      const uint64_t index = next.fetch_add(1);
      if (index >= clusters || faults.set()) break;
      cluster.Run(index);
    }
    executed += cluster.instructions();
  };
  std::vector<std::thread> helpers;
  for (uint64_t i = 1; i < std::min<uint64_t>(static_cast<uint64_t>(threads), clusters); ++i) {
    helpers.emplace_back(work);
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  *instructions += executed;
  return faults.text();
}

}  // namespace oscar::emulator
