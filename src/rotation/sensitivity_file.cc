#include "rotation/sensitivity_file.h"

#include <fmt/core.h>

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error_text.h"
#include "base/file.h"
#include "base/json.h"
#include "rotation/rotation.h"

namespace oscar {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr char kFormat[] = "oscar-sensitivity-1";
constexpr uint64_t kMaxBytes = uint64_t{64} << 20;
constexpr size_t kMaxTextBytes = 4096;
constexpr int kMaxLayerId = 1'000'000;

Result<std::string> TextField(const json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_string() ||
      found->get_ref<const std::string&>().size() > kMaxTextBytes) {
    return Unexpected(
        DataLoss(fmt::format("\"{}\" must be a string of at most {} bytes", name, kMaxTextBytes)));
  }
  return found->get<std::string>();
}

Result<std::vector<double>> Numbers(const json& layer, const char* side, std::string_view id) {
  const auto found = layer.find(side);
  if (found == layer.end() || !found->is_array() || found->empty() ||
      found->size() > kMaxRotationHeads) {
    return Unexpected(DataLoss(fmt::format("layer {}: \"{}\" must be a list of 1 to {} numbers", id,
                                           side, kMaxRotationHeads)));
  }
  std::vector<double> out;
  for (const json& value : *found) {
    const double number = value.is_number() ? value.get<double>() : -1.0;
    if (!std::isfinite(number) || number < 0) {
      return Unexpected(
          DataLoss(fmt::format("layer {}: \"{}\" of head {} must be a number that is not negative",
                               id, side, out.size())));
    }
    out.push_back(number);
  }
  return out;
}

Result<Sensitivities> Parse(const json& root) {
  if (!root.is_object()) return Unexpected(DataLoss("must be an object"));
  Sensitivities out;
  OSCAR_ASSIGN_OR_RETURN(const std::string format, TextField(root, "format"));
  if (format != kFormat) {
    return Unexpected(
        Unimplemented(fmt::format("format {}; this program reads {}", Quote(format), kFormat)));
  }
  OSCAR_ASSIGN_OR_RETURN(out.model_fingerprint, TextField(root, "model_fingerprint"));
  OSCAR_ASSIGN_OR_RETURN(out.rotation, TextField(root, "rotation"));
  if (out.rotation != "hadamard" && out.rotation != "calibrated") {
    return Unexpected(DataLoss(
        fmt::format("\"rotation\" is {}; hadamard or calibrated is known", Quote(out.rotation))));
  }
  OSCAR_ASSIGN_OR_RETURN(out.measure, TextField(root, "measure"));
  if (out.measure != "kl" && out.measure != "proxy") {
    return Unexpected(
        DataLoss(fmt::format("\"measure\" is {}; kl or proxy is known", Quote(out.measure))));
  }
  const auto tokens = root.find("tokens");
  if (tokens == root.end() || !tokens->is_number_unsigned() ||
      tokens->get<uint64_t>() > uint64_t{1} << 62) {
    return Unexpected(DataLoss("\"tokens\" must be a count"));
  }
  out.tokens = static_cast<int64_t>(tokens->get<uint64_t>());
  const auto layers = root.find("layers");
  if (layers == root.end() || !layers->is_object() || layers->empty() ||
      layers->size() > kMaxRotationLayers) {
    return Unexpected(DataLoss(
        fmt::format("\"layers\" must be an object of 1 to {} layers", kMaxRotationLayers)));
  }
  for (const auto& [id, layer] : layers->items()) {
    int number = -1;
    const char* end = id.data() + id.size();
    const auto [stop, error] = std::from_chars(id.data(), end, number);
    if (error != std::errc() || stop != end || number < 0 || number > kMaxLayerId ||
        (id.size() > 1 && id[0] == '0')) {
      return Unexpected(DataLoss(fmt::format("{} is not a layer id", Quote(id))));
    }
    if (!layer.is_object()) {
      return Unexpected(DataLoss(fmt::format("layer {} must be an object with k and v", id)));
    }
    OSCAR_ASSIGN_OR_RETURN(const std::vector<double> k, Numbers(layer, "k", id));
    OSCAR_ASSIGN_OR_RETURN(const std::vector<double> v, Numbers(layer, "v", id));
    if (k.size() != v.size()) {
      return Unexpected(
          DataLoss(fmt::format("layer {} has {} heads of K and {} of V", id, k.size(), v.size())));
    }
    std::vector<HeadSensitivity>& heads = out.layers[number];
    for (size_t i = 0; i < k.size(); ++i) heads.push_back({k[i], v[i]});
  }
  return out;
}

}  // namespace

Result<Sensitivities> ParseSensitivities(std::string_view text, std::string_view what) {
  OSCAR_ASSIGN_OR_RETURN(const json root, ParseJson(text, what));
  Result<Sensitivities> out = Parse(root);
  if (!out.has_value()) return Unexpected(out.error().WithContext(std::string(what)));
  return out;
}

std::string SensitivitiesToJson(const Sensitivities& sensitivities) {
  ordered_json out = {{"format", kFormat},
                      {"model_fingerprint", sensitivities.model_fingerprint},
                      {"rotation", sensitivities.rotation},
                      {"measure", sensitivities.measure},
                      {"tokens", sensitivities.tokens}};
  for (const auto& [id, heads] : sensitivities.layers) {
    ordered_json& layer = out["layers"][std::to_string(id)];
    for (const HeadSensitivity& head : heads) {
      layer["k"].push_back(head.k);
      layer["v"].push_back(head.v);
    }
  }
  return out.dump(2) + "\n";
}

Result<Sensitivities> ReadSensitivities(const std::filesystem::path& path) {
  const std::filesystem::path file = IsDirectory(path) ? path / kSensitivityFileName : path;
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(file, kMaxBytes));
  return ParseSensitivities(text, file.string());
}

Status WriteSensitivities(const std::filesystem::path& path, const Sensitivities& sensitivities) {
  return WriteFileAtomically(path, SensitivitiesToJson(sensitivities));
}

Result<SensitivityMap> MapOf(const Sensitivities& sensitivities, std::span<const int> layer_ids,
                             int num_kv_heads) {
  SensitivityMap out;
  for (const int id : layer_ids) {
    const auto found = sensitivities.layers.find(id);
    if (found == sensitivities.layers.end()) {
      return Unexpected(InvalidArgument(
          fmt::format("the sensitivities have no layer {}, which the model has", id)));
    }
    if (std::cmp_not_equal(found->second.size(), num_kv_heads)) {
      return Unexpected(InvalidArgument(
          fmt::format("the sensitivities have {} KV heads in layer {}; the model has {}",
                      found->second.size(), id, num_kv_heads)));
    }
    out.push_back(found->second);
  }
  if (out.size() != sensitivities.layers.size()) {
    return Unexpected(
        InvalidArgument(fmt::format("the sensitivities are of {} layers; the model has {}",
                                    sensitivities.layers.size(), out.size())));
  }
  return out;
}

}  // namespace oscar
