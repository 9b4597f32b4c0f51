// What a calibration found, as JSON and as a page.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "calibrate/calibrate.h"
#include "report/charts.h"

namespace oscar {
namespace {

using nlohmann::ordered_json;

std::vector<double> Descending(std::span<const float> values) {
  std::vector<double> out(values.begin(), values.end());
  std::sort(out.rbegin(), out.rend());
  return out;
}

// The mean over heads of a side's sorted spectrum.
std::vector<double> MeanSpectrum(const SideRotation& side) {
  std::vector<double> mean;
  for (int head = 0; head < side.num_heads; ++head) {
    const std::vector<double> one = Descending(side.EigenvaluesOf(head));
    mean.resize(one.size());
    for (size_t i = 0; i < one.size(); ++i) mean[i] += one[i] / side.num_heads;
  }
  return mean;
}

ordered_json SideToJson(const SideRotation& side, const std::vector<std::vector<double>>& curves) {
  ordered_json out = {{"matrices", side.num_heads}, {"clip", side.clip}};
  for (int head = 0; head < side.num_heads; ++head) {
    out["eigenvalues"].push_back(Descending(side.EigenvaluesOf(head)));
  }
  if (!curves.empty()) out["clip_curves"] = curves;
  return out;
}

std::string Spectra(const Calibration& c, bool keys) {
  std::vector<ChartSeries> series;
  for (const auto& [id, layer] : c.rotation.layers) {
    ChartSeries line{fmt::format("layer {}", id), {}, MeanSpectrum(keys ? layer.k : layer.v), -1};
    double sum = 0;
    for (const double value : line.y) sum += value;
    // Without a spectrum: a Hadamard or a rotation that was given.
    if (!(sum > 0) || line.y.front() == line.y.back()) continue;
    for (size_t i = 0; i < line.y.size(); ++i) {
      line.x.push_back(static_cast<double>(i + 1));
      line.y[i] *= static_cast<double>(line.y.size()) / sum;
    }
    series.push_back(std::move(line));
  }
  if (series.empty()) return {};
  ChartOptions options;
  options.title = keys ? "Spectrum of the K objective" : "Spectrum of the V objective";
  options.x.label = "eigenvalue, largest first";
  options.y.label = "over their mean";
  options.y.log_scale = true;
  return LineChart(series, options);
}

std::string ClipCurves(const Calibration& c, bool keys) {
  std::vector<ChartSeries> series;
  for (const auto& [id, layer] : c.layers) {
    const auto& curves = keys ? layer.k_clip_curves : layer.v_clip_curves;
    if (curves.empty()) continue;
    ChartSeries line{fmt::format("layer {}", id), {}, {}, -1};
    for (size_t i = 0; i < c.clip_candidates.size(); ++i) {
      double mean = 0;
      for (const auto& curve : curves) mean += curve[i] / static_cast<double>(curves.size());
      // Ratio 0 is no clip, which is what 1 would be on this axis.
      line.x.push_back(c.clip_candidates[i] == 0 ? 1.0 : c.clip_candidates[i]);
      line.y.push_back(mean);
    }
    series.push_back(std::move(line));
  }
  if (series.empty()) return {};
  ChartOptions options;
  options.title = keys ? "K: error by clip ratio" : "V: error by clip ratio";
  options.x.label = "clip ratio (1: no clip)";
  options.y.label = "weighted error, no clip = 1";
  return LineChart(series, options);
}

struct MeanError {
  double k = 0, v = 0;  // over layers
};
std::optional<MeanError> MeanErrorOf(const Calibration& c, std::string_view label) {
  for (const auto& [name, errors] : c.errors) {
    if (name != label || errors.empty()) continue;
    MeanError mean;
    const auto layers = static_cast<double>(errors.size());
    for (const auto& [k, v] : errors) mean.k += k / layers, mean.v += v / layers;
    return mean;
  }
  return std::nullopt;
}

std::string ErrorMap(const Calibration& c, bool keys) {
  std::vector<std::string> rows, columns;
  std::vector<std::vector<double>> values;
  for (const auto& [label, errors] : c.errors) {
    rows.push_back(label);
    values.emplace_back();
    for (const auto& [k, v] : errors) values.back().push_back(keys ? k : v);
    columns.clear();
    for (const auto& [layer, sides] : c.rotation.layers) columns.push_back(std::to_string(layer));
  }
  ChartOptions options;
  // Both maps in the same colours.
  for (const auto& [label, errors] : c.errors) {
    for (const auto& [k, v] : errors) {
      for (const double error : {k, v}) {
        if (!(error > 0)) continue;
        options.y.low = std::min(options.y.low.value_or(error), error);
        options.y.high = std::max(options.y.high.value_or(error), error);
      }
    }
  }
  options.title = keys ? "Relative error of the logits at 2 bits" : "Relative error of V at 2 bits";
  options.x.label = "layer";
  return HeatMap(rows, columns, values, options);
}

}  // namespace

CalibrationVerdict VerdictOf(const Calibration& c) {
  const auto fitted = MeanErrorOf(c, "oscar+, this rotation");
  const auto hadamard = MeanErrorOf(c, "oscar+, Hadamard");
  if (!fitted || !hadamard) {
    return {"No verdict", "the text is too short to fill a page, so no errors were measured.", ""};
  }
  const double k = 100 * (fitted->k / hadamard->k - 1), v = 100 * (fitted->v / hadamard->v - 1);
  CalibrationVerdict verdict{"Neither better nor worse than the Hadamard",
                             "compare both with oscar eval before you use it.", ""};
  if (k < 0 && v < 0) verdict = {"Better than the Hadamard", "use this rotation.", ""};
  if (k > 0 && v > 0) verdict = {"Worse than the Hadamard", "leave --rotation out.", ""};
  verdict.figures = fmt::format(
      "Relative error with oscar+, mean over layers: logits {:.4f} against {:.4f} with the "
      "Hadamard ({:+.1f} %), V {:.4f} against {:.4f} ({:+.1f} %), on {}.",
      fitted->k, hadamard->k, k, fitted->v, hadamard->v, v,
      c.held_out_tokens > 0
          ? fmt::format("{} held-out tokens", c.held_out_tokens)
          : std::string("the text of the fit: the data has no further tokens to hold out"));
  return verdict;
}

std::string CalibrationToJson(const Calibration& c) {
  ordered_json out = {{"format", "oscar-calibration-1"}};
  AddStrings(c.rotation.info, out);
  out["sequences"] = c.num_sequences;
  out["tokens"] = c.num_tokens;
  out["generated_tokens"] = c.generated_tokens;
  out["held_out_tokens"] = c.held_out_tokens;
  if (!c.clip_candidates.empty()) out["clip_candidates"] = c.clip_candidates;
  for (const auto& [id, layer] : c.rotation.layers) {
    const FittedLayer& fitted = c.layers.at(id);
    out["layers"].push_back({{"layer", id},
                             {"k", SideToJson(layer.k, fitted.k_clip_curves)},
                             {"v", SideToJson(layer.v, fitted.v_clip_curves)}});
  }
  for (const auto& [label, errors] : c.errors) {
    ordered_json k = ordered_json::array(), v = ordered_json::array();
    for (const auto& [k_error, v_error] : errors) k.push_back(k_error), v.push_back(v_error);
    out["errors"].push_back({{"method", label}, {"k_logits", k}, {"v", v}});
  }
  return out.dump(1) + "\n";
}

std::string CalibrationToHtml(const Calibration& c) {
  const RotationInfo& info = c.rotation.info;
  const CalibrationVerdict verdict = VerdictOf(c);
  std::string body = fmt::format("<p class=\"verdict\"><b>{}</b>: {}</p>\n<p>{}</p>\n",
                                 verdict.finding, verdict.advice, verdict.figures);
  body += fmt::format(
      "<p class=\"note\">K objective {}, V objective {}, composition {}, clips {}. {} sequences, "
      "{} "
      "tokens of text and {} generated. calibration.json has the fingerprints of model and "
      "data.</p>\n",
      EscapeHtml(info.k_objective), EscapeHtml(info.v_objective), EscapeHtml(info.composition),
      EscapeHtml(info.clip_source), c.num_sequences, c.num_tokens, c.generated_tokens);
  const auto pair = [&](const std::string& a, const std::string& b) {
    body += "<div class=\"charts\"><div>" + a + "</div><div>" + b + "</div></div>\n";
  };
  if (!c.errors.empty()) {
    body +=
        "<h2>Error before and after</h2>\n<p class=\"note\">Rows through real pages, every token "
        "quantised. Lower error of a row is not a better answer by itself: oscar+ trades it for "
        "logits without bias.</p>\n";
    pair(ErrorMap(c, true), ErrorMap(c, false));
  }
  const std::string k_spectra = Spectra(c, true), v_spectra = Spectra(c, false);
  if (!k_spectra.empty() || !v_spectra.empty()) {
    body += "<h2>Spectra</h2>\n<p class=\"note\">Mean over heads.</p>\n";
    pair(k_spectra, v_spectra);
  }
  if (!c.clip_candidates.empty()) {
    body +=
        "<h2>Clip ratios</h2>\n<p class=\"note\">Keys weighted by the query second moment, "
        "values by the attention their tokens get; mean over heads.</p>\n";
    pair(ClipCurves(c, true), ClipCurves(c, false));
  }
  return HtmlPage("Calibration", body);
}

}  // namespace oscar
