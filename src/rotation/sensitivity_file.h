// What two bits cost each KV head of a model (quant/bit_map.h), as `oscar calibrate` measures it
// and as it lies on disk: sensitivity.json, alone in a directory or beside a rotation
// (docs/rotation-file.md). Whatever is read is validated. Free functions; plain values.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"
#include "quant/bit_map.h"

namespace oscar {

inline constexpr char kSensitivityFileName[] = "sensitivity.json";

struct Sensitivities {
  std::string model_fingerprint;
  std::string rotation = "hadamard";  // measured under it: "hadamard" or "calibrated"
  std::string measure = "kl";         // "kl": end to end; "proxy": from noise and attention alone
  int64_t tokens = 0;                 // answers' tokens that were compared, or those captured
  std::map<int, std::vector<HeadSensitivity>> layers;  // by layer id, then KV head

  friend bool operator==(const Sensitivities&, const Sensitivities&) = default;
};

// A file, or a directory that holds one under its name. Errors name the file.
Result<Sensitivities> ReadSensitivities(const std::filesystem::path& path);
Status WriteSensitivities(const std::filesystem::path& path, const Sensitivities& sensitivities);
Result<Sensitivities> ParseSensitivities(std::string_view text, std::string_view what);
std::string SensitivitiesToJson(const Sensitivities& sensitivities);

// In the order of a model's layers with a cache. kInvalidArgument where layers or heads are not the
// model's.
Result<SensitivityMap> MapOf(const Sensitivities& sensitivities, std::span<const int> layer_ids,
                             int num_kv_heads);

}  // namespace oscar
