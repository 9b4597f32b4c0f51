// KeyRing: the API keys that open the server. Keeps only SHA-256 hashes; a check compares with
// every one of them in constant time, so that neither the number of matching bytes nor the place
// of a key in the list shows. Immutable after loading; safe from any thread.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "http/http.h"
#include "oscar/status.h"

namespace oscar::server {

// A key without the key.
struct KeyIdentity {
  std::string id;    // short, for logs; two keys may have the same one
  std::string hash;  // all of its SHA-256 in hexadecimal: no two keys have the same one
};

class KeyRing {
 public:
  // Refuses empty keys and keys with spaces or control characters (they could not be sent).
  Status Add(std::string_view key);
  // One key per line; empty lines and lines that begin with '#' are skipped.
  Status AddFile(const std::filesystem::path& path);

  bool empty() const { return keys_.empty(); }
  size_t size() const { return keys_.size(); }

  // The key that the request carries (Authorization: Bearer, or X-Api-Key); nothing where it
  // carries none that fits.
  std::optional<KeyIdentity> Check(const HttpRequest& request) const;

 private:
  using Hash = std::array<uint8_t, 32>;
  struct Key {
    Hash hash;
    KeyIdentity identity;
  };
  static Hash HashOf(std::string_view key);
  std::vector<Key> keys_;
};

}  // namespace oscar::server
