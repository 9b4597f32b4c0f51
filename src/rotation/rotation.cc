#include "rotation/rotation.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/check.h"
#include "numeric/hadamard.h"
#include "numeric/matrix.h"
#include "rotation/recipe.h"

namespace oscar {
namespace {

Status ValidateSide(const SideRotation& side, int layer, char name, int dim, double tolerance) {
  const auto heads = static_cast<size_t>(side.num_heads);
  const auto d = static_cast<size_t>(dim);
  if (side.num_heads < 1 || side.num_heads > kMaxRotationHeads) {
    return DataLoss(fmt::format("layer {} {}: {} matrices; between 1 and {} are allowed", layer,
                                name, side.num_heads, kMaxRotationHeads));
  }
  if (side.matrices.size() != heads * d * d || side.eigenvalues.size() != heads * d ||
      side.clip.size() != heads) {
    return DataLoss(fmt::format(
        "layer {} {}: {} matrix elements, {} eigenvalues and {} clips do not make {} heads of "
        "dimension {}",
        layer, name, side.matrices.size(), side.eigenvalues.size(), side.clip.size(), heads, dim));
  }
  if (!AllFinite(side.eigenvalues)) {
    return DataLoss(fmt::format("layer {} {}: an eigenvalue is not finite", layer, name));
  }
  for (int head = 0; head < side.num_heads; ++head) {
    const float clip = side.ClipOf(head);
    if (!(clip >= 0.0f && clip <= 1.0f)) {
      return DataLoss(fmt::format("layer {} {}, head {}: clip ratio {} is not in [0, 1]", layer,
                                  name, head, clip));
    }
    const double error = OrthogonalityError(Matrix::FromFloats(side.MatrixOf(head), dim, dim));
    if (!(error <= tolerance)) {
      return DataLoss(
          fmt::format("layer {} {}, head {}: not a rotation: max |R R^T - I| is {:.3g}, above the "
                      "tolerance of {:.3g}; fit or download the file again",
                      layer, name, head, error, tolerance));
    }
  }
  return {};
}

SideRotation MultiplySides(const SideRotation& a, const SideRotation& b, int dim) {
  SideRotation product;
  const int heads = std::max(a.num_heads, b.num_heads);
  for (int head = 0; head < heads; ++head) {
    const auto eigenvalues = a.EigenvaluesOf(head);
    AppendHead(product,
               Multiply(Matrix::FromFloats(a.MatrixOf(head), dim, dim),
                        Matrix::FromFloats(b.MatrixOf(head), dim, dim)),
               std::vector<double>(eigenvalues.begin(), eigenvalues.end()), a.ClipOf(head));
  }
  return product;
}

}  // namespace

std::span<const float> SideRotation::MatrixOf(int kv_head) const {
  const size_t size = matrices.size() / static_cast<size_t>(num_heads);
  return std::span(matrices).subspan(IndexOf(kv_head) * size, size);
}

std::span<const float> SideRotation::EigenvaluesOf(int kv_head) const {
  const size_t size = eigenvalues.size() / static_cast<size_t>(num_heads);
  return std::span(eigenvalues).subspan(IndexOf(kv_head) * size, size);
}

const LayerRotation* Rotation::Find(int layer) const {
  const auto found = layers.find(layer);
  return found == layers.end() ? nullptr : &found->second;
}

void AppendHead(SideRotation& side, const Matrix& matrix, std::span<const double> eigenvalues,
                float clip) {
  OSCAR_CHECK(matrix.rows() == matrix.cols() &&
              eigenvalues.size() == static_cast<size_t>(matrix.rows()));
  const std::vector<float> values = matrix.ToFloats();
  side.matrices.insert(side.matrices.end(), values.begin(), values.end());
  for (const double x : eigenvalues) side.eigenvalues.push_back(static_cast<float>(x));
  side.clip.push_back(clip);
  ++side.num_heads;
}

OrthogonalityReport MeasureOrthogonality(const Rotation& rotation) {
  OrthogonalityReport report;
  const int dim = rotation.head_dim;
  for (const auto& [layer, sides] : rotation.layers) {
    double errors[2] = {0, 0};
    for (const int side_idx : {0, 1}) {
      const SideRotation& side = side_idx == 0 ? sides.k : sides.v;
      for (int head = 0; head < side.num_heads; ++head) {
        const double error = OrthogonalityError(Matrix::FromFloats(side.MatrixOf(head), dim, dim));
        errors[side_idx] = std::max(errors[side_idx], error);
        if (report.layer < 0 || error > report.max_error) {
          report.max_error = error;
          report.layer = layer;
          report.side = side_idx == 0 ? 'k' : 'v';
          report.head = head;
        }
      }
    }
    report.by_layer[layer] = {errors[0], errors[1]};
  }
  return report;
}

Status ValidateRotation(const Rotation& rotation, double tolerance) {
  if (rotation.head_dim < 1 || rotation.head_dim > kMaxRotationDim) {
    return DataLoss(fmt::format("head dimension {}; between 1 and {} are allowed",
                                rotation.head_dim, kMaxRotationDim));
  }
  if (rotation.layers.empty()) return DataLoss("no layers");
  if (rotation.layers.size() > kMaxRotationLayers) {
    return DataLoss(fmt::format("{} layers; at most {} are allowed", rotation.layers.size(),
                                kMaxRotationLayers));
  }
  for (const auto& [layer, sides] : rotation.layers) {
    OSCAR_RETURN_IF_ERROR(ValidateSide(sides.k, layer, 'k', rotation.head_dim, tolerance));
    OSCAR_RETURN_IF_ERROR(ValidateSide(sides.v, layer, 'v', rotation.head_dim, tolerance));
  }
  return {};
}

Status CheckRotationFits(const Rotation& rotation, std::span<const int> layer_ids, int head_dim,
                         int num_kv_heads, std::string_view model_fingerprint,
                         std::span<const int> unused_ids) {
  if (rotation.head_dim != head_dim) {
    return InvalidArgument(
        fmt::format("the rotation is for head dimension {}, the model has {}; use the rotation "
                    "that was calibrated on this model",
                    rotation.head_dim, head_dim));
  }
  const std::set<int> wanted(layer_ids.begin(), layer_ids.end());
  for (const int layer : wanted) {
    if (rotation.Find(layer) == nullptr) {
      return InvalidArgument(fmt::format(
          "the rotation has no layer {} ({} layers; the model has {}); use the rotation that was "
          "calibrated on this model",
          layer, rotation.layers.size(), wanted.size()));
    }
  }
  for (const auto& [layer, sides] : rotation.layers) {
    if (!wanted.contains(layer) && std::ranges::find(unused_ids, layer) == unused_ids.end()) {
      return InvalidArgument(
          fmt::format("the rotation has layer {}, which the model has not ({} layers; the model "
                      "has {}); use the "
                      "rotation that was calibrated on this model",
                      layer, rotation.layers.size(), wanted.size()));
    }
    for (const SideRotation* side : {&sides.k, &sides.v}) {
      if (side->num_heads != 1 && side->num_heads != num_kv_heads) {
        return InvalidArgument(fmt::format(
            "the rotation has {} matrices in layer {}, the model {} KV heads; expected 1 or {}",
            side->num_heads, layer, num_kv_heads, num_kv_heads));
      }
    }
  }
  if (!rotation.info.model_fingerprint.empty() && !model_fingerprint.empty() &&
      rotation.info.model_fingerprint != model_fingerprint) {
    return InvalidArgument(fmt::format(
        "the rotation was calibrated on another model (fingerprint {}, this model's is {}); "
        "calibrate again",
        rotation.info.model_fingerprint, model_fingerprint));
  }
  return {};
}

Result<Rotation> MakeDataFreeRotation(std::string_view objective, std::span<const int> layer_ids,
                                      int head_dim) {
  if (head_dim < 1 || head_dim > kMaxRotationDim) {
    return Unexpected(InvalidArgument(
        fmt::format("head dimension {}; between 1 and {} are allowed", head_dim, kMaxRotationDim)));
  }
  if (layer_ids.empty() || layer_ids.size() > kMaxRotationLayers) {
    return Unexpected(InvalidArgument(fmt::format("{} layers; between 1 and {} are allowed",
                                                  layer_ids.size(), kMaxRotationLayers)));
  }
  Matrix matrix;
  if (objective == NameOf(Objective::kHadamard)) {
    if (!IsPowerOfTwo(head_dim)) {
      return Unexpected(InvalidArgument(fmt::format(
          "a Hadamard matrix of order {} does not exist here: it must be a power of two",
          head_dim)));
    }
    matrix = HadamardMatrix(head_dim);
  } else if (objective == NameOf(Objective::kIdentity)) {
    matrix = Matrix::Identity(head_dim);
  } else {
    return Unexpected(InvalidArgument(
        fmt::format("objective '{}' needs data; only hadamard and identity do not", objective)));
  }
  Rotation rotation;
  rotation.head_dim = head_dim;
  rotation.info.k_objective = rotation.info.v_objective = objective;
  rotation.info.composition = NameOf(Composition::kPlain);
  rotation.info.clip_source = "published";
  const std::vector<double> ones(static_cast<size_t>(head_dim), 1.0);
  for (const int layer : layer_ids) {
    LayerRotation sides;
    AppendHead(sides.k, matrix, ones, kPublishedKClip);
    AppendHead(sides.v, matrix, ones, kPublishedVClip);
    rotation.layers[layer] = std::move(sides);
  }
  return rotation;
}

Result<Rotation> MultiplyRotations(const Rotation& a, const Rotation& b) {
  if (a.head_dim != b.head_dim) {
    return Unexpected(InvalidArgument(fmt::format(
        "cannot multiply rotations of head dimension {} and {}", a.head_dim, b.head_dim)));
  }
  Rotation product;
  product.head_dim = a.head_dim;
  product.info = a.info;
  product.info.composition = fmt::format("{}*({}_{} {})", a.info.composition, b.info.k_objective,
                                         b.info.v_objective, b.info.composition);
  for (const auto& [layer, left] : a.layers) {
    const LayerRotation* right = b.Find(layer);
    if (right == nullptr) {
      return Unexpected(InvalidArgument(
          fmt::format("layer {} is in the first rotation and not in the second", layer)));
    }
    for (const auto& [x, y] : {std::pair(&left.k, &right->k), std::pair(&left.v, &right->v)}) {
      if (x->num_heads != y->num_heads && x->num_heads != 1 && y->num_heads != 1) {
        return Unexpected(InvalidArgument(
            fmt::format("layer {}: {} matrices times {}", layer, x->num_heads, y->num_heads)));
      }
    }
    product.layers[layer] = {MultiplySides(left.k, right->k, a.head_dim),
                             MultiplySides(left.v, right->v, a.head_dim)};
  }
  if (product.layers.size() != b.layers.size()) {
    return Unexpected(InvalidArgument(fmt::format("the first rotation has {} layers, the second {}",
                                                  a.layers.size(), b.layers.size())));
  }
  return product;
}

}  // namespace oscar
