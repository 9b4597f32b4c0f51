#include "quant/kv_method.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <vector>

#include "quant/affine_rows.h"
#include "quant/kitty.h"
#include "quant/kivi.h"
#include "quant/oscar_su.h"
#include "quant/page_shape.h"
#include "quant/turboquant.h"
#include "quant/uniform_rows.h"

namespace oscar {
namespace {

constexpr int kLargestBlockHadamard = 128;  // Saw-INT4 offers orders 16 to 128

enum class RotationFile : uint8_t { kRefused, kOptional, kRequired };

constexpr double kKittyFraction = 0.125;

// One side of a method, before the head dim is known.
struct Side {
  RotationKind rotation = RotationKind::kNone;  // where no rotation file is given
  RowRule rule = RowRule::kMinMax;
  float clip = 0.0f;
  int bits = 2;
  SideForm form = SideForm::kRows;
  int group = 128;  // dims of rows, or the head where it is smaller; tokens of channels
  TokenNorm norm = TokenNorm::kNone;
};

// A method is its row: nothing else in the library asks for a name.
struct Method {
  std::string_view name, summary;
  Side k = {}, v = {};
  int sink = 0, recent = 0;
  int defined_sink = 0;  // of the published form, where it is not whole pages
  int skip_layers = 0;   // that stay BF16 at either end
  RotationFile rotation_file = RotationFile::kRefused;
  std::optional<Side> v_calibrated = {};  // V, where a rotation file is given
  bool takes_bits = false;
  std::string_view switches = {};
  bool is_quantized = true;
  bool takes_group = false;  // KvMethodOptions::group_dims
};

using enum RotationKind;
using enum SideForm;

// One group per row, whatever the head dim.
constexpr Side kTurboQuantV = {.bits = 3, .group = kMaxHeadDim};

constexpr Method kMethods[] = {
    {.name = "bf16", .summary = "every number in BF16", .is_quantized = false},
    {.name = "naive", .summary = "INT2 min/max rows, no rotation", .takes_group = true},
    {.name = "naive-sym",
     .summary = "INT2 symmetric rows (levels -2 to 1), no rotation",
     .k = {.rule = RowRule::kSymmetric},
     .v = {.rule = RowRule::kSymmetric},
     .takes_group = true},
    {.name = "quarot",
     .summary = "INT2 min/max rows on Hadamard-rotated K and V",
     .k = {.rotation = kHadamard},
     .v = {.rotation = kHadamard},
     .takes_group = true},
    {.name = "saw-int4",
     .summary = "INT4 min/max rows, block Hadamard on K",
     .k = {.rotation = kBlockHadamard, .bits = 4},
     .v = {.bits = 4},
     .takes_group = true},
    {.name = "int4",
     .summary = "INT4 min/max rows, no rotation",
     .k = {.bits = 4},
     .v = {.bits = 4},
     .takes_group = true},
    {.name = "turboquant",
     .summary = "3-bit Lloyd-Max keys on a Hadamard, 3-bit values, all layers",
     .k = {.rotation = kHadamard, .bits = 3, .form = kCodebook},
     .v = kTurboQuantV,
     .switches = "bits k_bits v_bits"},
    {.name = "turboquant-skip",  // as vLLM ships it
     .summary = "turboquant with the first and last two layers in BF16",
     .k = {.rotation = kHadamard, .bits = 3, .form = kCodebook},
     .v = kTurboQuantV,
     .skip_layers = 2,
     .switches = "bits k_bits v_bits"},
    {.name = "kivi",
     .summary = "2-bit keys per channel over 32 tokens, values in groups of 32",
     .k = {.rule = RowRule::kRealMin, .form = kChannels, .group = 32},
     .v = {.rule = RowRule::kRealMin, .group = 32},
     .recent = 128,
     .switches = "bits k_bits v_bits group"},
    {.name = "kivi-sink",
     .summary = "2-bit keys per channel over 128 tokens, values in groups of 128, BF16 sink",
     .k = {.rule = RowRule::kRealMin, .form = kChannels, .group = 128},
     .v = {.rule = RowRule::kRealMin},
     .sink = 64,
     .recent = 128,
     .defined_sink = 32,
     .switches = "bits k_bits v_bits group"},
    {.name = "oscar-su",
     .summary = "OScaR: token norm, Hadamard, 2-bit keys per channel over 32 tokens",
     .k = {.rotation = kHadamard,
           .rule = RowRule::kIntegerZero,
           .form = kChannels,
           .group = 32,
           .norm = TokenNorm::kAllHeads},
     .v = {.rotation = kHadamard, .rule = RowRule::kIntegerZero, .group = 32},
     .recent = 128,
     .switches = "bits k_bits v_bits group norm rotation k"},
    {.name = "oscar",
     .summary = "published OSCAR: calibrated rotation, clipped INT2 rows",
     .k = {.clip = 0.96f},
     .v = {.clip = 0.92f},
     .sink = 64,
     .recent = 256,
     .rotation_file = RotationFile::kRequired,
     .takes_group = true},
    {.name = "oscar+",
     .summary = "unbiased INT2 fit; calibrated rotation where given, else the Hadamard",
     .k = {.rotation = kHadamard, .rule = RowRule::kMseFitUnbiased},
     .v = {.rotation = kHadamard, .rule = RowRule::kMseFit},
     .sink = 64,
     .recent = 256,
     .rotation_file = RotationFile::kOptional,
     .v_calibrated = Side{.clip = 0.92f},
     .takes_bits = true,
     .takes_group = true},
    {.name = "kitty",
     .summary = "2-bit keys per channel over 128 tokens, 1/8 of the channels at 4 bits",
     .k = {.form = kMixed, .group = kMaxGroupTokens},
     .v = {},
     .sink = 64,
     .recent = 128,
     .defined_sink = 32},
    {.name = "lloyd-max",
     .summary = "INT2 rows by mean and deviation (OSCAR's Lloyd-Max switch), clipped, Hadamard",
     .k = {.rotation = kHadamard, .rule = RowRule::kLloydMax, .clip = 0.96f},
     .v = {.rotation = kHadamard, .rule = RowRule::kLloydMax, .clip = 0.92f},
     .sink = 64,
     .recent = 256,
     .takes_group = true},
};

constexpr auto kInfos = [] {
  std::array<KvMethodInfo, std::size(kMethods)> infos;
  for (size_t i = 0; i < infos.size(); ++i) {
    const Method& method = kMethods[i];
    infos[i] = {method.name,
                method.summary,
                method.rotation_file != RotationFile::kRefused,
                method.rotation_file == RotationFile::kRequired,
                method.takes_bits,
                method.switches};
  }
  return infos;
}();

// Of a name that may carry switches.
Result<const Method*> FindMethod(std::string_view spec) {
  const std::string_view name = spec.substr(0, spec.find(':'));
  const auto* found = std::ranges::find(kMethods, name, &Method::name);
  if (found != std::end(kMethods)) return found;
  std::vector<std::string_view> names;
  for (const Method& method : kMethods) names.push_back(method.name);
  return Unexpected(InvalidArgument(fmt::format("unknown KV method \"{}\": one of {}", name,
                                                fmt::join(names, ", ")))
                        .WithParam("kv"));
}

Status SwitchError(const Method& method, std::string_view part, std::string_view what) {
  return InvalidArgument(fmt::format("KV method {}, switch \"{}\": {}", method.name, part, what))
      .WithParam("kv");
}

// The value's place in `values`, -1 where it is none of them.
int IndexOf(std::string_view value, std::initializer_list<std::string_view> values) {
  const auto* found = std::ranges::find(values, value);
  return found == values.end() ? -1 : static_cast<int>(found - values.begin());
}

// Applies the switches of `spec` to the sides of its row.
Status ApplySwitches(std::string_view spec, const Method& method, Side* k, Side* v) {
  bool sets_norm = false;
  for (size_t at = spec.find(':'); at != std::string_view::npos;) {
    const size_t end = spec.find(':', at + 1);
    const std::string_view part =
        spec.substr(at + 1, end == std::string_view::npos ? std::string_view::npos : end - at - 1);
    at = end;
    const size_t equals = part.find('=');
    const std::string_view key = part.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view() : part.substr(equals + 1);
    const bool known =
        !key.empty() &&
        fmt::format(" {} ", method.switches).find(fmt::format(" {} ", key)) != std::string::npos;
    if (!known) {
      return SwitchError(method, part,
                         method.switches.empty()
                             ? "this method has none"
                             : fmt::format("its switches are {}", method.switches));
    }
    if (key == "bits" || key == "k_bits" || key == "v_bits") {
      const int index = IndexOf(value, {"2", "3", "4"});
      if (index < 0) return SwitchError(method, part, "must be 2, 3 or 4");
      if (key != "v_bits") k->bits = 2 + index;
      if (key != "k_bits") v->bits = 2 + index;
    } else if (key == "group") {
      const int index = IndexOf(value, {"32", "64", "128"});
      if (index < 0) return SwitchError(method, part, "must be 32, 64 or 128");
      k->group = v->group = 32 << index;
    } else if (key == "norm") {
      const int index = IndexOf(value, {"none", "all", "head"});
      if (index < 0) return SwitchError(method, part, "must be all, head or none");
      k->norm = static_cast<TokenNorm>(index);
      sets_norm = true;
    } else if (key == "rotation") {
      const int index = IndexOf(value, {"off", "on"});
      if (index < 0) return SwitchError(method, part, "must be on or off");
      k->rotation = v->rotation = index == 0 ? kNone : kHadamard;
    } else {
      const int index = IndexOf(value, {"token", "channel"});
      if (index < 0) return SwitchError(method, part, "must be channel or token");
      k->form = index == 0 ? kRows : kChannels;
    }
  }
  if (k->form == kRows && k->norm != TokenNorm::kNone) {
    if (sets_norm) {
      return SwitchError(method, "k=token",
                         "a norm changes nothing where each token has its own "
                         "scale; leave norm out");
    }
    k->norm = TokenNorm::kNone;
  }
  return {};
}

std::shared_ptr<const KvQuantizer> MakeQuantizer(const KvSide& side, bool is_quantized) {
  const RowSpec& rows = side.rows;
  if (!is_quantized) return std::make_shared<Bf16Rows>();
  switch (side.form) {
    case kRows:
      if (rows.rule == RowRule::kRealMin || rows.rule == RowRule::kIntegerZero) {
        return std::make_shared<AffineRows>(
            AffineRowSpec{rows.rule, rows.bits, rows.group_dims, rows.meta});
      }
      return std::make_shared<UniformRows>(rows);
    case kChannels:
      if (rows.rule == RowRule::kRealMin) {
        return std::make_shared<KiviKeys>(rows.bits, side.group_tokens, rows.meta);
      }
      return std::make_shared<OscarSuKeys>(
          OscarSuSpec{rows.bits, side.group_tokens, side.norm, rows.meta});
    case kMixed:
      return std::make_shared<KittyKeys>(kKittyFraction);
    case kCodebook:
      break;
  }
  return std::make_shared<TurboQuantKeys>(rows.bits, /*renormalize=*/true);
}

// A side for heads of that many dims.
KvSide MakeSide(const Side& side, const Method& method, const KvMethodOptions& options) {
  KvSide out;
  out.rotation = options.has_rotation ? kCalibrated : side.rotation;
  out.form = side.form;
  out.norm = side.norm;
  const int group = side.form == kRows ? side.group : options.head_dim;
  out.rows = {side.rule, side.bits,
              options.group_dims && method.takes_group ? *options.group_dims
                                                       : std::min(options.head_dim, group),
              side.clip, MetaType::kFp16};
  if (side.form == kChannels || side.form == kMixed) out.group_tokens = side.group;
  if (side.form == kMixed) {
    out.boosted_dims = static_cast<int>(std::lround(kKittyFraction * options.head_dim));
  }
  return out;
}

// Bits per number of one side.
double SideBits(const KvSide& side, int kv_heads, int head_dim) {
  const double norm = side.norm == TokenNorm::kNone       ? 0.0
                      : side.norm == TokenNorm::kAllHeads ? 32.0 / (kv_heads * head_dim)
                                                          : 32.0 / head_dim;
  switch (side.form) {
    case kRows:
      break;
    case kChannels:
      return side.rows.bits + 32.0 / side.group_tokens + norm;
    case kMixed:
      return side.rows.bits + 2.0 * side.boosted_dims / head_dim + (8.0 + 32.0) / side.group_tokens;
    case kCodebook:
      return side.rows.bits + 16.0 / head_dim;
  }
  return side.rows.bits + 32.0 / side.rows.group_dims;
}

Status SetClip(std::string_view method, const char* name, std::optional<float> clip,
               bool is_quantized, KvSide* side) {
  if (!clip.has_value()) return {};
  if (!(*clip >= 0.0f && *clip <= 1.0f)) {
    return InvalidArgument(fmt::format("{} clip ratio {}: must lie in [0, 1]; 0 turns the clip off",
                                       name, *clip))
        .WithParam(fmt::format("{}_clip", name));
  }
  const bool clips = is_quantized && side->form == kRows && Clips(side->rows.rule);
  if (!clips) {
    return InvalidArgument(fmt::format("{} clip ratio {}: method {} chooses {}'s range without one",
                                       name, *clip, method, name))
        .WithParam(fmt::format("{}_clip", name));
  }
  side->rows.clip_ratio = *clip;
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
  Side k_side = method.k, v_side = method.v;
  OSCAR_RETURN_IF_ERROR(ApplySwitches(options.name, method, &k_side, &v_side));
  if (options.has_rotation && method.v_calibrated) v_side = *method.v_calibrated;
  KvMethod m;
  m.name = options.name;
  m.is_quantized = method.is_quantized;
  m.sink_tokens = method.sink;
  m.recent_tokens = method.recent;
  m.defined_sink = method.defined_sink;
  m.skip_first_layers = m.skip_last_layers = method.skip_layers;
  m.k = MakeSide(k_side, method, options);
  m.v = MakeSide(v_side, method, options);
  m.run_tokens = std::max(kPageTokens, m.k.group_tokens);
  if (m.k.rotation == kBlockHadamard) {
    m.hadamard_block = std::min(options.head_dim, kLargestBlockHadamard);
  }
  const int group = m.k.rows.group_dims;
  if (options.group_dims.has_value() && !method.takes_group) {
    return Unexpected(
        InvalidArgument(fmt::format("group size {}: method {} has its own groups{}",
                                    *options.group_dims, method.name,
                                    method.switches.find("group") != std::string_view::npos
                                        ? fmt::format("; --kv {}:group=N sets them", method.name)
                                        : ""))
            .WithParam("group_dims"));
  }
  if (method.takes_group && group != 32 && group != 64 && group != 128 &&
      group != options.head_dim) {
    return Unexpected(
        InvalidArgument(fmt::format("group size {}: must be 32, 64, 128 or the head dim and divide "
                                    "it ({})",
                                    group, options.head_dim))
            .WithParam("group_dims"));
  }
  OSCAR_RETURN_IF_ERROR(SetClip(m.name, "k", options.k_clip, m.is_quantized, &m.k));
  OSCAR_RETURN_IF_ERROR(SetClip(m.name, "v", options.v_clip, m.is_quantized, &m.v));
  OSCAR_RETURN_IF_ERROR(SetWindow("sink", options.sink_tokens, &m.sink_tokens));
  OSCAR_RETURN_IF_ERROR(SetWindow("recent", options.recent_tokens, &m.recent_tokens));
  if (m.defined_sink == 0 || options.sink_tokens.has_value()) m.defined_sink = m.sink_tokens;
  const TileShape block{m.run_tokens, 1, options.head_dim};
  for (KvSide* side : {&m.k, &m.v}) {
    side->quantizer = MakeQuantizer(*side, m.is_quantized);
    Status status = side->quantizer->CheckShape(block);
    if (status.ok()) continue;
    return Unexpected(std::move(status).WithParam(options.group_dims ? "group_dims" : "head_dim"));
  }
  return m;
}

bool KvMethod::IsQuantizedLayer(int layer, int num_layers) const {
  return is_quantized && layer >= skip_first_layers && layer < num_layers - skip_last_layers;
}

TokenSplit KvMethod::Split(int64_t tokens) const {
  if (!is_quantized) return {0, 0, tokens};
  TokenSplit split;
  split.sink = std::min<int64_t>(tokens, sink_tokens);
  const int64_t old = tokens - split.sink - recent_tokens;
  split.history = old > 0 ? old / run_tokens * run_tokens : 0;
  split.newest = tokens - split.sink - split.history;
  return split;
}

double KvMethod::HistoryBits(int kv_heads, int head_dim) const {
  if (!is_quantized) return 16.0;
  return 0.5 * (SideBits(k, kv_heads, head_dim) + SideBits(v, kv_heads, head_dim));
}

std::string KvMethod::Describe(double history_bits) const {
  const bool calibrated = k.rotation == RotationKind::kCalibrated;
  const bool none = k.rotation == RotationKind::kNone && v.rotation == RotationKind::kNone;
  // History bits are those of quantised layers; where others stay BF16, that has to be said.
  const std::string skipped =
      skip_first_layers + skip_last_layers > 0
          ? fmt::format(", first {} and last {} layers BF16", skip_first_layers, skip_last_layers)
          : "";
  return fmt::format("{} ({}), {:.4g} history bits{}", name,
                     calibrated ? "calibrated rotation"
                     : none     ? "no rotation"
                                : "Hadamard",
                     history_bits, skipped);
}

}  // namespace oscar
