#include "reproduce/papers.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string>

namespace oscar {
namespace {

using enum PaperMeasureKind;
using View = std::string_view;

// Names of models as the papers have them.
constexpr View k4bThinking = "Qwen3-4B-Thinking-2507", k8b = "Qwen3-8B", k32b = "Qwen3-32B",
               kGlm = "GLM-4.7", kLlama = "Llama-3.1-8B";
// Rows that several tables have.
constexpr PaperRow kBf16 = {"BF16", "bf16", ""};
constexpr PaperRow kOscar = {"OSCAR", "oscar", ""};
constexpr PaperRow kOurs = {"oscar+", "oscar+", "this project's own; no published figure"};

constexpr View kOscarSource = "README of FutureMLS-Lab/OSCAR, main at 473ff3f";
constexpr View kOscarSuSource = "README of ZunhaiSu/OScaR-KV-Quant at d2109f5";

// --- OSCAR ---------------------------------------------------------------------------------------

constexpr std::array<View, 5> kReasoningSuites = {"gpqa", "humaneval", "livecodebench", "aime25",
                                                  "math500"};
constexpr std::array kReasoningMeasures = {PaperMeasure{kMeanScore, "mean of five tasks, %"},
                                           PaperMeasure{kBits, "bits at 128K", 131072}};
constexpr std::array kReasoningRows = {
    kBf16,
    PaperRow{"naive INT2", "naive", ""},
    PaperRow{"QuaRot-INT2", "quarot",
             "theirs rotates by eight Hadamard blocks of 16 dims, ours by one of the whole head"},
    kOscar,
    kOurs,
};
constexpr std::array kReasoningFigures = {
    PaperFigure{k4bThinking, "BF16", 0, 75.64},
    PaperFigure{k8b, "BF16", 0, 70.84},
    PaperFigure{k32b, "BF16", 0, 74.19},
    PaperFigure{kGlm, "BF16", 0, 77.89},
    PaperFigure{k4bThinking, "OSCAR", 0, 71.86},
    PaperFigure{k8b, "OSCAR", 0, 69.42},
    PaperFigure{k32b, "OSCAR", 0, 74.17},
    PaperFigure{kGlm, "OSCAR", 0, 78.16},
    PaperFigure{k4bThinking, "QuaRot-INT2", 0, 1.4},
    PaperFigure{k8b, "QuaRot-INT2", 0, 10.14},
    PaperFigure{k32b, "QuaRot-INT2", 0, 7.9},
    PaperFigure{kGlm, "QuaRot-INT2", 0, 75.14},
    PaperFigure{k4bThinking, "naive INT2", 0, 0},
    PaperFigure{k8b, "naive INT2", 0, 0},
    PaperFigure{k32b, "naive INT2", 0, 0},
    PaperFigure{kGlm, "naive INT2", 0, 60.49},
    PaperFigure{k4bThinking, "OSCAR", 1, 2.28},
    PaperFigure{k8b, "OSCAR", 1, 2.28},
    PaperFigure{k32b, "OSCAR", 1, 2.28},
    PaperFigure{kGlm, "OSCAR", 1, 2.28},
};
constexpr std::array<View, 4> kReasoningNotes = {
    "Five seeds, 32,768 tokens of output; three seeds for GLM-4.7 (--repeats 3).",
    "The repository has the driver of GPQA alone; the others' prompts are those that their data "
    "sets or authors publish.",
    "Its calibration prompts are GPQA's test prompts, and so are ours where GPQA's CSV is there.",
    "Its 2.28 bits take scales of 16 bits; the scripts that it ships have 32 (2.53 bits). Ours are "
    "16.",
};

constexpr std::array<View, 1> kAimeSuites = {"aime25"};
constexpr std::array kAimeMeasures = {PaperMeasure{kMeanScore, "AIME25, %"},
                                      PaperMeasure{kBits, "bits at 32K", 32768}};
constexpr std::array kAimeRows = {kBf16, kOscar, kOurs};
constexpr std::array kAimeFigures = {
    PaperFigure{k8b, "BF16", 0, 66.00},  PaperFigure{k8b, "OSCAR", 0, 66.67, 3.33},
    PaperFigure{k32b, "BF16", 0, 72.59}, PaperFigure{k32b, "OSCAR", 0, 74.00, 5.48},
    PaperFigure{k8b, "OSCAR", 1, 2.38},  PaperFigure{k32b, "OSCAR", 1, 2.38},
};
constexpr std::array<View, 2> kAimeNotes = {
    "30 items: one standard error of a single seed is about 9 points.",
    "Five seeds, 32,768 tokens of output.",
};

constexpr std::array<View, 1> kGpqaSuites = {"gpqa"};
constexpr std::array kGpqaMeasures = {PaperMeasure{kMeanScore, "GPQA diamond, %"}};
constexpr std::array kGpqaFigures = {
    PaperFigure{k8b, "OSCAR", 0, 62.0},
    PaperFigure{"Qwen3.5-4B", "BF16", 0, 75.25},
    PaperFigure{"Qwen3.5-4B", "OSCAR", 0, 74.75},
    PaperFigure{"Qwen3.5-35B-A3B", "BF16", 0, 80.30},
    PaperFigure{"Qwen3.5-35B-A3B", "OSCAR", 0, 82.32},
};
constexpr std::array<View, 2> kGpqaNotes = {
    "One seed, as its driver has it; 198 items, so one standard error is about 3 points.",
    "Qwen3-8B's 62 is a comment in its calibration script, without the BF16 score beside.",
};

constexpr std::array<View, 1> kLongBenchSuites = {"longbench-e"};
constexpr std::array kLongBenchMeasures = {PaperMeasure{kMeanScore, "mean of 13 tasks, %"}};
constexpr std::array kLongBenchRows = {kBf16, kOscar, kOurs};
constexpr std::array kLongBenchFigures = {PaperFigure{k8b, "OSCAR", 0, 50.25}};
constexpr std::array<View, 3> kLongBenchNotes = {
    "Groups of 32 dims: 3.0 bits with scales of 16 bits, 4.0 with the 32 that its scripts ship.",
    "The rotation is calibrated on LongBench's own texts, there and here; there on 25 prompts of "
    "8,000 to 28,000 tokens, here on the first that fill the budget, in pieces of 4,096.",
    "Chat template on, as its driver has by default, except for few-shot and completion tasks.",
};

// --- OScaR ---------------------------------------------------------------------------------------

constexpr std::array kSuLongBenchRows = {
    PaperRow{"16-bit", "bf16", ""},
    PaperRow{"QuaRot", "quarot", "the published row does not say which group and zero point"},
    PaperRow{"RotateKV", "",
             "not here: it rotates keys before RoPE, so each cached key would be embedded anew at "
             "every step"},
    PaperRow{"KIVI", "kivi", ""},
    PaperRow{"OTT", "", "not here: its public text does not say how outlier tokens are chosen"},
    PaperRow{"TurboQuant+ 2.5b", "",
             "not here: nothing published says which channels get the third bit"},
    PaperRow{"OScaR", "oscar-su", ""},
    kOurs,
};
constexpr std::array kSuLongBenchFigures = {
    PaperFigure{kLlama, "16-bit", 0, 41.70},
    PaperFigure{k8b, "16-bit", 0, 49.56},
    PaperFigure{kLlama, "QuaRot", 0, 37.94},
    PaperFigure{k8b, "QuaRot", 0, 40.13},
    PaperFigure{kLlama, "RotateKV", 0, 37.98},
    PaperFigure{k8b, "RotateKV", 0, 42.95},
    PaperFigure{kLlama, "KIVI", 0, 39.84},
    PaperFigure{k8b, "KIVI", 0, 47.95},
    PaperFigure{kLlama, "OTT", 0, 40.74},
    PaperFigure{k8b, "OTT", 0, 48.21},
    PaperFigure{kLlama, "TurboQuant+ 2.5b", 0, 40.03},
    PaperFigure{k8b, "TurboQuant+ 2.5b", 0, 47.56},
    PaperFigure{kLlama, "OScaR", 0, 41.75},
    PaperFigure{k8b, "OScaR", 0, 48.74},
};
constexpr std::array<View, 3> kSuLongBenchNotes = {
    "No chat template in any task; inputs above 32,768 tokens keep their first and last halves.",
    "The published scores most probably come from its simulation in Python (window 128), not from "
    "its kernels (window 256); ours are of real pages, window 128.",
    "Its script computes no average; the mean of the 13 tasks' bucket means stands for it here.",
};

constexpr std::array kSuSpeedMeasures = {
    PaperMeasure{kMillisecondsAStep, "ms per token, 1 x 128K", 131072, 1},
    PaperMeasure{kTokensPerSecond, "tokens/s, 48 x 4K", 4096, 48},
    PaperMeasure{kHistoryRatio, "BF16 bytes over history bytes"},
};
constexpr std::array kSuSpeedRows = {kBf16, PaperRow{"OScaR", "oscar-su", ""}, kOurs};
constexpr std::array kSuSpeedFigures = {
    PaperFigure{kLlama, "BF16", 0, 92.9}, PaperFigure{kLlama, "OScaR", 0, 30.9},
    PaperFigure{kLlama, "BF16", 1, 331},  PaperFigure{kLlama, "OScaR", 1, 1354},
    PaperFigure{kLlama, "OScaR", 2, 5.3},
};
constexpr std::array<View, 4> kSuSpeedNotes = {
    "Its figure names neither GPU nor model; a review says Llama-3.1-8B.",
    "Its BF16 side copies the whole K and V at every step (about three times the traffic), its own "
    "side does not; here both read in place.",
    "Its steps never empty the window; ours seal pages as generation does.",
    "Caches hold copies of one page of Gaussian rows, so that no prompt of 128K tokens is "
    "computed.",
};

// --- Of neither, or not to be run ----------------------------------------------------------------

constexpr std::array<View, 3> kRulerSuites = {"ruler", "qa_1", "qa_2"};
constexpr std::array kRulerMeasures = {
    PaperMeasure{kMeanScore, "mean of all tasks and lengths, %"}};
constexpr std::array kRulerRows = {
    kBf16,  PaperRow{"QuaRot-INT2", "quarot", ""}, PaperRow{"KIVI", "kivi", ""},
    kOscar, PaperRow{"OScaR", "oscar-su", ""},     kOurs};
constexpr std::array<int64_t, 4> kRulerLengths = {4096, 8192, 16384, 32768};
constexpr std::array<View, 2> kRulerNotes = {
    "Neither repository publishes RULER scores: all figures are ours.",
    "100 items per task and length, where RULER has 500; values and essays are ours.",
};

constexpr std::array<View, 1> kGsmSuites = {"gsm8k"};
constexpr std::array kGsmMeasures = {PaperMeasure{kMeanScore, "GSM8K, %"}};
constexpr std::array kGsmRows = {kBf16,
                                 PaperRow{"KIVI", "kivi", ""},
                                 PaperRow{"OScaR", "oscar-su", ""},
                                 PaperRow{"OScaR, Hadamard only", "oscar-su:norm=none", ""},
                                 PaperRow{"OScaR, norm only", "oscar-su:rotation=off", ""},
                                 kOurs};
constexpr std::array<View, 1> kGsmNotes = {
    "OScaR's script takes 15 examples and the first 10 items, and its score is not published; here "
    "no examples and all items.",
};

constexpr std::array kPictureMeasures = {PaperMeasure{kMeanScore, "OCRBench, of 1,000"}};
constexpr std::array kPictureRows = {PaperRow{"16-bit", "bf16", ""}, PaperRow{"KIVI", "kivi", ""},
                                     PaperRow{"OScaR", "oscar-su", ""}};
constexpr std::array kPictureFigures = {
    PaperFigure{"LLaVA-1.6-7B", "16-bit", 0, 536}, PaperFigure{"LLaVA-1.6-7B", "KIVI", 0, 488},
    PaperFigure{"LLaVA-1.6-7B", "OScaR", 0, 519},  PaperFigure{"Qwen3-VL-8B", "16-bit", 0, 858},
    PaperFigure{"Qwen3-VL-8B", "KIVI", 0, 851},    PaperFigure{"Qwen3-VL-8B", "OScaR", 0, 856},
    PaperFigure{"Qwen3-VL-4B", "16-bit", 0, 852},  PaperFigure{"Qwen3-VL-4B", "KIVI", 0, 813},
    PaperFigure{"Qwen3-VL-4B", "OScaR", 0, 838},
};
constexpr View kNoPictures = "OCRBench asks about pictures, and models here read text alone";

constexpr std::array kTables = {
    PaperTable{.name = "oscar-reasoning",
               .title = "OSCAR: GPQA, HumanEval, LiveCodeBench v6, AIME25 and MATH-500",
               .source = kOscarSource,
               .suites = kReasoningSuites,
               .measures = kReasoningMeasures,
               .rows = kReasoningRows,
               .figures = kReasoningFigures,
               .notes = kReasoningNotes,
               .calibration = "gpqa"},
    PaperTable{.name = "oscar-aime25",
               .title = "OSCAR: AIME25",
               .source = kOscarSource,
               .suites = kAimeSuites,
               .measures = kAimeMeasures,
               .rows = kAimeRows,
               .figures = kAimeFigures,
               .notes = kAimeNotes,
               .calibration = "gpqa"},
    PaperTable{.name = "oscar-gpqa",
               .title = "OSCAR: GPQA diamond, hybrid models",
               .source = "FutureMLS-Lab/OSCAR: compute_rotation.sh at 473ff3f; branch "
                         "zhongzhu/hybrid-model at 797e39c7c for Qwen3.5",
               .suites = kGpqaSuites,
               .measures = kGpqaMeasures,
               .rows = kAimeRows,
               .figures = kGpqaFigures,
               .notes = kGpqaNotes,
               .calibration = "gpqa",
               .repeats = 1},
    PaperTable{.name = "oscar-longbench",
               .title = "OSCAR: LongBench-E",
               .source = "FutureMLS-Lab/OSCAR, branch zhongzhu/VL at 39dd7c817",
               .suites = kLongBenchSuites,
               .measures = kLongBenchMeasures,
               .rows = kLongBenchRows,
               .figures = kLongBenchFigures,
               .notes = kLongBenchNotes,
               .calibration = "longbench-e",
               .group_dims = 32},
    PaperTable{.name = "oscar-su-longbench",
               .title = "OScaR: LongBench-E",
               .source = kOscarSuSource,
               .suites = kLongBenchSuites,
               .measures = kLongBenchMeasures,
               .rows = kSuLongBenchRows,
               .figures = kSuLongBenchFigures,
               .notes = kSuLongBenchNotes,
               .plain_prompts = true},
    PaperTable{.name = "oscar-su-efficiency",
               .title = "OScaR: decode latency, throughput and memory",
               .source = "ZunhaiSu/OScaR-KV-Quant at d2109f5: pictures/overview.png, README",
               .measures = kSuSpeedMeasures,
               .rows = kSuSpeedRows,
               .figures = kSuSpeedFigures,
               .notes = kSuSpeedNotes},
    PaperTable{.name = "oscar-su-gsm8k",
               .title = "OScaR: GSM8K slice of its repository",
               .source = "none is published",
               .suites = kGsmSuites,
               .measures = kGsmMeasures,
               .rows = kGsmRows,
               .notes = kGsmNotes},
    PaperTable{.name = "ruler",
               .title = "RULER, both methods beside the baselines",
               .source = "none is published",
               .suites = kRulerSuites,
               .measures = kRulerMeasures,
               .rows = kRulerRows,
               .notes = kRulerNotes,
               .lengths = kRulerLengths},
    PaperTable{.name = "oscar-su-ocrbench",
               .title = "OScaR: OCRBench",
               .source = kOscarSuSource,
               .measures = kPictureMeasures,
               .rows = kPictureRows,
               .figures = kPictureFigures,
               .refused = kNoPictures},
};

constexpr std::array<View, 2> kGpqaFiles = {"gpqa_diamond.csv", "gpqa/gpqa_diamond.csv"};
constexpr std::array<View, 4> kHumanEvalFiles = {"HumanEval.jsonl.gz", "HumanEval.jsonl",
                                                 "humaneval/HumanEval.jsonl.gz",
                                                 "humaneval/HumanEval.jsonl"};
constexpr std::array<View, 2> kLiveCodeFiles = {"test6.jsonl", "livecodebench/test6.jsonl"};
constexpr std::array<View, 2> kAimeFiles = {"aime25.jsonl", "aime25/test.jsonl"};
constexpr std::array<View, 2> kMathFiles = {"math500.jsonl", "math500/test.jsonl"};
constexpr std::array<View, 2> kGsmFiles = {"gsm8k.jsonl", "gsm8k/test.jsonl"};
constexpr std::array<View, 3> kLongBenchFiles = {
    "longbench-e/qasper_e.jsonl", "longbench/qasper_e.jsonl", "longbench/data/qasper_e.jsonl"};
constexpr std::array<View, 2> kSquadFiles = {"squad.json", "dev-v2.0.json"};
constexpr std::array<View, 2> kHotpotFiles = {"hotpotqa.json", "hotpot_dev_distractor_v1.json"};

constexpr std::array kData = {
    PaperData{"gpqa", kGpqaFiles,
              "openaipublic.blob.core.windows.net/simple-evals/gpqa_diamond.csv"},
    PaperData{"humaneval", kHumanEvalFiles,
              "github.com/openai/human-eval, data/HumanEval.jsonl.gz"},
    PaperData{"livecodebench", kLiveCodeFiles,
              "huggingface.co/datasets/livecodebench/code_generation_lite, test6.jsonl"},
    PaperData{"aime25", kAimeFiles, "huggingface.co/datasets/math-ai/aime25, test.jsonl"},
    PaperData{"math500", kMathFiles, "huggingface.co/datasets/HuggingFaceH4/MATH-500, test.jsonl"},
    PaperData{"gsm8k", kGsmFiles, "github.com/openai/grade-school-math, data/test.jsonl"},
    PaperData{"longbench-e", kLongBenchFiles, "huggingface.co/datasets/THUDM/LongBench, data.zip"},
    PaperData{"qa_1", kSquadFiles, "rajpurkar.github.io/SQuAD-explorer, dev-v2.0.json", true},
    PaperData{"qa_2", kHotpotFiles, "hotpotqa.github.io, hotpot_dev_distractor_v1.json", true},
};

std::string Lower(View text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

}  // namespace

std::span<const PaperTable> PaperTables() { return kTables; }

Result<const PaperTable*> FindPaperTable(View name) {
  const auto found = std::ranges::find(kTables, name, &PaperTable::name);
  if (found != kTables.end()) return &*found;
  std::string names;
  for (const PaperTable& table : kTables) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", table.name);
  }
  return Unexpected(
      InvalidArgument(fmt::format("{}: no table has this name; there are {}", name, names)));
}

View MatchPaperModel(const PaperTable& table, View model) {
  while (model.ends_with('/')) model.remove_suffix(1);
  const size_t slash = model.rfind('/');
  std::string name = Lower(slash == View::npos ? model : model.substr(slash + 1));
  if (const size_t at = name.find('@'); at != std::string::npos) name.resize(at);
  if (name.starts_with("meta-")) name.erase(0, 5);
  View best;
  for (const PaperFigure& figure : table.figures) {
    const std::string wanted = Lower(figure.model);
    if (!name.starts_with(wanted) || figure.model.size() <= best.size()) continue;
    // "Qwen3-4B" does not stand for "Qwen3-4Bx".
    if (name.size() > wanted.size() && name[wanted.size()] != '-') continue;
    best = figure.model;
  }
  return best;
}

float PaperValueClip(View model) { return model == k32b ? 0.96f : 0.92f; }

const PaperData* DataOf(View suite) {
  const auto found = std::ranges::find(kData, suite, &PaperData::suite);
  return found == kData.end() ? nullptr : &*found;
}

}  // namespace oscar
