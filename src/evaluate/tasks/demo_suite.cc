#include "tasks/demo_suite.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>
#include <vector>

#include "tasks/python_random.h"

namespace oscar {
namespace {

constexpr double kCharsPerToken = 3.6;
constexpr std::string_view kAdjectives =
    "amber ancient brave bright calm clever cold copper crimson curious dusty eager early empty "
    "faint fierce frozen gentle golden grand green hidden hollow humble icy jolly keen late "
    "lively lonely lucky mellow mighty misty modest narrow noble odd old pale patient plain "
    "proud quick quiet rapid red rough royal rusty sharp silent silver simple sleepy slow small "
    "smooth solid steep stormy strange sunny swift tall tender thin tidy tiny velvet vivid warm "
    "wild windy wise wooden young";
constexpr std::string_view kNouns =
    "anchor apple arrow badge barrel basket beacon bell bird boat bottle branch bridge brook "
    "button candle canyon castle cave chair circle cliff clock cloud coin comet cradle crown "
    "desert door dragon drum eagle engine falcon feather field fire flag flower forest fountain "
    "fox garden gate glove harbor hammer hill island jacket kettle key kite ladder lake lamp "
    "lantern leaf lion lock maple meadow mirror moon mountain needle ocean orchard owl paper "
    "pebble pencil piano pine pocket prairie rabbit raven ribbon river road robin rope sail "
    "shadow shell ship spoon spring star stone stream summit table temple thunder ticket tiger "
    "tower train tree tunnel valley village violin wagon wheel whistle willow window winter wolf";
constexpr std::string_view kRegisters = "abcd";

using Words = std::vector<std::string_view>;

Words Split(std::string_view text) {
  Words out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

const Words& Adjectives() {
  static const Words kList = Split(kAdjectives);
  return kList;
}

const Words& Nouns() {
  static const Words kList = Split(kNouns);
  return kList;
}

template <typename List>
auto Choice(PythonRandom& random, const List& list) {
  return list[random.Below(static_cast<uint32_t>(list.size()))];
}

// randrange(first, end)
int Number(PythonRandom& random, int first, int end) {
  return first + static_cast<int>(random.Below(static_cast<uint32_t>(end - first)));
}

std::vector<std::string> UniqueKeys(PythonRandom& random, size_t count) {
  std::vector<std::string> keys;
  std::set<std::string> seen;
  while (keys.size() < count) {
    std::string key(Choice(random, Adjectives()));
    key += '-';
    key += Choice(random, Nouns());
    if (seen.insert(key).second) keys.push_back(std::move(key));
  }
  return keys;
}

std::string Uuid(PythonRandom& random) {
  std::array<uint32_t, 4> words;  // of a number of 128 bits, the lowest first
  for (uint32_t& word : words) word = random.GetBits(32);
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:04x}{:08x}", words[3], words[2] >> 16,
                     words[2] & 0xffff, words[1] >> 16, words[1] & 0xffff, words[0]);
}

// As the generator writes strings into JSON: what is not ASCII stays as it is.
std::string Quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
        } else {
          out += c;
        }
    }
  }
  return out + "\"";
}

// What a task makes of one stream of random numbers. `prompt` is the fields that hold it.
struct Item {
  std::string prompt, answer;
  std::vector<std::string> steps;  // thought before the answer; empty: none
};

Item ShortItem(std::string_view prompt, std::string answer, std::vector<std::string> steps = {}) {
  return {"\"prompt\": " + Quoted(prompt), std::move(answer), std::move(steps)};
}

// A piece of the haystack, in code points, that begins at a word.
struct Passage {
  size_t start = 0, chars = 0;
  std::vector<size_t> cuts;  // where needles may stand, from the start
};

Result<Passage> TakePassage(const CodePointText& haystack, int tokens, size_t needles,
                            PythonRandom& random) {
  const auto length = static_cast<size_t>(tokens * kCharsPerToken);
  const auto is_space = [&](size_t at) { return haystack.Slice(at, at + 1) == " "; };
  if (haystack.size() <= length) {
    return Unexpected(OutOfRange(fmt::format(
        "the haystack has {} characters where a task of {} tokens takes {}; name a longer one",
        haystack.size(), tokens, length + 1)));
  }
  Passage out;
  out.start = random.Below(static_cast<uint32_t>(haystack.size() - length));
  while (out.start > 0 && !is_space(out.start - 1) && out.start < haystack.size()) ++out.start;
  out.chars = std::min(length, haystack.size() - out.start);
  while (out.chars > 0 && is_space(out.start + out.chars - 1)) --out.chars;
  for (size_t i = 0; i + 2 < out.chars; ++i) {
    if (haystack.Slice(out.start + i, out.start + i + 2) == ". ") out.cuts.push_back(i + 2);
  }
  if (out.cuts.size() >= needles) return out;
  return Unexpected(
      OutOfRange(fmt::format("the haystack has {} sentences from character {} on where a task "
                             "hides {} needles; name another one",
                             out.cuts.size(), out.start, needles)));
}

std::string Context(const Passage& passage, std::string_view intro,
                    std::vector<std::string> needles, std::string_view question, bool is_shuffled,
                    PythonRandom& random) {
  std::vector<size_t> where;
  for (const uint32_t i : random.Sample(static_cast<uint32_t>(passage.cuts.size()),
                                        static_cast<uint32_t>(needles.size()))) {
    where.push_back(passage.cuts[i]);
  }
  std::sort(where.begin(), where.end());
  if (is_shuffled) random.Shuffle(needles);
  std::string inserts;
  for (size_t i = 0; i < where.size(); ++i) {
    inserts += fmt::format("{}[{}, {}]", i == 0 ? "" : ", ", where[i], Quoted(needles[i]));
  }
  return fmt::format(
      "\"context\": {{\"intro\": {}, \"start\": {}, \"chars\": {}, \"inserts\": [{}]}}, "
      "\"question\": {}",
      Quoted(intro), passage.start, passage.chars, inserts, Quoted(question));
}

Result<Item> Needles(PythonRandom& random, const CodePointText& haystack, int tokens, bool is_uuid,
                     size_t keys) {
  const std::vector<std::string> names = UniqueKeys(random, keys);
  const std::string_view kind = is_uuid ? "uuid" : "number";
  std::vector<std::string> values, needles;
  for (const std::string& name : names) {
    values.push_back(is_uuid ? Uuid(random) : std::to_string(Number(random, 1000000, 10000000)));
    needles.push_back(
        fmt::format("One of the special magic {}s for {} is: {}.", kind, name, values.back()));
  }
  OSCAR_ASSIGN_OR_RETURN(const Passage passage, TakePassage(haystack, tokens, keys, random));
  // The question is chosen after the needles have been put in.
  std::string context = Context(
      passage,
      fmt::format("Some special magic {}s are hidden within the following text. Make sure to "
                  "memorize them.",
                  kind),
      needles, "@", /*is_shuffled=*/true, random);
  const size_t asked = random.Sample(static_cast<uint32_t>(keys), 1).front();
  context.replace(context.size() - 3, 3,
                  Quoted(fmt::format("What is the special magic {} for {} mentioned in the "
                                     "provided text?",
                                     kind, names[asked])));
  return Item{std::move(context), values[asked], {}};
}

Result<Item> VariableTracking(PythonRandom& random, const CodePointText& haystack, int tokens,
                              size_t hops) {
  std::vector<std::string> names;
  for (const uint32_t i : random.Sample(26 * 26 * 26, static_cast<uint32_t>(hops + 1))) {
    names.push_back({static_cast<char>('A' + i / 676), static_cast<char>('A' + i / 26 % 26),
                     static_cast<char>('A' + i % 26)});
  }
  const int value = Number(random, 10000, 100000);
  std::vector<std::string> needles = {fmt::format("VAR {} = {}.", names[0], value)};
  for (size_t i = 0; i < hops; ++i) {
    needles.push_back(fmt::format("VAR {} = VAR {}.", names[i + 1], names[i]));
  }
  OSCAR_ASSIGN_OR_RETURN(const Passage passage,
                         TakePassage(haystack, tokens, needles.size(), random));
  // Places come from a stream of their own.
  PythonRandom places = PythonRandom::OfFloat(random.Random());
  return Item{
      Context(passage,
              "Memorize and track the chain of variable assignments hidden in the following text.",
              needles, fmt::format("Which variables are assigned the value {}?", value),
              /*is_shuffled=*/false, places),
      fmt::format("{}", fmt::join(names, " ")),
      {}};
}

Item SumChain(PythonRandom& random, int count) {
  std::vector<int> numbers;
  for (int i = 0; i < count; ++i) numbers.push_back(Number(random, 1, 1000));
  std::vector<std::string> steps;
  int total = 0;
  for (int i = 0; i < count; ++i) {
    const int x = numbers[static_cast<size_t>(i)];
    steps.push_back(fmt::format("{}: {} + {} = {}", i + 1, total, x, total + x));
    total += x;
  }
  return ShortItem(fmt::format("Add these numbers: {}", fmt::join(numbers, " ")),
                   std::to_string(total), std::move(steps));
}

Item MultiHop(PythonRandom& random, size_t entries, size_t hops) {
  const std::vector<std::string> keys = UniqueKeys(random, entries);
  const std::vector<uint32_t> chain =
      random.Sample(static_cast<uint32_t>(entries), static_cast<uint32_t>(hops + 1));
  std::vector<size_t> next(entries);
  for (size_t& to : next) to = random.Below(static_cast<uint32_t>(entries));
  for (size_t i = 0; i < hops; ++i) next[chain[i]] = chain[i + 1];
  std::vector<size_t> order(entries);
  for (size_t i = 0; i < entries; ++i) order[i] = i;
  random.Shuffle(order);
  const auto entry = [&](size_t i) { return fmt::format("{} -> {}", keys[i], keys[next[i]]); };
  std::string prompt = "Follow this map:\n";
  for (const size_t i : order) prompt += entry(i) + "\n";
  prompt +=
      fmt::format("Start at {} and take {} steps. Where do you arrive?", keys[chain[0]], hops);
  std::vector<std::string> steps;
  for (size_t i = 0; i < hops; ++i) steps.push_back(entry(chain[i]));
  return ShortItem(prompt, keys[chain[hops]], std::move(steps));
}

Item ProgramTrace(PythonRandom& random, int num_lines) {
  std::array<int, kRegisters.size()> state;
  for (int& x : state) x = Number(random, 0, 50);
  std::string program = "Run this program:\n";
  for (size_t i = 0; i < state.size(); ++i) {
    program += fmt::format("{} = {}\n", kRegisters[i], state[i]);
  }
  const auto value_of = [&](char name) -> int& { return state[kRegisters.find(name)]; };
  std::vector<std::string> steps;
  for (int i = 0; i < num_lines; ++i) {
    const char to = Choice(random, kRegisters), from = Choice(random, kRegisters);
    const int k = Number(random, 1, 50);
    const uint32_t operation = random.Below(4);  // add a constant, subtract it, add, copy
    std::string line = fmt::format("{} = {}", to, from);
    int value = value_of(from);
    if (operation == 0) {
      line += fmt::format(" + {}", k);
      value += k;
    } else if (operation == 1) {
      line += fmt::format(" - {}", k);
      value -= k;
    } else if (operation == 2) {
      const char other = Choice(random, kRegisters);
      line += fmt::format(" + {}", other);
      value += value_of(other);
    }
    if (value < -999 || value > 999) {
      line = fmt::format("{} = {}", to, k);
      value = k;
    }
    value_of(to) = value;
    program += line + "\n";
    line += " |";
    for (size_t r = 0; r < state.size(); ++r) {
      line += fmt::format(" {}={}", kRegisters[r], state[r]);
    }
    steps.push_back(std::move(line));
  }
  const char asked = Choice(random, kRegisters);
  program += fmt::format("What is {} at the end?", asked);
  return ShortItem(program, std::to_string(value_of(asked)), std::move(steps));
}

Item SortNumbers(PythonRandom& random, uint32_t count) {
  std::vector<uint32_t> numbers = random.Sample(900, count);
  for (uint32_t& x : numbers) x += 100;
  const std::string prompt = fmt::format("Sort these numbers: {}", fmt::join(numbers, " "));
  std::sort(numbers.begin(), numbers.end());
  return ShortItem(prompt, fmt::format("{}", fmt::join(numbers, " ")));
}

Item CopyWords(PythonRandom& random, int count) {
  Words words;
  for (int i = 0; i < count; ++i) {
    const Words& list = random.Random() < 0.5 ? Nouns() : Adjectives();
    words.push_back(Choice(random, list));
  }
  std::string text = fmt::format("{}", fmt::join(words, " "));
  return ShortItem("Repeat exactly: " + text, text);
}

struct Task {
  std::string_view name;
  int max_tokens;
  Result<Item> (*make)(PythonRandom& random, const CodePointText& haystack);
};

constexpr Task kTasks[] = {
    {"recall_4k", 40,
     [](PythonRandom& r, const CodePointText& h) { return Needles(r, h, 3300, false, 1); }},
    {"multikey_4k", 40,
     [](PythonRandom& r, const CodePointText& h) { return Needles(r, h, 3100, false, 8); }},
    {"uuid_4k", 60,
     [](PythonRandom& r, const CodePointText& h) { return Needles(r, h, 3300, true, 1); }},
    {"track_4k", 40,
     [](PythonRandom& r, const CodePointText& h) { return VariableTracking(r, h, 3300, 3); }},
    {"multikey_14k", 40,
     [](PythonRandom& r, const CodePointText& h) { return Needles(r, h, 13000, false, 8); }},
    {"sum", 700,
     [](PythonRandom& r, const CodePointText&) -> Result<Item> { return SumChain(r, 24); }},
    {"trace", 1600,
     [](PythonRandom& r, const CodePointText&) -> Result<Item> { return ProgramTrace(r, 32); }},
    {"hop", 200,
     [](PythonRandom& r, const CodePointText&) -> Result<Item> { return MultiHop(r, 80, 6); }},
    {"sort", 120,
     [](PythonRandom& r, const CodePointText&) -> Result<Item> { return SortNumbers(r, 20); }},
    {"copy", 300,
     [](PythonRandom& r, const CodePointText&) -> Result<Item> { return CopyWords(r, 100); }},
};

constexpr auto kNames = [] {
  std::array<std::string_view, std::size(kTasks)> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = kTasks[i].name;
  return names;
}();

}  // namespace

std::span<const std::string_view> DemoTasks() { return kNames; }

Result<std::string> DemoTaskLines(std::string_view name, int64_t samples, uint64_t seed,
                                  const CodePointText& haystack) {
  const Task* const task = std::ranges::find(kTasks, name, &Task::name);
  if (task == std::end(kTasks)) {
    return Unexpected(NotFound(fmt::format("the demo suite has no task \"{}\"", name)));
  }
  std::string out;
  for (int64_t i = 0; i < samples; ++i) {
    PythonRandom random = PythonRandom::OfText(fmt::format("{}/{}/{}", seed, name, i));
    OSCAR_ASSIGN_OR_RETURN(const Item item, task->make(random, haystack));
    const std::string reference =
        item.steps.empty()
            ? item.answer
            : fmt::format("<think>\n{}\n</think>\n{}", fmt::join(item.steps, "\n"), item.answer);
    out += fmt::format(
        "{{\"id\": \"{}-{:03}\", \"task\": \"{}\", {}, \"answer\": {}, \"reference\": {}, "
        "\"max_tokens\": {}}}\n",
        name, i, name, item.prompt, Quoted(item.answer), Quoted(reference), task->max_tokens);
  }
  return out;
}

Result<EvalSuite> MakeDemoSuite(int64_t samples, uint64_t seed, const CodePointText& haystack,
                                const SuiteOptions& options) {
  EvalSuite suite;
  suite.names.assign(kNames.begin(), kNames.end());
  std::sort(suite.names.begin(), suite.names.end());
  for (const std::string& name : suite.names) {
    if (!options.Takes(name)) continue;
    const int64_t limit = options.LimitOf(name);
    OSCAR_ASSIGN_OR_RETURN(
        const std::string lines,
        DemoTaskLines(name, limit > 0 ? std::min(limit, samples) : samples, seed, haystack));
    EvalTask& task = suite.tasks.emplace_back();
    task.name = name;
    for (size_t at = 0; at < lines.size();) {
      const size_t end = lines.find('\n', at);
      OSCAR_ASSIGN_OR_RETURN(
          EvalItem item, ParseItem(std::string_view(lines).substr(at, end - at), name, &haystack));
      task.items.push_back(std::move(item));
      at = end + 1;
    }
  }
  return suite;
}

}  // namespace oscar
