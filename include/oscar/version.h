#pragma once

namespace oscar {
inline constexpr char kVersion[] = "0.1.0";
}  // namespace oscar
