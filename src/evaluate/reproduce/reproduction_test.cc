#include "reproduce/reproduction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "quant/kv_method.h"
#include "tasks/benchmarks.h"
#include "tasks/ruler.h"

namespace oscar {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

TEST(PapersTest, TablesAreWhole) {
  std::set<std::string_view> names;
  for (const PaperTable& table : PaperTables()) {
    SCOPED_TRACE(table.name);
    EXPECT_TRUE(names.insert(table.name).second);
    EXPECT_FALSE(table.rows.empty());
    EXPECT_FALSE(table.measures.empty());
    EXPECT_FALSE(table.source.empty());
    std::set<std::string_view> labels, methods;
    for (const PaperRow& row : table.rows) {
      EXPECT_TRUE(labels.insert(row.label).second) << row.label;
      if (row.kv.empty()) {
        EXPECT_FALSE(row.note.empty()) << row.label << " is missing without a reason";
        continue;
      }
      EXPECT_TRUE(FindKvMethod(row.kv).has_value()) << row.kv;
      EXPECT_TRUE(methods.insert(row.kv).second) << "scores are found by " << row.kv;
    }
    std::set<std::tuple<std::string_view, std::string_view, size_t>> figures;
    for (const PaperFigure& figure : table.figures) {
      EXPECT_TRUE(labels.contains(figure.row)) << figure.row;
      ASSERT_LT(figure.measure, table.measures.size());
      EXPECT_TRUE(figures.insert({figure.model, figure.row, figure.measure}).second);
      EXPECT_EQ(FindFigure(table, figure.model, figure.row, figure.measure), &figure);
    }
    for (const std::string_view suite : table.suites) {
      EXPECT_TRUE(suite == "ruler" || IsRulerTask(suite) || IsBenchmark(suite)) << suite;
      EXPECT_EQ(DataOf(suite) == nullptr, suite == "ruler") << suite;
    }
  }
  EXPECT_TRUE(FindPaperTable("oscar-reasoning").has_value());
  EXPECT_THAT(FindPaperTable("oscar-reasonin").error().message(), HasSubstr("oscar-reasoning,"));
}

TEST(PapersTest, ModelsAreKnownByTheirNames) {
  const PaperTable& table = **FindPaperTable("oscar-reasoning");
  for (const auto& [name, model] : std::initializer_list<std::pair<const char*, const char*>>{
           {"Qwen/Qwen3-8B", "Qwen3-8B"},
           {"/models/qwen3-8b-fp8/", "Qwen3-8B"},
           {"Qwen/Qwen3-8B@main", "Qwen3-8B"},
           {"Qwen3-4B-Thinking-2507", "Qwen3-4B-Thinking-2507"},
           {"zai-org/GLM-4.7-FP8", "GLM-4.7"},
           {"Qwen3-4B", ""},
           {"Qwen3-80B", ""},
           {"Qwen3-8Bit", ""},
           {"DeepSeek-R1-0528-Qwen3-8B", ""},
           {"", ""}}) {
    EXPECT_EQ(MatchPaperModel(table, name), model) << name;
  }
  EXPECT_EQ(MatchPaperModel(**FindPaperTable("oscar-su-longbench"), "Meta-Llama-3.1-8B-Instruct"),
            "Llama-3.1-8B");
}

// Two methods with one task each.
EvalResults Results() {
  EvalResults results;
  for (const auto& [label, score] : {std::pair{"bf16", 66.0}, {"oscar", 70.0}}) {
    MethodScore& method = results.methods.emplace_back();
    method.label = label;
    method.description = std::string(label) + " as run";
    method.stored_bits[32768] = label == std::string("bf16") ? 16 : 2.4;
    method.tasks["aime25"].items = 30;
    method.tasks["aime25"].answer = score;
  }
  return results;
}

Reproduction MakeReproduction(const char* table, std::string_view model) {
  Reproduction out;
  out.table = *FindPaperTable(table);
  out.model = model;
  out.column = MatchPaperModel(*out.table, model);
  for (const PaperRow& row : out.table->rows) {
    ReproducedRow& line = out.rows.emplace_back();
    line.row = &row;
    line.ours.resize(out.table->measures.size());
  }
  return out;
}

TEST(ReproductionTest, ComparesWithThePapersModel) {
  Reproduction r = MakeReproduction("oscar-aime25", "Qwen3-8B");
  AddScores(Results(), r);
  EXPECT_DOUBLE_EQ(*r.Difference(0, 0), 0.0);          // 66.0 and 66.00
  EXPECT_NEAR(*r.Difference(1, 0), 70 - 66.67, 1e-9);  // oscar
  EXPECT_NEAR(*r.Difference(1, 1), 2.4 - 2.38, 1e-9);  // bits
  EXPECT_FALSE(r.Difference(2, 0).has_value());        // oscar+ was not measured
  const std::string table = ReproductionToTable(r);
  EXPECT_THAT(table, HasSubstr("published, Qwen3-8B"));
  EXPECT_THAT(table, HasSubstr("66.67 ± 3.33"));
  EXPECT_THAT(table, Not(HasSubstr("72.59"))) << "the 32B's";
  const json parsed = json::parse(ReproductionToJson(r));
  EXPECT_EQ(parsed["compared_with"], "Qwen3-8B");
  EXPECT_EQ(parsed["rows"][1]["method"], "oscar as run");
  EXPECT_EQ(parsed["rows"][1]["measures"][0]["here"], 70.0);
  EXPECT_EQ(parsed["rows"][1]["measures"][0]["published"]["Qwen3-8B"]["spread"], 3.33);
  EXPECT_EQ(parsed["rows"][1]["tasks"]["aime25"], 70.0);
  EXPECT_TRUE(parsed["rows"][2]["measures"][0]["here"].is_null());
  EXPECT_LT(parsed["rows"][0]["measures"][0]["low"].get<double>(), 66.0);
}

TEST(ReproductionTest, ComparesNothingThatIsAnotherExperiment) {
  Reproduction r = MakeReproduction("oscar-aime25", "Qwen3-8B");
  AddScores(Results(), r);
  r.departures.emplace_back("--limit 2: the first items alone.");
  EXPECT_FALSE(r.Difference(1, 0).has_value());
  EXPECT_TRUE(r.Difference(1, 1).has_value()) << "bits are the same for two items";
  EXPECT_THAT(ReproductionToTable(r), HasSubstr("Not the published experiment: --limit 2"));
  // No model of the paper: its figures stand beside, uncompared.
  Reproduction other = MakeReproduction("oscar-aime25", "demo");
  AddScores(Results(), other);
  EXPECT_FALSE(other.Difference(1, 1).has_value());
  EXPECT_THAT(ReproductionToTable(other), HasSubstr("published, Qwen3-32B"));
  EXPECT_THAT(ReproductionToTable(other), HasSubstr("none of the models"));
}

TEST(ReproductionTest, SpeedsAreComparedWithBf16OfTheSameMachine) {
  Reproduction r = MakeReproduction("oscar-su-efficiency", "Llama-3.1-8B");
  r.rows[0].ours = {Measured{50}, Measured{100}, Measured{1}};
  r.rows[1].ours = {Measured{25}, Measured{300}, Measured{5.3}};
  EXPECT_FALSE(r.Difference(1, 0).has_value()) << "another machine";
  EXPECT_NEAR(*r.Difference(1, 2), 0, 1e-9) << "of formula";
  EXPECT_DOUBLE_EQ(*r.Speedup(1, 0), 2);
  EXPECT_DOUBLE_EQ(*r.Speedup(1, 1), 3);
  EXPECT_FALSE(r.Speedup(1, 2).has_value());
  EXPECT_FALSE(r.Speedup(0, 0).has_value());
  EXPECT_NEAR(*r.PublishedSpeedup("Llama-3.1-8B", 1, 0), 3.0, 0.01);
  EXPECT_NEAR(*r.PublishedSpeedup("Llama-3.1-8B", 1, 1), 4.1, 0.01);
  const std::string table = ReproductionToTable(r);
  EXPECT_THAT(table, HasSubstr("25.00 (2.00x)"));
  EXPECT_THAT(table, HasSubstr("30.90 (3.01x)"));
  const json parsed = json::parse(ReproductionToJson(r));
  EXPECT_EQ(parsed["rows"][1]["measures"][1]["over_bf16"], 3.0);
}

TEST(ReproductionTest, RowsWithoutAMethodKeepTheirFigureAndReason) {
  Reproduction r = MakeReproduction("oscar-su-longbench", "Qwen3-8B");
  const std::string table = ReproductionToTable(r), html = ReproductionToHtml(r, "report.html");
  for (const std::string& text : {table, html}) {
    EXPECT_THAT(text, HasSubstr("42.95"));
    EXPECT_THAT(text, HasSubstr("RotateKV: not here: it rotates keys before RoPE"));
  }
  EXPECT_THAT(html, HasSubstr("href=\"report.html\""));
  EXPECT_THAT(html, HasSubstr("<svg"));
}

TEST(ReproductionTest, ListsTables) {
  const std::string text = PaperTablesToText();
  EXPECT_THAT(text, HasSubstr("gpqa_diamond.csv"));
  EXPECT_THAT(text, HasSubstr("cannot be run: OCRBench"));
  const json parsed = json::parse(PaperTablesToJson());
  EXPECT_EQ(parsed.size(), PaperTables().size());
}

}  // namespace
}  // namespace oscar
