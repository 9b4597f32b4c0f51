#include "emulator/register_slots.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

namespace oscar::emulator {

namespace {

// Whether the first operand is a result.
bool HasResult(const Statement& s) {
  static const std::set<std::string_view> kNone = {
      "st",       "red",    "bra",       "exit",           "ret",          "trap",     "cp",
      "fence",    "membar", "nanosleep", "griddepcontrol", "setmaxnreg",   "prefetch", "prefetchu",
      "stmatrix", "brkpt",  "pmevent",   "discard",        "applypriority"};
  const std::string_view op = s.op[0];
  if (kNone.contains(op)) return false;
  if (op == "bar" || op == "barrier") return s.Has("red");
  if (op == "mbarrier") {
    const std::string_view what = s.op[1];
    return what != "init" && what != "inval" && what != "expect_tx" && what != "complete_tx";
  }
  return true;
}

void Collect(const Operand& o, std::vector<int>* out) {
  if (o.reg >= 0) out->push_back(o.reg);
  if (o.second >= 0) out->push_back(o.second);
  for (const Operand& item : o.items) Collect(item, out);
}

struct Access {
  std::vector<int> results, sources;
};

Access AccessOf(const Statement& s) {
  Access access;
  const bool result = HasResult(s);
  for (size_t i = 0; i < s.operands.size(); ++i) {
    const Operand& o = s.operands[i];
    // A result under an address is the address's source.
    const bool written = i == 0 && result && o.kind != Operand::Kind::kAddress;
    Collect(o, written ? &access.results : &access.sources);
  }
  if (s.guard >= 0) access.sources.push_back(s.guard);
  // Results that may keep what was there before.
  if (s.guard >= 0 || s.op[0] == "wgmma") {
    access.sources.insert(access.sources.end(), access.results.begin(), access.results.end());
  }
  return access;
}

using Bits = std::vector<uint64_t>;
void Set(Bits& bits, int i) { bits[static_cast<size_t>(i) / 64] |= uint64_t{1} << (i % 64); }
bool Test(const Bits& bits, int i) { return (bits[static_cast<size_t>(i) / 64] >> (i % 64)) & 1; }

struct BasicBlock {
  int begin = 0, end = 0;
  std::vector<int> next;
  Bits used, written, in, out;  // used: read before it is written here
};

std::vector<BasicBlock> BlocksOf(const Body& body, const std::vector<Access>& accesses) {
  const auto& code = body.statements;
  std::vector<bool> leads(code.size() + 1, false);
  leads[0] = true;
  for (size_t i = 0; i < code.size(); ++i) {
    if (code[i].op[0] == "bra") {
      leads[static_cast<size_t>(code[i].target)] = true;
      leads[i + 1] = true;
    } else if (code[i].op[0] == "exit" || code[i].op[0] == "ret") {
      leads[i + 1] = true;
    }
  }
  std::vector<BasicBlock> blocks;
  std::map<int, int> block_at;
  for (size_t i = 0; i < code.size(); ++i) {
    if (!leads[i]) continue;
    if (!blocks.empty()) blocks.back().end = static_cast<int>(i);
    block_at[static_cast<int>(i)] = static_cast<int>(blocks.size());
    blocks.emplace_back();
    blocks.back().begin = static_cast<int>(i);
  }
  blocks.back().end = static_cast<int>(code.size());
  const size_t words = body.registers.size() / 64 + 1;
  for (BasicBlock& block : blocks) {
    for (Bits* bits : {&block.used, &block.written, &block.in, &block.out}) bits->assign(words, 0);
    for (int i = block.begin; i < block.end; ++i) {
      for (const int r : accesses[static_cast<size_t>(i)].sources) {
        if (!Test(block.written, r)) Set(block.used, r);
      }
      for (const int r : accesses[static_cast<size_t>(i)].results) Set(block.written, r);
    }
    const Statement& last = code[static_cast<size_t>(block.end) - 1];
    const bool jumps = last.op[0] == "bra";
    const bool ends = last.op[0] == "exit" || last.op[0] == "ret";
    if (jumps) block.next.push_back(block_at[last.target]);
    const bool falls = (!jumps && !ends) || last.guard >= 0;
    if (falls && block.end < static_cast<int>(code.size())) {
      block.next.push_back(block_at[block.end]);
    }
  }
  return blocks;
}

void SolveLiveness(std::vector<BasicBlock>& blocks) {
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t b = blocks.size(); b-- > 0;) {
      BasicBlock& block = blocks[b];
      for (const int n : block.next) {
        const Bits& in = blocks[static_cast<size_t>(n)].in;
        for (size_t w = 0; w < in.size(); ++w) block.out[w] |= in[w];
      }
      for (size_t w = 0; w < block.in.size(); ++w) {
        const uint64_t in = block.used[w] | (block.out[w] & ~block.written[w]);
        changed |= in != block.in[w];
        block.in[w] = in;
      }
    }
  }
}

}  // namespace

std::vector<int> AssignSlots(const Body& body) {
  const int registers = static_cast<int>(body.registers.size());
  std::vector<Access> accesses;
  accesses.reserve(body.statements.size());
  for (const Statement& s : body.statements) accesses.push_back(AccessOf(s));
  std::vector<BasicBlock> blocks = BlocksOf(body, accesses);
  SolveLiveness(blocks);

  // From the first to the last statement where a register must be kept.
  struct Interval {
    int reg, begin, end;
  };
  const int last = static_cast<int>(body.statements.size());
  std::vector<Interval> intervals;
  for (int r = 0; r < registers; ++r) intervals.push_back({r, last, -1});
  const auto touch = [&](int r, int at) {
    Interval& i = intervals[static_cast<size_t>(r)];
    i.begin = std::min(i.begin, at);
    i.end = std::max(i.end, at);
  };
  for (const BasicBlock& block : blocks) {
    for (int i = block.begin; i < block.end; ++i) {
      for (const int r : accesses[static_cast<size_t>(i)].sources) touch(r, i);
      for (const int r : accesses[static_cast<size_t>(i)].results) touch(r, i);
    }
    for (int r = 0; r < registers; ++r) {
      if (Test(block.in, r)) touch(r, block.begin);
      if (Test(block.out, r)) touch(r, block.end - 1);
    }
  }
  // What is set before the program starts is kept to its end.
  for (const auto& [reg, which] : body.specials) {
    touch(reg, 0);
    touch(reg, last);
  }

  std::vector<int> slots(static_cast<size_t>(registers), -1);
  std::erase_if(intervals, [](const Interval& i) { return i.end < 0; });
  std::ranges::sort(intervals, {}, &Interval::begin);
  struct Pool {
    std::vector<int> free;               // last in, first out: what is in the caches
    std::set<std::pair<int, int>> busy;  // end, slot
    int count = 0;
  };
  std::map<int, Pool> pools;  // by width
  for (const Interval& i : intervals) {
    Pool& pool = pools[body.registers[static_cast<size_t>(i.reg)].bytes];
    // Not in the statement where the other ends: handlers write while they read.
    while (!pool.busy.empty() && pool.busy.begin()->first < i.begin) {
      pool.free.push_back(pool.busy.begin()->second);
      pool.busy.erase(pool.busy.begin());
    }
    int slot;
    if (pool.free.empty()) {
      slot = pool.count++;
    } else {
      slot = pool.free.back();
      pool.free.pop_back();
    }
    slots[static_cast<size_t>(i.reg)] = slot;
    pool.busy.emplace(i.end, slot);
  }
  return slots;
}

}  // namespace oscar::emulator
