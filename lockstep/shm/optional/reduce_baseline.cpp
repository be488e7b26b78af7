// The kernels compiled for the instruction set every machine of this architecture has (SSE2, NEON); flags in
// cmake/LockstepShm.cmake.
#include "lockstep/shm/optional/half_portable.h"
#include "lockstep/shm/reduce_kernels.h"

namespace lockstep::shm::detail {

extern const KernelTable baseline_kernels;
const KernelTable baseline_kernels = kKernels<PortableHalf>;

}  // namespace lockstep::shm::detail
