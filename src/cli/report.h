// How commands show what the cache of an answer holds.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "oscar/language_model.h"

namespace oscar::cli {

// What ended an answer and repeats it: token_ids, finish_reason, stop_reason, seed.
nlohmann::ordered_json AnswerToJson(const Completion& completion);
nlohmann::ordered_json CacheToJson(const CacheReport& cache);
// "14021 tokens cached in 3.20 MiB (BF16: 27.4 MiB), 2.56 bits per element".
std::string CacheLine(const CacheReport& cache);
// The same and what the answer took.
std::string StatsLine(const Completion& completion);

}  // namespace oscar::cli
