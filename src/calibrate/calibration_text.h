// What a model is calibrated on, as token sequences: a text file cut into pieces, a JSONL file of
// prompts or chats, the prompts of a published data set, or the built-in sample (half prose, half
// synthetic chats), which needs no file.
// The same inputs give the same tokens. Free functions; safe from any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "oscar/status.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace oscar {

inline constexpr int64_t kDefaultMaxSequence = 4096;
// Token ids are kept: more would take memory by the GiB, and days to read.
inline constexpr int64_t kMaxCalibrationTokens = 100'000'000;

struct CalibrationTextOptions {
  // .jsonl or .ndjson ({"text"}, {"prompt"} or {"messages"} a line), else text; NAME=PATH with a
  // name of CalibrationSets(); or empty: the built-in sample.
  std::filesystem::path data;
  int64_t tokens = 30000;  // budget over all sequences; the last is cut
  // Longer ones are cut into pieces. 0: kDefaultMaxSequence.
  int64_t max_sequence = 0;
  uint64_t seed = 0;  // of the synthetic chats
};

// Data sets whose published files are read by name: "wikitext" (its raw text, an article a
// sequence), and benchmarks, whose prompts are those of `oscar eval`, a sequence each, tasks
// alternating.
std::span<const std::string_view> CalibrationSets();

struct CalibrationText {
  std::vector<std::vector<int32_t>> sequences;
  // Of each sequence, how many of its last tokens are the answer of a chat; 0: not known.
  std::vector<int64_t> answers;
  std::vector<std::string> warnings;  // lines left out, by number
  int64_t num_tokens = 0;
};

// A text is encoded up to the budget only. `chat` may be null: prompts are then taken as they are,
// and chats refused. kOutOfRange where the data holds no token.
Result<CalibrationText> ReadCalibrationText(const CalibrationTextOptions& options,
                                            const Tokenizer& tokenizer, const ChatTemplate* chat);

}  // namespace oscar
