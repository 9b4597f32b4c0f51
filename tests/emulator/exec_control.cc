// Branches, exits, and what orders memory, which this machine does not reorder.
#include <fmt/core.h>

#include "emulator/decoder.h"
#include "emulator/lanes.h"

namespace oscar::emulator {

namespace {

void Branch(Warp& w, const Instruction& in) { w.Diverge(w.active, in.target); }
void Exit(Warp& w, const Instruction&) { w.Exit(); }
void Trap(Warp& w, const Instruction& in) { w.Fault(in, "trap"); }
void Nothing(Warp&, const Instruction&) {}
void Sleep(Warp& w, const Instruction&) { w.Yield(); }

}  // namespace

bool DecodeControl(Decoder& d) {
  const std::string_view op = d.part(0);
  if (op == "bra") {
    d.in->target = static_cast<uint32_t>(d.statement().target);
    d.in->run = Branch;
  } else if (op == "exit" || op == "ret") {
    d.in->run = Exit;
  } else if (op == "trap" || op == "brkpt") {
    d.in->run = Trap;
  } else if (op == "nanosleep") {
    d.in->run = Sleep;
  } else if (op == "fence" || op == "membar" || op == "griddepcontrol" || op == "setmaxnreg" ||
             op == "prefetch" || op == "prefetchu" || op == "applypriority" || op == "discard" ||
             op == "pmevent") {
    d.in->run = Nothing;
  } else {
    return false;
  }
  return true;
}

}  // namespace oscar::emulator
