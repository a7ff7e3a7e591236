// The best token of each row: what a greedy draw is.
#pragma once

#include <cstdint>

#include "pointwise.h"

namespace minisgl {

// Of each vector the largest number, and where it first stands; NaN counts as infinity. size is not 0, inner is 1.
void best_of_rows(Dtype dtype, Vectors x, float* best, int64_t* places);

}  // namespace minisgl
