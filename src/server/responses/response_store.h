// ResponseStore: the responses that clients may ask for again or continue (previous_response_id).
// Bounded in bytes and in number; those that nobody has used for longest go first. Callers see
// their own responses only. Safe from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace oscar::server {

// One response and what it answered. A conversation is a chain of them, each held by the next one:
// what leaves the store is still there for those that continue it. Immutable once stored.
struct StoredResponse {
  StoredResponse() = default;
  ~StoredResponse();  // of a chain of any length
  StoredResponse(const StoredResponse&) = delete;
  StoredResponse& operator=(const StoredResponse&) = delete;

  std::string id;
  std::string body;  // the response as JSON text
  // Where the list of its output lies in the body.
  size_t output_begin = 0, output_size = 0;
  std::string input;  // the request's own items, a JSON list
  size_t items = 0;   // of input and output
  std::shared_ptr<const StoredResponse> previous;

  std::string_view output() const {
    return std::string_view(body).substr(output_begin, output_size);
  }
  size_t bytes() const { return sizeof(*this) + id.size() + body.size() + input.size(); }

 private:
  friend class ResponseStore;
  std::shared_ptr<std::atomic<uint64_t>> counter_;  // of the store; may outlive it
};

class ResponseStore {
 public:
  // Of zero bytes, or none at all, nothing is kept.
  ResponseStore(uint64_t max_bytes, size_t max_count)
      : max_bytes_(max_bytes), max_count_(max_count) {}

  // `owner` keeps callers apart. False where it does not fit: it and the conversation that it
  // continues have more bytes than the store may.
  bool Put(std::string_view owner, std::shared_ptr<StoredResponse> response);
  // Null where there is none of that id; counts as use.
  std::shared_ptr<const StoredResponse> Find(std::string_view owner, std::string_view id);
  bool Remove(std::string_view owner, std::string_view id);

  struct Stats {
    size_t count = 0;
    uint64_t bytes = 0;  // of all that are still held, by the store or by those that continue them
    uint64_t evicted = 0;
  };
  Stats stats() const;
  uint64_t max_bytes() const { return max_bytes_; }
  size_t max_count() const { return max_count_; }

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<const StoredResponse> response;
  };
  static std::string KeyOf(std::string_view owner, std::string_view id);

  const uint64_t max_bytes_;
  const size_t max_count_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // the one used last is first
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
  std::shared_ptr<std::atomic<uint64_t>> bytes_ = std::make_shared<std::atomic<uint64_t>>(0);
  uint64_t evicted_ = 0;
};

}  // namespace oscar::server
