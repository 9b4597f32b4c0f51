// Rotations: for each layer the orthogonal matrices that keys and values are multiplied by before
// they are quantised (row vectors: x R), with the eigenvalues they were ordered by and the clip
// ratios that go with them. One matrix per layer (shared by all KV heads) or one per KV head.
// Layers may have gaps: hybrid models have attention in some layers only. A plain value; immutable
// use is thread-safe. On disk: docs/rotation-file.md.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/status.h"

namespace oscar {

class Matrix;

inline constexpr int kMaxRotationDim = 1024;
inline constexpr int kMaxRotationHeads = 1024;
inline constexpr int kMaxRotationLayers = 4096;
// Largest max |R R^T - I| that a rotation may have. Fitted ones are near 3e-8 (fp32 storage,
// measured in fp64); at 1e-3 the logits are wrong by about the rounding of BF16, so what is above
// is not a rotation.
inline constexpr double kOrthogonalityTolerance = 1e-3;

// Ratios of the published recipe; 0 is off.
inline constexpr float kPublishedKClip = 0.96f;
inline constexpr float kPublishedVClip = 0.92f;

// The matrices of one side (K or V) of one layer.
struct SideRotation {
  int num_heads = 0;               // n: 1 (shared) or the number of KV heads
  std::vector<float> matrices;     // [n, D, D]
  std::vector<float> eigenvalues;  // [n, D]; ones where the rotation is data-free
  std::vector<float> clip;         // [n], in [0, 1]; 0 is off

  // Entry of a KV head: 0 where the layer shares one matrix.
  size_t IndexOf(int kv_head) const { return num_heads == 1 ? 0 : static_cast<size_t>(kv_head); }
  std::span<const float> MatrixOf(int kv_head) const;
  std::span<const float> EigenvaluesOf(int kv_head) const;
  float ClipOf(int kv_head) const { return clip[IndexOf(kv_head)]; }

  friend bool operator==(const SideRotation&, const SideRotation&) = default;
};

struct LayerRotation {
  SideRotation k;
  SideRotation v;
  friend bool operator==(const LayerRotation&, const LayerRotation&) = default;
};

// Where a rotation came from. Strings as the file has them; empty means not known.
struct RotationInfo {
  std::string k_objective;        // "qqt", "hadamard", ...
  std::string v_objective;        // "sst", ...
  std::string composition;        // "r_h_pbr", ...
  std::string clip_source;        // "published", "given" or "fitted"
  std::string model_fingerprint;  // of the model that the calibration ran on
  std::string calibration_hash;   // of the Q, K and V that were fitted
  int64_t calibration_tokens = 0;
  friend bool operator==(const RotationInfo&, const RotationInfo&) = default;
};

// The strings above by the names they have in rotation files and in JSON.
inline constexpr std::pair<const char*, std::string RotationInfo::*> kRotationStrings[] = {
    {"k_objective", &RotationInfo::k_objective},
    {"v_objective", &RotationInfo::v_objective},
    {"composition", &RotationInfo::composition},
    {"clip_source", &RotationInfo::clip_source},
    {"model_fingerprint", &RotationInfo::model_fingerprint},
    {"calibration_hash", &RotationInfo::calibration_hash},
};
// As members of a JSON object or entries of a map.
template <typename Object>
void AddStrings(const RotationInfo& info, Object& out) {
  for (const auto& [name, field] : kRotationStrings) out[name] = info.*field;
}

struct Rotation {
  int head_dim = 0;
  RotationInfo info;
  std::map<int, LayerRotation> layers;  // by layer id

  // Null where the layer has none.
  const LayerRotation* Find(int layer) const;
};

// One matrix [D, D] and what it was ordered by, appended to a side. REQUIRES: square, D values.
void AppendHead(SideRotation& side, const Matrix& matrix, std::span<const double> eigenvalues,
                float clip);

struct OrthogonalityReport {
  double max_error = 0;
  int layer = -1;  // where the largest error is
  char side = 'k';
  int head = 0;
  std::map<int, std::pair<double, double>> by_layer;  // (k, v)
};
// max |R R^T - I| in fp64 over all matrices.
OrthogonalityReport MeasureOrthogonality(const Rotation& rotation);

// Shapes agree, everything is finite, clips lie in [0, 1], and matrices are orthogonal to
// `tolerance`. The message names layer, side, head, the error and the tolerance.
Status ValidateRotation(const Rotation& rotation, double tolerance = kOrthogonalityTolerance);

// Whether the rotation serves a model: the layer ids with attention, D and KV heads, and (where
// both sides know one) the fingerprint. Layers that are neither among these nor among `unused_ids`,
// which the file may have in vain, are an error too: the file is another model's.
Status CheckRotationFits(const Rotation& rotation, std::span<const int> layer_ids, int head_dim,
                         int num_kv_heads, std::string_view model_fingerprint,
                         std::span<const int> unused_ids = {});

// The same data-free matrix for every layer named: H for "hadamard", I for "identity".
Result<Rotation> MakeDataFreeRotation(std::string_view objective, std::span<const int> layer_ids,
                                      int head_dim);

// Layer by layer A B: first A, then B on its output. Shared matrices are repeated where the other
// side has one per head. Eigenvalues, clips and provenance are A's; the composition names both.
Result<Rotation> MultiplyRotations(const Rotation& a, const Rotation& b);

}  // namespace oscar
