#include "rotation/recipe.h"

#include <fmt/core.h>

#include <array>
#include <optional>

#include "base/check.h"
#include "numeric/hadamard.h"

namespace oscar {
namespace {

struct ObjectiveRow {
  Objective objective;
  std::string_view name;
  bool for_k;
  bool for_v;
};
// Longer names before their prefixes, so that splitting at the first match is right.
constexpr std::array<ObjectiveRow, 8> kObjectives = {{
    {Objective::kQqt, "qqt", true, false},
    {Objective::kKtk, "ktk", true, false},
    {Objective::kSstExact, "sst_exact", false, true},
    {Objective::kSst, "sst", false, true},
    {Objective::kVtv, "vtv", false, true},
    {Objective::kUresidual, "uresidual", true, true},
    {Objective::kHadamard, "hadamard", true, true},
    {Objective::kIdentity, "identity", true, true},
}};

// Factors as a string over R, H and P, multiplied left to right.
struct CompositionRow {
  Composition composition;
  std::string_view name;
  std::string_view factors;
};
constexpr std::array<CompositionRow, 9> kCompositions = {{
    {Composition::kPlain, "plain", "R"},
    {Composition::kPbr, "pbr", "P"},
    {Composition::kBr, "br", "RP"},
    {Composition::kBrH128, "br_h128", "RPH"},
    {Composition::kRH, "r_h", "RH"},
    {Composition::kHPbr, "h_pbr", "HP"},
    {Composition::kHRPbr, "h_r_pbr", "HRP"},
    {Composition::kHPbrR, "h_pbr_r", "HPR"},
    {Composition::kRHPbr, "r_h_pbr", "RHP"},
}};

const ObjectiveRow* FindObjective(std::string_view name) {
  for (const ObjectiveRow& row : kObjectives) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

}  // namespace

std::string_view NameOf(Objective objective) {
  for (const ObjectiveRow& row : kObjectives) {
    if (row.objective == objective) return row.name;
  }
  OSCAR_CHECK(false, "objective {}", static_cast<int>(objective));
  return {};
}

std::string_view NameOf(Composition composition) {
  for (const CompositionRow& row : kCompositions) {
    if (row.composition == composition) return row.name;
  }
  OSCAR_CHECK(false, "composition {}", static_cast<int>(composition));
  return {};
}

std::string NameOf(const ObjectivePair& pair) {
  if (pair.k == pair.v) return std::string(NameOf(pair.k));
  return fmt::format("{}_{}", NameOf(pair.k), NameOf(pair.v));
}

bool IgnoresComposition(Objective objective) {
  return objective == Objective::kUresidual || objective == Objective::kHadamard ||
         objective == Objective::kIdentity;
}

Result<ObjectivePair> ParseObjectives(std::string_view text) {
  if (const ObjectiveRow* both = FindObjective(text);
      both != nullptr && both->for_k && both->for_v) {
    return ObjectivePair{both->objective, both->objective};
  }
  for (const ObjectiveRow& k : kObjectives) {
    if (!k.for_k || text.size() <= k.name.size() || !text.starts_with(k.name) ||
        text[k.name.size()] != '_') {
      continue;
    }
    const ObjectiveRow* v = FindObjective(text.substr(k.name.size() + 1));
    if (v != nullptr && v->for_v) return ObjectivePair{k.objective, v->objective};
  }
  return Unexpected(InvalidArgument(fmt::format(
      "objective '{}' is not known; give K's and V's joined by '_' (K: qqt ktk uresidual hadamard "
      "identity; V: sst sst_exact vtv uresidual hadamard identity), e.g. qqt_sst, or hadamard, "
      "identity or uresidual for both",
      text)));
}

Result<Composition> ParseComposition(std::string_view text) {
  for (const CompositionRow& row : kCompositions) {
    if (row.name == text) return row.composition;
  }
  std::string names;
  for (const CompositionRow& row : kCompositions) names += fmt::format(" {}", row.name);
  return Unexpected(
      InvalidArgument(fmt::format("composition '{}' is not known; one of:{}", text, names)));
}

std::string ZooObjective(std::string_view objective, std::string_view composition) {
  const ObjectiveRow* row = FindObjective(objective);
  if (composition.empty() || (row != nullptr && IgnoresComposition(row->objective))) {
    return std::string(objective);
  }
  return fmt::format("{}_{}", objective, composition);
}

void SplitZooObjective(std::string_view text, std::string& objective, std::string& composition) {
  objective = text;
  composition.clear();
  for (const ObjectiveRow& row : kObjectives) {
    if (text.size() > row.name.size() && text.starts_with(row.name) &&
        text[row.name.size()] == '_') {
      const std::string_view rest = text.substr(row.name.size() + 1);
      if (ParseComposition(rest).has_value()) {
        objective = row.name;
        composition = rest;
        return;
      }
    }
  }
}

Result<Matrix> Compose(const Matrix& r, std::span<const double> eigenvalues,
                       Composition composition) {
  const int dim = r.rows();
  OSCAR_CHECK(r.cols() == dim && eigenvalues.size() == static_cast<size_t>(dim));
  std::string_view factors;
  for (const CompositionRow& row : kCompositions) {
    if (row.composition == composition) factors = row.factors;
  }
  if (factors != "R" && !IsPowerOfTwo(dim)) {
    return Unexpected(InvalidArgument(fmt::format(
        "composition {} needs a head dimension that is a power of two, not {}; use plain",
        NameOf(composition), dim)));
  }
  std::optional<Matrix> product;
  for (const char factor : factors) {
    if (factor == 'P') {
      const std::vector<int> perm = BitReversalPermutation(eigenvalues);
      product = (product ? *product : Matrix::Identity(dim)).PermutedColumns(perm);
    } else {
      const Matrix next = factor == 'R' ? r : HadamardMatrix(dim);
      product = product ? Multiply(*product, next) : next;
    }
  }
  return *product;
}

}  // namespace oscar
