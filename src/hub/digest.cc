#include "hub/digest.h"

#include <fmt/core.h>
#include <openssl/evp.h>

#include <array>

#include "base/check.h"

namespace oscar::hub {
namespace {

constexpr size_t kGitDigits = 40, kSha256Digits = 64;

std::string Hex(EVP_MD_CTX* context) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
  unsigned int size = 0;
  OSCAR_CHECK(EVP_DigestFinal_ex(context, bytes.data(), &size) == 1);
  std::string out;
  for (unsigned int i = 0; i < size; ++i) out += fmt::format("{:02x}", bytes[i]);
  return out;
}

}  // namespace

struct Digest::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
};

bool IsDigest(std::string_view text) {
  return (text.size() == kGitDigits || text.size() == kSha256Digits) &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Digest::Digest(std::string expected, uint64_t size)
    : expected_(std::move(expected)), state_(std::make_unique<State>()) {
  const bool is_git = expected_.size() == kGitDigits;
  OSCAR_CHECK(state_->context != nullptr &&
              EVP_DigestInit_ex(state_->context, is_git ? EVP_sha1() : EVP_sha256(), nullptr) == 1);
  if (is_git) {
    const std::string head = fmt::format("blob {}", size);
    Add({head.c_str(), head.size() + 1});  // with the zero byte
  }
}

Digest::~Digest() = default;

void Digest::Add(std::span<const char> bytes) {
  OSCAR_CHECK(EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()) == 1);
}

bool Digest::Matches() { return Hex(state_->context) == expected_; }

std::string Sha256(std::string_view text) {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  OSCAR_CHECK(context != nullptr && EVP_DigestInit_ex(context, EVP_sha256(), nullptr) == 1 &&
              EVP_DigestUpdate(context, text.data(), text.size()) == 1);
  std::string out = Hex(context);
  EVP_MD_CTX_free(context);
  return out;
}

}  // namespace oscar::hub
