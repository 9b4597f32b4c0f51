// Utf8Masks: which tokens would make text that is no UTF-8, for grammars whose characters are
// ranges of bytes alone: they let surrogates and overlong forms through, in one token or over two.
// Immutable; share it between threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

class Utf8Masks {
 public:
  // How a text ends: 0 to 3 within a character whose next byte is bounded.
  using State = uint8_t;
  static constexpr State kAnywhere = 4;

  // The bytes of every token, by id.
  explicit Utf8Masks(std::span<const std::string> tokens);

  State After(int32_t token) const { return after_[static_cast<size_t>(token)]; }
  static State After(std::string_view text);
  // Clears the tokens that may not follow.
  void Apply(State state, std::span<uint32_t> mask) const;

 private:
  std::array<std::vector<uint32_t>, kAnywhere + 1> forbidden_;  // by state; the last one always
  std::vector<State> after_;                                    // by token
};

}  // namespace oscar
