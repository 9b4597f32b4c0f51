// Chats for calibration without data of the user's own: needles in prose, chains of sums and
// look-ups with their steps written out, assignments to track, lists to copy and sort. Random names
// and digits and the way back to them are what a cache must hold and prose lacks. A chat is a pure
// function of (seed, index, prose). Free functions; safe from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace oscar {

struct SyntheticChat {
  std::string user;
  std::string assistant;
};

// `documents` give the filler of needle chats; they may be empty, which leaves those out.
// `filler_chars` is about how much of it one chat takes.
SyntheticChat MakeSyntheticChat(uint64_t seed, uint64_t index,
                                std::span<const std::string> documents, size_t filler_chars);

}  // namespace oscar
