#include "lockstep/ddp/sparse_reduction.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"

namespace lockstep {
namespace {

/// `rows` of every rank, each as long as it says in `counts`.
std::vector<at::Tensor> gather_rows(const at::Tensor& rows, const std::vector<int64_t>& counts, const GroupPtr& group) {
  const auto longest = *std::max_element(counts.begin(), counts.end());
  auto sizes = rows.sizes().vec();
  sizes[0] = longest;
  const auto padded = at::zeros(sizes, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  sizes[0] = longest * group->getSize();
  const auto all = at::zeros(sizes, rows.options());
  all_gather_into_tensor(all, padded, group);
  std::vector<at::Tensor> result;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    result.push_back(all.narrow(0, static_cast<int64_t>(rank) * longest, counts[rank]));
  }
  return result;
}

}  // namespace

at::Tensor sparse_all_reduce(const at::Tensor& tensor, const GroupPtr& group) {
  const at::NoGradGuard no_grad;
  const auto mine = tensor.coalesce();
  if (group->getSize() == 1) return mine;
  const auto count = at::full({1}, mine._nnz(), at::TensorOptions(at::kLong).device(tensor.device()));
  const auto counts_tensor = at::zeros({group->getSize()}, count.options());
  all_gather_into_tensor(counts_tensor, count, group);
  const auto on_host = counts_tensor.cpu();
  const std::vector<int64_t> counts(on_host.const_data_ptr<int64_t>(),
                                    on_host.const_data_ptr<int64_t>() + on_host.numel());
  if (*std::max_element(counts.begin(), counts.end()) == 0) return mine;
  const auto indices = gather_rows(mine.indices().t().contiguous(), counts, group);
  const auto values = gather_rows(mine.values().contiguous(), counts, group);
  return at::_sparse_coo_tensor_unsafe(at::cat(indices).t(), at::cat(values), tensor.sizes()).coalesce();
}

}  // namespace lockstep
