// The named ways to make a rotation: the objective says which second moment's eigenvectors R are
// taken, the composition how R, the Hadamard matrix H and the bit-reversal permutation P are
// multiplied. Names are those of the published fitter. Free functions; safe from any thread.
//
// Second moments (never centred), Q_h: the g query heads of KV head h stacked, T tokens:
//   qqt        K  A_h = Q_h^T Q_h / (T g)
//   ktk        K  K_h^T K_h / T
//   sst        V  sum_t w_t v_t^T v_t / T, w_t = k_t A_h k_t^T, then w <- w T / max(sum w, 1e-12)
//   sst_exact  V  V^T S^T S V / T with the causal softmax scores S of each query head (scale
//                 1/sqrt(D)), mean over the group
//   vtv        V  V_h^T V_h / T
//   uresidual  both: U_e Pi U^T, U the eigenvectors of qqt (sst for V), U_e those of the residual
//              second moment of 2-bit min/max rows under a reference rotation; Pi pairs the
//              largest eigenvalue of the one with the smallest of the other
//   hadamard, identity  both, no data: H or I
// One matrix per layer is the eigenbasis of the mean of these over KV heads. hadamard, identity and
// uresidual are complete by themselves: the composition does not apply to them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "numeric/matrix.h"
#include "oscar/status.h"

namespace oscar {

enum class Objective : uint8_t {
  kQqt,
  kKtk,
  kSst,
  kSstExact,
  kVtv,
  kUresidual,
  kHadamard,
  kIdentity,
};

enum class Composition : uint8_t {
  kPlain,   // R
  kPbr,     // P
  kBr,      // R P
  kBrH128,  // R P H
  kRH,      // R H
  kHPbr,    // H P
  kHRPbr,   // H R P
  kHPbrR,   // H P R
  kRHPbr,   // R H P, the published default
};

struct ObjectivePair {
  Objective k = Objective::kQqt;
  Objective v = Objective::kSst;
  friend bool operator==(const ObjectivePair&, const ObjectivePair&) = default;
};

std::string_view NameOf(Objective objective);
std::string_view NameOf(Composition composition);
std::string NameOf(const ObjectivePair& pair);  // "qqt_sst"; "hadamard" where both are

// True for objectives whose matrix is R itself whatever the composition.
bool IgnoresComposition(Objective objective);

// "qqt_sst", "ktk_sst_exact", "hadamard_vtv", or one word for both sides where that makes sense.
Result<ObjectivePair> ParseObjectives(std::string_view text);
Result<Composition> ParseComposition(std::string_view text);

// "<objective>_<composition>" as .pt files have it, and back. Splitting leaves the composition
// empty where the text is not of that form.
std::string ZooObjective(std::string_view objective, std::string_view composition);
void SplitZooObjective(std::string_view text, std::string& objective, std::string& composition);

// Multiplies the factors left to right. `eigenvalues` (ascending, of R's columns) decide P.
// Fails where H or P is asked for and D is not a power of two.
Result<Matrix> Compose(const Matrix& r, std::span<const double> eigenvalues,
                       Composition composition);

}  // namespace oscar
