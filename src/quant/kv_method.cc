#include "quant/kv_method.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "quant/kitty.h"
#include "quant/kivi.h"
#include "quant/oscar_su.h"
#include "quant/turboquant.h"
#include "quant/uniform_rows.h"

namespace oscar {
namespace {

constexpr int kPageTokens = 64;  // of cache/block_layout.h, which lies above this module
constexpr double kKittyFraction = 0.125;
constexpr int kLargestBlockHadamard = 128;  // Saw-INT4 offers orders 16 to 128

constexpr std::array<KvMethodInfo, 13> kTable = {{
    {"bf16", "every number in BF16", false, false},
    {"naive", "INT2 min/max rows, no rotation", false, false},
    {"quarot", "INT2 min/max rows on Hadamard-rotated K and V", false, false},
    {"saw-int4", "INT4 min/max rows, block Hadamard on K", false, false},
    {"int4", "INT4 min/max rows, no rotation", false, false},
    {"turboquant", "3-bit Lloyd-Max keys on a Hadamard, 3-bit values, all layers", false, false},
    {"turboquant-skip", "turboquant with the first and last two layers in BF16", false, false},
    {"kivi", "2-bit keys per channel over 32 tokens, values in groups of 32", false, false},
    {"kivi-sink", "2-bit keys per channel over 128 tokens, values in groups of 128, BF16 sink",
     false, false},
    {"oscar-su", "OScaR: token norm, Hadamard, 2-bit keys per channel over 32 tokens", false,
     false},
    {"oscar", "published OSCAR: calibrated rotation, clipped INT2 rows", true, true},
    {"oscar+", "unbiased INT2 fit; calibrated rotation where given, else the Hadamard", true,
     false},
    {"kitty", "2-bit keys per channel over 128 tokens, 1/8 of the channels at 4 bits", false,
     false},
}};

RowSpec Rows(RowRule rule, int bits, int group, float clip = 0.0f) {
  return {rule, bits, group, clip, MetaType::kFp16};
}

// The two sides of a method on pages.
void SetPages(KvMethod* m, KvStorage storage, const RowSpec& k, const RowSpec& v) {
  m->storage = storage;
  m->k_rows = k;
  m->v_rows = v;
}

void SetSimulated(KvMethod* m, int run_tokens, std::unique_ptr<KvQuantizer> k,
                  std::unique_ptr<KvQuantizer> v) {
  m->storage = KvStorage::kSimulated;
  m->run_tokens = run_tokens;
  m->k_quantizer = std::move(k);
  m->v_quantizer = std::move(v);
}

void SetWindows(KvMethod* m, int sink, int recent) {
  m->sink_tokens = sink;
  m->recent_tokens = recent;
}

void SetRotations(KvMethod* m, RotationKind k, RotationKind v) {
  m->k_rotation = k;
  m->v_rotation = v;
}

// The table's meaning. `group` is that of page rows.
KvMethod Recipe(std::string_view name, int head_dim, int group, bool calibrated) {
  using enum RotationKind;
  KvMethod m;
  m.name = name;
  const int wide = std::min(head_dim, 128);
  const auto fp16 = MetaType::kFp16;
  const RowSpec min_max2 = Rows(RowRule::kMinMax, 2, group);
  const RowSpec min_max4 = Rows(RowRule::kMinMax, 4, group);
  if (name == "naive") {
    SetPages(&m, KvStorage::kInt2Pages, min_max2, min_max2);
  } else if (name == "quarot") {
    SetPages(&m, KvStorage::kInt2Pages, min_max2, min_max2);
    SetRotations(&m, kHadamard, kHadamard);
  } else if (name == "saw-int4") {
    SetPages(&m, KvStorage::kInt4Pages, min_max4, min_max4);
    SetRotations(&m, kBlockHadamard, kNone);
    m.hadamard_block = std::min(head_dim, kLargestBlockHadamard);
  } else if (name == "int4") {
    SetPages(&m, KvStorage::kInt4Pages, min_max4, min_max4);
  } else if (name == "turboquant" || name == "turboquant-skip") {
    SetSimulated(&m, kPageTokens, std::make_unique<TurboQuantKeys>(3, /*renormalize=*/true),
                 std::make_unique<UniformRows>(Rows(RowRule::kMinMax, 3, head_dim)));
    SetRotations(&m, kHadamard, kNone);
    if (name == "turboquant-skip") m.skip_first_layers = m.skip_last_layers = 2;
  } else if (name == "kivi") {
    SetSimulated(&m, kPageTokens, std::make_unique<KiviKeys>(2, 32, fp16),
                 MakeKiviValues(2, 32, fp16));
    SetWindows(&m, 0, 128);
  } else if (name == "kivi-sink") {
    SetSimulated(&m, 2 * kPageTokens, std::make_unique<KiviKeys>(2, 128, fp16),
                 MakeKiviValues(2, wide, fp16));
    SetWindows(&m, 64, 128);
    m.defined_sink = 32;
  } else if (name == "oscar-su") {
    SetSimulated(&m, kPageTokens, std::make_unique<OscarSuKeys>(OscarSuSpec{}),
                 MakeOscarSuValues(2, 32, fp16));
    SetRotations(&m, kHadamard, kHadamard);
    SetWindows(&m, 0, 128);
  } else if (name == "oscar") {
    SetPages(&m, KvStorage::kInt2Pages, Rows(RowRule::kMinMax, 2, group, 0.96f),
             Rows(RowRule::kMinMax, 2, group, 0.92f));
    SetRotations(&m, kCalibrated, kCalibrated);
    SetWindows(&m, 64, 256);
  } else if (name == "oscar+") {
    SetPages(
        &m, KvStorage::kInt2Pages, Rows(RowRule::kMseFitUnbiased, 2, group),
        calibrated ? Rows(RowRule::kMinMax, 2, group, 0.92f) : Rows(RowRule::kMseFit, 2, group));
    SetRotations(&m, calibrated ? kCalibrated : kHadamard, calibrated ? kCalibrated : kHadamard);
    SetWindows(&m, 64, 256);
  } else if (name == "kitty") {
    SetSimulated(&m, KittyKeys::kPage, std::make_unique<KittyKeys>(kKittyFraction),
                 std::make_unique<UniformRows>(Rows(RowRule::kMinMax, 2, wide)));
    SetWindows(&m, 64, 128);
    m.defined_sink = 32;
  } else {
    OSCAR_CHECK(name == "bf16", "{}", name);
    m.k_quantizer = std::make_shared<Bf16Rows>();
    m.v_quantizer = m.k_quantizer;
  }
  return m;
}

bool IsPages(const KvMethod& m) {
  return m.storage == KvStorage::kInt2Pages || m.storage == KvStorage::kInt4Pages;
}

Status SetClip(std::string_view method, const char* side, std::optional<float> clip, bool pages,
               RowSpec* rows) {
  if (!clip.has_value()) return {};
  if (!(*clip >= 0.0f && *clip <= 1.0f)) {
    return InvalidArgument(fmt::format("{} clip ratio {}: must lie in [0, 1]; 0 turns the clip off",
                                       side, *clip))
        .WithParam(fmt::format("{}_clip", side));
  }
  const bool clips = pages && (rows->rule == RowRule::kMinMax || rows->rule == RowRule::kSymmetric);
  if (!clips) {
    return InvalidArgument(fmt::format("{} clip ratio {}: method {} chooses {}'s range without one",
                                       side, *clip, method, side))
        .WithParam(fmt::format("{}_clip", side));
  }
  rows->clip_ratio = *clip;
  return {};
}

Status SetWindow(std::string_view what, std::optional<int> tokens, int* window) {
  if (!tokens.has_value()) return {};
  if (*tokens < 0 || *tokens % kPageTokens != 0) {
    return InvalidArgument(fmt::format("{} window of {} tokens: must be a multiple of {}", what,
                                       *tokens, kPageTokens))
        .WithParam(std::string(what));
  }
  *window = *tokens;
  return {};
}

}  // namespace

std::span<const KvMethodInfo> KvMethodTable() { return kTable; }

Result<KvMethodInfo> FindKvMethod(std::string_view name) {
  std::vector<std::string_view> names;
  for (const KvMethodInfo& info : kTable) {
    if (info.name == name) return info;
    names.push_back(info.name);
  }
  return Unexpected(InvalidArgument(fmt::format("unknown KV method \"{}\": one of {}", name,
                                                fmt::join(names, ", ")))
                        .WithParam("kv"));
}

Result<KvMethod> MakeKvMethod(const KvMethodOptions& options) {
  OSCAR_ASSIGN_OR_RETURN(const KvMethodInfo info, FindKvMethod(options.name));
  if (info.needs_rotation && !options.has_rotation) {
    return Unexpected(InvalidArgument(fmt::format("KV method {} needs a rotation: fit one with "
                                                  "`oscar calibrate` and pass --rotation, or use "
                                                  "oscar+, which needs none",
                                                  info.name))
                          .WithParam("rotation"));
  }
  if (options.has_rotation && !info.takes_rotation) {
    return Unexpected(InvalidArgument(fmt::format("KV method {} uses no rotation file: drop "
                                                  "--rotation, or choose oscar or oscar+",
                                                  info.name))
                          .WithParam("rotation"));
  }
  const int group = options.group_dims.value_or(std::min(options.head_dim, 128));
  KvMethod m = Recipe(info.name, options.head_dim, group, options.has_rotation);
  if (options.group_dims.has_value() && !IsPages(m)) {
    return Unexpected(InvalidArgument(fmt::format("group size {}: method {} has groups of its own",
                                                  group, info.name))
                          .WithParam("group_dims"));
  }
  if (IsPages(m) && group != 32 && group != 64 && group != 128 && group != options.head_dim) {
    return Unexpected(
        InvalidArgument(fmt::format("group size {}: must be 32, 64, 128 or the head dim and divide "
                                    "it ({})",
                                    group, options.head_dim))
            .WithParam("group_dims"));
  }
  OSCAR_RETURN_IF_ERROR(SetClip(info.name, "k", options.k_clip, IsPages(m), &m.k_rows));
  OSCAR_RETURN_IF_ERROR(SetClip(info.name, "v", options.v_clip, IsPages(m), &m.v_rows));
  OSCAR_RETURN_IF_ERROR(SetWindow("sink", options.sink_tokens, &m.sink_tokens));
  OSCAR_RETURN_IF_ERROR(SetWindow("recent", options.recent_tokens, &m.recent_tokens));
  if (m.defined_sink == 0 || options.sink_tokens.has_value()) m.defined_sink = m.sink_tokens;
  if (IsPages(m)) {
    m.k_quantizer = std::make_shared<UniformRows>(m.k_rows);
    m.v_quantizer = std::make_shared<UniformRows>(m.v_rows);
  }
  const TileShape block{m.run_tokens, 1, options.head_dim};
  for (const KvQuantizer* side : {m.k_quantizer.get(), m.v_quantizer.get()}) {
    Status status = side->CheckShape(block);
    if (status.ok()) continue;
    return Unexpected(std::move(status).WithParam(options.group_dims ? "group_dims" : "head_dim"));
  }
  return m;
}

bool KvMethod::IsQuantizedLayer(int layer, int num_layers) const {
  return storage != KvStorage::kBf16 && layer >= skip_first_layers &&
         layer < num_layers - skip_last_layers;
}

TokenSplit KvMethod::Split(int64_t tokens) const {
  if (storage == KvStorage::kBf16) return {0, 0, tokens};
  TokenSplit split;
  split.sink = std::min<int64_t>(tokens, sink_tokens);
  const int64_t old = tokens - split.sink - recent_tokens;
  split.history = old > 0 ? old / run_tokens * run_tokens : 0;
  split.newest = tokens - split.sink - split.history;
  return split;
}

double KvMethod::HistoryBits(int kv_heads, int head_dim) const {
  const TileShape shape{run_tokens, kv_heads, head_dim};
  return 0.5 * (k_quantizer->BitsPerElement(shape) + v_quantizer->BitsPerElement(shape));
}

uint64_t KvMethod::StoredBytes(int64_t tokens, int kv_heads, int head_dim, int num_layers) const {
  const TokenSplit split = Split(tokens);
  const TileShape block{run_tokens, kv_heads, head_dim};
  const uint64_t row = 2 * 2 * static_cast<uint64_t>(kv_heads) * static_cast<uint64_t>(head_dim);
  const uint64_t exact = static_cast<uint64_t>(tokens) * row;
  const uint64_t quantized =
      static_cast<uint64_t>(split.sink + split.newest) * row +
      static_cast<uint64_t>(split.history / run_tokens) *
          (k_quantizer->EncodedBytes(block) + v_quantizer->EncodedBytes(block));
  uint64_t bytes = 0;
  for (int layer = 0; layer < num_layers; ++layer) {
    bytes += IsQuantizedLayer(layer, num_layers) ? quantized : exact;
  }
  return bytes;
}

double KvMethod::StoredBits(int64_t tokens, int kv_heads, int head_dim, int num_layers) const {
  OSCAR_CHECK(tokens > 0);
  return 8.0 * static_cast<double>(StoredBytes(tokens, kv_heads, head_dim, num_layers)) /
         (2.0 * static_cast<double>(tokens) * kv_heads * head_dim * num_layers);
}

std::string KvMethod::Describe(int kv_heads, int head_dim) const {
  const bool calibrated = k_rotation == RotationKind::kCalibrated;
  const bool none = k_rotation == RotationKind::kNone && v_rotation == RotationKind::kNone;
  // History bits are those of quantised layers; where others stay BF16, that has to be said.
  const std::string skipped =
      skip_first_layers + skip_last_layers > 0
          ? fmt::format(", first {} and last {} layers BF16", skip_first_layers, skip_last_layers)
          : "";
  return fmt::format("{} ({}), {}, {:.4g} history bits{}", name,
                     calibrated ? "calibrated rotation"
                     : none     ? "no rotation"
                                : "Hadamard",
                     is_simulated() ? "simulated" : "real", HistoryBits(kv_heads, head_dim),
                     skipped);
}

}  // namespace oscar
