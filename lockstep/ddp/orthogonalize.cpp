#include "lockstep/ddp/orthogonalize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <mutex>

namespace lockstep::detail {
namespace {

void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const auto columns = matrices.size(2);
  for (int64_t i = 0; i < columns; ++i) {
    const auto column = matrices.narrow(2, i, 1);
    if (i > 0) {
      // Once more: of a column that depended on those before it only rounding errors are left, in any direction.
      const auto done = matrices.narrow(2, 0, i);
      column.sub_(at::bmm(done, at::bmm(done.transpose(1, 2), column)));
    }
    // Squares of half types overflow soon.
    const auto length = at::linalg_vector_norm(column.to(c10::promoteTypes(column.scalar_type(), at::kFloat)), 2,
                                               at::IntArrayRef({1}), /*keepdim=*/true);
    column.div_(epsilon == 0 ? length.masked_fill(length == 0, 1) : length + epsilon);
    if (i + 1 == columns) return;
    const auto rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_((column * rest).sum(1, /*keepdim=*/true) * column);
  }
}

}  // namespace

void orthogonalize(const at::Tensor& matrices, double epsilon) {
  TORCH_INTERNAL_ASSERT(matrices.dim() == 3 && matrices.size(2) <= matrices.size(1), "cannot orthogonalize ",
                        matrices.sizes());
  const auto dtype = matrices.scalar_type();
  if (matrices.size(2) <= 2 || dtype == at::kHalf || dtype == at::kBFloat16) {
    gram_schmidt(matrices, epsilon);
  } else {
    // libtorch loads its linear algebra for accelerators on first use, and fails if two threads do so at once.
    static std::mutex one_at_a_time;
    std::unique_lock lock(one_at_a_time, std::defer_lock);
    if (!matrices.is_cpu()) lock.lock();
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

}  // namespace lockstep::detail
