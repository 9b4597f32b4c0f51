// A streaming 64-bit hash (XXH3) that names data in provenance fields: equal data, equal name. Not
// for security. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace oscar {

class ContentHash {
 public:
  ContentHash();
  ~ContentHash();
  ContentHash(ContentHash&&) noexcept;
  ContentHash& operator=(ContentHash&&) noexcept;

  void Add(std::span<const float> values);
  void Add(uint64_t value);
  uint64_t Digest() const;
  std::string ToString() const;  // "xxh3:0123456789abcdef"

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace oscar
