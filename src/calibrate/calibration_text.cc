#include "calibrate/calibration_text.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "calibrate/sample_prose.h"
#include "calibrate/synthetic_chats.h"
#include "io/gzip.h"
#include "tasks/benchmarks.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr uint64_t kMaxDataBytes = uint64_t{1} << 30;
constexpr uint64_t kMaxSampleBytes = uint64_t{1} << 24;
constexpr std::string_view kSampleName = "the built-in sample";
constexpr std::string_view kWikiText = "wikitext";
constexpr std::array<std::string_view, 6> kSets = {kWikiText, "gpqa",    "mmlu",
                                                   "gsm8k",   "math500", "longbench-e"};
constexpr size_t kFillerChars = 6000;  // about 1,700 tokens of a needle chat

// Takes sequences until the budget is spent.
class Collector {
 public:
  Collector(const CalibrationTextOptions& options, CalibrationText& out)
      : options_(options), out_(out) {}
  bool full() const { return out_.num_tokens >= options_.tokens; }
  // `answer`: how many of the last tokens are one.
  void Add(std::span<const int32_t> tokens, int64_t answer = 0) {
    while (!tokens.empty() && !full()) {
      const auto count =
          static_cast<size_t>(std::min({static_cast<int64_t>(tokens.size()), options_.max_sequence,
                                        options_.tokens - out_.num_tokens}));
      out_.sequences.emplace_back(tokens.begin(),
                                  tokens.begin() + static_cast<std::ptrdiff_t>(count));
      out_.num_tokens += static_cast<int64_t>(count);
      tokens = tokens.subspan(count);
      // What was cut is no answer any more.
      out_.answers.push_back(
          tokens.empty() ? std::min<int64_t>(answer, std::ssize(out_.sequences.back())) : 0);
    }
  }

 private:
  const CalibrationTextOptions& options_;
  CalibrationText& out_;
};

Result<std::vector<int32_t>> EncodeChat(const ordered_json& messages, bool generation_prompt,
                                        const Tokenizer& tokenizer, const ChatTemplate& chat) {
  TemplateInput input;
  input.messages = &messages;
  input.add_generation_prompt = generation_prompt;
  input.now = 0;  // templates that print the date print the same one every time
  return chat.Encode(input, tokenizer);
}

Result<std::vector<int32_t>> EncodeLine(std::string_view line, const Tokenizer& tokenizer,
                                        const ChatTemplate* chat) {
  OSCAR_ASSIGN_OR_RETURN(const ordered_json record, ParseOrderedJson(line, "record"));
  const auto string_of = [&](const char* key) -> const std::string* {
    const auto found = record.find(key);
    return found != record.end() && found->is_string() ? found->get_ptr<const std::string*>()
                                                       : nullptr;
  };
  if (!record.is_object()) return Unexpected(InvalidArgument("a record must be an object"));
  if (const std::string* text = string_of("text")) return tokenizer.Encode(*text);
  if (const std::string* prompt = string_of("prompt")) {
    if (chat == nullptr) return tokenizer.Encode(*prompt, {.add_special = true});
    return EncodeChat({{{"role", "user"}, {"content", *prompt}}}, true, tokenizer, *chat);
  }
  if (const auto messages = record.find("messages"); messages != record.end()) {
    if (chat == nullptr) {
      return Unexpected(InvalidArgument("chats need a model with a chat template"));
    }
    const bool answered = messages->is_array() && !messages->empty() &&
                          messages->back().is_object() &&
                          messages->back().value("role", ordered_json()) == "assistant";
    return EncodeChat(*messages, !answered, tokenizer, *chat);
  }
  return Unexpected(InvalidArgument("a record needs \"text\", \"prompt\" or \"messages\""));
}

Status ReadLines(const CalibrationTextOptions& options, const Tokenizer& tokenizer,
                 const ChatTemplate* chat, Collector& collector, CalibrationText& out) {
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(options.data, kMaxDataBytes));
  size_t number = 0;
  for (size_t at = 0; at < text.size() && !collector.full();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line(text.data() + at, end - at);
    at = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const Result<std::vector<int32_t>> tokens = EncodeLine(line, tokenizer, chat);
    if (tokens.has_value()) {
      collector.Add(*tokens);
    } else {
      out.warnings.push_back(fmt::format("{}:{}: left out: {}", options.data.string(), number,
                                         tokens.error().message()));
    }
  }
  return {};
}

// At least the first `wanted` tokens of a text, or all of it: what lies far behind them need not be
// encoded, which would take ten times a file's size in memory.
Result<std::vector<int32_t>> EncodeBeginning(std::string_view text, int64_t wanted,
                                             const Tokenizer& tokenizer) {
  // Where the text is cut its last tokens may be others than in the whole: they are not used.
  constexpr size_t kMargin = 256;
  const size_t enough = static_cast<size_t>(wanted) + kMargin;
  for (size_t size = 8 * enough; size < text.size(); size *= 4) {
    while (size < text.size() && (static_cast<uint8_t>(text[size]) & 0xC0) == 0x80) ++size;
    OSCAR_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, tokenizer.Encode(text.substr(0, size)));
    if (tokens.size() >= enough) return tokens;
  }
  return tokenizer.Encode(text);
}

// Where a line of WikiText begins an article, " = Title = ", and no section, " = = Title = = ".
bool BeginsArticle(std::string_view line) {
  while (line.ends_with('\r') || line.ends_with(' ')) line.remove_suffix(1);
  return line.starts_with(" = ") && line.ends_with(" =") && line.size() > 5 &&
         !line.starts_with(" = =");
}

Status AddWikiText(const fs::path& path, const Tokenizer& tokenizer, int64_t budget,
                   Collector& collector, const CalibrationText& out) {
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxDataBytes));
  if (text.starts_with("PAR1")) {
    return InvalidArgument(fmt::format(
        "{}: Parquet is not read; give WikiText's raw text, such as wiki.test.raw", path.string()));
  }
  for (size_t begin = 0; begin < text.size() && !collector.full();) {
    size_t end = begin;
    do {
      end = std::min(text.find('\n', end), text.size() - 1) + 1;
      const size_t next = std::min(text.find('\n', end), text.size());
      if (BeginsArticle(std::string_view(text).substr(end, next - end))) break;
    } while (end < text.size());
    const Result<std::vector<int32_t>> tokens = EncodeBeginning(
        std::string_view(text).substr(begin, end - begin), budget - out.num_tokens, tokenizer);
    if (!tokens.has_value()) {  // it is not UTF-8
      return DataLoss(fmt::format("{}: {}", path.string(), tokens.error().message()));
    }
    collector.Add(*tokens);
    begin = end;
  }
  return {};
}

// A prompt of each task in turn: the first of many would spend the budget alone.
Status AddBenchmark(std::string_view name, const fs::path& path, const Tokenizer& tokenizer,
                    const ChatTemplate* chat, Collector& collector, CalibrationText& out) {
  OSCAR_ASSIGN_OR_RETURN(const EvalSuite suite, ReadBenchmark(name, path, {}));
  out.warnings.insert(out.warnings.end(), suite.warnings.begin(), suite.warnings.end());
  bool found = true;
  for (size_t i = 0; found && !collector.full(); ++i) {
    found = false;
    for (const EvalTask& task : suite.tasks) {
      if (i >= task.items.size()) continue;
      found = true;
      const EvalItem& item = task.items[i];
      std::vector<int32_t> tokens;
      if (chat != nullptr && item.use_template) {
        ordered_json messages = ordered_json::array();
        if (!item.system.empty()) {
          messages.push_back({{"role", "system"}, {"content", item.system}});
        }
        messages.push_back({{"role", "user"}, {"content", item.prompt}});
        OSCAR_ASSIGN_OR_RETURN(tokens, EncodeChat(messages, true, tokenizer, *chat));
      } else {
        OSCAR_ASSIGN_OR_RETURN(tokens, tokenizer.Encode(item.prompt, {.add_special = true}));
      }
      collector.Add(tokens);
    }
  }
  return {};
}

// Fills from NAME=PATH; kInvalidArgument where NAME is no set.
Status AddSet(const CalibrationTextOptions& options, const Tokenizer& tokenizer,
              const ChatTemplate* chat, Collector& collector, CalibrationText& out) {
  const std::string whole = options.data.string();
  const size_t equals = whole.find('=');
  const std::string name = whole.substr(0, equals), path = whole.substr(equals + 1);
  if (std::ranges::find(kSets, name) == kSets.end()) {
    std::string names;
    for (const std::string_view set : kSets) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", set);
    }
    return InvalidArgument(fmt::format(
        "{}: no such file, and {} is no data set read by name; there are {}", whole, name, names));
  }
  if (path.empty()) return InvalidArgument(fmt::format("{}: name its file after the =", whole));
  return name == kWikiText ? AddWikiText(path, tokenizer, options.tokens, collector, out)
                           : AddBenchmark(name, path, tokenizer, chat, collector, out);
}

Status AddSample(const CalibrationTextOptions& options, const Tokenizer& tokenizer,
                 const ChatTemplate* chat, Collector& collector) {
  OSCAR_ASSIGN_OR_RETURN(const std::string text,
                         Gunzip(std::string(SampleProseGzip()), kSampleName, kMaxSampleBytes));
  OSCAR_ASSIGN_OR_RETURN(const nlohmann::json list, ParseJson(text, kSampleName));
  // The second half: perplexity is judged on the first.
  std::vector<std::string> documents;
  for (size_t i = list.size() / 2; i < list.size(); ++i) {
    documents.push_back(list[i].get<std::string>());
  }
  // A piece of prose, then chats until they have as many tokens, and so on.
  std::vector<int32_t> stream;
  size_t document = 0;
  uint64_t index = 0;
  int64_t prose_tokens = 0, chat_tokens = 0;
  const int64_t piece = std::min<int64_t>(options.max_sequence, 2048);
  const std::optional<TokenId> separator = tokenizer.FindToken("<|endoftext|>");
  while (!collector.full()) {
    if (chat != nullptr && chat_tokens < prose_tokens) {
      const SyntheticChat made = MakeSyntheticChat(options.seed, index++, documents, kFillerChars);
      const ordered_json messages = {{{"role", "user"}, {"content", made.user}},
                                     {{"role", "assistant"}, {"content", made.assistant}}};
      OSCAR_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                             EncodeChat(messages, false, tokenizer, *chat));
      const ordered_json question = {messages[0]};
      OSCAR_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt,
                             EncodeChat(question, true, tokenizer, *chat));
      const bool is_prefix =
          prompt.size() < tokens.size() && std::equal(prompt.begin(), prompt.end(), tokens.begin());
      chat_tokens += static_cast<int64_t>(tokens.size());
      collector.Add(tokens, is_prefix ? std::ssize(tokens) - std::ssize(prompt) : 0);
      continue;
    }
    while (static_cast<int64_t>(stream.size()) < piece) {
      OSCAR_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens,
                             tokenizer.Encode(documents[document]));
      document = (document + 1) % documents.size();
      stream.insert(stream.end(), tokens.begin(), tokens.end());
      if (separator.has_value()) stream.push_back(*separator);
      if (tokens.empty() && document == 0 && stream.empty()) {
        return OutOfRange(
            fmt::format("{} has no token in the model's vocabulary; name a text with --data FILE",
                        kSampleName));
      }
    }
    collector.Add(std::span(stream).first(static_cast<size_t>(piece)));
    prose_tokens += piece;
    stream.erase(stream.begin(), stream.begin() + static_cast<std::ptrdiff_t>(piece));
  }
  return {};
}

}  // namespace

std::span<const std::string_view> CalibrationSets() { return kSets; }

Result<CalibrationText> ReadCalibrationText(const CalibrationTextOptions& given,
                                            const Tokenizer& tokenizer, const ChatTemplate* chat) {
  CalibrationTextOptions options = given;
  if (options.max_sequence == 0) options.max_sequence = kDefaultMaxSequence;
  if (options.tokens < 1 || options.tokens > kMaxCalibrationTokens || options.max_sequence < 1) {
    return Unexpected(InvalidArgument(
        fmt::format("a budget of {} tokens and sequences of {}; both must be positive, the budget "
                    "at most {}",
                    options.tokens, options.max_sequence, kMaxCalibrationTokens)));
  }
  CalibrationText out;
  Collector collector(options, out);
  std::string extension = options.data.extension().string();
  for (char& c : extension) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  if (options.data.empty()) {
    OSCAR_RETURN_IF_ERROR(AddSample(options, tokenizer, chat, collector));
  } else if (options.data.string().find('=') != std::string::npos && !Exists(options.data)) {
    OSCAR_RETURN_IF_ERROR(AddSet(options, tokenizer, chat, collector, out));
  } else if (extension == ".jsonl" || extension == ".ndjson") {
    OSCAR_RETURN_IF_ERROR(ReadLines(options, tokenizer, chat, collector, out));
  } else if (extension == ".json") {  // read as text it would be mostly marks
    return Unexpected(InvalidArgument(fmt::format(
        "{}: JSON is read by lines, one record with text, prompt or messages each; give a .jsonl "
        "or plain text",
        options.data.string())));
  } else {
    OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(options.data, kMaxDataBytes));
    const Result<std::vector<int32_t>> tokens = EncodeBeginning(text, options.tokens, tokenizer);
    if (!tokens.has_value()) {  // it is not UTF-8
      return Unexpected(
          DataLoss(fmt::format("{}: {}", options.data.string(), tokens.error().message())));
    }
    collector.Add(*tokens);
  }
  if (out.num_tokens == 0) {
    return Unexpected(OutOfRange(fmt::format(
        "{}: holds no text to calibrate on{}", options.data.string(),
        out.warnings.empty() ? "" : fmt::format("; the first reason: {}", out.warnings[0]))));
  }
  return out;
}

}  // namespace oscar
