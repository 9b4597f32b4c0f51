// Where weights come from: a checkpoint on disk, or random numbers in the same shapes for speed
// work. Sources hand out some rows of a tensor at a time, so that loading never holds much more
// than the result. A file that changes while it is read is an error. Safe from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arch/tensor_table.h"
#include "base/half.h"
#include "io/safetensors.h"
#include "oscar/status.h"

namespace oscar {

// Weights of an FP8 matrix [outputs, inputs] that share a scale: blocks of rows x columns, those at
// the ends cut short. A weight is its code times its block's scale.
struct Fp8Tiles {
  int64_t rows = 1, columns = 1;
  int64_t NumRows(int64_t outputs) const { return (outputs + rows - 1) / rows; }
  int64_t NumColumns(int64_t inputs) const { return (inputs + columns - 1) / columns; }
  friend bool operator==(const Fp8Tiles&, const Fp8Tiles&) = default;
};

struct WeightRows {
  int64_t first = 0, count = 0;
};

// Codes of 4 random bits have a root mean square of 2.93: with this scale, 0.023.
inline constexpr uint8_t kRandomMxfp4Scale = 120;

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // Rows of the first dimension of a tensor of this shape. Errors name the tensor, what it is and
  // what was wanted. FP8 and MXFP4 matrices come multiplied out. REQUIRES: rows within the shape,
  // `out` of their size.
  virtual Status LoadRows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                          std::span<float> out) const = 0;
  // As LoadRows, rounded to BF16 (exactly the stored numbers where they are BF16).
  virtual Status LoadBf16Rows(const std::string& name, std::span<const int64_t> shape,
                              WeightRows rows, std::span<Bf16> out) const = 0;
  // All rows.
  Status Load(const std::string& name, std::span<const int64_t> shape, std::span<float> out) const {
    return LoadRows(name, shape, {0, shape[0]}, out);
  }
  Status LoadBf16(const std::string& name, std::span<const int64_t> shape,
                  std::span<Bf16> out) const {
    return LoadBf16Rows(name, shape, {0, shape[0]}, out);
  }
  // Where a matrix is FP8 E4M3 (base/fp8.h): how its scales lie; its codes [outputs, inputs], none
  // of them NaN, and its scales [NumRows, NumColumns].
  virtual Result<std::optional<Fp8Tiles>> Fp8Of(const std::string& name, int64_t outputs,
                                                int64_t inputs) const;
  virtual Status LoadFp8(const std::string& name, int64_t outputs, int64_t inputs,
                         std::span<uint8_t> codes, std::span<float> scales) const;
  // Whether a matrix is MXFP4 (base/mxfp4.h); its codes [outputs, inputs / 2] and the scales of its
  // blocks [outputs, inputs / 32], in the range that makes every number a normal BF16.
  virtual Result<bool> IsMxfp4(const std::string&, int64_t, int64_t) const { return false; }
  virtual Status LoadMxfp4(const std::string& name, int64_t outputs, int64_t inputs,
                           std::span<uint8_t> codes, std::span<uint8_t> scales) const;
  virtual bool Has(const std::string& name) const = 0;
  // Whether a tensor of this shape can be loaded, as Load would say it, from its description alone.
  virtual Status CheckShape(const std::string&, std::span<const int64_t>) const { return {}; }
  // Random sources: the Philox (seed, stream) that Load's numbers of this name come from, so that a
  // device can sample the same ones itself.
  virtual std::optional<std::pair<uint64_t, uint64_t>> RandomStream(const std::string&) const {
    return std::nullopt;
  }
  // The same where LoadMxfp4's codes are its words as they are, and every block's scale is
  // kRandomMxfp4Scale.
  virtual std::optional<std::pair<uint64_t, uint64_t>> RandomMxfp4Stream(const std::string&) const {
    return std::nullopt;
  }
  // Identifies the weights in caches and rotation files.
  virtual uint64_t Fingerprint() const = 0;
};

// `blocks`: of FP8 matrices whose scales are for blocks; those for rows or the whole matrix are
// known by their shape. Scales are looked for beside a matrix as NAME_scale_inv and NAME_scale.
Result<std::unique_ptr<WeightSource>> OpenCheckpointWeights(const std::string& directory,
                                                            Fp8Tiles blocks = {128, 128});
// Whether the source has every tensor of the table in its shape, before room is made for any: a
// config may promise what no memory holds, and what the last layer lacks is told before the others
// are read.
Status CheckTensors(const WeightSource& source, const TensorTable& table);
// Matrices of as many inputs, one below the other, as slices of inputs with a scale each: inputs
// per scale where all of them are FP8 and slices are alike and of whole steps of 32; 0: multiply
// out.
Result<int64_t> ScaleInputsOf(const WeightSource& source,
                              std::span<const TensorDecl* const> tensors);
// Where a config ties the head to the embedding, the checkpoint has the last word: a head of its
// own beside the embedding was trained apart from it and is used, and one alone is the embedding as
// well. Changes `spec`; true where the model has become larger by a head.
Result<bool> FollowCheckpoint(const WeightSource& source, ModelSpec* spec);
// Gaussian matrices of standard deviation 0.02 and unit norms: the right shapes and magnitudes, no
// meaning. The same seed gives the same model. `mxfp4_experts`: as gpt-oss has them.
std::unique_ptr<WeightSource> MakeRandomWeights(uint64_t seed, bool mxfp4_experts = false);
// The layers' matrices of `source`, rounded to BF16, as FP8 with one scale per output or block, (the
// largest magnitude) / 448; embedding and head stay as they are.
std::unique_ptr<WeightSource> QuantizeWeights(std::unique_ptr<WeightSource> source,
                                              const ModelSpec& spec,
                                              std::optional<Fp8Tiles> blocks = {});

// One row of it: codes and the scale.
float QuantizeRowToFp8(std::span<const Bf16> row, std::span<uint8_t> codes);

}  // namespace oscar
