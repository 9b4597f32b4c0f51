// DevicePages: the arena that cache pages lie in, on the device (PageArena says where), and the
// order of everything that touches it: one stream. Page ids are offsets in units of kUnit bytes,
// which is what the kernels take as page stride: one arena serves both of their pools, and the
// recurrent states of sequences, which are pages to it.
//
// Sealing is queued and launched for all pages at once by Flush, or earlier where order demands it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/kv_plan.h"
#include "cache/page_arena.h"
#include "cache/page_pool.h"
#include "cache/page_sealer.h"
#include "cuda/attention/cache_view.h"
#include "cuda/kv/form_seal.h"
#include "cuda/kv/page_seal.h"

namespace oscar::cuda {

class DevicePages;

// Seals by queueing on the device.
class DeviceSealer : public PageSealer {
 public:
  explicit DeviceSealer(DevicePages& pages) : pages_(pages) {}
  uint64_t SealPages(std::span<const std::byte* const> open, std::span<std::byte* const> sealed,
                     ThreadPool&) const override;

 private:
  DevicePages& pages_;
};

class DevicePages : public PageMemory {
 public:
  static constexpr size_t kUnit = 256;  // bytes

  static PageArena::Sizes SizesOf(const CacheConfig& config) {
    return {config.open.bytes(), config.sealed.bytes(), kUnit, config.seals(),
            config.state.bytes()};
  }

  // `arena` [arena_bytes] and `scratch` [ScratchBytes] are the caller's.
  static Result<std::unique_ptr<DevicePages>> Create(const CacheConfig& config,
                                                     const AttentionShape& shape,
                                                     const KvPlan& plan, std::byte* arena,
                                                     uint64_t arena_bytes, std::byte* scratch,
                                                     Stream stream);
  static uint64_t ScratchBytes(const CacheConfig& config);
  ~DevicePages() override;

  uint64_t budget() const { return places_->budget(); }
  std::byte* arena() const { return arena_; }
  int32_t IdOf(const std::byte* page) const {
    return static_cast<int32_t>(static_cast<uint64_t>(page - arena_) / kUnit);
  }

  std::byte* Allocate(size_t bytes) override;
  void Free(std::byte* page, size_t bytes) override;
  void Copy(std::byte* to, const std::byte* from, size_t bytes) override;
  void Clear(std::byte* to, size_t bytes) override;
  Status Read(const std::byte* from, std::span<std::byte> to) override;
  Status Write(std::byte* to, std::span<const std::byte> from) override;
  std::byte* Scratch(int64_t index) override {
    return scratch_ + static_cast<uint64_t>(index) * places_->sizes().slot_bytes();
  }
  const PageSealer* sealer() const override { return &sealer_; }

  // Pages that are sealed together, which one launch takes.
  void QueueSeal(std::span<const std::byte* const> open, std::span<std::byte* const> sealed);
  // Launches what is queued; reports the first failure of anything since the last Flush.
  Status Flush();
  // Values clamped or NaN while sealing, since the start. Waits for the device. The first of them
  // are warned of by the Flush after the next, without waiting.
  Result<uint64_t> Saturated() const;

 private:
  struct SealJob {
    const std::byte* open;
    std::byte* sealed;
  };
  // Layers (and heads) of one rule, sealed by one launch whatever their bits. Layers are those that
  // sealed pages hold, every `step`th one.
  struct SealRun {
    std::optional<PageSeal> seal;  // none: BF16, which is copied
    int first_layer, layers, step;
    int head;   // -1 all
    int index;  // of the first layer among those that sealed pages hold
  };

  DevicePages() = default;
  // Layers of one layout, of methods that PageSeal does not seal.
  struct FormRun {
    FormSeal seal;
    int first_layer, layers;
  };
  Status PrepareForms(const CacheConfig& config, const KvPlan& plan);
  Status PrepareSealing(const CacheConfig& config, const AttentionShape& shape, const KvPlan& plan);
  void MovePage(uint64_t from, uint64_t to, uint64_t bytes);
  void WarnOfSaturation();
  void Keep(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  const DeviceSealer sealer_{*this};
  const CacheConfig* config_ = nullptr;
  Stream stream_ = nullptr;
  std::byte* arena_ = nullptr;
  std::byte* scratch_ = nullptr;  // sealed pages of a run, the saturation count, job ids
  std::unique_ptr<PageArena> places_;
  std::vector<SealJob> jobs_;
  std::vector<SealRun> runs_;
  std::vector<FormRun> form_runs_;
  int32_t* device_jobs_ = nullptr;  // [2, kMaxJobs]
  int32_t* host_jobs_ = nullptr;    // pinned, the same
  // [layers that are held, KV heads] of a page whose heads differ in bits
  HeadBlock* device_heads_ = nullptr;
  unsigned long long* saturated_ = nullptr;
  unsigned long long* seen_saturated_ = nullptr;  // pinned: as of some flush before
  bool warned_ = false;
  void* jobs_sent_ = nullptr;  // event
  Status status_;
};

}  // namespace oscar::cuda
