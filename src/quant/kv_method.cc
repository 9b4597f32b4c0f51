#include "quant/kv_method.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <vector>

#include "base/check.h"
#include "quant/kitty.h"
#include "quant/kivi.h"
#include "quant/oscar_su.h"
#include "quant/page_shape.h"
#include "quant/turboquant.h"
#include "quant/uniform_rows.h"

namespace oscar {
namespace {

constexpr int kLargestBlockHadamard = 128;  // Saw-INT4 offers orders 16 to 128
constexpr int kWideGroup = 128;             // dims, or the head where it is smaller

enum class RotationFile : uint8_t { kRefused, kOptional, kRequired };

using Quantizer = std::shared_ptr<const KvQuantizer>;

// One side of a method. Pages: a rule for rows. Simulated: a quantiser for heads of that many dims.
struct Side {
  RotationKind rotation = RotationKind::kNone;  // where no rotation file is given
  RowRule rule = RowRule::kMinMax;
  float clip = 0.0f;
  Quantizer (*make)(int head_dim) = nullptr;
};

// A method is its row: nothing else in the library asks for a name.
struct Method {
  std::string_view name, summary;
  KvStorage storage = KvStorage::kSimulated;
  Side k, v;
  int sink = 0, recent = 0;
  int defined_sink = 0;  // of the published form, where it is not whole pages
  int run_tokens = kPageTokens;
  int skip_layers = 0;  // that stay BF16 at either end
  RotationFile rotation_file = RotationFile::kRefused;
  std::optional<Side> v_calibrated = {};  // V, where a rotation file is given
  bool takes_bits = false;
};

template <int kBits, int kGroup>  // a group of 0 dims is the head
Quantizer MinMaxRows(int head_dim) {
  const int group = kGroup == 0 ? head_dim : std::min(head_dim, kGroup);
  return std::make_shared<UniformRows>(
      RowSpec{RowRule::kMinMax, kBits, group, 0.0f, MetaType::kFp16});
}
template <int kTokens>
Quantizer KiviK(int) {
  return std::make_shared<KiviKeys>(2, kTokens, MetaType::kFp16);
}
template <int kGroup>
Quantizer KiviV(int head_dim) {
  return MakeKiviValues(2, std::min(head_dim, kGroup), MetaType::kFp16);
}
Quantizer TurboQuantK(int) { return std::make_shared<TurboQuantKeys>(3, /*renormalize=*/true); }
Quantizer OscarSuK(int) { return std::make_shared<OscarSuKeys>(OscarSuSpec{}); }
Quantizer OscarSuV(int) { return MakeOscarSuValues(2, 32, MetaType::kFp16); }
Quantizer KittyK(int) { return std::make_shared<KittyKeys>(/*boosted_fraction=*/0.125); }
Quantizer Bf16Side(int) { return std::make_shared<Bf16Rows>(); }

using enum RotationKind;
using enum KvStorage;

constexpr Method kMethods[] = {
    {.name = "bf16",
     .summary = "every number in BF16",
     .storage = KvStorage::kBf16,
     .k = {.make = Bf16Side},
     .v = {.make = Bf16Side}},
    {.name = "naive",
     .summary = "INT2 min/max rows, no rotation",
     .storage = kInt2Pages,
     .k = {},
     .v = {}},
    {.name = "quarot",
     .summary = "INT2 min/max rows on Hadamard-rotated K and V",
     .storage = kInt2Pages,
     .k = {.rotation = kHadamard},
     .v = {.rotation = kHadamard}},
    {.name = "saw-int4",
     .summary = "INT4 min/max rows, block Hadamard on K",
     .storage = kInt4Pages,
     .k = {.rotation = kBlockHadamard},
     .v = {}},
    {.name = "int4",
     .summary = "INT4 min/max rows, no rotation",
     .storage = kInt4Pages,
     .k = {},
     .v = {}},
    {.name = "turboquant",
     .summary = "3-bit Lloyd-Max keys on a Hadamard, 3-bit values, all layers",
     .k = {.rotation = kHadamard, .make = TurboQuantK},
     .v = {.make = MinMaxRows<3, 0>}},
    {.name = "turboquant-skip",  // as vLLM ships it
     .summary = "turboquant with the first and last two layers in BF16",
     .k = {.rotation = kHadamard, .make = TurboQuantK},
     .v = {.make = MinMaxRows<3, 0>},
     .skip_layers = 2},
    {.name = "kivi",
     .summary = "2-bit keys per channel over 32 tokens, values in groups of 32",
     .k = {.make = KiviK<32>},
     .v = {.make = KiviV<32>},
     .recent = 128},
    {.name = "kivi-sink",
     .summary = "2-bit keys per channel over 128 tokens, values in groups of 128, BF16 sink",
     .k = {.make = KiviK<128>},
     .v = {.make = KiviV<kWideGroup>},
     .sink = 64,
     .recent = 128,
     .defined_sink = 32,
     .run_tokens = 128},
    {.name = "oscar-su",
     .summary = "OScaR: token norm, Hadamard, 2-bit keys per channel over 32 tokens",
     .k = {.rotation = kHadamard, .make = OscarSuK},
     .v = {.rotation = kHadamard, .make = OscarSuV},
     .recent = 128},
    {.name = "oscar",
     .summary = "published OSCAR: calibrated rotation, clipped INT2 rows",
     .storage = kInt2Pages,
     .k = {.clip = 0.96f},
     .v = {.clip = 0.92f},
     .sink = 64,
     .recent = 256,
     .rotation_file = RotationFile::kRequired},
    {.name = "oscar+",
     .summary = "unbiased INT2 fit; calibrated rotation where given, else the Hadamard",
     .storage = kInt2Pages,
     .k = {.rotation = kHadamard, .rule = RowRule::kMseFitUnbiased},
     .v = {.rotation = kHadamard, .rule = RowRule::kMseFit},
     .sink = 64,
     .recent = 256,
     .rotation_file = RotationFile::kOptional,
     .v_calibrated = Side{.clip = 0.92f},
     .takes_bits = true},
    {.name = "kitty",
     .summary = "2-bit keys per channel over 128 tokens, 1/8 of the channels at 4 bits",
     .k = {.make = KittyK},
     .v = {.make = MinMaxRows<2, kWideGroup>},
     .sink = 64,
     .recent = 128,
     .defined_sink = 32,
     .run_tokens = KittyKeys::kPage},
};

constexpr auto kInfos = [] {
  std::array<KvMethodInfo, std::size(kMethods)> infos;
  for (size_t i = 0; i < infos.size(); ++i) {
    const Method& method = kMethods[i];
    infos[i] = {method.name, method.summary, method.rotation_file != RotationFile::kRefused,
                method.rotation_file == RotationFile::kRequired, method.takes_bits};
  }
  return infos;
}();

Result<const Method*> FindMethod(std::string_view name) {
  const auto* found = std::ranges::find(kMethods, name, &Method::name);
  if (found != std::end(kMethods)) return found;
  std::vector<std::string_view> names;
  for (const Method& method : kMethods) names.push_back(method.name);
  return Unexpected(InvalidArgument(fmt::format("unknown KV method \"{}\": one of {}", name,
                                                fmt::join(names, ", ")))
                        .WithParam("kv"));
}

// A side for heads of that many dims; `group` is that of page rows.
void SetSide(const Side& side, const Method& method, const KvMethodOptions& options, int group,
             RotationKind* rotation, RowSpec* rows, Quantizer* quantizer) {
  *rotation = options.has_rotation ? kCalibrated : side.rotation;
  if (side.make != nullptr) {
    *quantizer = side.make(options.head_dim);
  } else {
    *rows = {side.rule, method.storage == kInt2Pages ? 2 : 4, group, side.clip, MetaType::kFp16};
  }
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

std::span<const KvMethodInfo> KvMethodTable() { return kInfos; }

Result<KvMethodInfo> FindKvMethod(std::string_view name) {
  OSCAR_ASSIGN_OR_RETURN(const Method* method, FindMethod(name));
  return kInfos[static_cast<size_t>(method - kMethods)];
}

Result<KvMethod> MakeKvMethod(const KvMethodOptions& options) {
  OSCAR_ASSIGN_OR_RETURN(const Method* found, FindMethod(options.name));
  const Method& method = *found;
  if (method.rotation_file == RotationFile::kRequired && !options.has_rotation) {
    return Unexpected(InvalidArgument(fmt::format("KV method {} needs a rotation: fit one with "
                                                  "`oscar calibrate` and pass --rotation, or use "
                                                  "oscar+, which needs none",
                                                  method.name))
                          .WithParam("rotation"));
  }
  if (options.has_rotation && method.rotation_file == RotationFile::kRefused) {
    return Unexpected(InvalidArgument(fmt::format("KV method {} uses no rotation file: drop "
                                                  "--rotation, or choose oscar or oscar+",
                                                  method.name))
                          .WithParam("rotation"));
  }
  const int group = options.group_dims.value_or(std::min(options.head_dim, kWideGroup));
  KvMethod m;
  m.name = method.name;
  m.storage = method.storage;
  m.run_tokens = method.run_tokens;
  m.sink_tokens = method.sink;
  m.recent_tokens = method.recent;
  m.defined_sink = method.defined_sink;
  m.skip_first_layers = m.skip_last_layers = method.skip_layers;
  SetSide(method.k, method, options, group, &m.k_rotation, &m.k_rows, &m.k_quantizer);
  SetSide(options.has_rotation && method.v_calibrated ? *method.v_calibrated : method.v, method,
          options, group, &m.v_rotation, &m.v_rows, &m.v_quantizer);
  if (m.k_rotation == kBlockHadamard) {
    m.hadamard_block = std::min(options.head_dim, kLargestBlockHadamard);
  }
  if (options.group_dims.has_value() && !IsPages(m)) {
    return Unexpected(InvalidArgument(fmt::format("group size {}: method {} has its own groups",
                                                  group, method.name))
                          .WithParam("group_dims"));
  }
  if (IsPages(m) && group != 32 && group != 64 && group != 128 && group != options.head_dim) {
    return Unexpected(
        InvalidArgument(fmt::format("group size {}: must be 32, 64, 128 or the head dim and divide "
                                    "it ({})",
                                    group, options.head_dim))
            .WithParam("group_dims"));
  }
  OSCAR_RETURN_IF_ERROR(SetClip(method.name, "k", options.k_clip, IsPages(m), &m.k_rows));
  OSCAR_RETURN_IF_ERROR(SetClip(method.name, "v", options.v_clip, IsPages(m), &m.v_rows));
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

std::string KvMethod::Describe(double history_bits) const {
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
                     is_simulated() ? "simulated" : "real", history_bits, skipped);
}

}  // namespace oscar
