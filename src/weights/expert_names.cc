#include "weights/expert_names.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <vector>

namespace oscar {
namespace {

enum class Part : uint8_t { kGate, kUp, kDown };

// "PREFIX.experts.7.up_proj.weight": what is before ".7", the number, the part, and what follows.
struct ExpertName {
  std::string_view prefix, suffix;
  int64_t expert = 0;
  Part part = Part::kGate;
};

std::optional<ExpertName> Parse(std::string_view name) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = name.find(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  ExpertName out;
  out.prefix = name.substr(0, at + kExperts.size() - 1);
  const std::string_view rest = name.substr(at + kExperts.size());
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), out.expert);
  if (error != std::errc() || out.expert < 0) return std::nullopt;
  const std::string_view tail = rest.substr(static_cast<size_t>(end - rest.data()));
  struct Known {
    std::string_view text;
    Part part;
  };
  constexpr std::array kParts = {Known{".gate_proj", Part::kGate}, Known{".up_proj", Part::kUp},
                                 Known{".down_proj", Part::kDown}, Known{".w1", Part::kGate},
                                 Known{".w3", Part::kUp},          Known{".w2", Part::kDown}};
  for (const Known& known : kParts) {
    if (!tail.starts_with(known.text) || !tail.substr(known.text.size()).starts_with(".weight")) {
      continue;
    }
    out.part = known.part;
    out.suffix = tail.substr(known.text.size());
    return out;
  }
  return std::nullopt;
}

Result<std::optional<StoredTensor>> FindFused(const Checkpoint& checkpoint,
                                              const std::string& name) {
  const std::optional<ExpertName> expert = Parse(name);
  if (!expert.has_value()) return std::optional<StoredTensor>();
  const bool is_down = expert->part == Part::kDown;
  const std::string fused =
      fmt::format("{}.{}", expert->prefix, is_down ? "down_proj" : "gate_up_proj");
  // ".weight" and ".weight_scale_inv" may have lost the word.
  const StoredTensor* found = checkpoint.Find(fused + std::string(expert->suffix));
  if (found == nullptr) {
    found = checkpoint.Find(fused + std::string(expert->suffix.substr(sizeof(".weight") - 1)));
  }
  if (found == nullptr) return std::optional<StoredTensor>();
  const std::vector<int64_t>& shape = found->shape;
  if (shape.size() != 3 || expert->expert >= shape[0] || shape[1] == 0 ||
      (!is_down && shape[1] % 2 != 0)) {
    return Unexpected(DataLoss(fmt::format(
        "{}: tensor {} has shape {}; expected [experts, {}rows, columns] with {} among them",
        checkpoint.directory(), found->name, ShapeToString(shape), is_down ? "" : "2 x ", name)));
  }
  StoredTensor part = *found;
  part.name = name;
  part.shape = {is_down ? shape[1] : shape[1] / 2, shape[2]};
  part.num_bytes = static_cast<uint64_t>(part.shape[0] * part.shape[1]) * SizeOf(part.dtype);
  const auto index = static_cast<uint64_t>(
      is_down ? expert->expert : 2 * expert->expert + (expert->part == Part::kUp ? 1 : 0));
  part.offset += index * part.num_bytes;
  return std::optional(std::move(part));
}

// The part of expert `index` in a tensor of all, whose first dimension they are.
Result<StoredTensor> PartOf(const Checkpoint& checkpoint, const StoredTensor& all, int64_t index,
                            std::string name) {
  if (all.shape.size() < 2 || index >= all.shape[0]) {
    return Unexpected(DataLoss(
        fmt::format("{}: tensor {} has shape {}; expected [experts, ...]", checkpoint.directory(),
                    all.name, ShapeToString(all.shape)) +
        (all.shape.size() < 2 ? std::string() : fmt::format(" with expert {} among them", index))));
  }
  StoredTensor part = all;
  part.name = std::move(name);
  part.shape.erase(part.shape.begin());
  part.num_bytes = all.num_bytes / static_cast<uint64_t>(all.shape[0]);
  part.offset += static_cast<uint64_t>(index) * part.num_bytes;
  return part;
}

Result<std::optional<StoredTensor>> FindNamed(const Checkpoint& checkpoint,
                                              const std::string& name) {
  if (const StoredTensor* found = checkpoint.Find(name)) return std::optional(*found);
  OSCAR_ASSIGN_OR_RETURN(std::optional<StoredTensor> fused, FindFused(checkpoint, name));
  if (fused.has_value()) return fused;
  constexpr std::string_view kMiniMax = ".block_sparse_moe.", kOthers = ".mlp.";
  const size_t at = name.find(kMiniMax);
  if (at == std::string::npos) return fused;
  std::string other = name;
  other.replace(at, kMiniMax.size(), kOthers);
  if (const std::optional<ExpertName> expert = Parse(other)) {
    constexpr std::array kNames = {"gate_proj", "up_proj", "down_proj"};
    other = fmt::format("{}.{}.{}{}", expert->prefix, expert->expert,
                        kNames[static_cast<size_t>(expert->part)], expert->suffix);
  }
  OSCAR_ASSIGN_OR_RETURN(fused, FindNamed(checkpoint, other));
  if (fused.has_value()) fused->name = name;
  return fused;
}

}  // namespace

Result<std::optional<ExpertPart>> FindExpertPart(const Checkpoint& checkpoint,
                                                 const std::string& name) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = name.find(kExperts);
  if (at == std::string::npos) return std::optional<ExpertPart>();
  const std::string_view rest = std::string_view(name).substr(at + kExperts.size());
  int64_t index = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), index);
  const std::string_view tail = rest.substr(static_cast<size_t>(end - rest.data()));
  constexpr std::array<std::string_view, 4> kTails = {".gate_up_proj", ".gate_up_proj_bias",
                                                      ".down_proj", ".down_proj_bias"};
  if (error != std::errc() || index < 0 || std::ranges::find(kTails, tail) == kTails.end()) {
    return std::optional<ExpertPart>();
  }
  // "...experts" and ".gate_up_proj".
  const std::string all = name.substr(0, at + kExperts.size() - 1) + std::string(tail);
  ExpertPart part;
  const StoredTensor* const blocks =
      tail.ends_with("_bias") ? nullptr : checkpoint.Find(all + "_blocks");
  if (blocks == nullptr) {
    const StoredTensor* const plain = checkpoint.Find(all);
    if (plain == nullptr) {
      return Unexpected(
          NotFound(fmt::format("{}: no tensor {}{}", checkpoint.directory(), all,
                               tail.ends_with("_bias") ? "" : fmt::format(" or {}_blocks", all))));
    }
    OSCAR_ASSIGN_OR_RETURN(part.tensor, PartOf(checkpoint, *plain, index, all));
    return std::optional(std::move(part));
  }
  const StoredTensor* const scales = checkpoint.Find(all + "_scales");
  if (scales == nullptr) {
    return Unexpected(DataLoss(fmt::format("{}: tensor {} has no {}_scales beside it",
                                           checkpoint.directory(), blocks->name, all)));
  }
  for (const StoredTensor* tensor : {blocks, scales}) {
    if (tensor->dtype == DType::kU8) continue;
    return Unexpected(
        DataLoss(fmt::format("{}: tensor {} is {}; expected U8", checkpoint.directory(),
                             tensor->name, NameOf(tensor->dtype))));
  }
  OSCAR_ASSIGN_OR_RETURN(part.tensor, PartOf(checkpoint, *blocks, index, blocks->name));
  OSCAR_ASSIGN_OR_RETURN(part.block_scales, PartOf(checkpoint, *scales, index, scales->name));
  return std::optional(std::move(part));
}

Result<std::optional<StoredTensor>> FindTensor(const Checkpoint& checkpoint,
                                               const std::string& name) {
  OSCAR_ASSIGN_OR_RETURN(std::optional<StoredTensor> found, FindNamed(checkpoint, name));
  if (found.has_value()) return found;
  // Longest first: the last one is the beginning of the first.
  constexpr std::array<std::string_view, 3> kDecoders = {"model.language_model.",
                                                         "language_model.model.", "model."};
  for (const std::string_view own : kDecoders) {
    if (!name.starts_with(own)) continue;
    for (const std::string_view other : kDecoders) {
      if (other == own) continue;
      OSCAR_ASSIGN_OR_RETURN(
          found, FindNamed(checkpoint, fmt::format("{}{}", other, name.substr(own.size()))));
      if (found.has_value()) return found;
    }
    return found;
  }
  return name.starts_with("lm_head.") ? FindNamed(checkpoint, "language_model." + name) : found;
}

}  // namespace oscar
