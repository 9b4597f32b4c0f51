#include "run/eval_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "base/progress.h"
#include "measure/token_distribution.h"
#include "quant/kv_method.h"
#include "report/charts.h"
#include "run/sweep.h"

namespace oscar {
namespace {

// A star where some of it was never measured.
std::string Cell(const std::optional<double>& value, int64_t failed,
                 const std::optional<double>& deviation = {}) {
  if (!value.has_value()) return "<td>–</td>";
  const char* mark = failed > 0 ? "*" : "";
  return deviation.has_value() ? fmt::format("<td>{:.1f} ± {:.1f}{}</td>", *value, *deviation, mark)
                               : fmt::format("<td>{:.1f}{}</td>", *value, mark);
}

std::optional<double> BitsAt(const MethodScore& method, int64_t length) {
  const auto found = method.stored_bits.find(length);
  if (found == method.stored_bits.end()) return std::nullopt;
  return found->second;
}

// The place in the table of the method that a label begins with ("oscar+@group=64"); -1: none.
int PlaceOf(std::string_view label) {
  const std::string_view name = label.substr(0, label.find_first_of(" ,:(@"));
  const auto table = KvMethodTable();
  const auto found = std::ranges::find(table, name, &KvMethodInfo::name);
  return found == table.end() ? -1 : static_cast<int>(found - table.begin());
}

// One colour per method in all charts and reports; where a method is there several times, the
// others get colours that no method here has.
std::vector<int> ColorsOf(const EvalResults& results) {
  std::vector<int> colors;
  std::set<int> taken;
  for (const MethodScore& method : results.methods) {
    const int place = PlaceOf(method.label);
    colors.push_back(place >= 0 && taken.insert(place).second ? place : -1);
  }
  int free = 0;
  for (int& color : colors) {
    if (color >= 0) continue;
    while (!taken.insert(free).second) ++free;
    color = free;
  }
  return colors;
}

// Variants of a method that differ in bits alone ("oscar+:2.5", "oscar+:3.25", "oscar+") are a
// curve: its number, of each method; -1 where a method is on none.
std::vector<int> CurvesOf(const EvalResults& results) {
  std::map<std::string, std::vector<size_t>> variants;
  std::set<std::string> has_bits;
  for (size_t i = 0; i < results.methods.size(); ++i) {
    const std::string& label = results.methods[i].label;
    const size_t colon = std::min(label.find(':'), label.size());
    const size_t end = std::min(label.find('@'), label.size());
    const std::string key = label.substr(0, std::min(colon, end)) + label.substr(end);
    variants[key].push_back(i);
    if (colon < end) has_bits.insert(key);
  }
  std::vector<int> curves(results.methods.size(), -1);
  int next = 0;
  for (const auto& [key, members] : variants) {
    if (members.size() < 2 || !has_bits.contains(key)) continue;
    for (const size_t i : members) curves[i] = next;
    ++next;
  }
  return curves;
}

// So few items that a score says little.
constexpr int64_t kFewItems = 50;

// The score a task is shown by: strict where it has one.
std::optional<double> Shown(const TaskScore& score) {
  return score.strict.has_value() ? score.strict : score.answer;
}

std::string Table(const EvalResults& results) {
  std::string out =
      "<div class=\"scroll\"><table><thead><tr><th>method</th><th>mean</th><th>long</th>"
      "<th>answer</th><th>bits, history</th><th>bits at 128K</th><th>perplexity</th><th>KL</th>"
      "<th>top-1 %</th><th>cache, longest item</th></tr></thead><tbody>\n";
  int64_t failed = 0;
  for (const MethodScore& method : results.methods) {
    out += fmt::format("<tr title=\"{}\"><td>{}{}</td>", EscapeHtml(method.description),
                       EscapeHtml(method.label), method.simulated ? " (simulated)" : "");
    failed += method.Failed();
    out += Cell(method.MeanStrict(), method.Failed()) +
           Cell(method.MeanStrict(results.short_tasks), method.Failed()) +
           Cell(method.MeanAnswer(), method.Failed());
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
    out += fmt::format("<td>{}</td></tr>\n",
                       method.CacheBytes() > 0 ? FormatBytes(method.CacheBytes()) : "–");
  }
  out += "</tbody></table></div>\n";
  if (failed > 0) {
    out += fmt::format(
        "<p class=\"note\">* {} outputs are missing and count as wrong; see the warnings.</p>\n",
        failed);
  }
  return out;
}

// A row per task: there may be dozens of them, of methods there are a few.
std::string TaskTable(const EvalResults& results, const std::vector<std::string>& tasks) {
  std::string out = "<div class=\"scroll\"><table><thead><tr><th>task</th><th>items</th>";
  for (const MethodScore& method : results.methods) {
    out += fmt::format("<th>{}</th>", EscapeHtml(method.label));
  }
  out += "</tr></thead><tbody>\n";
  for (const std::string& task : tasks) {
    std::string cells;
    int64_t items = 0;
    for (const MethodScore& method : results.methods) {
      const auto found = method.tasks.find(task);
      if (found == method.tasks.end()) {
        cells += "<td>–</td>";
        continue;
      }
      const TaskScore& score = found->second;
      items = std::max(items, score.items);
      cells += Cell(Shown(score), score.failed,
                    score.strict.has_value() ? score.strict_sd : score.answer_sd);
    }
    out += fmt::format("<tr><td>{}</td><td>{}</td>{}</tr>\n", EscapeHtml(task), items, cells);
  }
  return out + "</tbody></table></div>\n";
}

// Against BF16, item by item: a row per method and task, the mean of the long tasks first.
std::string PairedTable(const EvalResults& results, const std::vector<std::string>& tasks) {
  std::string rows;
  for (const MethodScore& method : results.methods) {
    std::vector<std::string> names = {kPairedMean};
    names.insert(names.end(), tasks.begin(), tasks.end());
    for (const std::string& name : names) {
      const auto found = method.paired.find(name);
      if (found == method.paired.end()) continue;
      const PairedScore& paired = found->second;
      rows += fmt::format(
          "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.2g}</td>"
          "<td>{:+.1f} [{:+.1f}, {:+.1f}]</td></tr>\n",
          EscapeHtml(method.label),
          name == kPairedMean ? "<b>mean of long tasks</b>" : EscapeHtml(name), paired.items,
          paired.lost, paired.won, paired.p, paired.difference, paired.low, paired.high);
    }
  }
  if (rows.empty()) return {};
  return fmt::format(
      "<h2>Against BF16, item by item</h2>\n<p class=\"note\">Lost: right with BF16 alone; won: "
      "right with the method alone. p: exact McNemar test, two-sided. Difference of the strict "
      "score in points with its 95 % interval, from {} bootstrap samples of the items.</p>\n"
      "<div class=\"scroll\"><table><thead><tr><th>method</th><th>task</th><th>items</th>"
      "<th>lost</th><th>won</th><th>p</th><th>difference</th></tr></thead><tbody>\n{}"
      "</tbody></table></div>\n",
      kResamples, rows);
}

// KL to BF16 and nll of the reference's tokens; the mean of the long tasks first.
std::string ReferenceTable(const EvalResults& results, const std::vector<std::string>& tasks) {
  const auto cells = [](const std::optional<ReferenceScore>& score) {
    if (!score.has_value()) return std::string("<td>–</td><td>–</td>");
    return (score->kl.has_value() ? fmt::format("<td>{:.4f}</td>", *score->kl)
                                  : std::string("<td>–</td>")) +
           fmt::format("<td>{:.4f}</td>", score->nll);
  };
  std::string rows;
  const auto add_row = [&](const std::string& name, const auto& score_of) {
    std::string row;
    int64_t tokens = 0;
    for (const MethodScore& method : results.methods) {
      const std::optional<ReferenceScore> score = score_of(method);
      if (score.has_value()) tokens = std::max(tokens, score->tokens);
      row += cells(score);
    }
    if (tokens > 0) rows += fmt::format("<tr><td>{}</td><td>{}</td>{}</tr>\n", name, tokens, row);
  };
  add_row("<b>mean of long tasks</b>",
          [&](const MethodScore& m) { return m.MeanReference(results.short_tasks); });
  for (const std::string& task : tasks) {
    add_row(EscapeHtml(task), [&](const MethodScore& m) {
      const auto found = m.tasks.find(task);
      return found == m.tasks.end() ? std::nullopt : found->second.reference;
    });
  }
  if (rows.empty()) return {};
  std::string head = "<th>task</th><th>tokens</th>";
  for (const MethodScore& method : results.methods) {
    head += fmt::format("<th>{}, KL</th><th>nll</th>", EscapeHtml(method.label));
  }
  return fmt::format(
      "<h2>Tokens of the references</h2>\n<p class=\"note\">Nats per token of the reference, read "
      "to its end whatever the model would have said. KL of the method's prediction from that on "
      "the BF16 cache, over its {} most likely tokens and all others as one.</p>\n"
      "<div class=\"scroll\"><table><thead><tr>{}</tr></thead><tbody>\n{}</tbody></table></div>\n",
      TokenDistribution::kMaxLikely, head, rows);
}

// What the height of a method's point is: the mean over tasks that reach the quantiser where there
// are any, else the best that was measured.
struct Accuracy {
  std::string label;
  std::function<std::optional<double>(const MethodScore&)> of;
  std::function<ScoreInterval(const MethodScore&)> interval;
};

Accuracy AccuracyOf(const EvalResults& results) {
  const auto any = [&](const auto& of) {
    return std::any_of(results.methods.begin(), results.methods.end(),
                       [&](const MethodScore& m) { return of(m).has_value(); });
  };
  const auto without_short = [&results](const MethodScore& m) {
    return m.MeanStrict(results.short_tasks);
  };
  const auto strict = [](const MethodScore& m) { return m.MeanStrict(); };
  if (!results.short_tasks.empty() && any(without_short)) {
    return {"mean strict score, long tasks, %", without_short,
            [&results](const MethodScore& m) { return m.StrictInterval(results.short_tasks); }};
  }
  if (any(strict)) {
    return {results.short_tasks.empty() ? "mean strict score, %"
                                        : "mean strict score, all tasks (none is long), %",
            strict, [](const MethodScore& m) { return m.StrictInterval(); }};
  }
  return {"mean answer score, %", [](const MethodScore& m) { return m.MeanAnswer(); },
          [](const MethodScore& m) { return m.AnswerInterval(); }};
}

std::string Pareto(const EvalResults& results) {
  std::vector<ChartPoint> stored, text, reference;
  const Accuracy accuracy = AccuracyOf(results);
  const std::vector<int> curves = CurvesOf(results);
  std::vector<int> colors = ColorsOf(results);
  for (size_t i = 0; i < colors.size(); ++i) {
    if (curves[i] < 0) continue;  // a curve has one colour
    const auto first = std::ranges::find(curves, curves[i]) - curves.begin();
    colors[i] = colors[static_cast<size_t>(first)];
  }
  for (size_t i = 0; i < results.methods.size(); ++i) {
    const MethodScore& method = results.methods[i];
    const std::optional<double> bits = BitsAt(method, 131072);
    const std::optional<double> mean = accuracy.of(method);
    if (!bits.has_value()) continue;
    const auto score = method.MeanReference(results.short_tasks);
    if (score.has_value() && score->kl.has_value() && *score->kl > 0) {
      reference.push_back(
          {method.label, *bits, *score->kl, method.simulated, NAN, NAN, colors[i], curves[i]});
    }
    if (mean.has_value()) {
      const ScoreInterval interval = accuracy.interval(method);
      stored.push_back({method.label, *bits, *mean, method.simulated, interval.low, interval.high,
                        colors[i], curves[i]});
    }
    if (method.text.has_value()) {
      text.push_back({method.label, *bits, -method.text->nll, method.simulated, NAN, NAN, colors[i],
                      curves[i]});
    }
  }
  if (stored.empty() && text.empty()) return {};
  ChartOptions options;
  options.title = "Accuracy against bits as stored at 128K tokens";
  options.x.label = "bits per K/V element (windows and metadata counted)";
  options.x.log_scale = true;
  options.x.low = 2, options.x.high = 16;
  options.y.label = accuracy.label;
  std::string out = "<div class=\"charts\"><div>" + ScatterChart(stored, true, options) + "</div>";
  if (!text.empty()) {
    options.title = "Log-likelihood of prose against bits";
    options.y.label = "log-likelihood, nats per token";
    out += "<div>" + ScatterChart(text, true, options) + "</div>";
  }
  if (!reference.empty()) {
    options.title = "KL of the references' tokens against bits";
    options.y.label = "KL to BF16, nats per token";
    options.y.log_scale = true;
    out += "<div>" + ScatterChart(reference, /*frontier=*/false, options) + "</div>";
  }
  out += "</div>\n";
  if (!stored.empty()) {
    out +=
        "<p class=\"note\">Bars: the 95 % Wilson interval of the mean, had other items been "
        "sampled. "
        "Methods answer the same items, so they differ from one another by less.</p>\n";
  }
  return out;
}

// In as many rows of charts as the names of the tasks need to stand beside one another.
std::string Bars(const EvalResults& results, const std::vector<std::string>& tasks) {
  constexpr int kWidth = 1120, kPlot = 1040, kLetter = 7, kGap = 12;
  size_t longest = 1;
  for (const std::string& task : tasks) longest = std::max(longest, task.size());
  const size_t needed = std::max(longest * kLetter + kGap, results.methods.size() * 4);
  const size_t most = std::max<size_t>(kPlot / needed, 1);
  const size_t rows = std::max<size_t>((tasks.size() + most - 1) / most, 1);
  const size_t columns = (tasks.size() + rows - 1) / rows;
  const std::vector<int> colors = ColorsOf(results);
  std::string out;
  for (size_t first = 0; first < tasks.size(); first += columns) {
    // The last row has gaps, so that bars are as wide as above.
    std::vector<std::string> groups(columns);
    const std::vector<double> gaps(columns, NAN);
    std::vector<ChartBars> bars;
    for (size_t m = 0; m < results.methods.size(); ++m) {
      bars.push_back({results.methods[m].label, gaps, gaps, gaps, colors[m]});
    }
    for (size_t i = 0; i < columns && first + i < tasks.size(); ++i) {
      groups[i] = tasks[first + i];
      for (size_t m = 0; m < results.methods.size(); ++m) {
        const auto found = results.methods[m].tasks.find(groups[i]);
        if (found == results.methods[m].tasks.end()) continue;
        const double score = Shown(found->second).value_or(NAN);
        const ScoreInterval interval =
            WilsonInterval(score, static_cast<double>(found->second.items));
        bars[m].values[i] = score;
        bars[m].low[i] = interval.low, bars[m].high[i] = interval.high;
      }
    }
    ChartOptions options;
    options.title = rows == 1 ? "Score by task"
                              : fmt::format("Score by task ({} of {})", first / columns + 1, rows);
    options.legend = first + columns >= tasks.size();
    options.y.label = "%";
    options.y.low = 0, options.y.high = 100;
    options.width = kWidth;
    options.height = rows > 1 ? 260 : 340;
    out += BarChart(groups, bars, options);
  }
  return out + "<p class=\"note\">Lines on bars: 95 % Wilson intervals.</p>\n";
}

// Which tasks have few items, and how far a score of theirs may be off.
std::string SmallSamples(const EvalResults& results, const std::vector<std::string>& tasks) {
  std::string names;
  int64_t fewest = kFewItems;
  for (const std::string& task : tasks) {
    int64_t items = 0;
    for (const MethodScore& method : results.methods) {
      const auto found = method.tasks.find(task);
      if (found != method.tasks.end()) items = std::max(items, found->second.items);
    }
    if (items == 0 || items >= kFewItems) continue;
    names += fmt::format("{}{} ({})", names.empty() ? "" : ", ", EscapeHtml(task), items);
    fewest = std::min(fewest, items);
  }
  if (names.empty()) return {};
  const ScoreInterval half = WilsonInterval(50, static_cast<double>(fewest));
  return fmt::format(
      "<p class=\"note\"><b>Few items</b>: {}. With {} of them the interval of a score of 50 % "
      "reaches from {:.0f} to {:.0f} %.</p>\n",
      names, fewest, half.low, half.high);
}

std::string BitsByLength(const EvalResults& results) {
  std::vector<ChartSeries> series;
  const std::vector<int> colors = ColorsOf(results);
  for (size_t i = 0; i < results.methods.size(); ++i) {
    const MethodScore& method = results.methods[i];
    ChartSeries line{method.label, {}, {}, colors[i]};
    for (const auto& [length, bits] : method.stored_bits) {
      line.x.push_back(static_cast<double>(length) / 1024), line.y.push_back(bits);
    }
    if (!line.x.empty() && method.history_bits < 16) series.push_back(std::move(line));
  }
  if (series.empty()) return {};
  ChartOptions options;
  options.title = "Bits as stored, by context length";
  options.x.label = "context, thousands of tokens (1024)";
  options.y.label = "bits per K/V element";
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
  const std::vector<std::string> tasks = TaskNames(results);
  std::string body = fmt::format(
      "<p>Model <b>{}</b>. Prefill: {}. Strict: the whole reference output is what the model "
      "produces; answer: what follows the last &lt;/think&gt;.",
      EscapeHtml(results.model), EscapeHtml(results.prefill));
  if (!results.short_tasks.empty()) {
    body += " “Long” leaves out tasks that end before anything leaves the default BF16 windows:";
    for (size_t i = 0; i < results.short_tasks.size(); ++i) {
      body += (i == 0 ? " " : ", ") + EscapeHtml(results.short_tasks[i]);
    }
    body += ".";
  }
  body += "</p>\n<p class=\"note\">";
  for (const auto& [key, value] : results.settings) {
    body += fmt::format("{}: {}. ", EscapeHtml(key), EscapeHtml(value));
  }
  body += "</p>\n" + Table(results);
  if (const auto charts = SweepCharts(results); !charts.empty()) {
    body += "<h2>Sweep</h2>\n<div class=\"charts\">";
    for (const auto& [name, chart] : charts) body += "<div>" + chart + "</div>";
    body += "</div>\n";
  }
  if (const std::string pareto = Pareto(results); !pareto.empty()) {
    body += "<h2>Accuracy and bits</h2>\n" + pareto;
  }
  if (!tasks.empty()) {
    body += "<h2>Tasks</h2>\n" + TaskTable(results, tasks) + SmallSamples(results, tasks) +
            Bars(results, tasks);
  }
  body += PairedTable(results, tasks) + ReferenceTable(results, tasks);
  const std::string k_map = LayerMap(results, true), v_map = LayerMap(results, false);
  if (!k_map.empty()) {
    body +=
        "<h2>Layers</h2>\n<p class=\"note\">On prose, over quantised tokens; rows go through "
        "the method's own pages.</p>\n<div class=\"charts\"><div>" +
        k_map + "</div><div>" + v_map + "</div></div>\n";
  }
  const std::string bits = BitsByLength(results), spectra = Spectra(results);
  if (!bits.empty()) {
    body += "<h2>Memory</h2>\n<div class=\"charts\"><div>" + bits + "</div></div>\n";
  }
  if (!spectra.empty()) {
    body += "<h2>Spectra</h2>\n<div class=\"charts\"><div>" + spectra + "</div></div>\n";
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
