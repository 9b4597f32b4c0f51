#include "tasks/ruler.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "base/json.h"
#include "tasks/ruler_generator.h"
#include "tasks/word_lists.h"
#include "text/unicode.h"

namespace oscar {
namespace {

constexpr std::array<std::string_view, 11> kTasks = {"niah_single_1",
                                                     "niah_single_2",
                                                     "niah_single_3",
                                                     "niah_multikey_1",
                                                     "niah_multikey_2",
                                                     "niah_multikey_3",
                                                     "niah_multivalue",
                                                     "niah_multiquery",
                                                     "vt",
                                                     "cwe",
                                                     "fwe"};

// Their documents are the user's own copies.
constexpr std::array<std::string_view, 2> kDocumentTasks = {"qa_1", "qa_2"};

constexpr std::string_view kNoiseLine =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
constexpr std::string_view kSpace = " \t\r\n";
constexpr uint64_t kMaxHaystackBytes = uint64_t{1} << 30;
constexpr int kMaxDraws = 4;      // of one item, to come closer to the length
constexpr int64_t kShort = 4096;  // below it, RULER takes smaller steps and lighter lists

using Sample = RulerSample;

enum class Haystack : uint8_t { kNoise, kEssay, kNeedle };
enum class Kind : uint8_t { kWords, kNumbers, kUuids };

struct NeedleTask {
  std::string_view name;
  Haystack haystack;
  Kind key, value;
  uint32_t keys, values, queries;
};

constexpr std::array<NeedleTask, 8> kNeedleTasks = {{
    {"niah_single_1", Haystack::kNoise, Kind::kWords, Kind::kNumbers, 1, 1, 1},
    {"niah_single_2", Haystack::kEssay, Kind::kWords, Kind::kNumbers, 1, 1, 1},
    {"niah_single_3", Haystack::kEssay, Kind::kWords, Kind::kUuids, 1, 1, 1},
    {"niah_multikey_1", Haystack::kEssay, Kind::kWords, Kind::kNumbers, 4, 1, 1},
    {"niah_multikey_2", Haystack::kNeedle, Kind::kWords, Kind::kNumbers, 1, 1, 1},
    {"niah_multikey_3", Haystack::kNeedle, Kind::kUuids, Kind::kUuids, 1, 1, 1},
    {"niah_multivalue", Haystack::kEssay, Kind::kWords, Kind::kNumbers, 1, 4, 1},
    {"niah_multiquery", Haystack::kEssay, Kind::kWords, Kind::kNumbers, 4, 1, 4},
}};

void Replace(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

std::string Join(const std::vector<std::string>& parts, std::string_view divider) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += divider;
    out += parts[i];
  }
  return out;
}

std::string Letters(PythonRandom& random, int count, char first) {
  std::string out;
  for (int i = 0; i < count; ++i)
    out += static_cast<char>(first + static_cast<int>(random.Below(26)));
  return out;
}

std::string Draw(Kind kind, PythonRandom& random) {
  switch (kind) {
    case Kind::kNumbers:
      return std::to_string(1000000 + random.Below(9000000));
    case Kind::kWords: {
      const auto adjectives = Adjectives(), nouns = Nouns();
      const std::string adjective(
          adjectives[random.Below(static_cast<uint32_t>(adjectives.size()))]);
      return adjective + "-" +
             std::string(nouns[random.Below(static_cast<uint32_t>(nouns.size()))]);
    }
    case Kind::kUuids: {
      std::array<uint32_t, 4> words;
      for (uint32_t& word : words) word = random.GetBits(32);
      words[1] = (words[1] & 0xffff0fffu) | 0x4000u;
      words[2] = (words[2] & 0x3fffffffu) | 0x80000000u;
      return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:04x}{:08x}", words[0], words[1] >> 16,
                         words[1] & 0xffffu, words[2] >> 16, words[2] & 0xffffu, words[3]);
    }
  }
  return {};
}

// A sentence ends at . ! or ? with closing quotes, before white space and something that can begin
// one.
std::vector<std::string_view> SplitSentences(std::string_view text) {
  std::vector<std::string_view> out;
  size_t start = 0;
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    if (text[i] != '.' && text[i] != '!' && text[i] != '?') continue;
    size_t end = i + 1;
    while (end < text.size() && (text[end] == '"' || text[end] == '\'' || text[end] == ')')) ++end;
    if (end >= text.size() || text[end] != ' ') continue;
    const char next = end + 1 < text.size() ? text[end + 1] : ' ';
    if (next >= 'a' && next <= 'z') continue;
    out.push_back(text.substr(start, end - start));
    start = end + 1;
    i = end;
  }
  if (start < text.size()) out.push_back(text.substr(start));
  return out;
}

class NeedleGenerator : public RulerGenerator {
 public:
  NeedleGenerator(const NeedleTask& task, const RulerOptions& options)
      : task_(task), length_(options.length), seed_(options.seed) {
    if (task.haystack != Haystack::kEssay) return;
    for (size_t at = 0; at < options.essays.size();) {
      const size_t first = options.essays.find_first_not_of(kSpace, at);
      if (first == std::string_view::npos) break;
      const size_t end =
          std::min(options.essays.find_first_of(kSpace, first), options.essays.size());
      words_.push_back(options.essays.substr(first, end - first));
      at = end;
    }
  }

  int64_t step() const override {
    if (task_.haystack == Haystack::kEssay) return length_ < kShort ? 100 : 500;
    return length_ < kShort ? 5 : 25;
  }
  int64_t min_size() const override { return 1; }
  int64_t answer_tokens() const override { return 128; }

  Sample Make(int64_t size, int64_t /*index*/, PythonRandom& random) const override {
    std::vector<std::string> keys, needles;
    std::vector<std::vector<std::string>> values;
    for (uint32_t k = 0; k < std::max(task_.keys, task_.queries); ++k) {
      keys.push_back(oscar::Draw(task_.key, random));
      values.emplace_back();
      for (uint32_t v = 0; v < task_.values; ++v) {
        values.back().push_back(oscar::Draw(task_.value, random));
        needles.push_back(Needle(keys.back(), values.back().back()));
      }
    }
    PythonRandom(seed_).Shuffle(needles);
    const std::string context = Context(size, needles, random);
    std::vector<std::string> queries;
    Sample out;
    for (const uint32_t k : random.Sample(static_cast<uint32_t>(keys.size()), task_.queries)) {
      queries.push_back(keys[k]);
      out.outputs.insert(out.outputs.end(), values[k].begin(), values[k].end());
    }
    std::string query = queries.front();
    if (queries.size() > 1) {
      const std::string last = queries.back();
      queries.pop_back();
      query = Join(queries, ", ") + ", and " + last;
    }
    std::string type = Plural();
    out.input =
        "Some special magic {type} are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the {type} afterwards.\n{context}\nWhat are all the special "
        "magic {type} for {query} mentioned in the provided text?";
    out.prefix = " The special magic {type} for {query} mentioned in the provided text are";
    const bool single = task_.queries * task_.values == 1;
    if (single) type.pop_back();
    for (std::string* text : {&out.input, &out.prefix}) {
      if (single) {
        Replace(*text, "Some", "A");
        Replace(*text, "are all", "is");
        Replace(*text, "are", "is");
        Replace(*text, "answers", "answer");
      }
      Replace(*text, "{type}", type);
      Replace(*text, "{query}", query);
    }
    Replace(out.input, "{context}", context);
    return out;
  }

 private:
  std::string Plural() const {
    return task_.value == Kind::kNumbers ? "numbers"
           : task_.value == Kind::kUuids ? "uuids"
                                         : "words";
  }
  std::string Needle(const std::string& key, const std::string& value) const {
    return fmt::format("One of the special magic {} for {} is: {}.", Plural(), key, value);
  }

  std::string Context(int64_t size, const std::vector<std::string>& needles,
                      PythonRandom& random) const {
    if (task_.haystack == Haystack::kEssay) return EssayContext(size, needles, random);
    std::vector<std::string> lines;
    for (int64_t i = 0; i < size; ++i) {
      if (task_.haystack == Haystack::kNoise) {
        lines.emplace_back(kNoiseLine);
      } else {
        const std::string key = oscar::Draw(task_.key, random);
        lines.push_back(Needle(key, oscar::Draw(task_.value, random)));
      }
    }
    std::vector<uint32_t> places =
        random.Sample(static_cast<uint32_t>(size),
                      std::min(static_cast<uint32_t>(needles.size()), static_cast<uint32_t>(size)));
    std::sort(places.rbegin(), places.rend());
    for (size_t i = 0; i < places.size(); ++i) {
      lines.insert(lines.begin() + places[i], needles[i]);
    }
    return Join(lines, "\n");
  }

  std::string EssayContext(int64_t size, const std::vector<std::string>& needles,
                           PythonRandom& random) const {
    std::string text;
    for (int64_t i = 0; i < size; ++i) {
      if (i > 0) text += ' ';
      text += words_[static_cast<size_t>(i) % words_.size()];
    }
    const std::vector<std::string_view> sentences = SplitSentences(text);
    // 40 depths from 0 to 100 percent, rounded to whole ones, halves to even.
    std::vector<size_t> places;
    for (const uint32_t i : random.Sample(40, static_cast<uint32_t>(needles.size()))) {
      const double depth = std::nearbyint(100.0 * i / 39.0);
      places.push_back(
          static_cast<size_t>(static_cast<double>(sentences.size()) * (depth / 100.0)));
    }
    std::sort(places.begin(), places.end());
    std::string out;
    const auto add = [&](std::string_view part) {
      if (!out.empty()) out += ' ';
      out += part;
    };
    size_t next = 0;
    for (size_t i = 0; i <= sentences.size(); ++i) {
      while (next < places.size() && places[next] == i) add(needles[next++]);
      if (i < sentences.size()) add(sentences[i]);
    }
    return out;
  }

  const NeedleTask& task_;
  const int64_t length_;
  const uint32_t seed_;
  std::vector<std::string_view> words_;
};

class TrackingGenerator : public RulerGenerator {
 public:
  explicit TrackingGenerator(const RulerOptions& options) : length_(options.length) {}
  int64_t step() const override { return length_ < kShort ? 5 : 10; }
  int64_t min_size() const override { return kVariables; }
  int64_t answer_tokens() const override { return 30; }

  Sample Make(int64_t size, int64_t /*index*/, PythonRandom& random) const override {
    const Sample example = One(kExampleLines, 3, random);
    Sample out = One(size, 5, random);
    out.input =
        example.input + example.prefix + " " + Join(example.outputs, " ") + "\n\n" + out.input;
    return out;
  }

 private:
  static constexpr int kVariables = 5;
  static constexpr int64_t kExampleLines = 10;  // below 500 tokens

  static Sample One(int64_t size, int letters, PythonRandom& random) {
    Sample out;
    std::set<std::string> seen;
    while (out.outputs.size() < kVariables) {
      std::string name = Letters(random, letters, 'A');
      if (seen.insert(name).second) out.outputs.push_back(std::move(name));
    }
    const uint32_t value = 10000 + random.Below(89999);
    std::vector<std::string> chain = {fmt::format("VAR {} = {}", out.outputs[0], value)};
    for (int i = 1; i < kVariables; ++i) {
      chain.push_back(fmt::format("VAR {} = VAR {} ", out.outputs[static_cast<size_t>(i)],
                                  out.outputs[static_cast<size_t>(i) - 1]));
    }
    std::vector<std::string> lines(static_cast<size_t>(size), std::string(kNoiseLine));
    std::vector<uint32_t> places = random.Sample(
        static_cast<uint32_t>(size), std::min<uint32_t>(kVariables, static_cast<uint32_t>(size)));
    std::sort(places.begin(), places.end());
    for (size_t i = places.size(); i > 0; --i) {
      lines.insert(lines.begin() + places[i - 1], chain[i - 1]);
    }
    std::string context = Join(lines, "\n");
    Replace(context, ". \n", ".\n");
    out.input = fmt::format(
        "Memorize and track the chain(s) of variable assignment hidden in the following "
        "text.\n\n{}\nQuestion: Find all variables that are assigned the value {} in the text "
        "above.",
        context, value);
    out.prefix = fmt::format(
        " Answer: According to the chain(s) of variable assignment in the text above, {} variables "
        "are assigned the value {}, they are: ",
        kVariables, value);
    return out;
  }

  const int64_t length_;
};

class CommonWordsGenerator : public RulerGenerator {
 public:
  explicit CommonWordsGenerator(const RulerOptions& options)
      : is_short_(options.length < kShort), seed_(options.seed) {
    std::set<std::string_view> all;
    for (const auto list : {Nouns(), Adjectives(), Verbs()}) all.insert(list.begin(), list.end());
    words_.assign(all.begin(), all.end());
  }
  int64_t step() const override { return 10; }
  int64_t min_size() const override { return kCommon; }
  int64_t max_size() const override { return static_cast<int64_t>(words_.size()); }
  int64_t answer_tokens() const override { return 120; }

  Sample Make(int64_t size, int64_t /*index*/, PythonRandom& random) const override {
    const Sample example = is_short_ ? One(20, 3, 1, random) : One(40, 10, 3, random);
    Sample out = is_short_ ? One(size, 6, 1, random) : One(size, 30, 3, random);
    std::string solved = example.input + example.prefix;
    for (size_t i = 0; i < example.outputs.size(); ++i) {
      solved += fmt::format(" {}. {}", i + 1, example.outputs[i]);
    }
    out.input = solved + "\n" + out.input;
    return out;
  }

 private:
  static constexpr size_t kCommon = 10;

  Sample One(int64_t size, int common_times, int other_times, PythonRandom& random) const {
    Sample out;
    std::vector<std::string> list;
    const std::vector<uint32_t> chosen =
        random.Sample(static_cast<uint32_t>(words_.size()), static_cast<uint32_t>(size));
    for (size_t i = 0; i < chosen.size(); ++i) {
      const std::string word(words_[chosen[i]]);
      if (i < kCommon) out.outputs.push_back(word);
      for (int t = 0; t < (i < kCommon ? common_times : other_times); ++t) list.push_back(word);
    }
    PythonRandom(seed_).Shuffle(list);
    std::string context;
    for (size_t i = 0; i < list.size(); ++i) {
      context += fmt::format("{}{}. {}", i > 0 ? " " : "", i + 1, list[i]);
    }
    out.input =
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n" +
        context + "\nQuestion: What are the 10 most common words in the above list?";
    out.prefix = " Answer: The top 10 words that appear most often in the list are:";
    return out;
  }

  const bool is_short_;
  const uint32_t seed_;
  std::vector<std::string_view> words_;
};

class FrequentWordsGenerator : public RulerGenerator {
 public:
  explicit FrequentWordsGenerator(const RulerOptions& options)
      : length_(options.length), seed_(options.seed) {}
  int64_t step() const override { return 50; }
  int64_t min_size() const override { return 27; }  // the fourth rank occurs once
  int64_t answer_tokens() const override { return 50; }

  Sample Make(int64_t size, int64_t /*index*/, PythonRandom& random) const override {
    std::set<std::string> names;
    const auto count = static_cast<size_t>(std::max<int64_t>(length_ / 50, 4));
    while (names.size() < count) names.insert(Letters(random, 6, 'a'));
    std::vector<std::string> vocabulary(names.begin(), names.end());
    PythonRandom(seed_).Shuffle(vocabulary);
    vocabulary[0] = "...";
    constexpr double kZeta2 = 1.6449340668482264;
    std::vector<std::string> list;
    for (size_t k = 1; k <= vocabulary.size(); ++k) {
      const double share = static_cast<double>(size) / static_cast<double>(k * k) / kZeta2;
      list.insert(list.end(), static_cast<size_t>(share), vocabulary[k - 1]);
    }
    PythonRandom(seed_).Shuffle(list);
    Sample out;
    out.outputs.assign(vocabulary.begin() + 1, vocabulary.begin() + 4);
    out.input =
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared coded words. " +
        Join(list, " ") +
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text?";
    out.prefix =
        " Answer: According to the coded text above, the three most frequently appeared words are:";
    return out;
  }

 private:
  const int64_t length_;
  const uint32_t seed_;
};

Result<std::unique_ptr<RulerGenerator>> MakeGenerator(std::string_view name,
                                                      const RulerOptions& options) {
  for (const NeedleTask& task : kNeedleTasks) {
    if (task.name != name) continue;
    if (task.haystack == Haystack::kEssay &&
        options.essays.find_first_not_of(kSpace) == std::string_view::npos) {
      return Unexpected(InvalidArgument(fmt::format(
          "{} hides its needles in prose: name a text that has words with --haystack", name)));
    }
    return std::make_unique<NeedleGenerator>(task, options);
  }
  if (name == "vt") return std::make_unique<TrackingGenerator>(options);
  if (name == "cwe") return std::make_unique<CommonWordsGenerator>(options);
  if (name == "fwe") return std::make_unique<FrequentWordsGenerator>(options);
  if (RulerTaskNeedsDocuments(name)) {
    if (options.documents.empty()) {
      return Unexpected(InvalidArgument(fmt::format(
          "{0} asks about documents: name {1} as {0}=FILE", name,
          name == "qa_1" ? "SQuAD's dev-v2.0.json" : "HotpotQA's hotpot_dev_distractor_v1.json")));
    }
    return MakeQuestionGenerator(name, options.documents);
  }
  return Unexpected(NotFound(fmt::format("RULER has no task \"{}\"", name)));
}

}  // namespace

std::span<const std::string_view> RulerTasks() { return kTasks; }

bool IsRulerTask(std::string_view name) {
  return std::find(kTasks.begin(), kTasks.end(), name) != kTasks.end() ||
         RulerTaskNeedsDocuments(name);
}

bool RulerTaskNeedsDocuments(std::string_view name) {
  return std::ranges::find(kDocumentTasks, name) != kDocumentTasks.end();
}

bool RulerTaskNeedsEssays(std::string_view name) {
  return std::any_of(kNeedleTasks.begin(), kNeedleTasks.end(), [&](const NeedleTask& task) {
    return task.name == name && task.haystack == Haystack::kEssay;
  });
}

Result<std::string> ReadHaystack(const std::filesystem::path& path) {
  OSCAR_ASSIGN_OR_RETURN(std::string text, ReadFile(path, kMaxHaystackBytes));
  if (path.extension() == ".json") {
    OSCAR_ASSIGN_OR_RETURN(nlohmann::json root, ParseJson(text, path.string()));
    const auto found = root.is_object() ? root.find("text") : root.end();
    if (!root.is_object() || found == root.end() || !found->is_string()) {
      return Unexpected(DataLoss(
          fmt::format("{}: a haystack in JSON is an object with the prose as \"text\", a string",
                      path.string())));
    }
    text = std::move(found->get_ref<std::string&>());
  }
  if (const size_t bad = FindInvalidUtf8(text); bad < text.size()) {
    return Unexpected(DataLoss(fmt::format("{}: the text is not valid UTF-8 at byte {} of {}",
                                           path.string(), bad, text.size())));
  }
  return text;
}

Result<EvalTask> MakeRulerTask(std::string_view name, const RulerOptions& options) {
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<RulerGenerator> generator,
                         MakeGenerator(name, options));
  const int64_t step = generator->step();
  const auto length_of = [&](const Sample& sample) -> Result<int64_t> {
    OSCAR_ASSIGN_OR_RETURN(const int64_t tokens,
                           options.count_tokens(sample.input + sample.prefix));
    return tokens + generator->answer_tokens();
  };
  const auto does_not_fit = [&] {
    return Unexpected(OutOfRange(fmt::format(
        "{} does not fit {} tokens; give it more with --length", name, options.length)));
  };
  // The largest size whose draw fits, to one unit; one step is the least. Sizes are tried with a
  // seed of their own so that the items depend on the size found alone.
  const auto length_at = [&](int64_t size) -> Result<int64_t> {
    PythonRandom random(options.seed + 1);
    return length_of(generator->Make(size, 0, random));
  };
  int64_t low = step, high = step;
  OSCAR_ASSIGN_OR_RETURN(int64_t low_length, length_at(low));
  const int64_t least_length = low_length;
  if (low_length > options.length) return does_not_fit();
  while (low == high) {
    high = std::min(low * 2, generator->max_size() + 1);
    if (high > generator->max_size()) break;
    OSCAR_ASSIGN_OR_RETURN(const int64_t length, length_at(high));
    if (length <= options.length) low = high, low_length = length;
  }
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    OSCAR_ASSIGN_OR_RETURN(const int64_t length, length_at(middle));
    if (length <= options.length) {
      low = middle, low_length = length;
    } else {
      high = middle;
    }
  }
  if (low == generator->max_size() && low_length < options.length * 9 / 10) {
    return Unexpected(OutOfRange(
        fmt::format("{} has words for {} tokens only; lower --length", name, low_length)));
  }
  // Tokens beside the units: question, solved example, answer.
  const double fixed = low == step ? 0
                                   : static_cast<double>(least_length) -
                                         static_cast<double>(step) *
                                             static_cast<double>(low_length - least_length) /
                                             static_cast<double>(low - step);
  EvalTask task;
  task.name = fmt::format("{}@{}", name, options.length);
  task.scorer = generator->scorer();
  PythonRandom random(options.seed);
  for (int64_t i = 0; i < std::min(options.samples, generator->max_items()); ++i) {
    // Draws of one size differ in tokens, a tenth for coded words: the same draw is taken again at
    // the size that its own tokens allow, until it is close, and smaller until it fits.
    const PythonRandom before = random;
    std::optional<Sample> best;
    int64_t best_length = 0, size = low;
    for (int attempt = 0; !best.has_value() || attempt < kMaxDraws; ++attempt) {
      if (size < generator->min_size()) {
        if (best.has_value()) break;
        return does_not_fit();
      }
      random = before;
      Sample sample = generator->Make(size, i, random);
      OSCAR_ASSIGN_OR_RETURN(const int64_t length, length_of(sample));
      if (length <= options.length && length > best_length) {
        best = std::move(sample);
        best_length = length;
      }
      const double unit =
          std::max((static_cast<double>(length) - fixed) / static_cast<double>(size), 1e-3);
      const double room = static_cast<double>(options.length - length) / unit;
      const int64_t next =
          std::min(size + static_cast<int64_t>(std::floor(room)), generator->max_size());
      if (next == size) break;
      if (best.has_value() && best_length * 100 >= options.length * 99) break;
      size = next;
    }
    EvalItem item;
    item.id = fmt::format("{}/{}", task.name, i);
    item.prompt = std::move(best->input);
    item.prefix = std::move(best->prefix);
    item.answers = std::move(best->outputs);
    item.max_tokens = generator->answer_tokens();
    task.items.push_back(std::move(item));
  }
  return task;
}

}  // namespace oscar
