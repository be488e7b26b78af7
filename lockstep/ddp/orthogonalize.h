// Makes the columns of matrices orthonormal, in place. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// `matrices` is a batch of them, none with more columns than rows. Columns of zeros stay zeros, and so do columns that
/// depend on those before them if nothing at all is left of them. `epsilon` is added to lengths before dividing by
/// them. Gram-Schmidt for two columns or half types, which QR does not take.
void orthogonalize(const at::Tensor& matrices, double epsilon);

}  // namespace lockstep::detail
