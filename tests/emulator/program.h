// What the reader makes of PTX text: statements first, then a program of instructions whose
// operands are places in a warp's register file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace oscar::emulator {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// Shared memory begins where it does on sm_90, whose first KiB is the system's. Generic addresses
// of shared and local memory lie above every address a Linux process can have.
inline constexpr uint32_t kSharedBase = 1024;
inline constexpr uint64_t kSharedWindow = uint64_t{1} << 56;
inline constexpr uint64_t kLocalWindow = uint64_t{1} << 57;
inline constexpr uint64_t kWindowBytes = uint64_t{1} << 32;
// Addresses in the shared memory of block r of a cluster (mapa) have r + 1 in these bits.
inline constexpr int kRankShift = 24;

// ---- statements ----

struct Operand {
  enum class Kind { kRegister, kImmediate, kSymbol, kAddress, kVector, kSink };
  Kind kind = Kind::kSink;
  int reg = -1;                // kRegister; kAddress: the base, or -1
  uint64_t bits = 0;           // kImmediate
  int64_t offset = 0;          // kAddress, kSymbol
  std::string_view symbol;     // kSymbol; kAddress: the base, or empty
  bool negated = false;        // !%p
  int second = -1;             // the predicate of "%r|%p"
  std::vector<Operand> items;  // kVector
};

struct Statement {
  std::vector<std::string_view> op;  // "ld", "global", "u32"
  std::string_view name;             // "ld.global.u32"
  std::vector<Operand> operands;
  int guard = -1;  // a predicate register, or -1
  bool guard_negated = false;
  int target = -1;  // of a branch: a statement's index
  int line = 0;

  bool Has(std::string_view part) const {
    for (const std::string_view p : op) {
      if (p == part) return true;
    }
    return false;
  }
};

// A virtual register: bytes per lane, 0 for predicates.
struct Register {
  int bytes = 4;
};

// ---- instructions ----

class Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&);

struct Instruction {
  Handler run = nullptr;
  // Places in the register file, in bytes. What each is depends on the handler.
  uint32_t d = 0, a = 0, b = 0, c = 0;
  int64_t imm = 0;
  const uint32_t* list = nullptr;  // places, where there are more
  uint32_t guard = 0;              // a predicate's place
  uint8_t guarded = 0;             // 0: no guard, 1: where it holds, 2: where it does not
  uint8_t count = 0;
  uint16_t flags = 0;
  uint32_t target = 0;
  uint32_t line = 0;
};

struct Constant {
  uint32_t place = 0;
  int bytes = 4;
  uint64_t bits = 0;
};

// Registers that a block or warp sets before it starts.
enum class Special {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneId,
  kWarpId,
  kNwarpId,
  kSmId,
  kNsmId,
  kLaneMaskEq,
  kLaneMaskLt,
  kLaneMaskLe,
  kLaneMaskGt,
  kLaneMaskGe,
  kDynamicSharedBytes,
  kClusterRank,
  kClusterSize,
  kCount
};

struct Parameter {
  std::string name;
  uint32_t offset = 0, bytes = 0;
};

struct Program {
  std::string name;
  std::vector<Instruction> code;
  std::vector<std::string> names;  // of each instruction, for messages
  std::vector<Constant> constants;
  uint32_t register_bytes = 0;
  uint32_t special[static_cast<int>(Special::kCount)] = {};  // places, 0 where not used
  uint32_t static_shared = 0;  // bytes from kSharedBase on; dynamic memory follows
  uint32_t local_bytes = 0;    // per lane
  uint32_t parameter_bytes = 0;
  std::vector<Parameter> parameters;
  int max_threads = 1024;
  uint32_t cluster = 0;  // blocks, where the kernel says so
  std::vector<std::unique_ptr<uint32_t[]>> lists;
};

}  // namespace oscar::emulator
