// TokenConstraint: what a request allows its next token to be. The engine asks for a mask before
// every sample and tells of every token; what the mask stands for (a grammar, a list) is the
// caller's. One per sequence, used by one thread at a time.
#pragma once

#include <cstdint>
#include <span>

#include "oscar/status.h"

namespace oscar {

class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Which tokens may come next: bit t % 32 of word t / 32, for the model's vocabulary. At least one
  // bit is set; an error ends the request with it.
  virtual Status Fill(std::span<uint32_t> mask) = 0;
  // The token that came, one of the mask. An error ends the request with it.
  virtual Status Accept(int32_t token) = 0;
  // The answer is complete, and nothing may follow.
  virtual bool finished() const = 0;
};

inline constexpr size_t MaskWords(int vocab_size) {
  return (static_cast<size_t>(vocab_size) + 31) / 32;
}

}  // namespace oscar
