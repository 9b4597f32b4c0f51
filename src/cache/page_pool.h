// PagePool: memory for cache pages (cache/page_layout.h) under one byte budget. A page is one
// allocation, so that sealing, sharing and eviction move one reference. Pages are reference-counted
// by plain integers: pool and pages belong to one thread (the engine's); only the bytes behind them
// may be read and written from workers.
//
// The bytes lie in host memory, or where a PageMemory keeps them: on a device, addresses are then
// not the host's to follow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/page_layout.h"
#include "oscar/status.h"

namespace oscar {

class PageSealer;

// Memory that pages lie in, other than the host's own. Calls act in order, but may do so later than
// they return (on a device's stream); failures are kept by the implementation and reported where it
// next can. One thread.
class PageMemory {
 public:
  virtual ~PageMemory() = default;
  // Null where nothing is free. May move pages to make room: see set_on_move.
  virtual std::byte* Allocate(size_t bytes) = 0;
  virtual void Free(std::byte* page, size_t bytes) = 0;
  virtual void Copy(std::byte* to, const std::byte* from, size_t bytes) = 0;
  virtual void Clear(std::byte* to, size_t bytes) = 0;  // to zeros
  virtual Status Read(const std::byte* from, std::span<std::byte> to) = 0;
  virtual Status Write(std::byte* to, std::span<const std::byte> from) = 0;
  // Room for a sealed page beside all others, for sealing in a full pool: the `index`-th of those
  // that are sealed together. Reused by every call.
  virtual std::byte* Scratch(int64_t index) = 0;
  // Seals pages that lie here.
  virtual const PageSealer* sealer() const = 0;

  using OnMove = std::function<void(std::byte* from, std::byte* to)>;
  void set_on_move(OnMove on_move) { on_move_ = std::move(on_move); }

 protected:
  OnMove on_move_;
};

class PagePool;

// A counted reference to a page; move-only, Share() makes another. Outlives nothing: the pool must.
class PageRef {
 public:
  PageRef() = default;
  PageRef(PageRef&& other) noexcept : page_(std::exchange(other.page_, nullptr)) {}
  PageRef& operator=(PageRef&& other) noexcept;
  ~PageRef() { Reset(); }

  PageRef Share() const;
  void Reset();

  explicit operator bool() const { return page_ != nullptr; }
  const PageLayout& layout() const { return *page_->layout; }
  bool shared() const { return page_->references > 1; }
  std::byte* data() const { return page_->data; }
  std::span<std::byte> Block(int layer, int head) const {
    return {page_->data + page_->layout->BlockOffset(layer, head),
            page_->layout->block(layer, head).block_bytes()};
  }

 private:
  friend class PagePool;
  struct Page {
    std::byte* data;
    const PageLayout* layout;
    PagePool* pool;
    int references;
  };
  explicit PageRef(Page* page) : page_(page) {}
  Page* page_ = nullptr;
};

class PagePool {
 public:
  // Pages in host memory, sealed by `sealer` (null: never), which must outlive the pool.
  explicit PagePool(uint64_t budget_bytes, const PageSealer* sealer = nullptr)
      : budget_(budget_bytes), sealer_(sealer) {}
  // Pages in `memory`, which must outlive the pool and hold `budget_bytes` in any mix of pages.
  PagePool(uint64_t budget_bytes, PageMemory& memory);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // `layout` must outlive the page. Bytes are undefined. kResourceExhausted when the budget is
  // full.
  Result<PageRef> Allocate(const PageLayout& layout);
  bool CanAllocate(uint64_t bytes) const { return bytes <= budget_ - in_use_; }

  // Bytes of pages, wherever they lie. Copy is between pages of one layout.
  void Copy(const PageRef& to, const PageRef& from);
  void Clear(const PageRef& to);  // all bytes zero
  Status Read(const PageRef& from, std::span<std::byte> to) const;
  Status Write(const PageRef& to, std::span<const std::byte> from);
  // Null: host memory.
  PageMemory* memory() const { return memory_; }
  const PageSealer* sealer() const { return sealer_; }
  // Changes whenever pages have moved, which only a PageMemory does.
  uint64_t moves() const { return moves_; }

  uint64_t budget() const { return budget_; }
  uint64_t bytes_in_use() const { return in_use_; }
  uint64_t peak_bytes() const { return peak_; }
  int64_t pages_in_use() const { return pages_; }

 private:
  friend class PageRef;
  PageRef Register(std::byte* data, const PageLayout& layout);
  void Free(PageRef::Page* page);
  void DropSpare();

  uint64_t budget_;
  PageMemory* memory_ = nullptr;
  const PageSealer* sealer_ = nullptr;
  std::unordered_map<std::byte*, PageRef::Page*> placed_;  // pages in memory_
  uint64_t moves_ = 0;
  uint64_t in_use_ = 0;
  uint64_t peak_ = 0;
  int64_t pages_ = 0;
  // The last pages freed, kept because a decode step that seals gives back a BF16 page just before
  // it asks for the next; bounded, and counted against the budget like the rest.
  std::vector<std::pair<std::byte*, size_t>> spare_;
  uint64_t spare_bytes_ = 0;
};

}  // namespace oscar
