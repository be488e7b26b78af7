// Divides what a module takes among devices along the batch dim, and puts what it returns together again: Python's
// scatter() and gather(), which are the collectives' names here. For any type visit_tensors() knows; what is no tensor
// is copied into every part.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "lockstep/nn/tensor_tree.h"

namespace lockstep {

namespace detail {

/// One chunk per device at most, each on its device; fewer if `dim` is too short.
std::vector<at::Tensor> scatter_tensor(const at::Tensor& tensor, const std::vector<c10::Device>& devices, int64_t dim);

/// The parts one after the other along `dim`. Parts without dims become the elements of a vector.
at::Tensor gather_tensor(const std::vector<at::Tensor>& parts, c10::Device device, int64_t dim);

template <class Tree>
std::vector<at::Tensor*> tensors_in(Tree& tree) {
  std::vector<at::Tensor*> tensors;
  visit_tensors(tree, [&](at::Tensor& tensor) { tensors.push_back(&tensor); });
  return tensors;
}

/// Throws unless part `part` has as many tensors as the first.
void check_same_structure(std::size_t part, std::size_t tensors, std::size_t expected);

}  // namespace detail

/// `tree` in as many parts as its tensors have chunks along `dim`, at most one per device. Differentiable.
template <class Tree>
std::vector<Tree> scatter_to_devices(const Tree& tree, const std::vector<c10::Device>& devices, int64_t dim = 0) {
  Tree whole = tree;
  std::vector<std::vector<at::Tensor>> chunks;
  std::size_t parts = devices.size();
  for (const auto* const tensor : detail::tensors_in(whole)) {
    chunks.push_back(detail::scatter_tensor(*tensor, devices, dim));
    parts = std::min(parts, chunks.back().size());
  }
  std::vector<Tree> result(parts, whole);
  for (std::size_t part = 0; part < parts; ++part) {
    const auto tensors = detail::tensors_in(result[part]);
    for (std::size_t i = 0; i < tensors.size(); ++i) *tensors[i] = chunks[i][part];
  }
  return result;
}

/// The parts as one, on `device`; what is no tensor is the first part's. Differentiable. Refuses an empty list and
/// parts of different structure.
template <class Tree>
Tree gather_from_devices(const std::vector<Tree>& parts, c10::Device device, int64_t dim = 0) {
  TORCH_CHECK(!parts.empty(), "[lockstep/ddp] there is nothing to gather: the list is empty");
  auto copies = parts;
  std::vector<std::vector<at::Tensor*>> tensors;
  for (auto& copy : copies) {
    tensors.push_back(detail::tensors_in(copy));
    detail::check_same_structure(tensors.size() - 1, tensors.back().size(), tensors[0].size());
  }
  Tree result = parts[0];
  const auto places = detail::tensors_in(result);
  for (std::size_t i = 0; i < places.size(); ++i) {
    std::vector<at::Tensor> pieces;
    for (const auto& part : tensors) pieces.push_back(*part[i]);
    *places[i] = detail::gather_tensor(pieces, device, dim);
  }
  return result;
}

}  // namespace lockstep
