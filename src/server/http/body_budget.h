// BodyBudget: how many bytes of request bodies all connections together may hold. Bytes count as
// they arrive, not as they are claimed, so a client that claims much and sends little takes little.
// When the budget is spent, readers wait, except the one whose request is oldest: it always goes
// on, so somebody always ends and the others follow. Safe from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace oscar::server {

class BodyBudget {
 public:
  // One request's part. Gives its bytes back when it ends.
  class Share {
   public:
    ~Share();
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;
    // Raises what the request holds to `bytes`. False: not now; `resume` of Open is called when it
    // is time to try again.
    bool Raise(uint64_t bytes);

   private:
    friend class BodyBudget;
    Share(BodyBudget& budget, uint64_t age) : budget_(budget), age_(age) {}
    BodyBudget& budget_;
    const uint64_t age_;
  };

  explicit BodyBudget(uint64_t bytes) : limit_(bytes) {}
  // `resume` may be called from any thread and must not call back into the budget.
  std::unique_ptr<Share> Open(std::function<void()> resume);
  uint64_t used() const;

 private:
  struct Entry {
    uint64_t held = 0;
    uint64_t wanted = 0;  // more; 0: not waiting
    std::function<void()> resume;
  };
  void Close(uint64_t age);
  void ResumeWaiters();

  const uint64_t limit_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Entry> entries_;  // by age, the oldest first
  uint64_t next_age_ = 0;
  uint64_t used_ = 0;
};

}  // namespace oscar::server
