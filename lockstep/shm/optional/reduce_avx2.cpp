// The kernels compiled for AVX2 with F16C; flags in cmake/LockstepShm.cmake.
#include "lockstep/shm/optional/half_f16c.h"
#include "lockstep/shm/reduce_kernels.h"

namespace lockstep::shm::detail {

extern const KernelTable avx2_kernels;
const KernelTable avx2_kernels = kKernels<F16cHalf>;

}  // namespace lockstep::shm::detail
