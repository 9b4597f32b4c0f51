#include "engine/prefix_index.h"

#include <gtest/gtest.h>
