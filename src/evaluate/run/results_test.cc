#include "run/results.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "report/well_formed.h"
#include "run/eval_report.h"

namespace oscar {
namespace {

ItemRecord Record(const std::string& id, int repeat, bool strict, double answer) {
  ItemRecord r;
  r.settings = "00ff";
  r.method = "oscar+";
  r.task = "sum";
  r.id = id;
  r.repeat = repeat;
  r.strict = strict;
  r.answer = answer;
  r.first_wrong = strict ? -1 : 7;
  r.prompt_tokens = 100, r.output_tokens = 20;
  r.bits = 2.5;
  r.cache_bytes = 4096;
  r.reference = ReferenceScore{20, 0.25, strict ? 0.5 : 0.75};
  r.output = "a \"quoted\" <answer>";
  return r;
}

EvalResults Sample() {
  EvalResults results;
  results.model = "demo";
  results.prefill = "cell 64";
  results.settings = {{"seed", "0"}};
  results.short_tasks = {"copy"};
  MethodScore method;
  method.label = "oscar+";
  method.description = "a & b";
  method.history_bits = 2.25;
  method.stored_bits = {{4096, 3.3}, {131072, 2.28}};
  method.tasks["sum"] = {10,
                         90.0,
                         95.0,
                         std::nullopt,
                         std::nullopt,
                         2.5,
                         4096,
                         120,
                         0,
                         ReferenceScore{200, 0.25, 0.0125}};
  method.tasks["copy"] = {10,
                          100.0,
                          100.0,
                          std::nullopt,
                          std::nullopt,
                          16,
                          1024,
                          60,
                          0,
                          ReferenceScore{40, 0.75, 0.0375}};
  method.paired["sum"] = {10, 2, 1, 1.0, -10.0, -40.0, 20.0};
  method.paired[kPairedMean] = {10, 9, 0, 0.0039, -90.0, -100.0, -70.0};
  method.text = TextMetrics{3.25, 25.79, 0.01, 0.95, 100, 50};
  method.layer_errors = {{0.1, 0.2}, {0.3, 0.4}};
  results.methods.push_back(method);
  results.spectra = {{1.5, 0.5}, {1.75, 0.25}};
  return results;
}

TEST(Results, RecordsSurviveTheFile) {
  const ItemRecord record = Record("x", 1, false, 0.5);
  const auto parsed = ParseItemRecord(ToJsonLine(record));
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(ToJsonLine(*parsed), ToJsonLine(record));
  EXPECT_EQ(KeyOf(*parsed), KeyOf(record));
  EXPECT_FALSE(ParseItemRecord(ToJsonLine(record).substr(0, 40)).has_value());
  EXPECT_FALSE(ParseItemRecord("{}").has_value());
}

TEST(Results, NumbersThatDoNotFitAreNotRead) {
  const auto record = ParseItemRecord(
      R"({"method":"m","id":"i","repeat":4294967296,"first_wrong":1e300,"output_tokens":9223372036854775808,)"
      R"("cache_bytes":-1,"prompt_tokens":7,"margins":[[1e300,1],[-1e300,1],[3,0.5]]})");
  ASSERT_TRUE(record.has_value());
  EXPECT_EQ(record->repeat, 0);
  EXPECT_EQ(record->first_wrong, -1);
  EXPECT_EQ(record->output_tokens, 0);
  EXPECT_EQ(record->cache_bytes, 0u);
  EXPECT_EQ(record->prompt_tokens, 7);
  EXPECT_EQ(record->margins, (std::vector<TokenMargin>{{3, 0.5}}));
}

TEST(Results, DeviationIsOverRepeats) {
  const std::vector<ItemRecord> records = {Record("a", 0, true, 1), Record("b", 0, true, 1),
                                           Record("a", 1, true, 1), Record("b", 1, false, 0)};
  std::vector<const ItemRecord*> pointers;
  pointers.reserve(records.size());
  for (const ItemRecord& record : records) pointers.push_back(&record);
  const TaskScore score = ScoreTask(pointers);
  EXPECT_EQ(score.items, 2);
  EXPECT_DOUBLE_EQ(*score.strict, 75.0);
  EXPECT_NEAR(*score.strict_sd, 35.3553, 1e-3);  // of 100 and 50
  EXPECT_EQ(score.reference, (ReferenceScore{80, 0.25, 0.5625}));
  const TaskScore one = ScoreTask({pointers[0], pointers[1]});
  EXPECT_FALSE(one.strict_sd.has_value());
}

// What never came is wrong, marked, and nothing to take a mean of bits and tokens from.
TEST(Results, FailedItemsCountAsWrong) {
  std::vector<ItemRecord> records = {Record("a", 0, true, 1), Record("b", 0, false, 0),
                                     Record("c", 0, false, 0)};
  records[1].failed = records[2].failed = true;
  records[1].bits = records[1].cache_bytes = 0, records[1].prompt_tokens = 0;
  const TaskScore score = ScoreTask({&records[0], &records[1], &records[2]});
  EXPECT_EQ(score.items, 3);
  EXPECT_EQ(score.failed, 2);
  EXPECT_NEAR(*score.answer, 100.0 / 3, 1e-9);
  EXPECT_EQ(score.bits, 2.5);
  EXPECT_EQ(score.mean_tokens, 120);
  EvalResults results = Sample();
  EXPECT_THAT(ResultsToTable(results), testing::Not(testing::HasSubstr("*")));
  results.methods[0].tasks["sum"] = score;
  const std::string table = ResultsToTable(results);
  EXPECT_THAT(table, testing::HasSubstr(" 33.3*"));
  EXPECT_THAT(table, testing::HasSubstr("100.0 "));
  EXPECT_THAT(table, testing::HasSubstr("* 2 outputs are missing and count as wrong"));
  EXPECT_THAT(RenderEvalReport(results), testing::HasSubstr("<td>33.3*</td>"));
}

// A token weighs the same in whichever item, a task in the mean; KL needs BF16 beside every item.
TEST(Results, ReferencesAreMeansOverTokens) {
  std::vector<ItemRecord> records = {Record("a", 0, true, 1), Record("b", 0, true, 1)};
  records[1].reference = ReferenceScore{60, 1.25, 0.1};
  const TaskScore both = ScoreTask({&records[0], &records[1]});
  EXPECT_EQ(both.reference->tokens, 80);
  EXPECT_DOUBLE_EQ(both.reference->nll, 1.0);
  EXPECT_DOUBLE_EQ(*both.reference->kl, 0.2);
  records[0].reference->kl.reset();
  EXPECT_FALSE(ScoreTask({&records[0], &records[1]}).reference->kl.has_value());
  records[0].reference.reset(), records[1].reference.reset();
  EXPECT_FALSE(ScoreTask({&records[0], &records[1]}).reference.has_value());

  EvalResults results = Sample();
  const MethodScore& method = results.methods[0];
  EXPECT_EQ(method.MeanReference()->tokens, 240);
  EXPECT_DOUBLE_EQ(method.MeanReference()->nll, 0.5);
  EXPECT_DOUBLE_EQ(*method.MeanReference({"copy"})->kl, 0.0125);
  EXPECT_THAT(ResultsToTable(results),
              testing::HasSubstr("oscar+        0.0250 0.5000  0.0125 0.2500  0.0375 0.7500  "
                                 "0.0125 0.2500\n"));
  EXPECT_THAT(ResultsToCsv(results), testing::HasSubstr(",0,200,0.250000,0.012500\n"));
  const std::string text = ResultsToJson(results);
  const auto back = ResultsFromJson(text, "results.json");
  EXPECT_EQ(back->methods[0].tasks.at("sum").reference, method.tasks.at("sum").reference);
  EXPECT_THAT(text, testing::HasSubstr("\"reference_without_short\""));
  const std::string page = RenderEvalReport(results);
  EXPECT_THAT(page, testing::HasSubstr("<td>0.0125</td><td>0.2500</td>"));
  EXPECT_THAT(page, testing::HasSubstr("KL of the references"));
}

// The dial: variants of one method are joined, others not.
TEST(Results, BitsOfOneMethodAreACurve) {
  EvalResults results = Sample();
  for (const char* label : {"oscar+:2.5", "oscar+:3.25@none", "quarot"}) {
    results.methods.push_back(results.methods[0]);
    results.methods.back().label = label;
  }
  const auto lines = [&] {
    const std::string page = RenderEvalReport(results);
    size_t count = 0;
    for (size_t at = 0; (at = page.find("stroke-width=\"1.2\"/>\n", at)) != std::string::npos; ++at)
      ++count;
    return count;
  };
  const size_t with = lines();
  results.methods[1].label = "oscar+:2.5@none";  // the same key as the third, not as the first
  EXPECT_EQ(lines(), with);
  results.methods[2].label = "naive";
  EXPECT_LT(lines(), with);
}

// What a server's cache takes cannot be seen: empty, not nought.
TEST(Results, ServersHaveNoBits) {
  EvalResults results = Sample();
  MethodScore& method = results.methods[0];
  method.is_remote = true;
  method.history_bits = 0;
  method.stored_bits.clear();
  method.text.reset();
  method.layer_errors.clear();
  EXPECT_THAT(ResultsToCsv(results),
              testing::HasSubstr("oscar+,,sum,10,90.0000,,95.0000,,,,,120.0,0"));
  const std::string text = ResultsToJson(results);
  EXPECT_THAT(text, testing::HasSubstr("\"bits_per_element\": null"));
  EXPECT_THAT(text, testing::HasSubstr("\"simulated\": null"));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("\"cache_bytes\": 4096")));
  const auto back = ResultsFromJson(text, "results.json");
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->methods[0].paired, results.methods[0].paired);
  EXPECT_TRUE(back->methods[0].is_remote);
  EXPECT_EQ(ResultsToJson(*back), text);
}

// A screen is no wider for many tasks: then they are rows.
TEST(Results, ManyTasksAreRows) {
  EvalResults results = Sample();
  for (int i = 0; i < 33; ++i) {
    results.methods[0].tasks["niah_task_" + std::to_string(i)] = results.methods[0].tasks["sum"];
  }
  const std::string table = ResultsToTable(results);
  EXPECT_THAT(table, testing::HasSubstr("\nniah_task_32      90.0\n"));
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) EXPECT_LT(line.size(), 130u) << line;
}

TEST(Results, LengthsAreInOrder) {
  EvalResults results;
  results.methods.emplace_back();
  for (const char* name : {"vt@16384", "vt@4096", "cwe@8192", "vt", "cwe@16384"}) {
    results.methods[0].tasks[name] = {};
  }
  EXPECT_EQ(TaskNames(results),
            (std::vector<std::string>{"cwe@8192", "cwe@16384", "vt", "vt@4096", "vt@16384"}));
}

TEST(Results, JsonRoundTripIsExact) {
  const EvalResults results = Sample();
  const std::string text = ResultsToJson(results);
  const auto back = ResultsFromJson(text, "results.json");
  ASSERT_TRUE(back.has_value()) << back.error().ToString();
  EXPECT_EQ(ResultsToJson(*back), text);
  EXPECT_EQ(ResultsToCsv(*back), ResultsToCsv(results));
  EXPECT_FALSE(ResultsFromJson("{}", "x").has_value());
  EXPECT_FALSE(ResultsFromJson("[1", "x").has_value());
}

TEST(Results, MeansLeaveShortTasksOut) {
  const EvalResults results = Sample();
  EXPECT_DOUBLE_EQ(*results.methods[0].MeanStrict(), 95.0);
  EXPECT_DOUBLE_EQ(*results.methods[0].MeanStrict({"copy"}), 90.0);
  EXPECT_EQ(results.methods[0].CacheBytes(), 4096u);
  EXPECT_FALSE(MethodScore().MeanStrict().has_value());
}

TEST(Results, CsvQuotesWhatItMust) {
  EvalResults results = Sample();
  results.methods[0].label = "oscar+@a,\"b\"";
  EXPECT_THAT(ResultsToCsv(results), testing::HasSubstr("\"oscar+@a,\"\"b\"\"\",real,sum,10,90.0"));
}

TEST(Report, IsOneWellFormedFile) {
  EvalResults results = Sample();
  results.methods[0].label = "<b>&";
  results.warnings = {"t.jsonl:3: left out: \"x\" <y>"};
  const std::string html = RenderEvalReport(results);
  ExpectWellFormed(html);
  EXPECT_THAT(html, testing::HasSubstr("&lt;b&gt;&amp;"));
  EXPECT_THAT(html, testing::Not(testing::HasSubstr("<b>&")));
  EXPECT_THAT(html, testing::Not(testing::HasSubstr("<script")));
  EXPECT_THAT(html, testing::Not(testing::HasSubstr("src=")));
  EXPECT_THAT(html, testing::Not(testing::HasSubstr("nan")));
}

// Names that would overprint go into further rows of bars.
TEST(Report, ManyTasksStayReadable) {
  EvalResults results = Sample();
  const TaskScore score = results.methods[0].tasks["sum"];
  for (int i = 0; i < 33; ++i) {
    results.methods[0].tasks["niah_multikey_" + std::to_string(i) + "@16384"] = score;
  }
  const std::string html = RenderEvalReport(results);
  ExpectWellFormed(html);
  EXPECT_THAT(html, testing::HasSubstr("Score by task (6 of 6)"));
  EXPECT_THAT(html, testing::HasSubstr("<tr><td>niah_multikey_32@16384</td><td>10</td>"));
  EXPECT_THAT(RenderEvalReport(Sample()), testing::HasSubstr("\"title\">Score by task</text>"));
}

// The axis names what is drawn.
TEST(Report, AccuracyIsCalledWhatItIs) {
  EvalResults results = Sample();
  EXPECT_THAT(RenderEvalReport(results), testing::HasSubstr("mean strict score, long tasks, %"));
  results.short_tasks = {"copy", "sum"};
  EXPECT_THAT(RenderEvalReport(results),
              testing::HasSubstr("mean strict score, all tasks (none is long), %"));
  results.short_tasks.clear();
  EXPECT_THAT(RenderEvalReport(results), testing::HasSubstr("mean strict score, %"));
  for (auto& [name, score] : results.methods[0].tasks) score.strict.reset();
  EXPECT_THAT(RenderEvalReport(results), testing::HasSubstr("mean answer score, %"));
}

TEST(WilsonInterval, IsAsPublished) {
  // 8 of 10 and 0 of 10, as statistics packages give them.
  EXPECT_NEAR(WilsonInterval(80, 10).low, 49.0, 0.05);
  EXPECT_NEAR(WilsonInterval(80, 10).high, 94.3, 0.05);
  EXPECT_EQ(WilsonInterval(0, 10).low, 0);
  EXPECT_NEAR(WilsonInterval(0, 10).high, 27.8, 0.05);
  EXPECT_DOUBLE_EQ(WilsonInterval(100, 10).high, 100);
  EXPECT_TRUE(std::isnan(WilsonInterval(50, 0).low));
}

TEST(MethodScore, IntervalsOfMeansAreThoseOfTheItems) {
  MethodScore method;
  EXPECT_TRUE(std::isnan(method.StrictInterval().low));
  method.tasks["a"].items = 25;
  method.tasks["a"].strict = 50;
  EXPECT_EQ(method.StrictInterval().low, WilsonInterval(50, 25).low);
  method.tasks["b"].items = 100;
  method.tasks["b"].strict = 100;
  // Two tasks: 4 / (1/25 + 1/100) = 80 items.
  EXPECT_DOUBLE_EQ(method.StrictInterval().high, WilsonInterval(75, 80).high);
  EXPECT_EQ(method.StrictInterval({"a"}).low, WilsonInterval(100, 100).low);
  EXPECT_TRUE(std::isnan(method.AnswerInterval().low));
  method.tasks["b"].answer = 80;
  EXPECT_EQ(method.AnswerInterval().low, WilsonInterval(80, 100).low);
}

// What is drawn of a method has its colour in every chart, and in every report.
TEST(Report, AMethodHasOneColour) {
  const auto colour_of = [](const std::string& html, const std::string& label) {
    const size_t at = html.find("<circle", html.rfind(label + ": ") - 200);
    return html.substr(html.find('#', at), 7);
  };
  EvalResults alone = Sample(), among = Sample();
  MethodScore other = among.methods[0];
  other.label = "naive", other.stored_bits = {{131072, 2.5}};
  among.methods.insert(among.methods.begin(), other);
  EXPECT_EQ(colour_of(RenderEvalReport(alone), "oscar+"),
            colour_of(RenderEvalReport(among), "oscar+"));
  EXPECT_NE(colour_of(RenderEvalReport(among), "naive"),
            colour_of(RenderEvalReport(among), "oscar+"));
}

TEST(Report, SaysWhereItemsAreFew) {
  EvalResults results = Sample();
  EXPECT_THAT(RenderEvalReport(results),
              testing::HasSubstr("<b>Few items</b>: copy (10), sum (10)."));
  for (auto& [name, score] : results.methods[0].tasks) score.items = 200;
  EXPECT_THAT(RenderEvalReport(results), testing::Not(testing::HasSubstr("Few items")));
}

TEST(Report, HeadingsHaveSomethingBelowThem) {
  EvalResults results = Sample();
  EXPECT_THAT(RenderEvalReport(results), testing::HasSubstr("<h2>Spectra</h2>"));
  results.spectra.clear();
  const std::string html = RenderEvalReport(results);
  EXPECT_THAT(html, testing::Not(testing::HasSubstr("pectra")));
  EXPECT_THAT(html, testing::HasSubstr("<h2>Memory</h2>"));
}

}  // namespace
}  // namespace oscar
