// Sealers: what turns open pages into sealed ones. A pool has the one for the memory that its pages
// lie in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "cache/block_codec.h"
#include "cache/cache_config.h"

namespace oscar {

class PageSealer {
 public:
  virtual ~PageSealer() = default;
  // Whole pages, CacheConfig::pages_together of them. Returns the number of values that were NaN or
  // saturated, or 0 where that is counted elsewhere.
  virtual uint64_t SealPages(std::span<const std::byte* const> open,
                             std::span<std::byte* const> sealed, ThreadPool& threads) const = 0;
};

// In host memory: called from workers, one layer each; must not depend on which.
class HostPageSealer : public PageSealer {
 public:
  // `config` outlives this.
  explicit HostPageSealer(const CacheConfig& config) : config_(config) {}
  uint64_t SealPages(std::span<const std::byte* const> open, std::span<std::byte* const> sealed,
                     ThreadPool& threads) const override;
  // `open` and `sealed` point to one layer's blocks (all KV heads, in order) in each of the pages.
  // REQUIRES: sealed pages hold the layer.
  virtual int Seal(int layer, std::span<const std::byte* const> open,
                   std::span<std::byte* const> sealed) const = 0;

 protected:
  const CacheConfig& config_;
};

// EncodeBlocks or a bit-equal vectorised twin.
using BlockEncoder = int (*)(const BlockLayout&, const BlockRules&, const BlockRun&);
class RuleSealer : public HostPageSealer {
 public:
  // `rules` [layers][kv heads]. Layers whose sealed layout is BF16 are copied.
  RuleSealer(const CacheConfig& config, std::vector<std::vector<BlockRules>> rules,
             BlockEncoder encoder)
      : HostPageSealer(config), rules_(std::move(rules)), encoder_(encoder) {}
  int Seal(int layer, std::span<const std::byte* const> open,
           std::span<std::byte* const> sealed) const override;

 private:
  std::vector<std::vector<BlockRules>> rules_;
  BlockEncoder encoder_;
};

}  // namespace oscar
