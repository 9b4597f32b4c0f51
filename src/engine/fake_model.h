// For tests: a model whose every row is a hash of everything it can see. A row's signature covers
// its token, its position, whether it came as a prompt and the stored form (open or sealed) and
// content of every page row before it; logits are a hash of the signature. Two runs therefore give
// the same tokens only if they went through the same cache states, and any page that is stale,
// foreign, sealed too early or lost shows at once. It checks its callers as the real model does.
#pragma once

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/check.h"
#include "cache/block_codec.h"
#include "cache/layered_append.h"
#include "model/model.h"

namespace oscar {

// A sealed page keeps the signatures of its 64 rows, changed: it is not what was stored open.
inline uint64_t SealedSignature(uint64_t open) { return open * 0x9E3779B97F4A7C15u + 1; }

inline int FakeEncodePage(const BlockLayout& layout, const BlockRules&, const BlockRun& run) {
  const auto row = static_cast<size_t>(layout.head_dim());
  for (size_t page = 0; page < run.blocks.size(); ++page) {
    for (size_t t = 0; t < kPageTokens; ++t) {
      uint64_t signature = 0;
      std::memcpy(&signature, run.k[page] + t * row, sizeof(signature));
      signature = SealedSignature(signature);
      std::memcpy(run.blocks[page] + t * sizeof(signature), &signature, sizeof(signature));
    }
  }
  return 0;
}

class FakeModel : public Model {
 public:
  static constexpr int kVocab = 61;
  static constexpr int kLayers = 8;  // rows mean something in the first

  struct Options {
    int cell = 256, sink = 64, recent = 128, max_batch_tokens = 512, head_dim = 64;
    std::string method = "oscar+";
    bool by_layer = true;    // offers to read prompts layer by layer
    bool samples = false;    // samples tokens itself
    bool runs_ahead = true;  // and leaves passes running
  };

  FakeModel(const Options& options, ThreadPool& threads) : options_(options), threads_(threads) {
    spec_.vocab_size = kVocab;
    AttentionSpec attention;
    attention.num_heads = attention.num_kv_heads = 1;
    attention.head_dim = attention.rotary_dims = options.head_dim;
    SetLayers({attention, DenseSpec{}}, kLayers, &spec_);
    spec_.max_positions = 1 << 20;
    KvPlanOptions plan;
    plan.method = options.method;
    plan.prefill_cell = options.cell;
    if (options.method != "bf16") {
      plan.sink = options.sink;
      plan.recent = options.recent;
    }
    auto made = KvPlan::Make(spec_, plan, FakeEncodePage);
    OSCAR_CHECK(made.has_value(), "{}", made.error().ToString());
    plan_ = std::move(*made);
  }

  const ModelSpec& spec() const override { return spec_; }
  const KvPlan& kv() const override { return *plan_; }
  uint64_t weight_bytes() const override { return 0; }
  uint64_t fingerprint() const override { return 1; }
  int max_batch_tokens() const override { return options_.max_batch_tokens; }
  Status SetTap(QkvTap) override { return Unimplemented("no tap"); }

  Status Forward(std::span<const ForwardItem> items, std::span<float> logits) override {
    if (before_pass) before_pass(items);
    const int left = fail_after.load();
    if (left == 0) return Internal("the device has failed");
    if (left > 0) fail_after.store(left - 1);
    if (pass_time.count() > 0) std::this_thread::sleep_for(pass_time);
    OSCAR_RETURN_IF_ERROR(Prepare(items));
    float* out = logits.data();
    for (const ForwardItem& item : items) {
      SequenceCache& cache = *item.cache;
      for (size_t t = 0; t < item.tokens.size(); ++t) {
        const int64_t position = cache.length() + static_cast<int64_t>(t);
        const uint64_t signature = SignatureOf(cache.page_table(), cache.sealed_flags(), position,
                                               item.tokens[t], item.is_prompt);
        for (int layer = 0; layer < kLayers; ++layer) {
          WriteRow(cache.KRow(layer, 0, position), cache.VRow(layer, 0, position), signature);
        }
        if (t + static_cast<size_t>(item.num_logits) >= item.tokens.size()) {
          WriteLogits(signature, out);
          if (position == broken_at) out[kVocab / 2] = broken_logit;
          out += kVocab;
        }
      }
    }
    OSCAR_CHECK(out == logits.data() + logits.size());
    for (const ForwardItem& item : items) {
      item.cache->Advance(static_cast<int64_t>(item.tokens.size()));
    }
    return {};
  }

  int max_samples() const override { return options_.samples ? 64 : 0; }
  bool CanRunAhead() const override { return options_.samples && options_.runs_ahead; }
  Status ForwardAndSample(std::span<const ForwardItem> items,
                          std::span<const SampleParams> sampling, std::span<int32_t> ids,
                          const BeforeSample& before_sample = {}) override {
    OSCAR_CHECK(launched_.empty(), "a pass while another is under way");
    OSCAR_RETURN_IF_ERROR(Launch(items, sampling, before_sample));
    return Collect(ids);
  }
  Status ReadLogits(size_t row, std::span<float> logits) override {
    OSCAR_CHECK(launched_.empty());
    std::copy_n(sampled_logits_.begin() + static_cast<ptrdiff_t>(row * kVocab), kVocab,
                logits.begin());
    return {};
  }
  // Computes at once: what a device does later it does in the same order.
  Status Launch(std::span<const ForwardItem> items, std::span<const SampleParams> sampling,
                const BeforeSample& before_sample = {}) override {
    OSCAR_CHECK(launched_.size() < 2);
    most_launched = std::max<int>(most_launched, static_cast<int>(launched_.size()) + 1);
    std::vector<ForwardItem> resolved(items.begin(), items.end());
    std::vector<int32_t> tokens(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].tokens[0] >= 0) continue;
      OSCAR_CHECK(launched_.size() == 1, "no pass to take a token from");
      const auto row = static_cast<size_t>(-1 - items[i].tokens[0]);
      tokens[i] = std::max(launched_.front()[row], 0);
      resolved[i].tokens = {&tokens[i], 1};
    }
    sampled_logits_.resize(sampling.size() * kVocab);
    OSCAR_RETURN_IF_ERROR(Forward(resolved, sampled_logits_));
    if (before_sample) OSCAR_RETURN_IF_ERROR(before_sample());
    std::vector<int32_t>& ids = launched_.emplace_back();
    for (size_t i = 0; i < sampling.size(); ++i) {
      const auto logits = std::span(sampled_logits_).subspan(i * kVocab, kVocab);
      ids.push_back(SampleFrom(logits, sampling[i]));
    }
    return {};
  }
  Status Collect(std::span<int32_t> ids) override {
    OSCAR_CHECK(!launched_.empty() && launched_.front().size() == ids.size());
    std::ranges::copy(launched_.front(), ids.begin());
    launched_.erase(launched_.begin());
    return {};
  }

  size_t num_launched() const { return launched_.size(); }

  // All rows depend on the first layer alone, so that layers and chunks can be told apart.
  struct FakeCellRead : CellRead {
    std::unique_ptr<LayeredAppend> append;
    std::vector<int32_t> tokens;
    std::vector<uint64_t> signatures;
    int layer = 0;
    int64_t row = 0;
    int64_t num_tokens() const override { return append->num_tokens(); }
    uint64_t bytes() const override { return append->bytes(); }
  };
  bool CanReadByLayer() const override { return options_.by_layer; }
  Result<std::unique_ptr<CellRead>> StartCell(SequenceCache& cache,
                                              std::span<const int32_t> tokens) override {
    auto read = std::make_unique<FakeCellRead>();
    const auto count = static_cast<int64_t>(tokens.size());
    const AppendCost cost = LayeredAppend::CostOf(cache, count);
    PagePool& pool = *pool_of_cells;
    const auto before = static_cast<int64_t>(pool.bytes_in_use());
    OSCAR_ASSIGN_OR_RETURN(read->append, LayeredAppend::Begin(cache, count, threads_));
    EXPECT_EQ(static_cast<int64_t>(pool.bytes_in_use()), before + cost.seal_net + cost.reserve);
    read->tokens.assign(tokens.begin(), tokens.end());
    ++cells_started;
    return std::unique_ptr<CellRead>(std::move(read));
  }
  Result<bool> ContinueCell(CellRead& cell, int64_t row_layers, std::span<float> logits) override {
    auto& read = dynamic_cast<FakeCellRead&>(cell);
    LayeredAppend& append = *read.append;
    for (; row_layers > 0; --row_layers) {
      const auto row = static_cast<size_t>(read.row);
      const int64_t position = append.cache().length() + read.row;
      if (read.layer == 0) {
        read.signatures.push_back(SignatureOf(append.page_table(), append.sealed_flags(), position,
                                              read.tokens[row], /*is_prompt=*/true));
      }
      WriteRow(append.KRow(0, position), append.VRow(0, position), read.signatures[row]);
      if (++read.row < append.num_tokens()) continue;
      append.SealLayer(threads_);
      read.row = 0;
      if (++read.layer == kLayers) break;
      append.SetLayer(read.layer);
    }
    if (read.layer < kLayers) return false;
    if (!logits.empty()) WriteLogits(read.signatures.back(), logits.data());
    append.Commit();
    return true;
  }

  // Passes that were under way at once, at most.
  std::atomic<int> most_launched{0};
  // What cells are read into; counts its own.
  PagePool* pool_of_cells = nullptr;
  std::atomic<int> cells_started{0};
  // Knobs; the first is called by the engine thread before each pass.
  std::function<void(std::span<const ForwardItem>)> before_pass;
  std::chrono::microseconds pass_time{0};
  std::atomic<int> fail_after{-1};  // passes until Forward fails; -1 never
  // The logits after the token at this position hold one such value; -1 never.
  int64_t broken_at = -1;
  float broken_logit = 0.0f;

 private:
  // Any function of the logits and the sample; now and then one is left to the caller.
  static int32_t SampleFrom(std::span<const float> logits, const SampleParams& sample) {
    if (std::ranges::any_of(logits, [](float x) { return !std::isfinite(x); })) {
      return SampleParams::kNotFinite;
    }
    const auto may = [&](int32_t token) {
      return sample.mask == nullptr || (sample.mask[token / 32] >> (token % 32) & 1) != 0;
    };
    int32_t best = -1;
    for (int32_t token = 0; token < kVocab; ++token) {
      if (may(token) &&
          (best < 0 || logits[static_cast<size_t>(token)] > logits[static_cast<size_t>(best)])) {
        best = token;
      }
    }
    if (static_cast<int>(logits[0] * 1024.0f) % 23 == 0) return SampleParams::kUndecided;
    if (sample.temperature == 0.0f) return best;
    const auto sampled = static_cast<int32_t>(sample.uniform * kVocab);
    return logits[static_cast<size_t>(sampled)] > 1.0f && may(sampled) ? sampled : best;
  }

  Status Prepare(std::span<const ForwardItem> items) {
    int64_t total = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      const ForwardItem& item = items[i];
      const auto count = static_cast<int64_t>(item.tokens.size());
      const int64_t at = item.cache->length(), cell = plan_->cache().cell;
      OSCAR_CHECK(count > 0 && (item.is_prompt || count == 1));
      OSCAR_CHECK(!item.is_prompt || at / cell == (at + count - 1) / cell, "crosses a cell");
      OSCAR_CHECK(item.num_logits >= 0 && item.num_logits <= count);
      for (size_t j = 0; j < i; ++j) OSCAR_CHECK(items[j].cache != item.cache);
      total += count;
    }
    OSCAR_CHECK(total <= options_.max_batch_tokens, "{} tokens in one pass", total);
    for (const ForwardItem& item : items) {
      OSCAR_RETURN_IF_ERROR(item.is_prompt ? item.cache->SealForPrompt(threads_)
                                           : item.cache->SealForGeneration(threads_));
    }
    for (size_t i = 0; i < items.size(); ++i) {
      const Status status = items[i].cache->Reserve(static_cast<int64_t>(items[i].tokens.size()));
      if (status.ok()) continue;
      for (size_t j = 0; j < i; ++j) items[j].cache->Trim(items[j].cache->length());
      return status;
    }
    return {};
  }

  void WriteRow(Bf16* k, Bf16* v, uint64_t signature) const {
    std::fill_n(k, options_.head_dim, Bf16{});
    std::fill_n(v, options_.head_dim, Bf16{});
    std::memcpy(static_cast<void*>(k), &signature, sizeof(signature));
  }

  static void WriteLogits(uint64_t signature, float* out) {
    for (uint64_t i = 0; i < kVocab; ++i) {
      const uint64_t h = XXH3_64bits_withSeed(&i, sizeof(i), signature);
      *out++ = static_cast<float>(h >> 40) * 0x1p-22f;
    }
  }

  // `pages`: the first layer's blocks, which are at the start of a page.
  uint64_t SignatureOf(const std::byte* const* pages, const uint8_t* sealed, int64_t position,
                       int32_t token, bool is_prompt) const {
    uint64_t state = XXH3_64bits_withSeed(&token, sizeof(token),
                                          static_cast<uint64_t>(position) * 2 + is_prompt);
    const auto open_row = static_cast<int64_t>(options_.head_dim * sizeof(Bf16));
    for (int64_t p = 0; p < position; ++p) {
      const int64_t j = p / kPageTokens;
      uint64_t row = 0;
      std::memcpy(&row, pages[j] + p % kPageTokens * (sealed[j] ? 8 : open_row), sizeof(row));
      state = (state ^ row) * 0xD6E8FEB86659FD93u;
      state ^= state >> 29;
    }
    return state;
  }

  const Options options_;
  ThreadPool& threads_;
  ModelSpec spec_;
  std::unique_ptr<KvPlan> plan_;
  std::vector<std::vector<int32_t>> launched_;  // ids of the passes under way
  std::vector<float> sampled_logits_;           // of the last pass
};

// Prompts of distinct tokens for distinct seeds.
inline std::vector<int32_t> FakeTokens(uint64_t seed, size_t count) {
  std::vector<int32_t> tokens(count);
  for (uint64_t i = 0; i < count; ++i) {
    tokens[i] = static_cast<int32_t>(XXH3_64bits_withSeed(&i, sizeof(i), seed) %
                                     static_cast<uint64_t>(FakeModel::kVocab));
  }
  return tokens;
}

}  // namespace oscar
