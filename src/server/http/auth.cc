#include "http/auth.h"

#include <fmt/core.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <strings.h>

#include <algorithm>

#include "base/file.h"

namespace oscar::server {
namespace {

constexpr uint64_t kMaxKeyFileBytes = 1 << 20;

std::string_view TrimLine(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::optional<std::string_view> KeyOf(const HttpRequest& request) {
  constexpr std::string_view kBearer = "Bearer ";
  if (const std::string* value = FindHeader(request.headers, "Authorization")) {
    if (value->size() > kBearer.size() &&
        ::strncasecmp(value->data(), kBearer.data(), kBearer.size()) == 0) {
      return TrimLine(std::string_view(*value).substr(kBearer.size()));
    }
  }
  if (const std::string* value = FindHeader(request.headers, "X-Api-Key")) return TrimLine(*value);
  return std::nullopt;
}

}  // namespace

KeyRing::Hash KeyRing::HashOf(std::string_view key) {
  Hash hash{};
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), hash.data());
  return hash;
}

Status KeyRing::Add(std::string_view key) {
  const bool printable =
      std::all_of(key.begin(), key.end(), [](unsigned char c) { return c > 0x20 && c != 0x7f; });
  if (key.empty() || !printable) {
    return InvalidArgument("an API key must not be empty or hold spaces or control characters");
  }
  Key entry;
  entry.hash = HashOf(key);
  for (const uint8_t byte : entry.hash) entry.identity.hash += fmt::format("{:02x}", byte);
  entry.identity.id = "key-" + entry.identity.hash.substr(0, 6);
  keys_.push_back(std::move(entry));
  return {};
}

Status KeyRing::AddFile(const std::filesystem::path& path) {
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxKeyFileBytes));
  const size_t before = keys_.size();
  size_t line_number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = TrimLine(std::string_view(text).substr(at, end - at));
    at = end + 1;
    ++line_number;
    if (line.empty() || line.front() == '#') continue;
    if (const Status status = Add(line); !status.ok()) {
      return status.WithContext(fmt::format("{}:{}", path.string(), line_number));
    }
  }
  if (keys_.size() == before) {
    return InvalidArgument(
        fmt::format("{}: holds no API key; write one key per line", path.string()));
  }
  return {};
}

std::optional<KeyIdentity> KeyRing::Check(const HttpRequest& request) const {
  const std::optional<std::string_view> given = KeyOf(request);
  const Hash hash = HashOf(given.value_or(""));
  const Key* match = nullptr;
  for (const Key& key : keys_) {
    if (CRYPTO_memcmp(key.hash.data(), hash.data(), hash.size()) == 0) match = &key;
  }
  if (match == nullptr || !given.has_value()) return std::nullopt;
  return match->identity;
}

}  // namespace oscar::server
