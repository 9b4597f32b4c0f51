// Kept for includes by this name: the functions live in base.
#pragma once

#include "base/error_text.h"  // IWYU pragma: export
