// Where weights come from: a checkpoint on disk, or random numbers in the same shapes for speed
// work. Sources hand out one tensor at a time, so that loading never holds much more than the
// result.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "io/safetensors.h"
#include "model/spec.h"
#include "oscar/status.h"

namespace oscar {

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // Errors name the tensor, what it is and what was wanted.
  virtual Status Load(const std::string& name, std::span<const int64_t> shape,
                      std::span<float> out) const = 0;
  // As Load, rounded to BF16 (exactly the stored numbers where they are BF16).
  virtual Status LoadBf16(const std::string& name, std::span<const int64_t> shape,
                          std::span<Bf16> out) const = 0;
  virtual bool Has(const std::string& name) const = 0;
  // Random sources: the Philox (seed, stream) that Load's numbers of this name come from, so that a
  // device can draw the same ones itself.
  virtual std::optional<std::pair<uint64_t, uint64_t>> RandomStream(const std::string&) const {
    return std::nullopt;
  }
  // Identifies the weights in caches and rotation files.
  virtual uint64_t Fingerprint() const = 0;
};

Result<std::unique_ptr<WeightSource>> OpenCheckpointWeights(const std::string& directory);
// Gaussian matrices of standard deviation 0.02 and unit norms: the right shapes and magnitudes, no
// meaning. The same seed gives the same model.
std::unique_ptr<WeightSource> MakeRandomWeights(uint64_t seed);

}  // namespace oscar
