// Small charts as SVG text, for reports that are one file: lines, bars, scatter, heat map. Colours
// follow the page's CSS variables, so that a dark page gets dark charts. Labels are escaped. Free
// functions; safe from any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

std::string EscapeHtml(std::string_view text);

struct ChartAxis {
  std::string label;
  bool log_scale = false;
  std::optional<double> low, high;  // unset: from the data
};

struct ChartSeries {
  std::string name;
  std::vector<double> x, y;  // the same size
  int color = -1;            // place in the palette; -1: the place of the series
  bool dashed = false;       // what the others are compared with
};

struct ChartOptions {
  std::string title;
  ChartAxis x, y;
  int width = 720, height = 360;
  bool legend = true;  // of bars: a chart that continues below needs none
};

// Values that are not finite, or not positive on a log axis, are left out. Where a line has few
// points they are marked: one alone would not be seen.
std::string LineChart(const std::vector<ChartSeries>& series, const ChartOptions& options);
// One labelled point each; `frontier` joins the points that no other beats in both directions
// (less x, more y).
struct ChartPoint {
  std::string label;
  double x = 0, y = 0;
  bool hollow = false;
  double y_error = 0;  // shown as a bar up and down; 0: none
};
std::string ScatterChart(const std::vector<ChartPoint>& points, bool frontier,
                         const ChartOptions& options);
// Groups of bars: values[series][group]; NaN leaves a gap.
std::string BarChart(const std::vector<std::string>& groups, const std::vector<std::string>& series,
                     const std::vector<std::vector<double>>& values, const ChartOptions& options);
// values[row][column], coloured on a log scale between the extremes and printed in the cell.
std::string HeatMap(const std::vector<std::string>& rows, const std::vector<std::string>& columns,
                    const std::vector<std::vector<double>>& values, const ChartOptions& options);

// A chart as a separate file, with the colours that a page would give it.
std::string StandaloneChart(std::string chart);

// A page around sections of HTML; no script, nothing is loaded from elsewhere.
std::string HtmlPage(std::string_view title, std::string_view body);

}  // namespace oscar
