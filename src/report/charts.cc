#include "report/charts.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>

namespace oscar {
namespace {

constexpr int kLeft = 64, kRight = 16, kTop = 34, kBottom = 46;
// Distinguishable in print and with colour-blind eyes, on light and dark.
constexpr std::array<const char*, 15> kColors = {
    "#6e7681", "#c44e52", "#9a7148", "#8466ad", "#d377b0", "#b5a726", "#7d8f2a", "#2ba8b8",
    "#1f7f9c", "#e07b39", "#3b78c3", "#3d9a5f", "#5b5fc7", "#e0a83b", "#a02c6e"};

const char* ColorOf(int color, size_t place) {
  const size_t index =
      color >= 0 ? static_cast<size_t>(color) : static_cast<size_t>(kPlainColor) + place;
  return kColors[index % kColors.size()];
}

// Of the text inside a chart; sizes are those of a chart that is shown at its own width.
constexpr char kChartCss[] = R"(svg .title { font-size: 14px; font-weight: 600; fill: var(--ink); }
svg .label { font-size: 12.5px; fill: var(--faint); }
svg .tick { font-size: 12px; fill: var(--ink); }
svg .point { font-size: 12px; fill: var(--ink); paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
svg .leader { stroke: var(--faint); stroke-width: 0.8; }
svg .cell { font-size: 12px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--faint); stroke-width: 1; }
svg .break { fill: none; stroke: var(--ink); stroke-width: 1.4; }
svg .whisker { stroke: var(--ink); stroke-width: 1; opacity: 0.75; }
svg .frontier { fill: none; stroke: var(--faint); stroke-width: 1.2; stroke-dasharray: 5 4; }
)";

// One axis: from values to pixels, with round ticks.
class Scale {
 public:
  Scale(const ChartAxis& axis, double low, double high, double from, double to)
      : log_(axis.log_scale), from_(from), to_(to) {
    low = axis.low.value_or(low), high = axis.high.value_or(high);
    if (log_) low = std::log10(low), high = std::log10(high);
    if (!(high > low)) low -= 0.5, high += 0.5;
    if (log_ && axis.low.has_value() && axis.high.has_value() && high - low < 2) {
      // Less than two decades: doublings are the round numbers.
      low_ = low, high_ = high;
      for (double t = *axis.low; t <= *axis.high * (1 + 1e-9); t *= 2) {
        ticks_.push_back(std::log10(t));
      }
      return;
    }
    if (log_) {
      low_ = std::floor(low), high_ = std::ceil(high);
      const double step = std::max(1.0, std::ceil((high_ - low_) / 8));
      for (double t = low_; t <= high_ + 1e-9; t += step) ticks_.push_back(t);
      return;
    }
    const double raw = (high - low) / 5, power = std::pow(10.0, std::floor(std::log10(raw)));
    const double unit = raw / power;
    const double step = (unit < 1.5 ? 1 : unit < 3 ? 2 : unit < 7 ? 5 : 10) * power;
    low_ = axis.low.has_value() ? low : std::floor(low / step) * step;
    high_ = axis.high.has_value() ? high : std::ceil(high / step) * step;
    for (double t = std::ceil(low_ / step) * step; t <= high_ + 1e-9 * step; t += step) {
      ticks_.push_back(std::abs(t) < 1e-12 * step ? 0.0 : t);
    }
  }
  bool Accepts(double value) const { return std::isfinite(value) && (!log_ || value > 0); }
  double At(double value) const { return Place(log_ ? std::log10(value) : value); }
  double Place(double position) const {
    return from_ + (position - low_) / (high_ - low_) * (to_ - from_);
  }
  const std::vector<double>& ticks() const { return ticks_; }
  bool leaves_zero_out() const { return !log_ && (low_ > 0 || high_ < 0); }
  std::string Label(double tick) const {
    if (!log_) return fmt::format("{:.6g}", tick);
    const bool far = std::abs(tick) > 5;  // 100000 and 0.00001 are written out
    if (far && tick == std::round(tick)) return fmt::format("1e{:.0f}", tick);
    return far ? fmt::format("{:.3g}", std::pow(10.0, tick)) : Plain(std::pow(10.0, tick));
  }

 private:
  // Three digits, without an exponent.
  static std::string Plain(double value) {
    const int decimals = std::max(0, 2 - static_cast<int>(std::floor(std::log10(value) + 1e-9)));
    std::string text = fmt::format("{:.{}f}", value, decimals);
    if (decimals > 0) text.erase(text.find_last_not_of('0') + 1);
    if (text.ends_with('.')) text.pop_back();
    return text;
  }

  bool log_;
  double from_, to_, low_ = 0, high_ = 1;
  std::vector<double> ticks_;
};

struct Range {
  double low = INFINITY, high = -INFINITY;
  void Add(double value) { low = std::min(low, value), high = std::max(high, value); }
};

std::string Open(const ChartOptions& o) {
  return fmt::format(
      "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\" "
      "xmlns=\"http://www.w3.org/2000/svg\">\n"
      "<text x=\"{}\" y=\"18\" class=\"title\">{}</text>\n",
      o.width, o.height, EscapeHtml(o.title), kLeft, EscapeHtml(o.title));
}

std::string YAxis(const Scale& y, const ChartOptions& o) {
  std::string out;
  for (double tick : y.ticks()) {
    const double at = y.Place(tick);
    out += fmt::format(
        "<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" class=\"grid\"/>"
        "<text x=\"{}\" y=\"{:.1f}\" class=\"tick\" text-anchor=\"end\">{}</text>\n",
        kLeft, o.width - kRight, at, at, kLeft - 6, at + 4, y.Label(tick));
  }
  if (y.leaves_zero_out()) {
    out += fmt::format(
        "<path d=\"M{} {}l12 -5M{} {}l12 -5\" class=\"break\"><title>This axis does not reach "
        "0.</title></path>\n",
        kLeft - 6, o.height - kBottom - 3, kLeft - 6, o.height - kBottom - 8);
  }
  const double middle = (kTop + o.height - kBottom) / 2.0;
  out += fmt::format(
      "<text x=\"14\" y=\"{:.1f}\" class=\"label\" text-anchor=\"middle\" "
      "transform=\"rotate(-90 14 {:.1f})\">{}</text>\n",
      middle, middle, EscapeHtml(o.y.label));
  return out;
}

std::string XAxis(const Scale& x, const ChartOptions& o) {
  std::string out = fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\" class=\"axis\"/>\n",
                                kLeft, o.width - kRight, o.height - kBottom, o.height - kBottom);
  for (double tick : x.ticks()) {
    out +=
        fmt::format("<text x=\"{:.1f}\" y=\"{}\" class=\"tick\" text-anchor=\"middle\">{}</text>\n",
                    x.Place(tick), o.height - kBottom + 16, x.Label(tick));
  }
  out +=
      fmt::format("<text x=\"{}\" y=\"{}\" class=\"label\" text-anchor=\"middle\">{}</text>\n",
                  (kLeft + o.width - kRight) / 2, o.height - kBottom + 36, EscapeHtml(o.x.label));
  return out;
}

struct LegendEntry {
  std::string name;
  const char* color;
  bool hollow = false;
};

// Below the chart, wrapped; returns the text and how much height it takes.
std::pair<std::string, int> Legend(const std::vector<LegendEntry>& entries, int width, int top) {
  std::string out;
  int x = kLeft, y = top;
  for (const LegendEntry& entry : entries) {
    const int needed = 26 + 15 * static_cast<int>(entry.name.size()) / 2;
    if (x > kLeft && x + needed > width - kRight) x = kLeft, y += 19;
    out += fmt::format(
        "<rect x=\"{}\" y=\"{}\" width=\"11\" height=\"11\" rx=\"2\" fill=\"{}\" stroke=\"{}\"/>"
        "<text x=\"{}\" y=\"{}\" class=\"tick\">{}</text>\n",
        x, y, entry.hollow ? "none" : entry.color, entry.color, x + 16, y + 10,
        EscapeHtml(entry.name));
    x += needed;
  }
  return {out, y + 19 - top};
}

// An interval of the vertical axis: a line with a stroke at both ends.
std::string Whisker(double x, double low, double high, double half, std::string_view paint) {
  return fmt::format(
      "<path d=\"M{0:.1f} {1:.1f}V{2:.1f}M{3:.1f} {1:.1f}h{4:.1f}M{3:.1f} {2:.1f}h{4:.1f}\" "
      "fill=\"none\" {5}/>\n",
      x, low, high, x - half, 2 * half, paint);
}

}  // namespace

std::string EscapeHtml(std::string_view text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string LineChart(const std::vector<ChartSeries>& series, const ChartOptions& options) {
  Range xs, ys;
  const Scale probe_x(options.x, 1, 2, 0, 1), probe_y(options.y, 1, 2, 0, 1);
  for (const ChartSeries& line : series) {
    for (size_t i = 0; i < line.x.size(); ++i) {
      if (!probe_x.Accepts(line.x[i]) || !probe_y.Accepts(line.y[i])) continue;
      xs.Add(line.x[i]), ys.Add(line.y[i]);
    }
  }
  if (xs.low > xs.high) return "<p>No data.</p>\n";
  std::vector<LegendEntry> entries;
  for (const ChartSeries& line : series) {
    entries.push_back({line.name, ColorOf(line.color, entries.size()), line.dashed});
  }
  ChartOptions o = options;
  const auto [legend, legend_height] = Legend(entries, o.width, o.height);
  const Scale x(o.x, xs.low, xs.high, kLeft, o.width - kRight);
  const Scale y(o.y, ys.low, ys.high, o.height - kBottom, kTop);
  std::string body = YAxis(y, o) + XAxis(x, o);
  for (size_t i = 0; i < series.size(); ++i) {
    constexpr size_t kMarked = 16;  // points, at most
    std::string points, marks;
    for (size_t j = 0; j < series[i].x.size(); ++j) {
      if (!x.Accepts(series[i].x[j]) || !y.Accepts(series[i].y[j])) continue;
      const double at_x = x.At(series[i].x[j]), at_y = y.At(series[i].y[j]);
      points += fmt::format("{:.1f},{:.1f} ", at_x, at_y);
      if (series[i].x.size() > kMarked) continue;
      marks += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.6\" fill=\"{}\"/>\n", at_x,
                           at_y, entries[i].color);
    }
    body += fmt::format(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.6\"{}><title>{}"
        "</title></polyline>\n{}",
        points, entries[i].color, series[i].dashed ? " stroke-dasharray=\"5 3\"" : "",
        EscapeHtml(series[i].name), marks);
  }
  o.height += legend_height;
  return Open(o) + body + legend + "</svg>\n";
}

std::string ScatterChart(const std::vector<ChartPoint>& points, bool frontier,
                         const ChartOptions& o) {
  Range xs, ys;
  for (const ChartPoint& point : points) {
    if (!std::isfinite(point.x) || !std::isfinite(point.y)) continue;
    xs.Add(point.x), ys.Add(point.y);
    if (std::isfinite(point.low)) ys.Add(point.low), ys.Add(point.high);
  }
  if (xs.low > xs.high) return "<p>No data.</p>\n";
  const Scale x(o.x, xs.low, xs.high, kLeft, o.width - kRight);
  const Scale y(o.y, ys.low, ys.high, o.height - kBottom, kTop);
  std::string out = Open(o) + YAxis(y, o) + XAxis(x, o);
  if (frontier) {
    std::vector<const ChartPoint*> best;
    for (const ChartPoint& p : points) {
      if (!std::isfinite(p.x) || !std::isfinite(p.y)) continue;
      if (std::none_of(points.begin(), points.end(), [&](const ChartPoint& q) {
            return q.x <= p.x && q.y >= p.y && (q.x < p.x || q.y > p.y);
          })) {
        best.push_back(&p);
      }
    }
    std::sort(best.begin(), best.end(),
              [](const ChartPoint* a, const ChartPoint* b) { return a->x < b->x; });
    std::string line;
    for (const ChartPoint* p : best) line += fmt::format("{:.1f},{:.1f} ", x.At(p->x), y.At(p->y));
    out += fmt::format("<polyline points=\"{}\" class=\"frontier\"/>\n", line);
  }
  std::map<int, std::vector<size_t>> curves;
  for (size_t i = 0; i < points.size(); ++i) {
    if (points[i].curve >= 0 && std::isfinite(points[i].x) && std::isfinite(points[i].y)) {
      curves[points[i].curve].push_back(i);
    }
  }
  for (auto& [curve, members] : curves) {
    std::ranges::stable_sort(members, {}, [&](size_t i) { return points[i].x; });
    std::string line;
    for (const size_t i : members) {
      line += fmt::format("{:.1f},{:.1f} ", x.At(points[i].x), y.At(points[i].y));
    }
    out +=
        fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.2\"/>\n",
                    line, ColorOf(points[members.front()].color, members.front()));
  }
  // Labels step aside where one is already there.
  std::vector<std::array<double, 4>> taken;  // x0, y0, x1, y1
  const auto overlaps = [&](const std::array<double, 4>& box) {
    return std::any_of(taken.begin(), taken.end(), [&](const std::array<double, 4>& other) {
      return box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3];
    });
  };
  for (const ChartPoint& point : points) {
    if (!std::isfinite(point.x) || !std::isfinite(point.y)) continue;
    const double px = x.At(point.x), py = y.At(point.y);
    taken.push_back({px - 6, py - 6, px + 6, py + 6});
  }
  // From the top down, so that the higher of two close points has the higher label.
  std::vector<size_t> order;
  for (size_t i = 0; i < points.size(); ++i) {
    if (std::isfinite(points[i].x) && std::isfinite(points[i].y)) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return points[a].y > points[b].y; });
  for (const size_t i : order) {
    const double px = x.At(points[i].x), py = y.At(points[i].y);
    const double width = 7.0 * static_cast<double>(points[i].label.size());
    const char* const color = ColorOf(points[i].color, i);
    bool left = px + 8 + width > o.width - kRight;
    double ty = py + 4;
    std::array<double, 4> box{};
    for (int attempt = 0; attempt < 12; ++attempt) {
      const int rows = (attempt + 1) / 2;  // 0, 1, 1, 2, 2, ... lines below and above in turn
      const double offset = 13.0 * rows * (attempt % 2 == 0 ? 1 : -1);
      ty = py + 4 + offset;
      const double x0 = left ? px - 8 - width : px + 8;
      box = {x0, ty - 10, x0 + width, ty + 3};
      if (!overlaps(box) && ty > kTop && ty < o.height - kBottom) break;
    }
    taken.push_back(box);
    if (ty != py + 4) {  // a label that stepped aside points back at its own
      out += fmt::format(
          "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" class=\"leader\"/>\n", px,
          py, left ? px - 7 : px + 7, ty - 4);
    }
    if (std::isfinite(points[i].low)) {
      out += Whisker(px, y.At(points[i].low), y.At(points[i].high), 4,
                     fmt::format("stroke=\"{}\" stroke-width=\"1.2\"", color));
    }
    out += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\" fill=\"{}\" stroke=\"{}\" "
        "stroke-width=\"1.6\"><title>{}: {:.3g}, {:.4g}</title></circle>"
        "<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"point\" text-anchor=\"{}\">{}</text>\n",
        px, py, points[i].hollow ? "none" : color, color, EscapeHtml(points[i].label), points[i].x,
        points[i].y, left ? px - 8 : px + 8, ty, left ? "end" : "start",
        EscapeHtml(points[i].label));
  }
  return out + "</svg>\n";
}

std::string BarChart(const std::vector<std::string>& groups, const std::vector<ChartBars>& series,
                     const ChartOptions& options) {
  if (groups.empty() || series.empty()) return "<p>No data.</p>\n";
  Range ys;
  ys.Add(0);
  std::vector<LegendEntry> entries;
  for (const ChartBars& bars : series) {
    entries.push_back({bars.name, ColorOf(bars.color, entries.size())});
    for (const std::vector<double>* values : {&bars.values, &bars.high}) {
      for (const double value : *values) {
        if (std::isfinite(value)) ys.Add(value);
      }
    }
  }
  ChartOptions o = options;
  const auto [legend, legend_height] =
      o.legend ? Legend(entries, o.width, o.height) : std::pair<std::string, int>("", 0);
  const Scale y(o.y, ys.low, ys.high, o.height - kBottom, kTop);
  std::string out = YAxis(y, o);
  const double each =
      static_cast<double>(o.width - kLeft - kRight) / static_cast<double>(groups.size());
  const double width = each * 0.86 / static_cast<double>(series.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    const double start = kLeft + each * (static_cast<double>(g) + 0.07);
    for (size_t s = 0; s < series.size(); ++s) {
      const ChartBars& bars = series[s];
      const double value = bars.values[g];
      if (!std::isfinite(value)) continue;
      const double top = y.At(value), bottom = y.At(0);
      const double left = start + width * static_cast<double>(s);
      out += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
          "fill=\"{}\"><title>{}, "
          "{}: {:.4g}</title></rect>\n",
          left, std::min(top, bottom), std::max(width - 0.6, 0.8),
          std::max(std::abs(bottom - top), 0.6), entries[s].color, EscapeHtml(bars.name),
          EscapeHtml(groups[g]), value);
      if (g < bars.low.size() && std::isfinite(bars.low[g])) {
        out += Whisker(left + (width - 0.6) / 2, y.At(bars.low[g]), y.At(bars.high[g]),
                       std::min(width / 4, 4.0), "class=\"whisker\"");
      }
    }
    out +=
        fmt::format("<text x=\"{:.1f}\" y=\"{}\" class=\"tick\" text-anchor=\"middle\">{}</text>\n",
                    kLeft + each * (static_cast<double>(g) + 0.5), o.height - kBottom + 16,
                    EscapeHtml(groups[g]));
  }
  out += fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" class=\"axis\"/>\n",
                     kLeft, o.width - kRight, y.At(0), y.At(0));
  o.height += legend_height;
  return Open(o) + out + legend + "</svg>\n";
}

std::string HeatMap(const std::vector<std::string>& rows, const std::vector<std::string>& columns,
                    const std::vector<std::vector<double>>& values, const ChartOptions& options) {
  if (rows.empty() || columns.empty()) return "<p>No data.</p>\n";
  constexpr int kCell = 26;
  size_t longest = 0;
  for (const std::string& row : rows) longest = std::max(longest, row.size());
  const int names = 20 + 15 * static_cast<int>(longest) / 2;
  ChartOptions o = options;
  const double width =
      static_cast<double>(o.width - names - kRight) / static_cast<double>(columns.size());
  o.height = kTop + kCell * static_cast<int>(rows.size()) + kBottom;
  Range range;
  for (const auto& row : values) {
    for (double value : row) {
      if (std::isfinite(value) && value > 0) range.Add(std::log10(value));
    }
  }
  if (o.y.low.has_value()) range.low = std::log10(*o.y.low);
  if (o.y.high.has_value()) range.high = std::log10(*o.y.high);
  std::string out = Open(o);
  for (size_t r = 0; r < rows.size(); ++r) {
    const int top = kTop + kCell * static_cast<int>(r);
    out += fmt::format("<text x=\"{}\" y=\"{}\" class=\"tick\" text-anchor=\"end\">{}</text>\n",
                       names - 8, top + 17, EscapeHtml(rows[r]));
    for (size_t c = 0; c < columns.size(); ++c) {
      const double value = values[r][c];
      double share = 0;  // of the way from least to most
      if (std::isfinite(value) && value > 0 && range.high > range.low) {
        share = std::clamp((std::log10(value) - range.low) / (range.high - range.low), 0.0, 1.0);
      }
      // Light to dark red; text turns white on the dark half.
      const int red = static_cast<int>(255 - 75 * share),
                other = static_cast<int>(245 - 215 * share);
      const double x = names + width * static_cast<double>(c);
      out += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"rgb({},{},{})\"/>"
          "<text x=\"{:.1f}\" y=\"{}\" class=\"cell\" fill=\"{}\" "
          "text-anchor=\"middle\">{}</text>\n",
          x, top, width - 1, kCell - 1, red, other, other, x + width / 2, top + 17,
          share > 0.5 ? "#fff" : "#222",
          std::isfinite(value) ? fmt::format("{:.{}g}", value, o.digits) : "");
    }
  }
  for (size_t c = 0; c < columns.size(); ++c) {
    out +=
        fmt::format("<text x=\"{:.1f}\" y=\"{}\" class=\"tick\" text-anchor=\"middle\">{}</text>\n",
                    names + width * (static_cast<double>(c) + 0.5), o.height - kBottom + 16,
                    EscapeHtml(columns[c]));
  }
  out +=
      fmt::format("<text x=\"{}\" y=\"{}\" class=\"label\" text-anchor=\"middle\">{}</text>\n",
                  (names + o.width - kRight) / 2, o.height - kBottom + 36, EscapeHtml(o.x.label));
  return out + "</svg>\n";
}

std::string DenseMap(const std::vector<std::vector<double>>& values, double most,
                     const ChartOptions& options) {
  if (values.empty() || values.front().empty() || !(most > 0)) return "<p>No data.</p>\n";
  constexpr int kLevels = 12;
  constexpr int kKey = 90;  // pixels of the scale at the right
  const ChartOptions& o = options;
  const size_t columns = values.front().size();
  const auto rows = static_cast<double>(values.size());
  const int right = o.width - kRight - kKey, height = o.height - kTop - kBottom;
  const auto paint = [](int level) {
    const int other = 250 - 225 * level / (kLevels - 1);
    return fmt::format("rgb({},{},{})", 255 - 95 * level / (kLevels - 1), other, other);
  };
  // One path per colour, of runs along rows; in cells, which the group scales.
  std::vector<std::string> runs(kLevels);
  for (size_t r = 0; r < values.size(); ++r) {
    const auto level_at = [&](size_t c) {
      const double share = std::isfinite(values[r][c]) ? values[r][c] / most : 0;
      return std::clamp(static_cast<int>(share * kLevels), 0, kLevels - 1);
    };
    for (size_t c = 0; c < columns;) {
      size_t end = c + 1;
      while (end < columns && level_at(end) == level_at(c)) ++end;
      runs[static_cast<size_t>(level_at(c))] += fmt::format("M{} {}h{}", c, r, end - c);
      c = end;
    }
  }
  std::string out = Open(o);
  out += fmt::format(
      "<g transform=\"translate({} {:.2f}) scale({:.4f} {:.4f})\" "
      "shape-rendering=\"crispEdges\">\n",
      kLeft, kTop + 0.5 * height / rows,
      static_cast<double>(right - kLeft) / static_cast<double>(columns), height / rows);
  for (int level = 0; level < kLevels; ++level) {
    const std::string& path = runs[static_cast<size_t>(level)];
    if (path.empty()) continue;
    // A little wider than a cell, so that no seams show between rows.
    out += fmt::format("<path d=\"{}\" stroke=\"{}\" stroke-width=\"1.04\" fill=\"none\"/>\n", path,
                       paint(level));
  }
  out += "</g>\n";
  // Ends are those of the map: rounded ones would move its cells away from their numbers.
  ChartAxis x_axis = o.x, y_axis = o.y;
  x_axis.low = y_axis.low = 0;
  x_axis.high = o.x.high.value_or(static_cast<double>(columns));
  y_axis.high = o.y.high.value_or(rows);
  const Scale x(x_axis, 0, *x_axis.high, kLeft, right);
  const Scale y(y_axis, 0, *y_axis.high, kTop, o.height - kBottom);
  for (const double tick : x.ticks()) {
    out +=
        fmt::format("<text x=\"{:.1f}\" y=\"{}\" class=\"tick\" text-anchor=\"middle\">{}</text>\n",
                    x.Place(tick), o.height - kBottom + 16, x.Label(tick));
  }
  for (const double tick : y.ticks()) {
    out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" class=\"tick\" text-anchor=\"end\">{}</text>\n",
                       kLeft - 6, y.Place(tick) + 4, y.Label(tick));
  }
  out += fmt::format("<text x=\"{}\" y=\"{}\" class=\"label\" text-anchor=\"middle\">{}</text>\n",
                     (kLeft + right) / 2, o.height - kBottom + 36, EscapeHtml(o.x.label));
  const double middle = (kTop + o.height - kBottom) / 2.0;
  out += fmt::format(
      "<text x=\"14\" y=\"{0:.1f}\" class=\"label\" text-anchor=\"middle\" "
      "transform=\"rotate(-90 14 {0:.1f})\">{1}</text>\n",
      middle, EscapeHtml(o.y.label));
  for (int level = 0; level < kLevels; ++level) {
    const double step = static_cast<double>(height) / kLevels;
    out += fmt::format("<rect x=\"{}\" y=\"{:.1f}\" width=\"14\" height=\"{:.1f}\" fill=\"{}\"/>\n",
                       right + 18, kTop + step * (kLevels - 1 - level), step + 0.3, paint(level));
  }
  for (const double share : {0.0, 0.5, 1.0}) {
    out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" class=\"tick\">{}{:.3g}</text>\n", right + 38,
                       kTop + height * (1 - share) + 4, share == 1.0 ? "≥ " : "", most * share);
  }
  return out + "</svg>\n";
}

std::string StandaloneChart(std::string chart) {
  const size_t body = chart.find('>') + 1;
  return chart.insert(
      body,
      fmt::format("\n<style>\nsvg {{ --ink: #1f2328; --faint: #6b7280; --line: #e3e5e8; --page: "
                  "#ffffff; background: #ffffff; font-family: system-ui, sans-serif; }}\n"
                  "{}</style>\n",
                  kChartCss));
}

std::string HtmlPage(std::string_view title, std::string_view body) {
  return fmt::format(R"(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{0}</title>
<style>
:root {{ --ink: #1f2328; --faint: #6b7280; --line: #e3e5e8; --page: #ffffff; --band: #f6f7f9; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e6e6; --faint: #9aa0a8; --line: #34383e; --page: #16181c; --band: #1e2126; }}
}}
body {{ margin: 2rem auto; padding: 0 1rem; max-width: 1180px; color: var(--ink);
       background: var(--page); font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
p, li {{ color: var(--ink); max-width: 75ch; }} .note {{ color: var(--faint); }}
.verdict {{ font-size: 1.1rem; }}
.scroll {{ overflow-x: auto; margin-bottom: 1.6rem; }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 9px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
thead th {{ background: var(--band); }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(520px, 100%), 1fr)); gap: 1.2rem; }}
svg {{ width: 100%; height: auto; font-family: inherit; }}
{2}</style>
</head>
<body>
<h1>{0}</h1>
{1}</body>
</html>
)",
                     EscapeHtml(title), body, kChartCss);
}

}  // namespace oscar
