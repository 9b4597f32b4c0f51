// Calibration: the model reads text on a BF16 cache, its queries, keys and values stream into
// second moments (nothing but sums is kept, whatever the number of tokens), and rotations and clip
// ratios are fitted to them. The text is read once a pass of the fit (rotation/statistics.h), which
// costs time and saves memory. The same inputs give the same bytes. One thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "calibrate/calibration_text.h"
#include "measure/head_sensitivity.h"
#include "oscar/options.h"
#include "oscar/status.h"
#include "rotation/statistics.h"

namespace oscar {

struct CalibrateOptions {
  ModelOptions model;  // the cache holds BF16: method, rotation, windows and clips are not used
  CalibrationTextOptions text;
  // Tokens that the model adds to each sequence, most likely first; they count beside the budget.
  int64_t generate = 0;
  FitOptions fit;
  // Dims that share one scale where clips are tried and errors measured; 0: as the cache has it.
  int group_dims = 0;
  std::filesystem::path dump;  // also write the captured rows there; empty: no
  bool show_progress = true;
};

struct Calibration {
  Rotation rotation;
  Rotation shared;                    // one matrix per layer, from the same moments
  std::map<int, FittedLayer> layers;  // moments, clip curves, rotations
  int64_t num_sequences = 0, num_tokens = 0, generated_tokens = 0;
  std::vector<float> clip_candidates;
  // Relative error of the logits and of V by layer: method label -> (K, V) per layer.
  // Empty where the data does not fill a page.
  std::vector<std::pair<std::string, std::vector<std::pair<double, double>>>> errors;
  // Tokens after the budget that errors are measured on; 0: there were too few, and errors are
  // measured on the text of the fit.
  int64_t held_out_tokens = 0;
};

Result<Calibration> Calibrate(const CalibrateOptions& options);

// How the sensitivities of heads are measured (measure/head_sensitivity.h).
enum class SensitivityMeasure : uint8_t {
  kAuto,  // end to end where the model has at most kMaxSidesEndToEnd sides, else the proxy
  kKl,
  kProxy,
};
// K and V of one KV head are two sides. End to end costs one reading of the answers for each.
inline constexpr int kMaxSidesEndToEnd = 128;
inline constexpr int64_t kSensitivityTokens = 150000;

struct SensitivityRequest {
  ModelOptions model;  // rotation: "none" (the Hadamard) or a fitted one
  // Of the text; the built-in sample has another seed than the fit's.
  CalibrationTextOptions text;
  SensitivityMeasure measure = SensitivityMeasure::kAuto;
  bool show_progress = true;
};
Result<SensitivityResult> CalibrateSensitivities(const SensitivityRequest& request);

// Whether WriteCalibration can write to `directory`, and would not leave a pair there that it does
// not replace: two rotations in one place would be ambiguous. Needs no fit, so that it can be asked
// first.
Status CheckCalibrationDirectory(const FitOptions& fit, const std::filesystem::path& directory);

// rotation.safetensors, calibration.json, calibration.html, and the shared form as a RotationZoo
// pair in zoo/.
Status WriteCalibration(const Calibration& calibration, const std::filesystem::path& directory);

// Whether the rotation is better than the Hadamard, which needs no calibration, and what to use: by
// the mean error over layers of oscar+ with either, on held-out text where there is some.
struct CalibrationVerdict {
  std::string finding;  // "Better than the Hadamard"
  std::string advice;   // "use this rotation."
  std::string figures;  // a sentence; empty where nothing was measured
};
CalibrationVerdict VerdictOf(const Calibration& calibration);
std::string CalibrationToJson(const Calibration& calibration);
std::string CalibrationToHtml(const Calibration& calibration);

}  // namespace oscar
