// Rotary position embedding: the angles of each position, with the published ways of stretching
// them beyond the trained context (linear, llama3, yarn). Immutable after construction.
//
// Frequencies are rounded to binary32 and angles are binary32 products, as in the reference
// implementations that models were trained with: exact angles would differ from what a model has
// seen at far positions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "io/hf_config.h"

namespace oscar {

class RopeTable {
 public:
  // REQUIRES: a validated config; head_dim even.
  RopeTable(double theta, const RopeScaling& scaling, int head_dim);

  int half() const { return static_cast<int>(frequency_.size()); }
  // Angle per position of each pair (i, i + half).
  std::span<const float> frequency() const { return frequency_; }
  // What yarn multiplies cos and sin with; 1 otherwise.
  float magnitude() const { return magnitude_; }
  // cos, sin: [half].
  void Fill(int64_t position, std::span<float> cos, std::span<float> sin) const;

 private:
  std::vector<float> frequency_;
  float magnitude_ = 1.0f;
};

}  // namespace oscar
