#include "calibrate/synthetic_chats.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <vector>

#include "base/rng.h"

namespace oscar {
namespace {

constexpr std::array<std::string_view, 24> kFirst = {
    "bold", "dry",  "dim",   "fair",  "flat",   "fresh", "grey", "heavy",
    "high", "kind", "light", "loud",  "marble", "neat",  "open", "pink",
    "pure", "rare", "shy",   "sweet", "tame",   "vast",  "wet",  "yellow"};
constexpr std::array<std::string_view, 24> kSecond = {
    "acorn", "badger", "barn",  "beetle", "bench", "bowl",   "cedar",  "cellar",
    "coral", "daisy",  "ember", "fern",   "goose", "hazel",  "heron",  "ivory",
    "lemon", "mill",   "otter", "pearl",  "quilt", "rocket", "saddle", "teapot"};

// Samples in sequence from one counter stream.
class Dice {
 public:
  Dice(uint64_t seed, uint64_t stream) : philox_(seed, stream) {}
  uint32_t Below(uint32_t bound) { return philox_.Below(next_++, bound); }
  uint32_t Between(uint32_t low, uint32_t high) { return low + Below(high - low + 1); }
  std::string Name() { return fmt::format("{}-{}", kFirst[Below(24)], kSecond[Below(24)]); }
  std::vector<std::string> Names(size_t count) {
    std::set<std::string> seen;
    std::vector<std::string> out;
    while (out.size() < count) {
      std::string name = Name();
      if (seen.insert(name).second) out.push_back(std::move(name));
    }
    return out;
  }
  std::string Hex(size_t digits) {
    std::string out;
    for (size_t i = 0; i < digits; ++i) out += "0123456789abcdef"[Below(16)];
    return out;
  }

 private:
  Philox philox_;
  uint64_t next_ = 0;
};

std::string Think(const std::string& steps, const std::string& answer) {
  return fmt::format("<think>\n{}</think>\n{}", steps, answer);
}

SyntheticChat Sum(Dice& dice) {
  const uint32_t count = dice.Between(6, 28);
  std::string list, steps;
  uint32_t total = 0;
  for (uint32_t i = 1; i <= count; ++i) {
    const uint32_t x = dice.Between(1, 999);
    list += fmt::format(" {}", x);
    steps += fmt::format("{}: {} + {} = {}\n", i, total, x, total + x);
    total += x;
  }
  return {"Add these numbers:" + list, Think(steps, std::to_string(total))};
}

SyntheticChat Hops(Dice& dice) {
  const std::vector<std::string> names = dice.Names(dice.Between(20, 70));
  const auto size = static_cast<uint32_t>(names.size());
  std::vector<uint32_t> next(size);
  for (uint32_t& n : next) n = dice.Below(size);
  std::string table, steps;
  for (uint32_t i = 0; i < size; ++i) table += fmt::format("{} -> {}\n", names[i], names[next[i]]);
  const uint32_t start = dice.Below(size), hops = dice.Between(3, 7);
  uint32_t at = start;
  for (uint32_t i = 0; i < hops; ++i, at = next[at]) {
    steps += fmt::format("{} -> {}\n", names[at], names[next[at]]);
  }
  return {fmt::format("Follow this map:\n{}Start at {} and take {} steps. Where do you arrive?",
                      table, names[start], hops),
          Think(steps, names[at])};
}

SyntheticChat Program(Dice& dice) {
  constexpr std::string_view kNames = "abcd";
  std::array<int64_t, 4> state{};
  std::string lines, steps;
  for (size_t v = 0; v < 4; ++v) {
    state[v] = dice.Below(50);
    lines += fmt::format("{} = {}\n", kNames[v], state[v]);
  }
  const uint32_t count = dice.Between(8, 30);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t to = dice.Below(4), from = dice.Below(4);
    const int64_t k = dice.Between(1, 49);
    const bool add = dice.Below(2) == 0;
    int64_t value = add ? state[from] + k : state[from] - k;
    std::string line = fmt::format("{} = {} {} {}", kNames[to], kNames[from], add ? '+' : '-', k);
    if (value < -999 || value > 999) {
      value = k;
      line = fmt::format("{} = {}", kNames[to], k);
    }
    state[to] = value;
    lines += line + "\n";
    steps +=
        fmt::format("{} | a={} b={} c={} d={}\n", line, state[0], state[1], state[2], state[3]);
  }
  const uint32_t ask = dice.Below(4);
  return {fmt::format("Run this program:\n{}What is {} at the end?", lines, kNames[ask]),
          Think(steps, std::to_string(state[ask]))};
}

SyntheticChat Copy(Dice& dice) {
  std::string words;
  for (uint32_t i = dice.Between(20, 110); i > 0; --i) {
    words +=
        fmt::format(" {}", dice.Below(2) == 0 ? kFirst[dice.Below(24)] : kSecond[dice.Below(24)]);
  }
  return {"Repeat exactly:" + words, words.substr(1)};
}

SyntheticChat Sort(Dice& dice) {
  std::set<uint32_t> numbers;
  std::string list, sorted;
  for (uint32_t i = dice.Between(8, 24); numbers.size() < i;) {
    const uint32_t x = dice.Between(100, 999);
    if (numbers.insert(x).second) list += fmt::format(" {}", x);
  }
  for (uint32_t x : numbers) sorted += fmt::format("{}{}", sorted.empty() ? "" : " ", x);
  return {"Sort these numbers:" + list, sorted};
}

// About `chars` of prose from sentence to sentence.
std::vector<std::string> Sentences(Dice& dice, std::span<const std::string> documents,
                                   size_t chars) {
  std::vector<std::string> out;
  size_t taken = 0;
  size_t document = dice.Below(static_cast<uint32_t>(documents.size()));
  for (size_t tries = 0; taken < chars && tries < documents.size(); ++tries) {
    const std::string& text = documents[document];
    document = (document + 1) % documents.size();
    for (size_t at = 0; at < text.size() && taken < chars;) {
      size_t end = text.find(". ", at);
      end = end == std::string::npos ? text.size() : end + 2;
      out.push_back(text.substr(at, end - at));
      taken += end - at;
      at = end;
    }
  }
  return out;
}

std::string Scatter(Dice& dice, std::vector<std::string> sentences,
                    const std::vector<std::string>& needles) {
  std::vector<size_t> places;
  for (size_t i = 0; i < needles.size(); ++i) {
    places.push_back(dice.Below(static_cast<uint32_t>(sentences.size())));
  }
  std::sort(places.begin(), places.end());
  std::string out;
  size_t next = 0;
  for (size_t i = 0; i < sentences.size(); ++i) {
    while (next < places.size() && places[next] == i) out += needles[next++] + " ";
    out += sentences[i];
  }
  return out;
}

SyntheticChat Needle(Dice& dice, std::span<const std::string> documents, size_t chars) {
  const bool uuid = dice.Below(4) == 0;
  const std::vector<std::string> names = dice.Names(dice.Between(1, 8));
  const char* kind = uuid ? "uuid" : "number";
  std::vector<std::string> values, needles;
  for (const std::string& name : names) {
    values.push_back(uuid ? fmt::format("{}-{}-{}-{}-{}", dice.Hex(8), dice.Hex(4), dice.Hex(4),
                                        dice.Hex(4), dice.Hex(12))
                          : std::to_string(dice.Between(1000000, 9999999)));
    needles.push_back(
        fmt::format("One of the special magic {}s for {} is: {}.", kind, name, values.back()));
  }
  const size_t asked = dice.Below(static_cast<uint32_t>(names.size()));
  return {
      fmt::format("Some special magic {0}s are hidden within the following text. Make sure to "
                  "memorize them.\n{1}\nWhat is the special magic {0} for {2} mentioned in the "
                  "provided text?",
                  kind, Scatter(dice, Sentences(dice, documents, chars), needles), names[asked]),
      values[asked]};
}

SyntheticChat Track(Dice& dice, std::span<const std::string> documents, size_t chars) {
  std::set<std::string> seen;
  std::vector<std::string> names;
  while (names.size() < 4) {
    std::string name;
    for (int i = 0; i < 3; ++i) name += static_cast<char>('A' + dice.Below(26));
    if (seen.insert(name).second) names.push_back(name);
  }
  const uint32_t value = dice.Between(10000, 99999);
  std::vector<std::string> lines = {fmt::format("VAR {} = {}.", names[0], value)};
  for (size_t i = 1; i < names.size(); ++i) {
    lines.push_back(fmt::format("VAR {} = VAR {}.", names[i], names[i - 1]));
  }
  return {fmt::format("Memorize and track the chain of variable assignments hidden in the "
                      "following text.\n{}\nWhich variables are assigned the value {}?",
                      Scatter(dice, Sentences(dice, documents, chars), lines), value),
          fmt::format("{} {} {} {}", names[0], names[1], names[2], names[3])};
}

}  // namespace

SyntheticChat MakeSyntheticChat(uint64_t seed, uint64_t index,
                                std::span<const std::string> documents, size_t filler_chars) {
  Dice dice(seed, index);
  switch (index % (documents.empty() ? 5 : 8)) {
    case 0:
      return Sum(dice);
    case 1:
      return Hops(dice);
    case 2:
      return Program(dice);
    case 3:
      return Copy(dice);
    case 4:
      return Sort(dice);
    case 7:
      return Track(dice, documents, filler_chars);
    default:
      return Needle(dice, documents, filler_chars);
  }
}

}  // namespace oscar
