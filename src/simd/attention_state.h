// The running softmax of a few query heads over part of a sequence: o = sum 2^(l - m) v, m = the
// largest logit or a number near it, d = sum 2^(l - m), logits in base 2. Pages, splits and threads
// all combine by the same rule. An empty part has m = -infinity, d = 0, o = 0; every real part has
// a finite m, because a tile is never wholly masked. Internal to the module.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/softmax_sink.h"

namespace oscar::simd {

// Decode splits the page list at multiples of this: 4096 tokens, enough to repay the tables of q
// (as long as 1.2 pages of 64) and the merge, small enough that 64 cores share one 128K-token
// sequence of 8 KV heads (256 splits).
inline constexpr int64_t kPagesPerSplit = 64;

// How far ahead pages are fetched where tiles take them: keys are unpacked two pages before their
// turn.
inline constexpr int kTilePagesAhead = 3;

inline constexpr float kEmptyMax = -std::numeric_limits<float>::infinity();

// A view of [heads] m, [heads] d, [heads, head_dim] o in one run of floats.
struct AttentionState {
  float* m;
  float* d;
  float* o;

  static constexpr size_t Size(int heads, int head_dim) {
    // Rounded to whole cache lines: two threads never write one line.
    return (static_cast<size_t>(heads) * static_cast<size_t>(head_dim + 2) + 15) / 16 * 16;
  }
  AttentionState(float* memory, int heads) : m(memory), d(memory + heads), o(memory + 2 * heads) {}

  // Appends the part `other`, which comes later in the sequence.
  void Merge(const AttentionState& other, int heads, int head_dim) const {
    for (int h = 0; h < heads; ++h) {
      const float largest = std::max(m[h], other.m[h]);
      if (largest == kEmptyMax) continue;
      const float mine = std::exp2(m[h] - largest), theirs = std::exp2(other.m[h] - largest);
      m[h] = largest;
      d[h] = d[h] * mine + other.d[h] * theirs;
      for (int i = h * head_dim; i < (h + 1) * head_dim; ++i) {
        o[i] = o[i] * mine + other.o[i] * theirs;
      }
    }
  }
  // What head h's o is multiplied by once all is read; `sinks`: of the heads, natural, or null.
  float Inverse(int h, const float* sinks) const {
    return InverseOf(m[h], d[h], sinks == nullptr ? kEmptyMax : sinks[h]);
  }
  static float InverseOf(float m, float d, float sink) {
    return sink == kEmptyMax ? 1.0f / d : InverseWithSink(m, d, sink);
  }
};

}  // namespace oscar::simd
