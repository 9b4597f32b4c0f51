#include "report/charts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "report/well_formed.h"

namespace oscar {
namespace {

TEST(Charts, DrawsErrorsWithinTheChart) {
  const ChartPoint sure{"one", 2, 30, false, 0}, unsure{"two", 3, 30, false, 20};
  const std::string bare = ScatterChart({sure}, false, {});
  EXPECT_THAT(bare, testing::Not(testing::HasSubstr("<path")));
  const std::string chart = ScatterChart({sure, unsure}, false, {});
  ExpectWellFormed(chart);
  EXPECT_THAT(chart, testing::HasSubstr("<path"));
  EXPECT_THAT(chart, testing::HasSubstr(">50</text>"));  // the axis reaches both ends
  EXPECT_THAT(chart, testing::HasSubstr(">10</text>"));
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

}  // namespace
}  // namespace oscar
