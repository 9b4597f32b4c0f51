#include "rotation/content_hash.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <new>

namespace oscar {

struct ContentHash::State {
  State() : xxh3(XXH3_createState()) {
    if (xxh3 == nullptr) throw std::bad_alloc();
    XXH3_64bits_reset(xxh3);
  }
  ~State() { XXH3_freeState(xxh3); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  XXH3_state_t* xxh3;
};

ContentHash::ContentHash() : state_(std::make_unique<State>()) {}
ContentHash::~ContentHash() = default;
ContentHash::ContentHash(ContentHash&&) noexcept = default;
ContentHash& ContentHash::operator=(ContentHash&&) noexcept = default;

void ContentHash::Add(std::span<const float> values) {
  XXH3_64bits_update(state_->xxh3, values.data(), values.size_bytes());
}

void ContentHash::Add(uint64_t value) { XXH3_64bits_update(state_->xxh3, &value, sizeof(value)); }

uint64_t ContentHash::Digest() const { return XXH3_64bits_digest(state_->xxh3); }

std::string ContentHash::ToString() const { return fmt::format("xxh3:{:016x}", Digest()); }

}  // namespace oscar
