// The pre-tokenizer: cuts text into the words that byte-pair merges never cross. Built from the
// "pre_tokenizer" tree of a tokenizer.json; patterns are compiled once by PCRE2 (UTF, UCP, JIT).
// Immutable after construction and safe to use from any thread: match data belongs to the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"

namespace oscar {

// Rewrites a pattern of the Oniguruma dialect, in which tokenizer files are written, for PCRE2.
// Constructs that the two read differently are translated (\s, \S) or refused by name, since a
// wrong split is silent: the ids would merely be worse.
Result<std::string> TranslatePattern(std::string_view pattern);

class PreTokenizer {
 public:
  // A word: a piece of the text given to Split, [begin, end) in bytes.
  struct Word {
    size_t begin = 0;
    size_t end = 0;
  };

  // `tree` is the value of "pre_tokenizer". Fails unless the tree ends in the byte-level alphabet.
  static Result<PreTokenizer> FromJson(const nlohmann::json& tree);
  PreTokenizer(PreTokenizer&&) noexcept;
  PreTokenizer& operator=(PreTokenizer&&) noexcept;
  ~PreTokenizer();

  // Appends the words of `text` (valid UTF-8) in order. Text that starts without a space gets one
  // in front where the file asks for it, hence the non-const argument.
  Status Split(std::string* text, std::vector<Word>* words) const;

 private:
  enum class Behavior : uint8_t {
    kRemoved,
    kIsolated,
    kMergedWithPrevious,
    kMergedWithNext,
    kContiguous
  };
  struct Pattern;
  struct Stage {
    std::unique_ptr<Pattern> pattern;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
  };
  PreTokenizer();
  Status AddNode(const nlohmann::json& node, int depth);
  Status AddSplit(const nlohmann::json& node);
  Status AddByteLevel(const nlohmann::json& node);

  bool add_prefix_space_ = false;
  bool byte_level_ = false;
  std::vector<Stage> stages_;
};

}  // namespace oscar
