#include "cli/calibrate_once.h"

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/log.h"
#include "rotation/rotation_file.h"

namespace oscar::cli {
namespace {

constexpr char kSettingsFile[] = "settings.json";
constexpr uint64_t kMaxSettingsBytes = 1 << 16;

}  // namespace

Status CalibrateOnce(const CalibrateOptions& options, const std::filesystem::path& directory) {
  const std::string text =
      options.text.data.empty() ? "the built-in sample" : options.text.data.string();
  const std::string settings = nlohmann::ordered_json{{"text", text},
                                                      {"tokens", options.text.tokens},
                                                      {"fitted_clips", options.fit.fit_clip},
                                                      {"k_clip", options.fit.k_clip},
                                                      {"v_clip", options.fit.v_clip},
                                                      {"per_head", options.fit.per_head_k}}
                                   .dump(2) +
                               "\n";
  const Result<std::string> before = ReadFile(directory / kSettingsFile, kMaxSettingsBytes);
  if (before.has_value() && *before == settings && HasRotation(directory)) {
    LogInfo("{}: calibrated before", directory.string());
    return {};
  }
  LogInfo("calibrating on {}, {} tokens", text, options.text.tokens);
  OSCAR_RETURN_IF_ERROR(CheckCalibrationDirectory(options.fit, directory));
  OSCAR_ASSIGN_OR_RETURN(const Calibration calibration, Calibrate(options));
  OSCAR_RETURN_IF_ERROR(WriteCalibration(calibration, directory));
  // Last: a run that was stopped before it calibrates again.
  return WriteFileAtomically(directory / kSettingsFile, settings);
}

}  // namespace oscar::cli
