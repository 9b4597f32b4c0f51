// Small charts as SVG text, for reports that are one file: lines, bars, scatter, heat map. Colours
// follow the page's CSS variables, so that a dark page gets dark charts. A vertical axis that
// leaves 0 out carries a break mark. Labels are escaped. Free functions; safe from any thread.
#pragma once

#include <cmath>
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

// Places in the palette from here on are for series in order; oscar eval gives those before and
// after to cache methods, the first of them a grey.
inline constexpr int kPlainColor = 9;

struct ChartSeries {
  std::string name;
  std::vector<double> x, y;  // the same size
  int color = -1;            // place in the palette; -1: by the place of the series
  bool dashed = false;       // what the others are compared with
};

struct ChartOptions {
  std::string title;
  ChartAxis x, y;
  int width = 600, height = 340;  // text is of the page's size where two charts stand in a row
  bool legend = true;             // of bars: a chart that continues below needs none
  int digits = 2;                 // of the numbers in a heat map's cells
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
  double low = NAN, high = NAN;  // an interval of y, shown as a bar; NaN: none
  int color = -1;                // as of a series
  int curve = -1;                // those of one curve are joined, left to right; -1: of none
};
std::string ScatterChart(const std::vector<ChartPoint>& points, bool frontier,
                         const ChartOptions& options);
// Groups of bars, one of each series in every group; NaN leaves a gap.
struct ChartBars {
  std::string name;
  std::vector<double> values;     // [groups]
  std::vector<double> low, high;  // intervals, [groups] or empty; NaN: none
  int color = -1;
};
std::string BarChart(const std::vector<std::string>& groups, const std::vector<ChartBars>& series,
                     const ChartOptions& options);
// values[row][column], coloured on a log scale between the extremes (of y, where it is bounded: two
// maps can share theirs) and printed in the cell.
std::string HeatMap(const std::vector<std::string>& rows, const std::vector<std::string>& columns,
                    const std::vector<std::vector<double>>& values, const ChartOptions& options);

// values[row][column] of many cells, without their numbers: from white at 0 to dark at `most` and
// above, rows from the top down. Axes count cells, or what their `high` says. Takes about 10 bytes
// per run of equal colours.
std::string DenseMap(const std::vector<std::vector<double>>& values, double most,
                     const ChartOptions& options);

// A chart as a separate file, with the colours that a page would give it.
std::string StandaloneChart(std::string chart);

// A page around sections of HTML; no script, nothing is loaded from elsewhere.
std::string HtmlPage(std::string_view title, std::string_view body);

}  // namespace oscar
