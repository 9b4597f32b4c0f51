#include "evaluate/report.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/progress.h"
#include "evaluate/svg.h"

namespace oscar {
namespace {

std::string Cell(const std::optional<double>& value, const std::optional<double>& deviation = {}) {
  if (!value.has_value()) return "<td>–</td>";
  return deviation.has_value() ? fmt::format("<td>{:.1f} ± {:.1f}</td>", *value, *deviation)
                               : fmt::format("<td>{:.1f}</td>", *value);
}

std::optional<double> BitsAt(const MethodScore& method, int64_t length) {
  const auto found = method.stored_bits.find(length);
  if (found == method.stored_bits.end()) return std::nullopt;
  return found->second;
}

// The score a task is shown by: strict where it has one.
std::optional<double> Shown(const TaskScore& score) {
  return score.strict.has_value() ? score.strict : score.answer;
}

std::string Table(const EvalResults& results, const std::vector<std::string>& tasks) {
  std::string out =
      "<div class=\"scroll\"><table><thead><tr><th>method</th><th>mean</th><th>long</th>"
      "<th>answer</th><th>bits, history</th><th>bits at 128K</th><th>perplexity</th><th>KL</th>"
      "<th>top-1 %</th><th>peak cache</th>";
  for (const std::string& task : tasks) out += fmt::format("<th>{}</th>", EscapeHtml(task));
  out += "</tr></thead><tbody>\n";
  for (const MethodScore& method : results.methods) {
    out += fmt::format("<tr title=\"{}\"><td>{}{}</td>", EscapeHtml(method.description),
                       EscapeHtml(method.label), method.simulated ? " (simulated)" : "");
    out += Cell(method.MeanStrict()) + Cell(method.MeanStrict(results.short_tasks)) +
           Cell(method.MeanAnswer());
    // What a server does not tell is left open.
    out += method.history_bits > 0 ? fmt::format("<td>{:.2f}</td>", method.history_bits)
                                   : std::string("<td>–</td>");
    const std::optional<double> bits = BitsAt(method, 131072);
    out += bits.has_value() ? fmt::format("<td>{:.2f}</td>", *bits) : std::string("<td>–</td>");
    if (method.text.has_value()) {
      out += fmt::format("<td>{:.3f}</td><td>{:.4f}</td><td>{:.1f}</td>", method.text->perplexity,
                         method.text->kl, 100 * method.text->top1);
    } else {
      out += "<td>–</td><td>–</td><td>–</td>";
    }
    out +=
        fmt::format("<td>{}</td>", method.PeakBytes() > 0 ? FormatBytes(method.PeakBytes()) : "–");
    for (const std::string& task : tasks) {
      const auto found = method.tasks.find(task);
      if (found == method.tasks.end()) {
        out += "<td>–</td>";
        continue;
      }
      const bool strict = found->second.strict.has_value();
      out += Cell(Shown(found->second), strict ? found->second.strict_sd : found->second.answer_sd);
    }
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

std::string Pareto(const EvalResults& results) {
  std::vector<ChartPoint> stored, text;
  for (const MethodScore& method : results.methods) {
    const std::optional<double> bits = BitsAt(method, 131072);
    const std::optional<double> mean = method.MeanStrict(results.short_tasks).has_value()
                                           ? method.MeanStrict(results.short_tasks)
                                           : method.MeanAnswer();
    if (!bits.has_value()) continue;
    if (mean.has_value()) stored.push_back({method.label, *bits, *mean, method.simulated});
    if (method.text.has_value()) {
      text.push_back({method.label, *bits, -method.text->nll, method.simulated});
    }
  }
  ChartOptions options;
  options.title = "Accuracy against bits as stored at 128K tokens";
  options.x.label = "bits per K/V number (windows and metadata counted)";
  options.x.log_scale = true;
  options.x.low = 2, options.x.high = 16;
  options.y.label = "mean strict score, long tasks, %";
  std::string out = "<div class=\"charts\"><div>" + ScatterChart(stored, true, options) + "</div>";
  if (!text.empty()) {
    options.title = "Log-likelihood of prose against bits";
    options.y.label = "log-likelihood, nats a token";
    out += "<div>" + ScatterChart(text, true, options) + "</div>";
  }
  return out + "</div>\n";
}

std::string Bars(const EvalResults& results, const std::vector<std::string>& tasks) {
  std::vector<std::string> names;
  std::vector<std::vector<double>> values;
  for (const MethodScore& method : results.methods) {
    names.push_back(method.label);
    values.emplace_back();
    for (const std::string& task : tasks) {
      const auto found = method.tasks.find(task);
      values.back().push_back(found == method.tasks.end() ? NAN
                                                          : Shown(found->second).value_or(NAN));
    }
  }
  ChartOptions options;
  options.title = "Score by task";
  options.y.label = "%";
  options.y.low = 0, options.y.high = 100;
  options.width = 1120;
  options.height = 340;
  return BarChart(tasks, names, values, options);
}

std::string BitsByLength(const EvalResults& results) {
  std::vector<ChartSeries> series;
  for (const MethodScore& method : results.methods) {
    // A method has one colour in all charts, whichever of them leave others out.
    ChartSeries line{method.label, {}, {}, static_cast<int>(&method - results.methods.data())};
    for (const auto& [length, bits] : method.stored_bits) {
      line.x.push_back(static_cast<double>(length) / 1024), line.y.push_back(bits);
    }
    if (method.history_bits < 16) series.push_back(std::move(line));
  }
  if (series.empty()) return {};
  ChartOptions options;
  options.title = "Bits as stored, by context length";
  options.x.label = "context, thousands of tokens (1024)";
  options.y.label = "bits per K/V number";
  options.y.low = 2.0;
  return LineChart(series, options);
}

std::string LayerMap(const EvalResults& results, bool keys) {
  std::vector<std::string> rows, columns;
  std::vector<std::vector<double>> values;
  for (const MethodScore& method : results.methods) {
    if (method.layer_errors.empty() || method.history_bits >= 16) continue;
    rows.push_back(method.label);
    values.emplace_back();
    for (const auto& [k, v] : method.layer_errors) values.back().push_back(keys ? k : v);
  }
  if (values.empty()) return {};
  size_t layers = 0;
  for (const auto& row : values) layers = std::max(layers, row.size());
  for (auto& row : values) row.resize(layers, NAN);
  for (size_t i = 0; i < layers; ++i) columns.push_back(std::to_string(i));
  ChartOptions options;
  options.title = keys ? "Relative error of the logits, by layer" : "Relative error of V, by layer";
  options.x.label = "layer";
  return HeatMap(rows, columns, values, options);
}

std::string Spectra(const EvalResults& results) {
  std::vector<ChartSeries> series;
  for (size_t i = 0; i < results.spectra.size(); ++i) {
    ChartSeries line{fmt::format("layer {}", i), {}, results.spectra[i], -1};
    for (size_t j = 0; j < line.y.size(); ++j) line.x.push_back(static_cast<double>(j + 1));
    series.push_back(std::move(line));
  }
  if (series.empty()) return {};
  ChartOptions options;
  options.title = "Spectrum of the queries, by layer";
  options.x.label = "eigenvalue of the query second moment, largest first";
  options.y.label = "over their mean";
  options.y.log_scale = true;
  return LineChart(series, options);
}

}  // namespace

std::string RenderEvalReport(const EvalResults& results) {
  std::set<std::string> names;
  for (const MethodScore& method : results.methods) {
    for (const auto& [name, score] : method.tasks) names.insert(name);
  }
  const std::vector<std::string> tasks(names.begin(), names.end());
  std::string body = fmt::format(
      "<p>Model <b>{}</b>. Prefill: {}. Strict: the whole reference output is what the model "
      "produces; answer: what follows the last &lt;/think&gt;.",
      EscapeHtml(results.model), EscapeHtml(results.prefill));
  if (!results.short_tasks.empty()) {
    body += " “Long” leaves out tasks that end before anything leaves the default BF16 windows:";
    for (const std::string& task : results.short_tasks) body += " " + EscapeHtml(task);
    body += ".";
  }
  body += "</p>\n<p class=\"note\">";
  for (const auto& [key, value] : results.settings) {
    body += fmt::format("{}: {}. ", EscapeHtml(key), EscapeHtml(value));
  }
  body += "</p>\n" + Table(results, tasks);
  body += "<h2>Accuracy and bits</h2>\n" + Pareto(results);
  body += "<h2>Tasks</h2>\n" + Bars(results, tasks);
  const std::string k_map = LayerMap(results, true), v_map = LayerMap(results, false);
  if (!k_map.empty()) {
    body +=
        "<h2>Layers</h2>\n<p class=\"note\">On prose, over quantised tokens; rows go through "
        "the method's own pages.</p>\n<div class=\"charts\"><div>" +
        k_map + "</div><div>" + v_map + "</div></div>\n";
  }
  const std::string bits = BitsByLength(results), spectra = Spectra(results);
  if (!bits.empty() || !spectra.empty()) {
    body += "<h2>Memory and spectra</h2>\n<div class=\"charts\"><div>" + bits + "</div><div>" +
            spectra + "</div></div>\n";
  }
  if (!results.warnings.empty()) {
    body += "<h2>Warnings</h2>\n<ul>\n";
    for (const std::string& warning : results.warnings) {
      body += fmt::format("<li>{}</li>\n", EscapeHtml(warning));
    }
    body += "</ul>\n";
  }
  return HtmlPage("Evaluation of KV-cache methods", body);
}

}  // namespace oscar
