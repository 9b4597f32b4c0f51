#include "responses/response_store.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace oscar::server {
namespace {

std::shared_ptr<StoredResponse> Make(const std::string& id, size_t bytes,
                                     std::shared_ptr<const StoredResponse> previous = nullptr) {
  auto response = std::make_shared<StoredResponse>();
  response->id = id;
  response->body = std::string(bytes, 'x');
  response->previous = std::move(previous);
  return response;
}

TEST(ResponseStore, KeepsCallersApart) {
  ResponseStore store(1 << 20, 10);
  ASSERT_TRUE(store.Put("alice", Make("resp_1", 10)));
  EXPECT_NE(store.Find("alice", "resp_1"), nullptr);
  EXPECT_EQ(store.Find("bob", "resp_1"), nullptr);
  EXPECT_EQ(store.Find("", "alice\nresp_1"), nullptr);
  EXPECT_FALSE(store.Remove("bob", "resp_1"));
  EXPECT_TRUE(store.Remove("alice", "resp_1"));
  EXPECT_FALSE(store.Remove("alice", "resp_1"));
  EXPECT_EQ(store.Find("alice", "resp_1"), nullptr);
  EXPECT_EQ(store.stats().bytes, 0u);
}

TEST(ResponseStore, TheLeastRecentlyUsedLeaves) {
  ResponseStore store(1 << 20, 3);
  for (const char* id : {"a", "b", "c"}) ASSERT_TRUE(store.Put("", Make(id, 1)));
  EXPECT_NE(store.Find("", "a"), nullptr);
  ASSERT_TRUE(store.Put("", Make("d", 1)));
  EXPECT_EQ(store.Find("", "b"), nullptr);
  EXPECT_NE(store.Find("", "a"), nullptr);
  EXPECT_EQ(store.stats().count, 3u);
  EXPECT_EQ(store.stats().evicted, 1u);
}

TEST(ResponseStore, BytesAreBounded) {
  constexpr uint64_t kBudget = 100'000;
  ResponseStore store(kBudget, 1'000'000);
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(store.Put("", Make(std::to_string(i), 1000)));
    ASSERT_LE(store.stats().bytes, kBudget);
  }
  EXPECT_GT(store.stats().count, 50u);
  EXPECT_NE(store.Find("", "999"), nullptr);
  EXPECT_EQ(store.Find("", "0"), nullptr);
  EXPECT_FALSE(store.Put("", Make("large", kBudget)));
  EXPECT_EQ(store.Find("", "large"), nullptr);
  EXPECT_NE(store.Find("", "999"), nullptr) << "what does not fit drives nobody out";
  ResponseStore none(0, 10), nothing(10, 0);
  EXPECT_FALSE(none.Put("", Make("a", 0)));
  EXPECT_FALSE(nothing.Put("", Make("a", 0)));
}

// A conversation holds what it continues, and its bytes count as long as it does.
TEST(ResponseStore, AConversationOutlivesItsBeginning) {
  ResponseStore store(1 << 20, 2);
  ASSERT_TRUE(store.Put("", Make("1", 1000)));
  for (int i = 2; i <= 10; ++i) {
    auto next = Make(std::to_string(i), 1000, store.Find("", std::to_string(i - 1)));
    ASSERT_NE(next->previous, nullptr);
    ASSERT_TRUE(store.Put("", std::move(next)));
  }
  EXPECT_EQ(store.Find("", "1"), nullptr);
  EXPECT_EQ(store.stats().count, 2u);
  EXPECT_GT(store.stats().bytes, 10'000u);
  int length = 0;
  for (auto one = store.Find("", "10"); one != nullptr; one = one->previous) ++length;
  EXPECT_EQ(length, 10);
  ASSERT_TRUE(store.Remove("", "9"));
  ASSERT_TRUE(store.Remove("", "10"));
  EXPECT_EQ(store.stats().bytes, 0u);
}

TEST(ResponseStore, AConversationLargerThanTheStoreIsRefused) {
  ResponseStore store(10'000, 100);
  std::shared_ptr<const StoredResponse> last;
  int stored = 0;
  for (int i = 0; i < 100; ++i) {
    auto next = Make(std::to_string(i), 1000, last);
    if (!store.Put("", next)) break;
    last = std::move(next);
    ++stored;
  }
  EXPECT_GE(stored, 5);
  EXPECT_LT(stored, 10);
  EXPECT_LE(store.stats().bytes, 10'000u);
}

// Freed without a stack as deep as the chain is long.
TEST(ResponseStore, LongConversationsEnd) {
  ResponseStore store(uint64_t{1} << 40, 2);
  std::shared_ptr<const StoredResponse> last;
  {
    std::shared_ptr<const StoredResponse> chain;
    for (int i = 0; i < 200'000; ++i) chain = Make("x", 0, std::move(chain));
    ASSERT_TRUE(store.Put("", Make("end", 0, std::move(chain))));
  }
  EXPECT_TRUE(store.Remove("", "end"));
}

TEST(ResponseStore, ManyThreads) {
  ResponseStore store(50'000, 64);
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&store, t] {
      const std::string owner = std::to_string(t % 2);
      std::shared_ptr<const StoredResponse> last;
      for (int i = 0; i < 500; ++i) {
        const std::string id = std::to_string(t * 1000 + i);
        store.Put(owner, Make(id, 500, i % 7 == 0 ? nullptr : last));
        last = store.Find(owner, id);
        if (i % 5 == 0) store.Remove(owner, id);
      }
    });
  }
  threads.clear();
  EXPECT_LE(store.stats().bytes, 50'000u);
}

}  // namespace
}  // namespace oscar::server
