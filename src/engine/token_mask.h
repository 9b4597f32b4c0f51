// Tokens that a request rules out at one step. Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/service.h"
#include "oscar/status.h"

namespace oscar {

// In place of a token where none may be sampled; below what samplers return.
inline constexpr int32_t kNoTokenLeft = -1000;
Status NoTokenLeft(int64_t generated);

// Fills `masked` with the ids, each once and in order, that must not follow `generated`, the answer
// so far: stop tokens before min_tokens, what is not allowed, and the last token of bad words.
// False where that is all of them.
bool MaskTokens(const EngineRequest& request, std::span<const int32_t> generated, int vocab_size,
                std::vector<int32_t>* masked);

}  // namespace oscar
