// The KV-cache methods by their `--kv` names: one table, kMethods in kv_method.cc, that says which
// rotation K and V take, how rows become bytes, which tokens stay BF16 and what a number costs.
// Everything else (cache, model, command line, reports) reads it from here; docs/quantizers.md
// explains the methods.
//
// A name may carry switches, NAME:KEY=VALUE:..., where its row has them:
//   bits=2|3|4, k_bits, v_bits    of both sides, or of one
//   group=32|64|128               tokens of a group of K and dims of a group of V
//   norm=all|head|none            what each token's keys are divided by
//   rotation=on|off               the Hadamard of K and V
//   k=channel|token               the groups of K run along tokens, or along dims as V's do
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
#include "quant/page_shape.h"
#include "quant/rotation_kind.h"
#include "quant/row_quantizer.h"

namespace oscar {

// One row of the table: what a name means before a model is known.
struct KvMethodInfo {
  std::string_view name;
  std::string_view summary;   // one line for --help and reports
  bool takes_rotation;        // a rotation file makes sense
  bool needs_rotation;        // and must be given
  bool takes_bits;            // heads may have 2, 3 or 4 bits (quant/bit_map.h)
  std::string_view switches;  // keys it takes after a colon, "" for none
};

// In the order of --help and reports.
std::span<const KvMethodInfo> KvMethodTable();
// Of a name with or without switches. kInvalidArgument with the list of names for an unknown one.
Result<KvMethodInfo> FindKvMethod(std::string_view name);

// Everything that turns a name into a method. Unset options take the method's own values.
struct KvMethodOptions {
  std::string name = "oscar+";
  int head_dim = 128;
  bool has_rotation = false;           // a rotation file was given
  std::optional<int> group_dims = {};  // rows on both sides; default 128, or the head where smaller
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

// How one side of a method is stored. Bits, rule, clip and, for rows, the group are in `rows`.
struct KvSide {
  RotationKind rotation = RotationKind::kNone;
  SideForm form = SideForm::kRows;
  RowSpec rows;
  int group_tokens = 0;               // kChannels
  TokenNorm norm = TokenNorm::kNone;  // kChannels
  int boosted_dims = 0;               // kMixed: dims with two more bits
  // The same numbers as a separate codec: the reference that pages are tested against.
  std::shared_ptr<const KvQuantizer> quantizer;  // never null
};

struct KvMethod {
  std::string name;  // as asked for, with its switches
  KvSide k, v;
  int hadamard_block = 0;        // dims, where a rotation is kBlockHadamard
  bool is_quantized = false;     // else everything stays BF16
  int run_tokens = kPageTokens;  // quantised together; a multiple of 64
  int sink_tokens = 0;
  int recent_tokens = 0;
  int defined_sink = 0;  // of the published form, which need not be whole pages
  int skip_first_layers = 0, skip_last_layers = 0;  // these stay BF16 throughout

  bool IsQuantizedLayer(int layer, int num_layers) const;
  TokenSplit Split(int64_t tokens) const;
  // Mean of K and V over the quantised tokens of a quantised layer, metadata included, by formula;
  // pages (cache/page_layout.h) take exactly this, which a test holds.
  double HistoryBits(int kv_heads, int head_dim) const;
  // "oscar+ (Hadamard), 2.25 history bits": for logs and reports.
  std::string Describe(double history_bits) const;
};

// kInvalidArgument naming the option at fault: an unknown name, `oscar` without a rotation, a
// rotation for a method that takes none, a switch that it has not, a clip where the rule has none,
// groups that do not fit or that pages do not have. kUnimplemented for a head dim that codecs do
// not have.
Result<KvMethod> MakeKvMethod(const KvMethodOptions& options);

}  // namespace oscar
