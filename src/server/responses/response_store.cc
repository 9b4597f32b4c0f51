#include "responses/response_store.h"

#include <fmt/core.h>

#include <utility>

namespace oscar::server {

StoredResponse::~StoredResponse() {
  if (counter_ != nullptr) *counter_ -= bytes();
  // One after another: destructors that call one another would need a stack as deep as the chain.
  std::shared_ptr<const StoredResponse> next = std::move(previous);
  while (next != nullptr && next.use_count() == 1) {
    // Nobody else has it, so nobody else sees it change.
    next = std::move(const_cast<StoredResponse&>(*next).previous);
  }
}

std::string ResponseStore::KeyOf(std::string_view owner, std::string_view id) {
  return fmt::format("{}\n{}", owner, id);
}

bool ResponseStore::Put(std::string_view owner, std::shared_ptr<StoredResponse> response) {
  uint64_t needed = 0;
  for (const StoredResponse* one = response.get(); one != nullptr; one = one->previous.get()) {
    needed += one->bytes();
    if (needed > max_bytes_) return false;
  }
  if (max_count_ == 0) return false;
  response->counter_ = bytes_;
  *bytes_ += response->bytes();
  std::string key = KeyOf(owner, response->id);
  std::lock_guard lock(mutex_);
  entries_.push_front({key, std::move(response)});
  index_[std::move(key)] = entries_.begin();
  while (entries_.size() > 1 && (entries_.size() > max_count_ || *bytes_ > max_bytes_)) {
    index_.erase(entries_.back().key);
    entries_.pop_back();
    ++evicted_;
  }
  return true;
}

std::shared_ptr<const StoredResponse> ResponseStore::Find(std::string_view owner,
                                                          std::string_view id) {
  std::lock_guard lock(mutex_);
  const auto at = index_.find(KeyOf(owner, id));
  if (at == index_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, at->second);
  return at->second->response;
}

bool ResponseStore::Remove(std::string_view owner, std::string_view id) {
  std::shared_ptr<const StoredResponse> gone;  // freed without the lock
  std::lock_guard lock(mutex_);
  const auto at = index_.find(KeyOf(owner, id));
  if (at == index_.end()) return false;
  gone = std::move(at->second->response);
  entries_.erase(at->second);
  index_.erase(at);
  return true;
}

ResponseStore::Stats ResponseStore::stats() const {
  std::lock_guard lock(mutex_);
  return {entries_.size(), bytes_->load(), evicted_};
}

}  // namespace oscar::server
