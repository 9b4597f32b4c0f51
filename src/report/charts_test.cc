#include "report/charts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "report/well_formed.h"

namespace oscar {
namespace {

TEST(Charts, DrawsErrorsWithinTheChart) {
  const ChartPoint sure{.label = "one", .x = 2, .y = 30};
  const ChartPoint unsure{.label = "two", .x = 3, .y = 30, .low = 10, .high = 50};
  ChartOptions from_zero;
  from_zero.y.low = 0.0;
  const std::string bare = ScatterChart({sure}, false, from_zero);
  EXPECT_THAT(bare, testing::Not(testing::HasSubstr("<path")));
  const std::string chart = ScatterChart({sure, unsure}, false, {});
  ExpectWellFormed(chart);
  EXPECT_THAT(chart, testing::HasSubstr("<path"));
  EXPECT_THAT(chart, testing::HasSubstr(">50</text>"));  // the axis reaches both ends
  EXPECT_THAT(chart, testing::HasSubstr(">10</text>"));
}

// A difference looks as large as one likes on an axis that begins where one likes.
TEST(Charts, AnAxisThatLeavesZeroOutIsMarked) {
  const auto line = [](double low, bool log) {
    ChartOptions options;
    options.y.log_scale = log;
    return LineChart({{"a", {1, 2}, {low, 100}, -1}}, options);
  };
  EXPECT_THAT(line(90, false), testing::HasSubstr("class=\"break\""));
  EXPECT_THAT(line(-5, false), testing::Not(testing::HasSubstr("class=\"break\"")));
  EXPECT_THAT(LineChart({{"a", {1, 2}, {-3.4, -3.3}, -1}}, {}),
              testing::HasSubstr("class=\"break\""));
  EXPECT_THAT(line(0, false), testing::Not(testing::HasSubstr("class=\"break\"")));
  EXPECT_THAT(line(90, true), testing::Not(testing::HasSubstr("class=\"break\"")));  // has no 0
  const std::string bars = BarChart({"g"}, {{"s", {95}, {90}, {99}}}, {});
  ExpectWellFormed(bars);
  EXPECT_THAT(bars, testing::Not(testing::HasSubstr("class=\"break\"")));
  EXPECT_THAT(bars, testing::HasSubstr("class=\"whisker\""));
}

// A series that is given a colour has it in every kind of chart, whatever else is drawn.
TEST(Charts, ColoursBelongToWhatIsDrawn) {
  const auto color_in = [](const std::string& chart) {
    const size_t at = chart.find("rect x=");  // the legend's, or a bar
    const size_t from = chart.find('#', at == std::string::npos ? chart.find("<circle") : at);
    return chart.substr(from, 7);
  };
  ChartPoint point{.label = "m", .x = 2, .y = 3};
  point.color = 4;
  const std::string scatter = color_in(ScatterChart({point}, false, {}));
  EXPECT_EQ(scatter.front(), '#');
  EXPECT_EQ(color_in(BarChart({"g"}, {{"m", {3}, {}, {}, 4}}, {})), scatter);
  EXPECT_EQ(color_in(LineChart({{"m", {1, 2}, {3, 4}, 4}}, {})), scatter);
  EXPECT_NE(color_in(BarChart({"g"}, {{"m", {3}, {}, {}, 5}}, {})), scatter);
}

TEST(Charts, MarksFewPointsAndWritesDecadesOut) {
  ChartOptions options;
  options.y.log_scale = true;
  const auto marks = [](const std::string& chart) {
    size_t count = 0;
    for (size_t at = 0; (at = chart.find("<circle", at)) != std::string::npos; ++at) ++count;
    return count;
  };
  const std::string alone =
      LineChart({{"a", {1}, {10}, -1}, {"b", {1, 2}, {0.02, 4000}, -1, true}}, options);
  ExpectWellFormed(alone);
  EXPECT_EQ(marks(alone), 3u);  // one point alone would not be seen
  EXPECT_THAT(alone, testing::HasSubstr(">10000</text>"));
  EXPECT_THAT(alone, testing::HasSubstr(">0.01</text>"));
  EXPECT_THAT(alone, testing::HasSubstr("stroke-dasharray"));
  const std::vector<double> many(100, 1.0);
  EXPECT_EQ(marks(LineChart({{"a", many, many, -1}}, options)), 0u);
}

TEST(Charts, LeavesOutWhatCannotBeDrawn) {
  ChartOptions options;
  options.y.log_scale = true;
  const std::string chart = LineChart({{"a", {1, 2, 3}, {10, 0, 1000}, -1}}, options);
  ExpectWellFormed(chart);
  EXPECT_THAT(chart, testing::Not(testing::HasSubstr("inf")));
  EXPECT_EQ(LineChart({}, options), "<p>No data.</p>\n");
  EXPECT_THAT(ScatterChart({{"one", 2, 3, false}}, true, {}), testing::HasSubstr("one"));
  options.x.log_scale = true;
  options.x.low = 2, options.x.high = 16;
  EXPECT_THAT(ScatterChart({{"one", 4, 3, false}}, true, options), testing::HasSubstr(">8</text>"));
  ExpectWellFormed(HeatMap({"r"}, {"c"}, {{0.5}}, {}));
}

TEST(Charts, DenseMapsJoinCellsOfOneColour) {
  ChartOptions options;
  options.x.label = "channel";
  options.y.high = 8;  // each of the two rows stands for four
  const std::string chart = DenseMap({{0, 0, 0, 6}, {0, 3, NAN, 9}}, 6, options);
  ExpectWellFormed(chart);
  EXPECT_THAT(chart, testing::HasSubstr("M0 0h3M0 1h1M2 1h1\""));  // nothing is as light as 0
  EXPECT_THAT(chart, testing::HasSubstr("\"M3 0h1M3 1h1\""));      // above the scale is its end
  EXPECT_THAT(chart, testing::HasSubstr(">8</text>"));
  EXPECT_THAT(chart, testing::HasSubstr("\u2265 6</text>"));
  EXPECT_THAT(chart, testing::Not(testing::HasSubstr("nan")));
  EXPECT_EQ(DenseMap({}, 1, {}), "<p>No data.</p>\n");
  EXPECT_EQ(DenseMap({{1}}, 0, {}), "<p>No data.</p>\n");
}

TEST(Charts, HeatMapsHaveAsManyDigitsAsAsked) {
  ChartOptions options;
  EXPECT_THAT(HeatMap({"r"}, {"c"}, {{1.126}}, options), testing::HasSubstr(">1.1<"));
  options.digits = 3;
  EXPECT_THAT(HeatMap({"r"}, {"c"}, {{1.126}}, options), testing::HasSubstr(">1.13<"));
}

}  // namespace
}  // namespace oscar
