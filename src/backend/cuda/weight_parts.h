// What laying weights out and loading them agree on. Internal to the module.
#pragma once

#include <span>
#include <utility>

#include "arch/tensor_table.h"
#include "backend/backend.h"
#include "cuda/device_weights.h"

namespace oscar::cuda {

// The K rotation as matrices, where the write kernel has no form for it.
inline int NumMatrices(const SideTransform& transform) {
  if (transform.kind == RotationKind::kCalibrated) return transform.num_matrices;
  return transform.kind == RotationKind::kBlockHadamard ? 1 : 0;
}

inline constexpr Role kExpertGateUp[] = {Role::kExpertGate, Role::kExpertUp},
                      kExpertAlternating[] = {Role::kExpertGateUp},
                      kExpertDown[] = {Role::kExpertDown};
inline std::span<const Role> GateUpOf(const ExpertsSpec& experts) {
  return experts.alternates_gate_up ? std::span<const Role>(kExpertAlternating) : kExpertGateUp;
}

// The dense or shared part of a layer's feed-forward: its matrices, or none.
inline std::span<const std::pair<LayerMatrix, DeviceMatrix DeviceLayer::*>> DensePartOf(
    const LayerSpec& layer) {
  static constexpr std::pair<LayerMatrix, DeviceMatrix DeviceLayer::*> kDense[] = {
      {LayerMatrix::kGateUp, &DeviceLayer::gate_up}, {LayerMatrix::kDown, &DeviceLayer::down}};
  static constexpr std::pair<LayerMatrix, DeviceMatrix DeviceLayer::*> kShared[] = {
      {LayerMatrix::kSharedGateUp, &DeviceLayer::gate_up},
      {LayerMatrix::kSharedDown, &DeviceLayer::down}};
  if (layer.dense() != nullptr) return kDense;
  if (layer.experts()->shared_intermediate > 0) return kShared;
  return {};
}

}  // namespace oscar::cuda
