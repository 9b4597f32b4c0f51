// Rotations on disk: our rotation.safetensors (docs/rotation-file.md) and the .pt pairs of the
// published RotationZoo. Whatever is read is validated: shapes, finiteness, orthogonality. Writes
// are atomic, and equal rotations give equal bytes. Free functions; safe from any thread.
#pragma once

#include <filesystem>
#include <utility>

#include "oscar/status.h"
#include "rotation/rotation.h"

namespace oscar {

inline constexpr char kRotationFileName[] = "rotation.safetensors";
inline constexpr char kRotationFormatVersion[] = "1";
// Beside a model's weights: where its calibration is looked for.
inline constexpr char kRotationFolderName[] = "rotation";
// Where a calibration keeps the published form, beside its rotation.safetensors.
inline constexpr char kZooDirectoryName[] = "zoo";

struct ZooPaths {
  std::filesystem::path k;
  std::filesystem::path v;
};

// Loads a .safetensors file, a directory (rotation.safetensors, or else its one k_*.pt and v_*.pt),
// or one .pt of a pair (the other lies beside it: its namesake, or the only one of its side).
// `tolerance` bounds max |R R^T - I|; pass infinity to look at a broken file.
Result<Rotation> LoadRotation(const std::filesystem::path& path,
                              double tolerance = kOrthogonalityTolerance);

// Whether a directory has a rotation in either format.
bool HasRotation(const std::filesystem::path& directory);

Result<Rotation> ReadRotationFile(const std::filesystem::path& path,
                                  double tolerance = kOrthogonalityTolerance);
Status WriteRotationFile(const std::filesystem::path& path, const Rotation& rotation);

// A .pt pair names no model and no clip: clips are the published ones; eigenvalues are ones where a
// file lacks them.
Result<Rotation> ReadZooPair(const ZooPaths& paths, double tolerance = kOrthogonalityTolerance);
Result<ZooPaths> FindZooPair(const std::filesystem::path& directory);
bool IsZooFile(const std::filesystem::path& path);  // named k_*.pt or v_*.pt
// What WriteZooPair calls its files.
ZooPaths ZooPairPaths(const std::filesystem::path& directory, const RotationInfo& info);
// Writes {k,v}_rotation_<objective>_<composition>.pt into `directory`, which is made where missing.
// The format has one matrix per layer: per-head rotations are refused.
Result<ZooPaths> WriteZooPair(const std::filesystem::path& directory, const Rotation& rotation);

}  // namespace oscar
