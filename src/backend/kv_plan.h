// KvPlan: a `--kv` method made concrete for one model: the rotations of every layer with a cache
// and every head, the layouts of open and sealed pages, and the sealer that turns one into the
// other in host memory. Immutable after construction; sequences and models hold references to it,
// so it does not move.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "arch/spec.h"
#include "cache/page_sealer.h"
#include "oscar/status.h"
#include "quant/bit_map.h"
#include "quant/kv_method.h"
#include "rotation/rotation.h"

namespace oscar {

struct KvPlanOptions {
  std::string method = "oscar+";
  // Where given, `oscar` and `oscar+` use it; other methods refuse it.
  std::optional<Rotation> rotation;
  std::optional<int> group_dims, sink, recent;
  std::optional<float> k_clip, v_clip;
  // What two bits cost each head, by layer with a history; methods that take bits spend theirs by
  // it.
  std::optional<SensitivityMap> sensitivities;
  // History bits, metadata counted: 2.25 to 4.25 for groups of 128. Unset: all heads at 2 bits, or,
  // with sensitivities, kDefaultExtraBits more.
  std::optional<double> bits;
  int prefill_cell = 4096;
  // Windows end at the token instead of at the page: a query sees exactly the `recent` newest
  // tokens (itself at least) and the sink of the published form as written and all others as
  // stored, which is how methods are defined on paper. The open pages' rows are quantised anew for
  // every pass to show them so; what is stored, and its bits, stay the same. For evaluation on the
  // CPU.
  bool token_windows = false;
  CodeOrder order = CodeOrder::kCpu;
};

// What one side of one layer is multiplied by: nothing, a Hadamard matrix, or a dense one a KV
// head.
struct SideTransform {
  RotationKind kind = RotationKind::kNone;
  int hadamard_block = 0;       // dims, kBlockHadamard
  int num_matrices = 0;         // kCalibrated: 1 or kv_heads
  std::vector<float> matrices;  // [num_matrices, D, D]

  std::span<const float> MatrixOf(int kv_head, int head_dim) const;
  // x <- x R in fp32, for one head; the scalar reference.
  void Apply(int kv_head, std::span<float> x) const;
  // The inverse: x <- x R^T.
  void Undo(int kv_head, std::span<float> x) const;
};

class KvPlan {
 public:
  // Errors name the option: an unknown method, a rotation of another shape, windows that are not
  // multiples of 64, a head dim without pages, bits that need sensitivities.
  static Result<std::unique_ptr<KvPlan>> Make(const ModelSpec& spec, const KvPlanOptions& options,
                                              BlockEncoder encoder);
  // The same but for the bits of its heads. REQUIRES: a method that takes bits.
  Result<std::unique_ptr<KvPlan>> WithBits(const BitMap& map) const;
  KvPlan(const KvPlan&) = delete;
  KvPlan& operator=(const KvPlan&) = delete;

  const KvMethod& method() const { return method_; }
  const CacheConfig& cache() const { return *cache_; }
  // By slot of the cache: LayerSpec::kv_slot.
  const SideTransform& k(int slot) const { return k_[static_cast<size_t>(slot)]; }
  const SideTransform& v(int slot) const { return v_[static_cast<size_t>(slot)]; }
  // How pages are sealed, [slots][KV heads]; empty for methods that have no quantised pages.
  const std::vector<std::vector<BlockRules>>& rules() const { return rules_; }
  // For pools in host memory; null where nothing is ever sealed. Devices seal by rules().
  const HostPageSealer* host_sealer() const { return host_sealer_.get(); }
  bool uses_calibrated_rotation() const { return calibrated_; }
  // By layer with a history and KV head; empty for methods whose bits are their own.
  const BitMap& bit_map() const { return bit_map_; }
  // Whether sensitivities decided it.
  bool has_sensitivities() const { return has_sensitivities_; }
  // Bits per number of sealed pages, metadata counted.
  double HistoryBits() const;
  // Whether values are rotated in some layer.
  bool rotates_v() const;
  // Tokens of KvPlanOptions::token_windows, at least 1; 0: windows end at pages.
  int64_t token_window() const { return token_window_; }
  // The sink that goes with it, in tokens.
  int64_t token_sink() const { return method_.defined_sink; }
  // "oscar+ (Hadamard), 2.3125 history bits, 1 of 32 sides at more than 2".
  std::string Describe() const;
  // Bits per K/V number as stored at a context length, windows and metadata counted. Of layers with
  // a sliding window, what they still hold counts, both as bits and as numbers.
  double StoredBits(int64_t tokens) const;
  uint64_t StoredBytes(int64_t tokens) const;

 private:
  KvPlan() = default;
  KvMethod method_;
  // Of a sequence of `tokens`, those that layers with a sliding window hold.
  int64_t WindowedTokens(int64_t tokens) const;

  int kv_heads_ = 0, head_dim_ = 0, num_slots_ = 0;
  int num_history_ = 0;  // slots whose layers see all tokens
  bool calibrated_ = false;
  int64_t token_window_ = 0;
  std::vector<SideTransform> k_, v_;
  std::vector<std::vector<BlockRules>> rules_;
  BitMap bit_map_;
  bool has_sensitivities_ = false;
  BlockEncoder encoder_ = nullptr;
  std::unique_ptr<CacheConfig> cache_;
  std::unique_ptr<HostPageSealer> host_sealer_;
};

// Folds V's rotation into the projections around it, in fp32, so that nothing is left at run time:
// w_v [kv_heads * D, hidden] <- R^T w_v per head, b_v <- b_v R, w_o [hidden, heads * D] <- w_o R of
// the head's KV head. `b_v` may be empty.
void AbsorbValueRotation(const SideTransform& rotation, int num_heads, int num_kv_heads,
                         int head_dim, int hidden, std::span<float> w_v, std::span<float> b_v,
                         std::span<float> w_o);
// The same by parts: rows of w_v and entries of b_v (or none) of whole KV heads from `first_head`
// on; rows of w_o.
void AbsorbIntoValues(const SideTransform& rotation, int first_head, int head_dim, int hidden,
                      std::span<float> w_v, std::span<float> b_v);
void AbsorbIntoOutputs(const SideTransform& rotation, int num_heads, int num_kv_heads, int head_dim,
                       std::span<float> w_o);

}  // namespace oscar
