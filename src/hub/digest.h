// What a file's bytes must be: sha256, or git's id of a blob (sha1 over a head and the bytes).
// One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace oscar::hub {

// Whether the text is a digest that a file can be named by: 64 hex digits of sha256, or 40 of a git
// blob.
bool IsDigest(std::string_view text);

class Digest {
 public:
  // The kind follows from the length of `expected`. `size`: the file's, which git's ids begin with.
  // REQUIRES: IsDigest(expected).
  Digest(std::string expected, uint64_t size);
  ~Digest();
  Digest(const Digest&) = delete;
  Digest& operator=(const Digest&) = delete;

  void Add(std::span<const char> bytes);
  // Of all bytes so far; call once.
  bool Matches();

 private:
  struct State;
  std::string expected_;
  std::unique_ptr<State> state_;
};

// sha256 of a text, as hex digits.
std::string Sha256(std::string_view text);

}  // namespace oscar::hub
