#include "lockstep/comm/hierarchical/packing.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "lockstep/comm/plain_memory.h"

namespace lockstep::detail {
namespace {

bool is_one_run(const std::vector<at::Tensor>& tensors) {
  return tensors.size() == 1 && is_plain_memory(tensors[0]);
}

bool is_unpacked(const at::Tensor& run, const std::vector<at::Tensor>& tensors) {
  return is_one_run(tensors) && run.data_ptr() == tensors[0].data_ptr();
}

}  // namespace

at::Tensor pack(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) return as_plain_memory(tensors[0]).view({-1});
  std::vector<at::Tensor> runs;
  for (const auto& tensor : tensors) runs.push_back(tensor.reshape({-1}));
  return as_plain_memory(at::cat(runs));
}

at::Tensor room_for(const std::vector<at::Tensor>& tensors) {
  if (is_one_run(tensors)) return tensors[0].view({-1});
  int64_t total = 0;
  for (const auto& tensor : tensors) total += tensor.numel();
  return at::empty({total}, tensors.at(0).options());
}

void unpack(const at::Tensor& run, const std::vector<at::Tensor>& tensors) {
  if (is_unpacked(run, tensors)) return;
  int64_t at = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(run.narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
  }
}

at::Tensor pack_rows(const std::vector<at::Tensor>& tensors, int64_t rows) {
  if (tensors.size() == 1) return pack(tensors);
  std::vector<at::Tensor> tables;
  for (const auto& tensor : tensors) tables.push_back(tensor.reshape({rows, tensor.numel() / rows}));
  return at::cat(tables, 1).view({-1});
}

void unpack_rows(const at::Tensor& run, const std::vector<at::Tensor>& tensors, int64_t rows) {
  if (tensors.size() == 1) return unpack(run, tensors);
  const auto table = rows_of(run, rows);
  int64_t at = 0;
  for (const auto& tensor : tensors) {
    const auto width = tensor.numel() / rows;
    tensor.copy_(table.narrow(1, at, width).reshape(tensor.sizes()));
    at += width;
  }
}

at::Tensor rows_of(const at::Tensor& run, int64_t count) {
  return run.view({count, run.numel() / count});
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  // A tensor of one element is contiguous whatever its stride, but only stride 1 may be viewed in another dtype.
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

}  // namespace lockstep::detail
