// oscar demo: numbers hidden in a long text, asked for on four caches side by side.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>

#include "base/log.h"
#include "base/progress.h"
#include "cli/command.h"
#include "engine/loaded_model.h"
#include "engine/pass_runner.h"
#include "engine/prompt_reader.h"
#include "generation/model_host.h"
#include "measure/import_prompt.h"
#include "run/sequence_runner.h"
#include "server/serve.h"
#include "simd/vec_ops.h"
#include "tasks/suite.h"
#include "text/chat.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"

namespace oscar::cli {
namespace {

using nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr size_t kMaxAnswerTokens = 16;  // seven digits and the end, with room to be wrong
constexpr uint64_t kCacheBytes = uint64_t{512} << 20;

struct DemoArguments {
  bool serve = false, json = false;
  int port = 8000, threads = 0;
};

struct Question {
  std::string name, answer;
  std::vector<int32_t> tokens;  // of the chat prompt
};

// The text and what is asked of it: all prompts begin with the same `text`.
struct Exam {
  std::vector<int32_t> text;
  std::vector<Question> questions;
};

struct Method {
  std::string_view label, kv;
  bool rotated;  // takes the demo model's calibrated rotation
};
constexpr Method kMethods[] = {{"BF16", "bf16", false},
                               {"naive INT2", "naive", false},
                               {"OSCAR as published", "oscar", true},
                               {"oscar+ (default)", "oscar+", false}};

Result<std::vector<int32_t>> Encode(const ChatTemplate& chat, const Tokenizer& tokenizer,
                                    const std::string& content) {
  const ordered_json messages = {{{"role", "user"}, {"content", content}}};
  TemplateInput input;
  input.messages = &messages;
  OSCAR_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, chat.Encode(input, tokenizer));
  return std::vector<int32_t>(tokens.begin(), tokens.end());
}

// The first item of the evaluation's longest task holds several numbers; ask for each.
Result<Exam> MakeExam(const std::filesystem::path& model, const ChatTemplate& chat,
                      const Tokenizer& tokenizer) {
  OSCAR_ASSIGN_OR_RETURN(const EvalSuite suite,
                         ReadSuite(model / "eval", {.limit = 1, .tasks = {"multikey_14k"}}));
  if (suite.tasks.empty() || suite.tasks[0].items.empty()) {
    return Unexpected(
        NotFound(fmt::format("{}/eval: no item of multikey_14k; is the demo model's "
                             "folder complete?",
                             model.string())));
  }
  const std::string& prompt = suite.tasks[0].items[0].prompt;
  const std::string text = prompt.substr(0, prompt.rfind('\n') + 1);
  static const std::regex hidden("magic numbers for ([a-z-]+) is: ([0-9]+)");
  Exam exam;
  for (std::sregex_iterator it(text.begin(), text.end(), hidden), end; it != end; ++it) {
    Question& question = exam.questions.emplace_back(Question{(*it)[1], (*it)[2], {}});
    OSCAR_ASSIGN_OR_RETURN(
        question.tokens,
        Encode(chat, tokenizer,
               fmt::format("{}What is the special magic number for {} mentioned in the provided "
                           "text?",
                           text, question.name)));
  }
  if (exam.questions.size() < 2) {
    return Unexpected(
        DataLoss(fmt::format("{}/eval/multikey_14k.jsonl: the first item hides no "
                             "numbers",
                             model.string())));
  }
  exam.text = exam.questions[0].tokens;
  for (const Question& other : exam.questions) {
    exam.text.erase(std::ranges::mismatch(exam.text, other.tokens).in1, exam.text.end());
  }
  return exam;
}

// One method at work: its model, its copy of the text, and one sequence a question.
struct Contender {
  const Method* method = nullptr;
  std::unique_ptr<LoadedModel> model;
  std::optional<SequenceCache> text;
  struct Answer {
    SequenceCache cache;
    Detokenizer words;
    std::string text;
    int32_t next = -1;
    size_t tokens = 0;
    bool done = false;
  };
  std::vector<Answer> answers;

  uint64_t bytes = 0;
  double bits = 0.0;
  double decode_seconds = 0.0;
  size_t decoded = 0, right = 0;
  bool finished = false;
};

// A table that is drawn over itself on a terminal, and row by row, once, elsewhere.
class Table {
 public:
  Table(const Exam& exam, bool live) : exam_(exam), live_(live) {}

  void Begin(std::span<const Contender> contenders) {
    fmt::print("{:<20} {:>10} {:>6}   {:<15} {:<18} {:>8}\n", "cache of the text", "memory", "bits",
               exam_.questions.back().name + "?", "all questions", "tokens/s");
    if (live_) {
      for (const Contender& c : contenders) fmt::print("{}\n", Line(c));
    }
    std::fflush(stdout);
  }
  void Update(std::span<const Contender> contenders) {
    if (!live_) return;
    fmt::print("\x1b[{}A", contenders.size());
    for (const Contender& c : contenders) fmt::print("\r\x1b[K{}\n", Line(c));
    std::fflush(stdout);
  }
  void Finish(const Contender& contender) {
    if (live_) return;
    fmt::print("{}\n", Line(contender));
    std::fflush(stdout);
  }

 private:
  std::string Line(const Contender& c) const {
    std::string last(15, ' '), marks;
    for (size_t i = 0; i < c.answers.size(); ++i) {
      const bool is_right = FinalAnswer(c.answers[i].text) == exam_.questions[i].answer;
      marks += !c.answers[i].done ? "." : Coloured(is_right ? "\u2713" : "\u2717", is_right);
      if (i + 1 < c.answers.size()) continue;
      last = fmt::format("{:<15}", Shown(c.answers[i].text));
      if (c.answers[i].done) last = Coloured(last, is_right);
    }
    const std::string count = c.finished ? fmt::format("{} of {}", c.right, c.answers.size()) : "";
    return fmt::format(
        "{:<20} {:>10} {:>6}   {} {} {:<{}} {:>8}", c.method->label,
        c.bytes == 0 ? "" : FormatBytes(c.bytes), c.bytes == 0 ? "" : fmt::format("{:.2f}", c.bits),
        last, marks, count, 17 - static_cast<int>(c.answers.size()),
        c.decode_seconds > 0
            ? fmt::format("{:.0f}", static_cast<double>(c.decoded) / c.decode_seconds)
            : "");
  }
  std::string Coloured(const std::string& text, bool is_right) const {
    return live_ ? fmt::format("\x1b[{}m{}\x1b[0m", is_right ? 32 : 31, text) : text;
  }
  // A wrong answer may be anything: one line, no control characters, not too long.
  static std::string Shown(const std::string& text) {
    std::string out;
    for (const char c : text) {
      if (out.size() >= 14) break;
      out.push_back(c >= 0x20 && c < 0x7f ? c : '.');
    }
    return out;
  }

  const Exam& exam_;
  const bool live_;
};

class Demo {
 public:
  explicit Demo(const DemoArguments& arguments) : arguments_(arguments) {}

  Status Run() {
    OSCAR_ASSIGN_OR_RETURN(const std::filesystem::path folder, FindDemoModel());
    OSCAR_ASSIGN_OR_RETURN(tokenizer_, LoadTokenizer(folder));
    OSCAR_ASSIGN_OR_RETURN(const ChatTemplate chat, ChatTemplate::Load(folder));
    OSCAR_ASSIGN_OR_RETURN(exam_, MakeExam(folder, chat, *tokenizer_));
    Say(
        fmt::format("{} numbers are hidden in {} tokens of prose. The text is read once, exactly, "
                    "in BF16;\neach cache below then keeps it in its own way, and all {} questions "
                    "are read and\nanswered from that cache alone.\n",
                    exam_.questions.size(), exam_.text.size(), exam_.questions.size()));
    for (const Method& method : kMethods) {
      ModelOptions options;
      options.model = folder;
      options.kv = method.kv;
      if (method.rotated) options.rotation = folder / "rotation";
      options.num_threads = arguments_.threads;
      options.kv_memory = kCacheBytes;
      Contender& contender = contenders_.emplace_back();
      contender.method = &method;
      OSCAR_ASSIGN_OR_RETURN(contender.model, LoadedModel::Load(options));
    }
    const auto start = Clock::now();
    LoadedModel& exact = *contenders_[0].model;
    SequenceCache text(exact.kv().cache(), exact.pool());
    {
      Progress progress("reading the text", exam_.text.size(), "tokens");
      OSCAR_RETURN_IF_ERROR(PromptReader(exact.model(), text, exam_.text).ReadAll(&progress));
    }
    read_seconds_ = SecondsSince(start);
    Say(fmt::format("Read in {} ({:.0f} tokens/s).\n", FormatDuration(read_seconds_),
                    static_cast<double>(exam_.text.size()) / read_seconds_));

    Table table(exam_, ::isatty(STDOUT_FILENO) == 1);
    if (!arguments_.json) table.Begin(contenders_);
    for (Contender& contender : contenders_) {
      OSCAR_RETURN_IF_ERROR(Keep(text, contender));
      if (!arguments_.json) table.Update(contenders_);
    }
    for (Contender& contender : contenders_) {
      OSCAR_RETURN_IF_ERROR(Ask(contender));
      if (!arguments_.json) table.Update(contenders_);
    }
    // One token of every cache in turn, so that the answers grow side by side.
    for (bool any = true; any;) {
      any = false;
      for (Contender& contender : contenders_) {
        if (contender.finished) continue;
        OSCAR_RETURN_IF_ERROR(Step(contender));
        any = true;
        if (arguments_.json) continue;
        table.Update(contenders_);
        if (contender.finished) table.Finish(contender);
      }
    }
    if (arguments_.json) return PrintJson();
    PrintEnd();
    return {};
  }

 private:
  // What a person reads stays off the JSON.
  void Say(const std::string& text) const {
    if (arguments_.json) return;
    fmt::print("{}", text);
    std::fflush(stdout);
  }

  static Result<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::filesystem::path& folder) {
    OSCAR_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Load(folder));
    return std::make_unique<Tokenizer>(std::move(tokenizer));
  }

  static Status Keep(const SequenceCache& text, Contender& contender) {
    LoadedModel& model = *contender.model;
    const ModelSpec& spec = model.spec();
    if (!model.kv().cache().seals()) {
      contender.text = text.Fork();
    } else {
      contender.text.emplace(model.kv().cache(), model.pool());
      OSCAR_RETURN_IF_ERROR(ImportPrompt(text, model.kv(), spec.num_kv_layers(),
                                         spec.attention().num_kv_heads, spec.attention().head_dim,
                                         model.threads(), *contender.text));
    }
    const CacheUsage usage = contender.text->Usage();
    contender.bytes = usage.bytes;
    contender.bits = usage.bits_per_element;
    return {};
  }

  Status Ask(Contender& contender) const {
    for (const Question& question : exam_.questions) {
      Contender::Answer& answer = contender.answers.emplace_back(
          Contender::Answer{contender.text->Fork(), Detokenizer(*tokenizer_, /*skip_special=*/true),
                            "", -1, 0, false});
      PromptReader reader(contender.model->model(), answer.cache, question.tokens,
                          /*num_logits=*/1);
      OSCAR_RETURN_IF_ERROR(reader.ReadAll());
      Take(contender, answer, reader.logits());
    }
    return {};
  }

  Status Step(Contender& contender) const {
    std::vector<ForwardItem> items;
    std::vector<Contender::Answer*> owners;
    for (Contender::Answer& answer : contender.answers) {
      if (answer.done) continue;
      items.push_back({&answer.cache, {&answer.next, 1}, /*is_prompt=*/false, 1});
      owners.push_back(&answer);
    }
    PassRunner pass(contender.model->model());
    const auto start = Clock::now();
    OSCAR_RETURN_IF_ERROR(pass.Run(items));
    contender.decode_seconds += SecondsSince(start);
    contender.decoded += items.size();
    for (size_t i = 0; i < owners.size(); ++i) Take(contender, *owners[i], pass.logits(i));
    contender.finished = std::all_of(contender.answers.begin(), contender.answers.end(),
                                     [](const Contender::Answer& a) { return a.done; });
    contender.right = 0;
    for (size_t i = 0; i < contender.answers.size(); ++i) {
      contender.right += FinalAnswer(contender.answers[i].text) == exam_.questions[i].answer;
    }
    return {};
  }

  static void Take(const Contender& contender, Contender::Answer& answer,
                   std::span<const float> logits) {
    answer.next = static_cast<int32_t>(simd::ArgMax(logits));
    ++answer.tokens;
    const std::vector<int32_t>& stops = contender.model->spec().stop_tokens;
    const bool is_stop = std::find(stops.begin(), stops.end(), answer.next) != stops.end();
    if (!is_stop) answer.text += answer.words.Push(answer.next);
    answer.done = is_stop || answer.tokens >= kMaxAnswerTokens;
  }

  Status PrintJson() const {
    ordered_json methods = ordered_json::array();
    for (const Contender& c : contenders_) {
      ordered_json answers = ordered_json::array();
      for (size_t i = 0; i < c.answers.size(); ++i) {
        answers.push_back({{"question", exam_.questions[i].name},
                           {"expected", exam_.questions[i].answer},
                           {"answer", c.answers[i].text}});
      }
      methods.push_back(
          {{"kv", c.method->kv},
           {"description", c.model->kv().Describe()},
           {"bytes", c.bytes},
           {"bits_per_element", c.bits},
           {"right", c.right},
           {"questions", c.answers.size()},
           {"tokens_per_second",
            c.decode_seconds > 0 ? static_cast<double>(c.decoded) / c.decode_seconds : 0.0},
           {"answers", std::move(answers)}});
    }
    const ordered_json out = {{"text_tokens", exam_.text.size()},
                              {"read_seconds", read_seconds_},
                              {"methods", std::move(methods)}};
    fmt::print("{}\n", out.dump(2, ' ', false, ordered_json::error_handler_t::replace));
    return {};
  }

  void PrintEnd() const {
    const Contender &bf16 = contenders_.front(), &ours = contenders_.back();
    fmt::print(
        "\noscar+ keeps the text in {:.1f} times less memory than BF16. One text shows how it "
        "works; "
        "docs/accuracy.md\nhas the scores over many.\n",
        static_cast<double>(bf16.bytes) / static_cast<double>(std::max<uint64_t>(ours.bytes, 1)));
    if (arguments_.serve) return;
    std::error_code error;
    const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
    fmt::print(
        "\nTalk to the model and watch its cache:\n  {} serve\nthen open http://127.0.0.1:8000/\n",
        error ? "oscar" : self.string());
  }

  const DemoArguments& arguments_;
  std::unique_ptr<Tokenizer> tokenizer_;
  Exam exam_;
  std::vector<Contender> contenders_;  // in the order of kMethods
  double read_seconds_ = 0.0;
};

Status Serve(int port) {
  server::ServeOptions options;
  options.http.port = port;
  OSCAR_ASSIGN_OR_RETURN(const std::shared_ptr<server::ModelHost> host,
                         server::ModelHost::Prepare(ModelOptions{}, {}));
  return server::RunServer(options, [&]() -> Result<server::Loaded> {
    OSCAR_ASSIGN_OR_RETURN(auto served, host->Load());
    return server::Loaded{std::move(served), host};
  });
}

}  // namespace

void AddDemoCommand(CLI::App& app, RunFunction& run) {
  auto arguments = std::make_shared<DemoArguments>();
  CLI::App* command = app.add_subcommand(
      "demo", "Numbers hidden in a long text, asked for on four caches side by side");
  command->add_flag("--serve", arguments->serve, "Leave the server running afterwards");
  command->add_option("--port", arguments->port, "Port of --serve; 0 takes a free one")
      ->capture_default_str()
      ->check(CLI::Range(0, 65535));
  command->add_option("--threads", arguments->threads, "Compute threads; 0 is one per core")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  command->add_flag("--json", arguments->json, "Print the results as JSON");
  command->callback([arguments, &run] {
    run = [arguments]() -> Status {
      {
        const LogLevel level = GetLogLevel();
        SetLogLevel(std::max(level, LogLevel::kWarning));  // the table says what the log would
        Demo demo(*arguments);
        OSCAR_RETURN_IF_ERROR(demo.Run());
        SetLogLevel(level);
      }
      return arguments->serve ? Serve(arguments->port) : Status();
    };
  });
}

}  // namespace oscar::cli
