// JsonScanner: finds the end of a JSON object in text that arrives in pieces, and notices at once
// where it cannot be one. Structure and strings are checked; numbers and words only by their
// characters, so the text found must still be parsed. One object per attempt; not shared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

class JsonScanner {
 public:
  enum class State : uint8_t { kMore, kDone, kBroken };

  // The object begins at `at` of the text with '{'.
  void Start(size_t at);
  // `text` only grows. Once kDone, end() is behind the closing brace.
  State Scan(std::string_view text);
  size_t end() const { return at_; }
  // Keys of the outermost object so far, as written.
  const std::vector<std::string>& keys() const { return keys_; }

 private:
  enum class Expect : uint8_t { kValue, kValueOrEnd, kKey, kKeyOrEnd, kColon, kCommaOrEnd };
  bool Take(char c);

  size_t at_ = 0;
  std::vector<char> open_;  // '{' and '['
  Expect expect_ = Expect::kValue;
  bool in_string_ = false, escaped_ = false, is_key_ = false, in_word_ = false;
  State state_ = State::kMore;
  std::string key_;
  std::vector<std::string> keys_;
};

}  // namespace oscar
