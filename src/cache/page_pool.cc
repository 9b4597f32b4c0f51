#include "cache/page_pool.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/check.h"

namespace oscar {
namespace {

constexpr size_t kAlignment = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMaxSpare = 4;

size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::byte* AllocateBytes(size_t bytes) {
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, RoundUp(bytes)));
  if (data != nullptr && bytes >= kHugePage) ::madvise(data, RoundUp(bytes), MADV_HUGEPAGE);
  return data;
}

}  // namespace

PageRef& PageRef::operator=(PageRef&& other) noexcept {
  if (this != &other) {
    Reset();
    page_ = std::exchange(other.page_, nullptr);
  }
  return *this;
}

PageRef PageRef::Share() const {
  OSCAR_CHECK(page_ != nullptr);
  ++page_->references;
  return PageRef(page_);
}

void PageRef::Reset() {
  if (page_ == nullptr) return;
  if (--page_->references == 0) page_->pool->Free(page_);
  page_ = nullptr;
}

PagePool::PagePool(uint64_t budget_bytes, PageMemory& memory)
    : budget_(budget_bytes), memory_(&memory), sealer_(memory.sealer()) {
  memory.set_on_move([this](std::byte* from, std::byte* to) {
    auto node = placed_.extract(from);
    OSCAR_CHECK(!node.empty());
    node.mapped()->data = to;
    node.key() = to;
    placed_.insert(std::move(node));
    ++moves_;
  });
}

PagePool::~PagePool() {
  OSCAR_CHECK(pages_ == 0, "{} pages outlive their pool", pages_);
  if (memory_ != nullptr) memory_->set_on_move({});
  for (auto& [data, bytes] : spare_) std::free(data);
}

Result<PageRef> PagePool::Allocate(const PageLayout& layout) {
  const size_t bytes = layout.bytes();
  if (!CanAllocate(bytes)) {
    return Unexpected(ResourceExhausted(
        fmt::format("KV cache is full: {} of {} bytes in use, a page needs {}; raise --kv-memory",
                    in_use_, budget_, bytes)));
  }
  std::byte* data = nullptr;
  if (memory_ != nullptr) {
    data = memory_->Allocate(bytes);
    if (data == nullptr) {
      return Unexpected(ResourceExhausted(fmt::format(
          "no room for a cache page of {} bytes ({} in use); raise --kv-memory", bytes, in_use_)));
    }
    return Register(data, layout);
  }
  const auto spare = std::find_if(spare_.begin(), spare_.end(),
                                  [&](const auto& entry) { return entry.second == bytes; });
  if (spare != spare_.end()) {
    data = spare->first;
    spare_bytes_ -= bytes;
    spare_.erase(spare);
  } else {
    while (!spare_.empty() && in_use_ + spare_bytes_ + bytes > budget_) DropSpare();
    data = AllocateBytes(bytes);
    if (data == nullptr) {
      return Unexpected(ResourceExhausted(fmt::format(
          "the system has no memory for a cache page of {} bytes ({} in use)", bytes, in_use_)));
    }
  }
  return Register(data, layout);
}

PageRef PagePool::Register(std::byte* data, const PageLayout& layout) {
  in_use_ += layout.bytes();
  peak_ = std::max(peak_, in_use_);
  ++pages_;
  auto* page = new PageRef::Page{data, &layout, this, 1};
  if (memory_ != nullptr) placed_.emplace(data, page);
  return PageRef(page);
}

void PagePool::Copy(const PageRef& to, const PageRef& from) {
  OSCAR_CHECK(&to.layout() == &from.layout());
  const size_t bytes = to.layout().bytes();
  if (memory_ != nullptr) {
    memory_->Copy(to.data(), from.data(), bytes);
  } else {
    std::memcpy(to.data(), from.data(), bytes);
  }
}

void PagePool::Clear(const PageRef& to) {
  const size_t bytes = to.layout().bytes();
  if (memory_ != nullptr) {
    memory_->Clear(to.data(), bytes);
  } else {
    std::memset(to.data(), 0, bytes);
  }
}

Status PagePool::Read(const PageRef& from, std::span<std::byte> to) const {
  OSCAR_CHECK(to.size() == from.layout().bytes());
  if (memory_ != nullptr) return memory_->Read(from.data(), to);
  std::memcpy(to.data(), from.data(), to.size());
  return {};
}

Status PagePool::Write(const PageRef& to, std::span<const std::byte> from) {
  OSCAR_CHECK(from.size() == to.layout().bytes());
  if (memory_ != nullptr) return memory_->Write(to.data(), from);
  std::memcpy(to.data(), from.data(), from.size());
  return {};
}

// The one that has waited longest.
void PagePool::DropSpare() {
  std::free(spare_.front().first);
  spare_bytes_ -= spare_.front().second;
  spare_.erase(spare_.begin());
}

void PagePool::Free(PageRef::Page* page) {
  const size_t bytes = page->layout->bytes();
  in_use_ -= bytes;
  --pages_;
  if (memory_ != nullptr) {
    placed_.erase(page->data);
    memory_->Free(page->data, bytes);
  } else {
    if (spare_.size() == kMaxSpare) DropSpare();
    spare_.emplace_back(page->data, bytes);
    spare_bytes_ += bytes;
  }
  delete page;
}

}  // namespace oscar
