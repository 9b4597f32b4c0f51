// The KV-cache methods by their `--kv` names: one table, kMethods in kv_method.cc, that says which
// rotation K and V take, how rows become bytes, which tokens stay BF16 and what a number costs.
// Everything else (cache, model, command line, reports) reads it from here; docs/quantizers.md
// explains the methods.
//
// Geometry: [0, sink) BF16, then history in pages of 64 tokens, then the newest tokens BF16: when
// the newest part holds recent + run_tokens tokens, its oldest run_tokens are quantised. Sinks
// and windows are whole pages, so the 32-token sink of published kivi-sink and kitty is 64 here.
//
// Value types; the quantisers they share are immutable.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "oscar/status.h"
#include "quant/kv_quantizer.h"
#include "quant/rotation_kind.h"
#include "quant/row_quantizer.h"

namespace oscar {

enum class KvStorage : uint8_t {
  kBf16,       // nothing is ever quantised
  kInt2Pages,  // both sides by RowSpecs that cache pages hold: 2 bits, fp16 metadata
  kInt4Pages,
  kSimulated,  // bytes of the method's own KvQuantizers, run_tokens at a time
};

// One row of the table: what a name means before a model is known.
struct KvMethodInfo {
  std::string_view name;
  std::string_view summary;  // one line for --help and reports
  bool takes_rotation;       // a rotation file makes sense
  bool needs_rotation;       // and must be given
  bool takes_bits;           // heads may have 2, 3 or 4 bits (quant/bit_map.h)
};

// In the order of --help and reports.
std::span<const KvMethodInfo> KvMethodTable();
// kInvalidArgument with the list of names for an unknown one.
Result<KvMethodInfo> FindKvMethod(std::string_view name);

// Everything that turns a name into a method. Unset options take the method's own values.
struct KvMethodOptions {
  std::string name = "oscar+";
  int head_dim = 128;
  bool has_rotation = false;            // a rotation file was given
  std::optional<int> group_dims = {};   // page methods; default 128, or the head where smaller
  std::optional<int> sink_tokens = {};  // multiples of 64
  std::optional<int> recent_tokens = {};
  std::optional<float> k_clip = {};  // [0, 1], 0 is off; sides whose rule clips
  std::optional<float> v_clip = {};
};

// Which tokens of a sequence are stored how.
struct TokenSplit {
  int64_t sink = 0;     // BF16, from position 0
  int64_t history = 0;  // quantised
  int64_t newest = 0;   // BF16
};

struct KvMethod {
  std::string_view name;
  RotationKind k_rotation = RotationKind::kNone;
  RotationKind v_rotation = RotationKind::kNone;
  int hadamard_block = 0;  // dims, where a rotation is kBlockHadamard
  KvStorage storage = KvStorage::kBf16;
  int run_tokens = 64;  // quantised together; a multiple of 64
  int sink_tokens = 0;
  int recent_tokens = 0;
  int defined_sink = 0;  // of the published form, which need not be whole pages
  int skip_first_layers = 0, skip_last_layers = 0;              // these stay BF16 throughout
  RowSpec k_rows, v_rows;                                       // where storage is a page kind
  std::shared_ptr<const KvQuantizer> k_quantizer, v_quantizer;  // never null

  // Pages are read by the attention kernels in place. Other methods store real bytes, too, but are
  // decoded to BF16 rows for attention: results of theirs say "simulated".
  bool is_simulated() const { return storage == KvStorage::kSimulated; }
  bool IsQuantizedLayer(int layer, int num_layers) const;
  TokenSplit Split(int64_t tokens) const;
  // Mean of K and V over the quantised tokens of a quantised layer, metadata included.
  double HistoryBits(int kv_heads, int head_dim) const;
  // Bytes of K and V of one sequence over all layers, windows and metadata included.
  uint64_t StoredBytes(int64_t tokens, int kv_heads, int head_dim, int num_layers) const;
  // The same per number. REQUIRES: tokens > 0.
  double StoredBits(int64_t tokens, int kv_heads, int head_dim, int num_layers) const;
  // "oscar+ (Hadamard), real, 2.25 history bits": for logs and reports.
  std::string Describe(double history_bits) const;
};

// kInvalidArgument naming the option at fault: an unknown name, `oscar` without a rotation, a
// rotation for a method that takes none, a clip where the rule has none, groups that do not fit or
// that pages do not have. kUnimplemented for a head dim that codecs do not have.
Result<KvMethod> MakeKvMethod(const KvMethodOptions& options);

}  // namespace oscar
