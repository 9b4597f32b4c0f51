// The machine: clusters of blocks of warps of 32 lanes, each instruction a loop over the lanes.
//
// Lanes of a warp that diverge form groups, and the group at the lowest instruction runs, which
// brings them together again where their ways meet. An instruction that needs other lanes (.sync)
// waits until their group arrives. A warp runs until it must wait; a cluster's warps alternate.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulator/memory.h"
#include "emulator/program.h"

namespace oscar::emulator {

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t{x} * y * z; }
};

struct Launch {
  const Program* program = nullptr;
  Dim3 grid, block;
  uint32_t dynamic_shared = 0;
  uint32_t cluster = 1;  // blocks, along x
  std::vector<std::byte> parameters;
  // Bulk copies are made when no warp can run without them, the newest first, not at once: finds
  // who does not wait for them.
  bool late_copies = false;
};

// What went wrong first, of one launch.
class FaultLog {
 public:
  void Set(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = what;
    set_ = true;
  }
  bool set() const { return set_; }
  std::string text() const { return text_; }

 private:
  std::mutex mutex_;
  std::string text_;
  std::atomic<bool> set_ = false;
};

class Block;
class Cluster;

class Warp {
 public:
  // ---- for handlers ----
  template <typename T>
  T* R(uint32_t place) const {
    return reinterpret_cast<T*>(registers_ + place);
  }
  uint32_t P(uint32_t place) const { return *R<uint32_t>(place); }
  void SetP(uint32_t place, uint32_t lanes) const {
    uint32_t* p = R<uint32_t>(place);
    *p = (*p & ~active) | (lanes & active);
  }
  void Fault(const Instruction& at, const std::string& what);
  // Whether all live lanes of `need` are here. If not, the group waits for them at this
  // instruction, and the handler returns.
  bool Gather(uint32_t need);
  // The group lets others run before it continues behind this instruction.
  void Yield();
  void Diverge(uint32_t taken, uint32_t target);
  void Exit();
  void BlockOn(int barrier);
  std::byte* local(int lane) const { return local_ + static_cast<size_t>(lane) * local_bytes_; }
  uint32_t local_bytes() const { return local_bytes_; }

  uint32_t active = 0;  // the running lanes, of those whose guard holds
  uint32_t group = 0;   // the running group
  uint32_t live = 0;    // that have not exited
  uint32_t pc = 0;      // the next instruction
  Block* block = nullptr;
  int index = 0;
  const Instruction* reduce = nullptr;  // the bar.red that waits for its result
  Allocation last;                      // global memory that this warp accessed last
  bool at_cluster = false;  // has arrived at the cluster's barrier, which others have not

 private:
  friend class Block;
  friend class Cluster;
  enum class Wait { kNone, kTurn, kMembers };
  struct Group {
    uint32_t pc, lanes, need;
    Wait wait;
  };
  bool done() const { return live == 0; }
  bool Runnable() const;
  // Until it waits, exits or has run for a while. Returns whether it ran at all.
  bool Run();
  bool Choose();  // a group to run
  void Park(uint32_t at, Wait wait, uint32_t need);

  std::byte* registers_ = nullptr;
  std::byte* local_ = nullptr;
  uint32_t local_bytes_ = 0;
  uint32_t limit_ = 0;  // pc at which something else may have to run; 0: at once
  bool stopped_ = false;
  int barrier_ = -1;
  std::vector<Group> parked_;
};

// A bulk copy to shared memory that is under way, and the mbarrier that counts its bytes.
struct PendingCopy {
  std::byte* to;
  const std::byte* from;
  uint32_t bytes;
  std::byte* barrier;
  Warp* warp;
  const Instruction* at;
  std::function<void()> move = nullptr;  // in place of `to` and `from`
};
void FinishCopy(const PendingCopy& copy);

// One block at a time; reused for the next one of the launch.
class Block {
 public:
  Block(const Launch& launch, Memory& memory, FaultLog& faults, Cluster& cluster, uint32_t rank);

  const std::byte* parameters() const { return launch_.parameters.data(); }
  uint32_t parameter_bytes() const { return static_cast<uint32_t>(launch_.parameters.size()); }
  // Of `bytes` at a shared address, or null.
  std::byte* Shared(uint64_t address, uint32_t bytes) const {
    const uint64_t at = address - kSharedBase;
    return at <= shared_bytes_ && bytes <= shared_bytes_ - at ? shared_ + at : nullptr;
  }
  uint32_t shared_bytes() const { return shared_bytes_; }
  // The same at an address of the cluster's: this block's, or what mapa gave.
  std::byte* SharedInCluster(uint64_t address, uint32_t bytes) const;
  Cluster& cluster() { return cluster_; }

  // A barrier among warps. `threads` 0: all of the block.
  void Arrive(Warp& warp, const Instruction& at, int barrier, uint32_t threads, bool wait);
  // bar.red: a vote that every warp of the barrier adds to; read when it has completed.
  struct Barrier {
    uint32_t arrived = 0, expected = 0;
    uint32_t any = 0, count = 0;
    bool all = true;
    uint32_t result_any = 0, result_count = 0;
    bool result_all = true;
  };
  Barrier& barrier(int i) { return barriers_[i]; }
  void WarpExited();
  void Event() { ++events_; }
  void Begin(const PendingCopy& copy) {
    if (launch_.late_copies) {
      copies_.push_back(copy);
    } else {
      FinishCopy(copy);
    }
  }

  const Program& program() const { return *launch_.program; }
  const Launch& launch() const { return launch_; }
  Memory& memory() { return memory_; }
  FaultLog& faults() { return faults_; }
  uint64_t index() const { return index_; }
  uint64_t instructions = 0;  // of warps, executed

 private:
  friend class Warp;
  friend class Cluster;
  void Start(uint64_t index);
  void Release(int barrier);
  std::string Describe() const;

  const Launch& launch_;
  Memory& memory_;
  FaultLog& faults_;
  Cluster& cluster_;
  const uint32_t rank_;
  uint64_t index_ = 0;
  std::vector<Warp> warps_;
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> registers_, shared_memory_, local_;
  size_t register_stride_ = 0;
  std::byte* shared_ = nullptr;
  uint32_t shared_bytes_ = 0;
  Barrier barriers_[16];
  uint64_t events_ = 0;  // that others may wait for
  std::vector<PendingCopy> copies_;
};

// The blocks of a cluster, which run at once; one block where there are no clusters.
class Cluster {
 public:
  Cluster(const Launch& launch, Memory& memory, FaultLog& faults);
  void Run(uint64_t index);

  uint32_t size() const { return static_cast<uint32_t>(blocks_.size()); }
  Block& block(uint32_t rank) { return *blocks_[rank]; }
  void Arrive(Warp& warp, const Instruction& at);
  void Wait(Warp& warp);
  void Release();  // the barrier, where all warps have arrived
  uint64_t instructions() const;

 private:
  uint64_t events() const;

  const Launch& launch_;
  FaultLog& faults_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

// Runs a launch to its end. `threads` share its blocks. Adds the executed warp instructions to
// `instructions`. Returns what went wrong, or an empty string.
std::string RunLaunch(const Launch& launch, Memory& memory, int threads, uint64_t* instructions);

}  // namespace oscar::emulator
