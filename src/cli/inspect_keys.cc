#include "cli/inspect_keys.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "measure/key_profile.h"
#include "report/charts.h"
#include "text/tokenizer.h"

namespace oscar::cli {
namespace {

using nlohmann::ordered_json;

constexpr uint64_t kMaxPromptBytes = uint64_t{1} << 26;
// Rows of the map of one head's keys; tokens are joined to that many.
constexpr size_t kMaxMapRows = 32;

struct Summary {
  double mean = 0, most = 0;
};

Summary SummaryOf(const KeyStage& stage, double KeyShape::*member) {
  Summary out;
  int64_t count = 0;
  for (const auto& layer : stage.shapes) {
    for (const KeyShape& shape : layer) {
      out.mean += shape.*member;
      out.most = std::max(out.most, shape.*member);
      ++count;
    }
  }
  out.mean /= static_cast<double>(std::max<int64_t>(count, 1));
  return out;
}

ordered_json ProfileToJson(const KeyProfile& profile, const std::string& model) {
  ordered_json out = {{"kind", "keys"},
                      {"model", model},
                      {"method", profile.method},
                      {"tokens", profile.tokens},
                      {"norm_group", kProfileGroup},
                      {"layers", profile.layers},
                      {"stages", ordered_json::array()}};
  for (const KeyStage& stage : profile.stages) {
    ordered_json heads = ordered_json::array();
    for (size_t i = 0; i < stage.shapes.size(); ++i) {
      for (size_t h = 0; h < stage.shapes[i].size(); ++h) {
        const KeyShape& shape = stage.shapes[i][h];
        heads.push_back({{"layer", profile.layers[i]},
                         {"kv_head", h},
                         {"channel_outlier", shape.channel_outlier},
                         {"norm_imbalance", shape.norm_imbalance},
                         {"channel_rms", shape.channel_rms},
                         {"token_norms", shape.token_norms}});
      }
    }
    out["stages"].push_back({{"stage", stage.name}, {"heads", std::move(heads)}});
  }
  return out;
}

std::string TableOf(const KeyProfile& profile) {
  std::string out = fmt::format(
      "{} tokens, {} layers, {}\n\n{:<24} {:>26} {:>30}\n{:<24} {:>13} {:>12} {:>17} {:>12}\n",
      profile.tokens, profile.layers.size(), profile.method, "keys", "largest channel over median",
      fmt::format("norms, most over least of {}", kProfileGroup), "", "mean of heads", "worst head",
      "mean of heads", "worst head");
  for (const KeyStage& stage : profile.stages) {
    const Summary channels = SummaryOf(stage, &KeyShape::channel_outlier);
    const Summary norms = SummaryOf(stage, &KeyShape::norm_imbalance);
    out += fmt::format("{:<24} {:>13.2f} {:>12.2f} {:>17.3f} {:>12.3f}\n", stage.name,
                       channels.mean, channels.most, norms.mean, norms.most);
  }
  return out;
}

// One row a stage and head, one column a layer: all stages on one scale.
std::string MapOf(const KeyProfile& profile, double KeyShape::*member, const char* title) {
  std::vector<std::string> rows, columns;
  std::vector<std::vector<double>> values;
  for (const int layer : profile.layers) columns.push_back(std::to_string(layer));
  for (const KeyStage& stage : profile.stages) {
    // A rotation changes no norm.
    if (member == &KeyShape::norm_imbalance && stage.name == "rotated") continue;
    for (size_t h = 0; h < stage.shapes.front().size(); ++h) {
      rows.push_back(fmt::format("{}, head {}", stage.name, h));
      values.emplace_back();
      for (const auto& layer : stage.shapes) values.back().push_back(layer[h].*member);
    }
  }
  ChartOptions options;
  options.title = title;
  options.x.label = "layer";
  options.digits = 3;
  options.width = std::max(600, 240 + 38 * static_cast<int>(columns.size()));
  return HeatMap(rows, columns, values, options);
}

const KeyShape& ChosenShape(const KeyProfile& profile, const KeyStage& stage) {
  const auto index = std::ranges::find(profile.layers, profile.layer) - profile.layers.begin();
  return stage.shapes[static_cast<size_t>(index)][static_cast<size_t>(profile.kv_head)];
}

std::string HeadName(const KeyProfile& profile) {
  return fmt::format("layer {}, head {}", profile.layer, profile.kv_head);
}

// Channels by size, over their mean: stages have different units.
std::string SpectrumOf(const KeyProfile& profile) {
  std::vector<ChartSeries> series;
  for (const KeyStage& stage : profile.stages) {
    std::vector<double> sorted = ChosenShape(profile, stage).channel_rms;
    std::ranges::sort(sorted, std::greater<>());
    double mean = 0;
    for (const double x : sorted) mean += x / static_cast<double>(sorted.size());
    // Over the line before it, which it may cover.
    ChartSeries line{stage.name, {}, {}, -1, stage.name.starts_with("divided")};
    for (size_t i = 0; i < sorted.size(); ++i) {
      line.x.push_back(static_cast<double>(i + 1));
      line.y.push_back(sorted[i] / std::max(mean, 1e-30));
    }
    series.push_back(std::move(line));
  }
  ChartOptions options;
  options.title = "Channels of K, largest first: " + HeadName(profile);
  options.x.label = "channel, by size";
  options.x.low = 0;
  options.x.high =
      static_cast<double>(ChosenShape(profile, profile.stages.front()).channel_rms.size());
  options.y.label = "root mean square over their mean";
  options.y.low = 0;
  return LineChart(series, options);
}

// A rotation changes no norm, so it has no line here.
std::string NormsOf(const KeyProfile& profile) {
  std::vector<ChartSeries> series;
  for (const KeyStage& stage : profile.stages) {
    if (stage.name == "rotated") continue;
    const std::vector<double>& norms = ChosenShape(profile, stage).token_norms;
    double mean = 0;
    for (const double x : norms) mean += x / static_cast<double>(norms.size());
    ChartSeries line{stage.name, {}, {}, kPlainColor + 2 * static_cast<int>(series.size())};
    for (size_t t = 0; t < norms.size(); ++t) {
      line.x.push_back(static_cast<double>(t));
      line.y.push_back(norms[t] / std::max(mean, 1e-30));
    }
    series.push_back(std::move(line));
  }
  ChartOptions options;
  options.title = "Norms of keys: " + HeadName(profile);
  options.x.label = "token";
  options.x.low = 0, options.x.high = static_cast<double>(profile.tokens);
  options.y.label = "norm over their mean";
  options.y.low = 0;
  return LineChart(series, options);
}

// |k| over its mean; what a quantiser is given at a stage. `most` of the scale.
std::string MagnitudesOf(const KeyProfile& profile, const KeyStage& stage, double most) {
  const size_t tokens = stage.magnitudes.size(), dim = stage.magnitudes.front().size();
  const size_t each = (tokens + kMaxMapRows - 1) / kMaxMapRows;
  std::vector<std::vector<double>> rows;
  double mean = 0;
  for (size_t t = 0; t < tokens; ++t) {
    if (t % each == 0) rows.emplace_back(dim);
    for (size_t d = 0; d < dim; ++d) {
      const double x = stage.magnitudes[t][d];
      const size_t in_row = std::min(each, tokens - t / each * each);
      rows.back()[d] += x / static_cast<double>(in_row);
      mean += x / static_cast<double>(tokens * dim);
    }
  }
  for (auto& row : rows) {
    for (double& x : row) x /= std::max(mean, 1e-30);
  }
  ChartOptions options;
  options.title = fmt::format("|K| over its mean, {}: {}", stage.name, HeadName(profile));
  options.x.label = "channel";
  options.y.label = "token";
  options.y.high = static_cast<double>(tokens);
  options.width = 560;
  return DenseMap(rows, most, options);
}

// The largest of a stage's channels over the mean: where its scale may end.
double LargestShare(const KeyProfile& profile, const KeyStage& stage) {
  const KeyShape& shape = ChosenShape(profile, stage);
  double mean = 0;
  for (const double x : shape.channel_rms) {
    mean += x / static_cast<double>(shape.channel_rms.size());
  }
  return std::ranges::max(shape.channel_rms) / std::max(mean, 1e-30);
}

Status WriteCharts(const KeyProfile& profile, const std::string& model,
                   const std::filesystem::path& out) {
  std::error_code error;
  std::filesystem::create_directories(out, error);
  std::vector<std::pair<std::string, std::string>> charts = {
      {"channels",
       MapOf(profile, &KeyShape::channel_outlier, "Largest channel of K over the median one")},
      {"norms", MapOf(profile, &KeyShape::norm_imbalance,
                      "Norms of 32 tokens in a row, largest over smallest")},
      {"spectrum", SpectrumOf(profile)},
      {"tokens", NormsOf(profile)}};
  // One scale: that of the keys as computed.
  const double most = std::max(3.0, std::round(LargestShare(profile, profile.stages.front())));
  for (const KeyStage& stage : profile.stages) {
    std::string name = "map-" + stage.name;
    std::ranges::replace(name, ' ', '-');
    charts.emplace_back(std::move(name), MagnitudesOf(profile, stage, most));
  }
  std::string body = fmt::format(
      "<p>Model <b>{}</b>, {} tokens; {}.</p>\n<p class=\"note\">Channels: root mean square over "
      "tokens. Norms: mean over groups of {} tokens, which share a scale where groups run along "
      "tokens. One head is shown in full: {}.</p>\n<div class=\"charts\">",
      EscapeHtml(model), profile.tokens, EscapeHtml(profile.method), kProfileGroup,
      HeadName(profile));
  for (const auto& [name, chart] : charts) {
    OSCAR_RETURN_IF_ERROR(
        WriteFileAtomically(out / ("keys-" + name + ".svg"), StandaloneChart(chart)));
    body += "<div>" + chart + "</div>";
  }
  OSCAR_RETURN_IF_ERROR(
      WriteFileAtomically(out / "keys.json", ProfileToJson(profile, model).dump() + "\n"));
  return WriteFileAtomically(out / "keys.html",
                             HtmlPage("Keys before and after", body + "</div>\n"));
}

}  // namespace

Status InspectKeys(const InspectKeysOptions& options) {
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadInput(options.prompt, kMaxPromptBytes));
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> method,
                         LoadedModel::Plan(options.model));
  OSCAR_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Load(method->directory()));
  OSCAR_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, tokenizer.Encode(text));
  ModelOptions plain = options.model;
  plain.kv = "bf16";
  plain.rotation.clear();
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> model, LoadedModel::Load(plain));
  OSCAR_ASSIGN_OR_RETURN(const KeyProfile profile,
                         MeasureKeys(*model, method->kv(), tokens, options.layer, options.kv_head));
  const std::string name = method->directory().filename().string();
  if (!options.out.empty()) OSCAR_RETURN_IF_ERROR(WriteCharts(profile, name, options.out));
  if (options.json) {
    fmt::print("{}\n", ProfileToJson(profile, name).dump(2));
    return {};
  }
  fmt::print("{}", TableOf(profile));
  if (!options.out.empty()) {
    fmt::print("\n{}/keys.html, keys.json and keys-*.svg written\n", options.out.string());
  }
  return {};
}

}  // namespace oscar::cli
