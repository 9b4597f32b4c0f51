#include "tasks/python_random.h"

#include <openssl/sha.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <string>

#include "base/check.h"

namespace oscar {

PythonRandom::PythonRandom(uint32_t seed) : PythonRandom(std::span<const uint32_t>(&seed, 1)) {}

// MT19937 seeded by an array, as CPython does for whole numbers.
PythonRandom::PythonRandom(std::span<const uint32_t> words) {
  state_[0] = 19650218u;
  for (size_t i = 1; i < kSize; ++i) {
    state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + static_cast<uint32_t>(i);
  }
  size_t i = 1, j = 0;
  for (size_t k = 0; k < std::max(kSize, words.size()); ++k) {
    state_[i] = (state_[i] ^ ((state_[i - 1] ^ (state_[i - 1] >> 30)) * 1664525u)) + words[j] +
                static_cast<uint32_t>(j);
    if (++i == kSize) state_[0] = state_[kSize - 1], i = 1;
    if (++j == words.size()) j = 0;
  }
  for (size_t k = 0; k < kSize - 1; ++k) {
    state_[i] = (state_[i] ^ ((state_[i - 1] ^ (state_[i - 1] >> 30)) * 1566083941u)) -
                static_cast<uint32_t>(i);
    if (++i == kSize) state_[0] = state_[kSize - 1], i = 1;
  }
  state_[0] = 0x80000000u;
}

// The number whose big-endian bytes are the text and then its SHA-512.
PythonRandom PythonRandom::OfText(std::string_view text) {
  std::string bytes(text);
  std::array<unsigned char, SHA512_DIGEST_LENGTH> hash;
  SHA512(reinterpret_cast<const unsigned char*>(text.data()), text.size(), hash.data());
  bytes.append(hash.begin(), hash.end());
  std::vector<uint32_t> words((bytes.size() + 3) / 4);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto byte = static_cast<unsigned char>(bytes[bytes.size() - 1 - i]);
    words[i / 4] |= uint32_t{byte} << (i % 4 * 8);
  }
  while (words.size() > 1 && words.back() == 0) words.pop_back();
  return PythonRandom(std::span<const uint32_t>(words));
}

// The number's hash: its value modulo 2^61 - 1.
PythonRandom PythonRandom::OfFloat(double number) {
  constexpr uint64_t kModulus = (uint64_t{1} << 61) - 1;
  constexpr int kBits = 61, kPart = 28;
  OSCAR_CHECK(std::isfinite(number) && number >= 0);
  int exponent = 0;
  double mantissa = std::frexp(number, &exponent);
  uint64_t hash = 0;
  while (mantissa != 0) {
    hash = ((hash << kPart) & kModulus) | (hash >> (kBits - kPart));
    mantissa *= 1 << kPart;
    exponent -= kPart;
    const auto part = static_cast<uint64_t>(mantissa);
    mantissa -= static_cast<double>(part);
    hash += part;
    if (hash >= kModulus) hash -= kModulus;
  }
  const int shift = exponent >= 0 ? exponent % kBits : kBits - 1 - (-1 - exponent) % kBits;
  hash = ((hash << shift) & kModulus) | (hash >> (kBits - shift));
  const uint32_t words[] = {static_cast<uint32_t>(hash), static_cast<uint32_t>(hash >> 32)};
  return PythonRandom(std::span<const uint32_t>(words, words[1] == 0 ? 1 : 2));
}

uint32_t PythonRandom::Next() {
  if (at_ == kSize) {
    for (size_t i = 0; i < kSize; ++i) {
      const uint32_t y = (state_[i] & 0x80000000u) | (state_[(i + 1) % kSize] & 0x7fffffffu);
      state_[i] = state_[(i + 397) % kSize] ^ (y >> 1) ^ ((y & 1u) != 0 ? 0x9908b0dfu : 0u);
    }
    at_ = 0;
  }
  uint32_t y = state_[at_++];
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

uint32_t PythonRandom::GetBits(int count) {
  OSCAR_CHECK(count >= 1 && count <= 32);
  return Next() >> (32 - count);
}

uint32_t PythonRandom::Below(uint32_t limit) {
  OSCAR_CHECK(limit > 0);
  const int bits = std::bit_width(limit);
  uint32_t value = GetBits(bits);
  while (value >= limit) value = GetBits(bits);
  return value;
}

double PythonRandom::Random() {
  const uint32_t high = Next() >> 5, low = Next() >> 6;
  return (static_cast<double>(high) * 67108864.0 + static_cast<double>(low)) / 9007199254740992.0;
}

std::vector<uint32_t> PythonRandom::Sample(uint32_t size, uint32_t count) {
  OSCAR_CHECK(count <= size);
  std::vector<uint32_t> out;
  // CPython copies the population where that is smaller than a set of what was drawn.
  double set_size = 21;
  if (count > 5) set_size += std::pow(4.0, std::ceil(std::log(count * 3.0) / std::log(4.0)));
  if (size <= set_size) {
    std::vector<uint32_t> pool(size);
    for (uint32_t i = 0; i < size; ++i) pool[i] = i;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t j = Below(size - i);
      out.push_back(pool[j]);
      pool[j] = pool[size - i - 1];
    }
    return out;
  }
  std::set<uint32_t> drawn;
  while (out.size() < count) {
    const uint32_t j = Below(size);
    if (drawn.insert(j).second) out.push_back(j);
  }
  return out;
}

}  // namespace oscar
