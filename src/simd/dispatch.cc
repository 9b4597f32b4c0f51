#include "simd/dispatch.h"

#include <cpuid.h>
#include <fmt/core.h>
#include <hwy/targets.h>

#include <array>
#include <atomic>
#include <cstring>

#include "base/check.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {
namespace {

bool IsAmd() {
  uint32_t a, b, c, d;
  char vendor[12];
  if (__get_cpuid(0, &a, &b, &c, &d) == 0) return false;
  std::memcpy(vendor, &b, 4);
  std::memcpy(vendor + 4, &d, 4);
  std::memcpy(vendor + 8, &c, 4);
  return std::memcmp(vendor, "AuthenticAMD", 12) == 0;
}

struct Machine {
  std::array<Target, 5> targets{};
  size_t count = 0;
};

const Machine& ThisMachine() {
  static const Machine machine = [] {
    Machine m;
    const int64_t supported = hwy::SupportedTargets();
    if ((supported & HWY_AVX2) != 0) m.targets[m.count++] = Target::kAvx2;
    if ((supported & HWY_AVX3) != 0) m.targets[m.count++] = Target::kAvx512;
    if ((supported & HWY_AVX3_DL) != 0) {
      m.targets[m.count++] = IsAmd() ? Target::kAvx512Vnni : Target::kAvx512Words;
      m.targets[m.count++] = IsAmd() ? Target::kAvx512Words : Target::kAvx512Vnni;
      if (HasAmxInt8()) m.targets[m.count++] = Target::kAmxInt8;
    }
    return m;
  }();
  return machine;
}

std::atomic<int>& Override() {
  static std::atomic<int> target{-1};
  return target;
}

}  // namespace

Status CheckCpu() {
  if (ThisMachine().count > 0) return {};
  return Unimplemented(
      "this processor lacks AVX2, FMA, F16C or BMI2; oscar needs an x86-64-v3 machine (Intel "
      "Haswell, AMD Zen or later)");
}

std::span<const Target> SupportedTargets() {
  return {ThisMachine().targets.data(), ThisMachine().count};
}

Target ActiveTarget() {
  const int override_target = Override().load(std::memory_order_relaxed);
  if (override_target >= 0) return static_cast<Target>(override_target);
  const Machine& machine = ThisMachine();
  OSCAR_CHECK(machine.count > 0, "CheckCpu() refuses this processor");
  return machine.targets[machine.count - 1];
}

std::string_view TargetName(Target target) {
  switch (target) {
    case Target::kAvx2:
      return "AVX2";
    case Target::kAvx512:
      return "AVX-512";
    case Target::kAvx512Vnni:
      return "AVX-512 VNNI";
    case Target::kAvx512Words:
      return "AVX-512 VNNI, word tables";
    case Target::kAmxInt8:
      return "AMX-INT8";
  }
  return "unknown";
}

ScopedTarget::ScopedTarget(Target target) : previous_(ActiveTarget()) {
  bool supported = false;
  for (const Target t : SupportedTargets()) supported = supported || t == target;
  OSCAR_CHECK(supported, "target {} is not supported here", TargetName(target));
  Override().store(static_cast<int>(target));
}

ScopedTarget::~ScopedTarget() { Override().store(static_cast<int>(previous_)); }

}  // namespace oscar::simd
