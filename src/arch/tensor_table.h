// TensorTable: the one list of the tensors that a model's checkpoint has, derived from its spec.
// Checking, loading, packing, counting and splitting over devices all read it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "arch/spec.h"

namespace oscar {

// How a tensor is kept in memory.
enum class TensorKind : uint8_t {
  kVector,      // norms, biases: fp32
  kTable,       // embedding and head: BF16, whatever the layers' matrices are
  kMatrix,      // of a layer: BF16, or FP8 where the checkpoint has it so
  kBf16Matrix,  // of a layer: BF16 always, with kMatrix below or above it
  kFp32Matrix,  // routers: a last bit decides which experts are read
};

// How a tensor is divided among ranks that share the heads and the feed-forward width.
enum class TensorSplit : uint8_t { kNone, kRows, kColumns };

struct TensorDecl {
  Role role = Role::kEmbedding;
  int layer = -1;   // -1: the model's
  int expert = -1;  // -1: the layer's
  std::string name;
  std::vector<int64_t> shape;  // [outputs, inputs] or [size]
  TensorKind kind = TensorKind::kVector;
  TensorSplit split = TensorSplit::kNone;
  float offset = 0.0f;  // added to what is stored: norms around 0 (ModelSpec::norm_offset)

  uint64_t num_elements() const {
    uint64_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<uint64_t>(extent);
    return count;
  }
};

// The matrices of a layer as passes use them; some are several tensors, one below the other.
enum class LayerMatrix : uint8_t {
  kQkv,
  kO,
  kGateUp,
  kDown,
  kSharedGateUp,
  kSharedDown,
  kStateIn,         // of linear attention
  kStateInGrouped,  // the same where LinearAttentionSpec::grouped_inputs
  kStateOut,
};
inline constexpr std::array kLayerMatrices = {
    LayerMatrix::kQkv,          LayerMatrix::kO,
    LayerMatrix::kGateUp,       LayerMatrix::kDown,
    LayerMatrix::kSharedGateUp, LayerMatrix::kSharedDown,
    LayerMatrix::kStateIn,      LayerMatrix::kStateInGrouped,
    LayerMatrix::kStateOut};
std::span<const Role> PartsOf(LayerMatrix matrix);
std::span<const Role> BiasesOf(LayerMatrix matrix);  // of its parts, or none

class TensorTable {
 public:
  explicit TensorTable(const ModelSpec& spec);

  std::span<const TensorDecl> tensors() const { return tensors_; }
  // Null where the model has none.
  const TensorDecl* Find(Role role, int layer = -1, int expert = -1) const;
  // REQUIRES: there is one.
  const TensorDecl& Get(Role role, int layer = -1, int expert = -1) const;

  uint64_t num_parameters() const;
  // Of those that one token goes through: of its experts, the routed ones.
  uint64_t num_active_parameters() const;
  // In BF16 (routers in fp32); or with a byte per weight of the layers' matrices that stay FP8, but
  // for those of V and the output where V's rotation is folded into them. Without FP8 scales. Or
  // with experts that stay MXFP4, their scales counted.
  enum class Fp8 : uint8_t { kNone, kExperts, kAll, kMxfp4Experts };
  uint64_t Bytes(Fp8 fp8, bool rotates_v) const;
  static uint64_t BytesOf(const TensorDecl& tensor, Fp8 fp8, bool rotates_v);

 private:
  void Add(Role role, int layer, int expert, std::vector<int64_t> shape, TensorKind kind,
           TensorSplit split);

  const ModelSpec* spec_;  // while the table is made
  uint64_t num_active_parameters_ = 0;
  std::vector<TensorDecl> tensors_;
  std::map<std::tuple<Role, int, int>, size_t> index_;
};

}  // namespace oscar
