#include "run/sweep.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace oscar {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST(SweepTest, ReadsAxes) {
  const auto axes = ParseSweep({"sink=0,64", "recent=64,256,512"});
  ASSERT_TRUE(axes.has_value()) << axes.error().ToString();
  ASSERT_EQ(axes->size(), 2u);
  EXPECT_EQ((*axes)[0], (SweepAxis{"sink", {"0", "64"}}));
  EXPECT_THAT((*axes)[1].values, ElementsAre("64", "256", "512"));
  EXPECT_THAT((*ParseSweep({"calibration-text=sample,gpqa=a/b.csv"}))[0].values,
              ElementsAre("sample", "gpqa=a/b.csv"));
  for (const auto& [texts, why] :
       std::initializer_list<std::pair<std::vector<std::string>, const char*>>{
           {{"window=64"}, "what is varied is sink"},
           {{"sink"}, "\"\" is no number"},
           {{"sink="}, "\"\" is no number"},
           {{"sink=0,"}, "\"\" is no number"},
           {{"sink=64x"}, "\"64x\" is no number"},
           {{"sink=-64"}, "\"-64\" is no number"},
           {{"sink=0.5"}, "\"0.5\" is no number"},
           {{"sink=nan"}, "\"nan\" is no number"},
           {{"sink=0,0"}, "0 is there twice"},
           {{"sink=0", "sink=64"}, "varied already"},
           {{"sink=0", "recent=64", "group=32"}, "at most 2"}}) {
    const auto wrong = ParseSweep(texts);
    ASSERT_FALSE(wrong.has_value()) << texts.front();
    EXPECT_THAT(wrong.error().message(), HasSubstr(why));
  }
  EXPECT_TRUE(ParseSweep({"bits=2.25,2.5"}).has_value());
  EXPECT_TRUE(ParseSweep({}).value().empty());
}

TEST(SweepTest, ExpandsMethodsThatAnAxisConcerns) {
  const auto methods = ParseMethods({"bf16", "oscar+", "kivi"}, {});
  const auto axes = ParseSweep({"sink=0,64", "recent=256,512"});
  const auto points = ExpandSweep(*methods, *axes);
  ASSERT_TRUE(points.has_value()) << points.error().ToString();
  ASSERT_EQ(points->size(), 9u);
  EXPECT_EQ((*points)[0].label, "bf16");
  EXPECT_FALSE((*points)[0].sink.has_value());
  EXPECT_EQ((*points)[2].label, "oscar+ sink=0 recent=512");
  EXPECT_EQ((*points)[2].sink, 0);
  EXPECT_EQ((*points)[2].recent, 512);
  EXPECT_EQ((*points)[2].base, "oscar+");
  EXPECT_EQ((*points)[8].base, "kivi");
  // Calibration concerns those that take a rotation and have none.
  const auto rotated = ParseMethods({"bf16", "oscar+", "oscar+@none", "kivi"}, {});
  const auto budgets = ExpandSweep(*rotated, *ParseSweep({"calibration-tokens=1000,2000"}));
  ASSERT_TRUE(budgets.has_value());
  EXPECT_EQ(budgets->size(), 5u);
  const auto useless =
      ExpandSweep(*ParseMethods({"bf16", "kivi"}, {}), *ParseSweep({"calibration-tokens=1000"}));
  ASSERT_FALSE(useless.has_value());
  EXPECT_THAT(useless.error().message(), HasSubstr("--sweep calibration-tokens: none"));
}

EvalResults Results(const std::vector<std::string>& sweep) {
  EvalResults results;
  results.sweep = *ParseSweep(sweep);
  double score = 70;
  const auto points = ExpandSweep(*ParseMethods({"bf16", "oscar+"}, {}), results.sweep);
  for (const EvalMethod& point : *points) {
    MethodScore& method = results.methods.emplace_back();
    method.label = point.label;
    method.base = point.base;
    method.swept = point.swept;
    method.tasks["sum"].items = 10;
    method.tasks["sum"].strict = score++;
    method.tasks["sum"].reference = ReferenceScore{100, 0.1, 0.01 * score};
  }
  return results;
}

TEST(SweepTest, ChartsEveryPoint) {
  const auto grid = SweepCharts(Results({"sink=0,64", "recent=64,256"}));
  ASSERT_EQ(grid.size(), 2u);
  EXPECT_EQ(grid[0].first, "sweep-oscar+-score.svg");
  EXPECT_EQ(grid[1].first, "sweep-oscar+-kl.svg");
  for (const char* value : {">71<", ">72<", ">73<", ">74<"}) {
    EXPECT_THAT(grid[0].second, HasSubstr(value));
  }
  EXPECT_THAT(grid[0].second, Not(HasSubstr(">70<"))) << "bf16 is no point";
  const auto row = SweepCharts(Results({"group=32,64"}));
  ASSERT_EQ(row.size(), 2u);
  EXPECT_EQ(row[0].first, "sweep-score.svg");
  EXPECT_THAT(row[0].second, HasSubstr("class=\"whisker\""));
  EvalResults none = Results({"group=32,64"});
  none.sweep.clear();
  EXPECT_TRUE(SweepCharts(none).empty());
}

TEST(SweepTest, ComesBackFromJson) {
  const EvalResults results = Results({"sink=0,64", "recent=64,256"});
  const auto read = ResultsFromJson(ResultsToJson(results), "test");
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(read->sweep, results.sweep);
  ASSERT_EQ(read->methods.size(), results.methods.size());
  EXPECT_EQ(read->methods[3].swept, results.methods[3].swept);
  EXPECT_EQ(SweepCharts(*read), SweepCharts(results));
}

}  // namespace
}  // namespace oscar
