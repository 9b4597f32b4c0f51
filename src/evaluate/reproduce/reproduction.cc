#include "reproduce/reproduction.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "report/charts.h"

namespace oscar {
namespace {

using nlohmann::ordered_json;

std::string Number(double value) {
  return fmt::format("{:.{}f}", value, std::abs(value) < 100 ? 2 : 1);
}

std::string Published(const PaperFigure* figure) {
  if (figure == nullptr) return "-";
  return std::isfinite(figure->spread)
             ? fmt::format("{} ± {}", Number(figure->value), Number(figure->spread))
             : Number(figure->value);
}

std::string Ours(const std::optional<Measured>& value) {
  if (!value.has_value()) return "-";
  return std::isfinite(value->low) ? fmt::format("{} [{}, {}]", Number(value->value),
                                                 Number(value->low), Number(value->high))
                                   : Number(value->value);
}

std::string Difference(const std::optional<double>& value) {
  return value.has_value() ? fmt::format("{:+.2f}", *value) : "-";
}

// Models that the table has figures of, in its order.
std::vector<std::string_view> ModelsOf(const PaperTable& table, size_t measure) {
  std::vector<std::string_view> models;
  for (const PaperFigure& figure : table.figures) {
    if (figure.measure != measure || std::ranges::find(models, figure.model) != models.end()) {
      continue;
    }
    models.push_back(figure.model);
  }
  return models;
}

// The published columns to show: the model's own, or all where it is none of them.
std::vector<std::string_view> ColumnsOf(const Reproduction& r, size_t measure) {
  std::vector<std::string_view> models = ModelsOf(*r.table, measure);
  if (!r.column.empty()) {
    std::erase_if(models, [&](std::string_view model) { return model != r.column; });
  }
  return models;
}

std::string LabelOf(const PaperRow& row) {
  return row.kv.empty() || row.label == row.kv ? std::string(row.label)
                                               : fmt::format("{} ({})", row.label, row.kv);
}

bool IsSpeed(const PaperMeasure& measure) {
  return measure.kind == PaperMeasureKind::kMillisecondsAStep ||
         measure.kind == PaperMeasureKind::kTokensPerSecond;
}

std::string Times(const std::optional<double>& speedup) {
  return speedup.has_value() ? fmt::format(" ({:.2f}x)", *speedup) : "";
}

// Faster is less time, or more tokens.
std::optional<double> SpeedupOver(const PaperMeasure& measure, double baseline, double value) {
  if (!IsSpeed(measure) || !(baseline > 0) || !(value > 0)) return std::nullopt;
  return measure.kind == PaperMeasureKind::kTokensPerSecond ? value / baseline : baseline / value;
}

// The row that others are compared with.
std::optional<size_t> PlainRow(const Reproduction& r) {
  const auto found = std::ranges::find_if(
      r.rows, [](const ReproducedRow& line) { return line.row->kv == "bf16"; });
  if (found == r.rows.end()) return std::nullopt;
  return static_cast<size_t>(found - r.rows.begin());
}

// One cell per column: the row's name, ours, the published figures and, where they are of one
// experiment, the difference.
bool HasDifference(const Reproduction& r, size_t measure) {
  return !r.column.empty() && !IsSpeed(r.table->measures[measure]);
}

std::vector<std::string> HeadOf(const Reproduction& r, size_t measure) {
  std::vector<std::string> head = {std::string(r.table->measures[measure].name), "here"};
  for (const std::string_view model : ColumnsOf(r, measure)) {
    head.push_back(fmt::format("published, {}", model));
  }
  if (HasDifference(r, measure)) head.emplace_back("difference");
  return head;
}

std::vector<std::string> CellsOf(const Reproduction& r, size_t row, size_t measure) {
  const ReproducedRow& line = r.rows[row];
  std::vector<std::string> cells = {LabelOf(*line.row),
                                    Ours(line.ours[measure]) + Times(r.Speedup(row, measure))};
  for (const std::string_view model : ColumnsOf(r, measure)) {
    cells.push_back(Published(FindFigure(*r.table, model, line.row->label, measure)) +
                    Times(r.PublishedSpeedup(model, row, measure)));
  }
  if (HasDifference(r, measure)) cells.push_back(Difference(r.Difference(row, measure)));
  return cells;
}

// Width on a terminal: code points, not bytes.
size_t WidthOf(std::string_view text) {
  return static_cast<size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::string AlignedTable(const std::vector<std::vector<std::string>>& lines) {
  std::vector<size_t> widths;
  for (const auto& line : lines) {
    widths.resize(std::max(widths.size(), line.size()));
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], WidthOf(line[i]));
  }
  std::string out;
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      const std::string pad(widths[i] - WidthOf(line[i]), ' ');
      out += i == 0 ? line[i] + pad : "  " + pad + line[i];
    }
    out.erase(out.find_last_not_of(' ') + 1);
    out += "\n";
  }
  return out;
}

// Beside the figures: what differs from the paper, known before and found now.
std::vector<std::string> RemarksOf(const Reproduction& r) {
  std::vector<std::string> out;
  if (r.column.empty() && !r.table->figures.empty()) {
    out.push_back(fmt::format(
        "{} is none of the models that this table has figures of, so nothing is compared.",
        r.model));
  }
  for (const std::string& departure : r.departures) {
    out.push_back("Not the published experiment: " + departure);
  }
  for (const ReproducedRow& row : r.rows) {
    for (const std::string_view note : {row.row->note, std::string_view(row.missing)}) {
      if (!note.empty()) out.push_back(fmt::format("{}: {}.", row.row->label, note));
    }
  }
  for (const std::string_view note : r.table->notes) out.emplace_back(note);
  return out;
}

std::vector<std::string> TasksOf(const Reproduction& r) {
  std::vector<std::string> names;
  for (const ReproducedRow& row : r.rows) {
    for (const auto& [name, score] : row.tasks) {
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

ordered_json NumberOrNull(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json();
}

ordered_json RowToJson(const Reproduction& r, size_t index) {
  const ReproducedRow& line = r.rows[index];
  ordered_json out = {{"row", line.row->label},
                      {"kv", line.row->kv.empty() ? ordered_json() : ordered_json(line.row->kv)},
                      {"method", line.description},
                      {"note", line.row->note},
                      {"missing", line.missing},
                      {"measures", ordered_json::array()}};
  for (size_t m = 0; m < r.table->measures.size(); ++m) {
    const std::optional<Measured>& ours = line.ours[m];
    ordered_json published = ordered_json::object();
    for (const std::string_view model : ModelsOf(*r.table, m)) {
      const PaperFigure* figure = FindFigure(*r.table, model, line.row->label, m);
      if (figure == nullptr) continue;
      ordered_json& entry = published[std::string(model)];
      entry = {{"value", figure->value}, {"spread", NumberOrNull(figure->spread)}};
      if (const auto speedup = r.PublishedSpeedup(model, index, m)) entry["over_bf16"] = *speedup;
    }
    const std::optional<double> difference = r.Difference(index, m);
    out["measures"].push_back(
        {{"name", r.table->measures[m].name},
         {"here", ours.has_value() ? ordered_json(ours->value) : ordered_json()},
         {"low", ours.has_value() ? NumberOrNull(ours->low) : ordered_json()},
         {"high", ours.has_value() ? NumberOrNull(ours->high) : ordered_json()},
         {"published", std::move(published)},
         {"difference", difference.has_value() ? ordered_json(*difference) : ordered_json()}});
    if (const auto speedup = r.Speedup(index, m)) out["measures"].back()["over_bf16"] = *speedup;
  }
  out["tasks"] = ordered_json::object();
  for (const auto& [name, score] : line.tasks) out["tasks"][name] = score;
  return out;
}

std::string HtmlTable(const std::vector<std::vector<std::string>>& lines) {
  std::string out = "<div class=\"scroll\"><table><thead>";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i == 1) out += "</thead><tbody>\n";
    const char* const tag = i == 0 ? "th" : "td";
    out += "<tr>";
    for (const std::string& cell : lines[i]) {
      out += fmt::format("<{0}>{1}</{0}>", tag, EscapeHtml(cell));
    }
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

// Of speeds, how many times that of BF16: machines differ.
std::string Bars(const Reproduction& r, size_t measure) {
  const bool is_speed = IsSpeed(r.table->measures[measure]);
  const Measured none{NAN, NAN, NAN};
  const auto ours_of = [&](size_t row) {
    const Measured value = r.rows[row].ours[measure].value_or(none);
    if (!is_speed) return value;
    if (r.rows[row].row->kv == "bf16" && std::isfinite(value.value)) return Measured{1};
    return Measured{r.Speedup(row, measure).value_or(NAN)};
  };
  const auto published_of = [&](std::string_view model, size_t row) {
    const PaperFigure* const figure = FindFigure(*r.table, model, r.rows[row].row->label, measure);
    if (figure == nullptr) return none;
    if (!is_speed) {
      return Measured{figure->value, figure->value - figure->spread,
                      figure->value + figure->spread};
    }
    if (r.rows[row].row->kv == "bf16") return Measured{1};
    return Measured{r.PublishedSpeedup(model, row, measure).value_or(NAN)};
  };
  const auto add = [](const Measured& value, ChartBars& bars) {
    bars.values.push_back(value.value);
    bars.low.push_back(value.low), bars.high.push_back(value.high);
  };
  const std::vector<std::string_view> models = ColumnsOf(r, measure);
  std::vector<ChartBars> series = {{"here", {}, {}, {}, kPlainColor}};
  for (const std::string_view model : models) {
    series.push_back({fmt::format("published, {}", model),
                      {},
                      {},
                      {},
                      kPlainColor + static_cast<int>(series.size())});
  }
  std::vector<std::string> groups;
  for (size_t row = 0; row < r.rows.size(); ++row) {
    bool is_known = std::isfinite(ours_of(row).value);
    for (const std::string_view model : models) {
      is_known |= std::isfinite(published_of(model, row).value);
    }
    if (!is_known) continue;
    groups.emplace_back(r.rows[row].row->label);
    add(ours_of(row), series[0]);
    for (size_t m = 0; m < models.size(); ++m) add(published_of(models[m], row), series[m + 1]);
  }
  ChartOptions options;
  options.title = fmt::format("{}{}", r.table->measures[measure].name,
                              is_speed ? ": speed over that of BF16" : "");
  options.width = 1000;
  options.height = 300;
  return BarChart(groups, series, options);
}

std::string NeedsOf(const PaperTable& table) {
  if (!table.refused.empty()) return fmt::format("cannot be run: {}", table.refused);
  std::string out;
  for (const std::string_view suite : table.suites) {
    const PaperData* const data = DataOf(suite);
    if (data == nullptr) continue;
    out += fmt::format("{}{}{}", out.empty() ? "data: " : ", ", data->files.front(),
                       data->optional ? " (optional)" : "");
  }
  return out.empty() ? "no data" : out;
}

}  // namespace

const PaperFigure* FindFigure(const PaperTable& table, std::string_view model, std::string_view row,
                              size_t measure) {
  const auto found = std::ranges::find_if(table.figures, [&](const PaperFigure& figure) {
    return figure.model == model && figure.row == row && figure.measure == measure;
  });
  return found == table.figures.end() ? nullptr : &*found;
}

std::optional<double> Reproduction::Difference(size_t row, size_t measure) const {
  const std::optional<Measured>& ours = rows[row].ours[measure];
  // Bits are a matter of formula: few items change nothing about them.
  const PaperMeasureKind kind = table->measures[measure].kind;
  const bool is_exact = kind == PaperMeasureKind::kBits || kind == PaperMeasureKind::kHistoryRatio;
  if (column.empty() || !ours.has_value() || IsSpeed(table->measures[measure]) ||
      (!departures.empty() && !is_exact)) {
    return std::nullopt;
  }
  const PaperFigure* const figure = FindFigure(*table, column, rows[row].row->label, measure);
  if (figure == nullptr) return std::nullopt;
  return ours->value - figure->value;
}

std::optional<double> Reproduction::Speedup(size_t row, size_t measure) const {
  const std::optional<size_t> plain = PlainRow(*this);
  if (!plain.has_value() || *plain == row) return std::nullopt;
  const std::optional<Measured>&baseline = rows[*plain].ours[measure],
        &own = rows[row].ours[measure];
  if (!baseline.has_value() || !own.has_value()) return std::nullopt;
  return SpeedupOver(table->measures[measure], baseline->value, own->value);
}

std::optional<double> Reproduction::PublishedSpeedup(std::string_view paper_model, size_t row,
                                                     size_t measure) const {
  const std::optional<size_t> plain = PlainRow(*this);
  if (!plain.has_value() || *plain == row) return std::nullopt;
  const PaperFigure* const baseline =
      FindFigure(*table, paper_model, rows[*plain].row->label, measure);
  const PaperFigure* const own = FindFigure(*table, paper_model, rows[row].row->label, measure);
  if (baseline == nullptr || own == nullptr) return std::nullopt;
  return SpeedupOver(table->measures[measure], baseline->value, own->value);
}

void AddScores(const EvalResults& results, Reproduction& reproduction) {
  for (ReproducedRow& line : reproduction.rows) {
    const auto method = std::ranges::find_if(results.methods, [&](const MethodScore& score) {
      return !line.row->kv.empty() && score.label == line.row->kv;
    });
    if (method == results.methods.end()) continue;
    line.description = method->description;
    for (const auto& [name, task] : method->tasks) {
      const std::optional<double> score = task.answer.has_value() ? task.answer : task.strict;
      if (score.has_value()) line.tasks[name] = *score;
    }
    for (size_t m = 0; m < reproduction.table->measures.size(); ++m) {
      const PaperMeasure& measure = reproduction.table->measures[m];
      if (measure.kind == PaperMeasureKind::kBits) {
        const auto bits = method->stored_bits.find(measure.context);
        if (bits != method->stored_bits.end()) line.ours[m] = Measured{bits->second};
      }
      if (measure.kind != PaperMeasureKind::kMeanScore) continue;
      const std::optional<double> mean = method->MeanAnswer();
      if (!mean.has_value()) continue;
      const ScoreInterval interval = method->AnswerInterval();
      line.ours[m] = Measured{*mean, interval.low, interval.high};
    }
  }
}

std::string ReproductionToTable(const Reproduction& r) {
  std::string out = fmt::format("{}, {}\nfigures: {}\n", r.table->title, r.model, r.table->source);
  if (!r.device.empty()) out += fmt::format("speed on: {}\n", r.device);
  for (size_t m = 0; m < r.table->measures.size(); ++m) {
    std::vector<std::vector<std::string>> lines = {HeadOf(r, m)};
    for (size_t i = 0; i < r.rows.size(); ++i) lines.push_back(CellsOf(r, i, m));
    out += "\n" + AlignedTable(lines);
  }
  if (const std::vector<std::string> tasks = TasksOf(r); tasks.size() > 1) {
    // A row per task: of methods there are a few.
    std::vector<std::vector<std::string>> lines = {{"here, % by task"}};
    for (const ReproducedRow& row : r.rows) {
      if (!row.tasks.empty()) lines[0].emplace_back(row.row->label);
    }
    for (const std::string& task : tasks) {
      lines.push_back({task});
      for (const ReproducedRow& row : r.rows) {
        if (row.tasks.empty()) continue;
        const auto found = row.tasks.find(task);
        lines.back().push_back(found == row.tasks.end() ? "-"
                                                        : fmt::format("{:.1f}", found->second));
      }
    }
    out += "\n" + AlignedTable(lines);
  }
  out += "\n";
  for (const std::string& remark : RemarksOf(r)) out += fmt::format("* {}\n", remark);
  return out;
}

std::string ReproductionToJson(const Reproduction& r) {
  ordered_json out = {{"table", r.table->name},
                      {"title", r.table->title},
                      {"source", r.table->source},
                      {"model", r.model},
                      {"device", r.device.empty() ? ordered_json() : ordered_json(r.device)},
                      {"compared_with", r.column.empty() ? ordered_json() : ordered_json(r.column)},
                      {"departures", r.departures},
                      {"remarks", RemarksOf(r)},
                      {"rows", ordered_json::array()}};
  for (size_t i = 0; i < r.rows.size(); ++i) out["rows"].push_back(RowToJson(r, i));
  return out.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string ReproductionToHtml(const Reproduction& r, std::string_view beside) {
  std::string body = fmt::format("<p>Model <b>{}</b>. Published figures: {}.{}</p>\n",
                                 EscapeHtml(r.model), EscapeHtml(r.table->source),
                                 r.device.empty() ? "" : " Speed on " + EscapeHtml(r.device) + ".");
  if (!beside.empty()) {
    body += fmt::format("<p>Every task, item counts and settings: <a href=\"{0}\">{0}</a>.</p>\n",
                        EscapeHtml(beside));
  }
  for (size_t m = 0; m < r.table->measures.size(); ++m) {
    body += fmt::format("<h2>{}</h2>\n", EscapeHtml(r.table->measures[m].name));
    std::vector<std::vector<std::string>> lines = {HeadOf(r, m)};
    for (size_t i = 0; i < r.rows.size(); ++i) lines.push_back(CellsOf(r, i, m));
    body += HtmlTable(lines) + Bars(r, m);
  }
  body += "<h2>What differs</h2>\n<ul>\n";
  for (const std::string& remark : RemarksOf(r)) {
    body += fmt::format("<li>{}</li>\n", EscapeHtml(remark));
  }
  return HtmlPage(r.table->title, body + "</ul>\n");
}

std::string PaperTablesToText() {
  std::vector<std::vector<std::string>> lines = {{"table", "methods", "needs"}};
  for (const PaperTable& table : PaperTables()) {
    std::string methods;
    for (const PaperRow& row : table.rows) {
      if (!row.kv.empty()) methods += fmt::format("{}{}", methods.empty() ? "" : ",", row.kv);
    }
    lines.push_back({std::string(table.name), methods, NeedsOf(table)});
  }
  // Left-aligned throughout: these are words.
  std::vector<size_t> widths(3);
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], WidthOf(line[i]));
  }
  std::string out;
  for (const auto& line : lines) {
    out += fmt::format("{:<{}}  {:<{}}  {}\n", line[0], widths[0], line[1], widths[1], line[2]);
  }
  return out;
}

std::string PaperTablesToJson() {
  ordered_json out = ordered_json::array();
  for (const PaperTable& table : PaperTables()) {
    ordered_json entry = {
        {"table", table.name},
        {"title", table.title},
        {"source", table.source},
        {"refused", table.refused.empty() ? ordered_json() : ordered_json(table.refused)},
        {"suites", table.suites},
        {"rows", ordered_json::array()},
        {"figures", ordered_json::array()},
        {"notes", table.notes}};
    for (const PaperRow& row : table.rows) {
      entry["rows"].push_back({{"row", row.label},
                               {"kv", row.kv.empty() ? ordered_json() : ordered_json(row.kv)},
                               {"note", row.note}});
    }
    for (const PaperFigure& figure : table.figures) {
      entry["figures"].push_back({{"model", figure.model},
                                  {"row", figure.row},
                                  {"measure", table.measures[figure.measure].name},
                                  {"value", figure.value},
                                  {"spread", NumberOrNull(figure.spread)}});
    }
    out.push_back(std::move(entry));
  }
  return out.dump(2) + "\n";
}

}  // namespace oscar
