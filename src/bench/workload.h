// What a load test sends and when: prompts and lengths of a named kind, and times of arrival. A
// request is a function of the settings, the seed and its number alone. Plain functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"

namespace oscar {

enum class Dataset : uint8_t {
  kRandom,        // every prompt and answer of the same length
  kShareGptLike,  // lengths spread as those of chats: see LengthsOf
};
// How prompts are given to the server.
enum class PromptFormat : uint8_t {
  kIds,   // token ids: lengths are exact
  kText,  // words, about a token each: for servers that take no ids
};

struct Workload {
  Dataset dataset = Dataset::kRandom;
  PromptFormat format = PromptFormat::kIds;
  int64_t prompt_tokens = 512;  // of kRandom, the shared prefix not counted
  int64_t max_tokens = 64;      // of kRandom; end tokens are ignored
  int64_t shared_tokens = 0;    // that all prompts begin with
  int vocab_size = 8192;        // ids are random in [vocab / 64, vocab)
  uint64_t seed = 1;            // other seeds, other prompts
};

struct RequestLengths {
  int64_t prompt = 0, output = 0;
};
// kShareGptLike: log-normal with medians of 95 and 120 tokens and sigmas (of the logarithm) of 1.5
// and 1.1, cut to [4, 1024]: 215 and 203 tokens on average, most short, some long.
RequestLengths LengthsOf(const Workload& workload, uint64_t number);

// The body of a streamed completion. Every number has its own prompt after the shared part; `model`
// may be empty.
std::string RequestBody(const Workload& workload, const std::string& model, uint64_t number,
                        const RequestLengths& lengths);

// Seconds after the start at which `count` requests arrive: a Poisson process of `rate` per second;
// all at once where it is infinite.
std::vector<double> Arrivals(double rate, int count, uint64_t seed);
// "2.5" or "inf"; above 0.
Result<double> ParseRate(std::string_view text);

}  // namespace oscar
