// Which instruction set the kernels of this module run on. It is chosen once, from CPUID, at first
// use; every kernel exists for each target and is tested on all that the machine has. Callers ask
// CheckCpu() at start-up: on an older processor any kernel call aborts. Thread-safe, except that
// ScopedTarget belongs to single-threaded tests.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "oscar/status.h"

namespace oscar::simd {

enum class Target : uint8_t {
  kAvx2,         // AVX2, FMA, F16C, BMI2
  kAvx512,       // AVX-512 F, BW, CD, DQ, VL
  kAvx512Vnni,   // and VNNI, VBMI, ... (Ice Lake, Zen 4 and later)
  kAvx512Words,  // the same instructions, with INT2 decode by permutes of words: single operations
                 // on AMD, three each on Intel
  kAmxInt8,      // and INT2 decode and prefill on tiles (Sapphire Rapids and later);
                 // OSCAR_DISABLE_AMX=1 hides it
};

// OK, or kUnimplemented naming what the processor lacks.
Status CheckCpu();

// What this machine can run, the one it should last; empty where CheckCpu fails.
std::span<const Target> SupportedTargets();
Target ActiveTarget();
std::string_view TargetName(Target target);
constexpr bool HasVnni(Target target) { return target >= Target::kAvx512Vnni; }

// Runs kernels on another supported target while it lives.
class ScopedTarget {
 public:
  explicit ScopedTarget(Target target);
  ~ScopedTarget();
  ScopedTarget(const ScopedTarget&) = delete;
  ScopedTarget& operator=(const ScopedTarget&) = delete;

 private:
  Target previous_;
};

}  // namespace oscar::simd
