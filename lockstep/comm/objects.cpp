#include "lockstep/comm/objects.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/collectives.h"

namespace lockstep {
namespace {

/// Bytes go through the CPU backend where there is one.
at::Device object_device(const GroupPtr& group) {
  if (serves_device(group, at::kCPU)) return at::kCPU;
  return group->getDeviceTypes().front();
}

at::Tensor to_tensor(const std::string& bytes, int64_t size, at::Device device) {
  auto tensor = at::zeros({size}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor.to(device);
}

std::string to_bytes(const at::Tensor& tensor, int64_t size) {
  const auto local = tensor.cpu();
  return {static_cast<const char*>(local.const_data_ptr()), static_cast<std::size_t>(size)};
}

/// Of every rank's bytes.
std::vector<int64_t> gather_lengths(const std::string& bytes, at::Device device, const GroupPtr& group) {
  const auto lengths = at::empty({group->getSize()}, at::TensorOptions(at::kLong).device(device));
  all_gather_into_tensor(lengths, at::tensor({static_cast<int64_t>(bytes.size())}, at::kLong).to(device), group);
  const auto local = lengths.cpu();
  const auto* first = local.const_data_ptr<int64_t>();
  return {first, first + local.numel()};
}

/// Room for all, in equal pieces, so that the transport needs no sizes; never empty, because not all of them like that.
int64_t piece_size(const std::vector<int64_t>& lengths) {
  return std::max<int64_t>(1, *std::max_element(lengths.begin(), lengths.end()));
}

std::vector<std::string> to_objects(const std::vector<at::Tensor>& pieces, const std::vector<int64_t>& lengths) {
  std::vector<std::string> objects;
  for (std::size_t rank = 0; rank < pieces.size(); ++rank) objects.push_back(to_bytes(pieces[rank], lengths[rank]));
  return objects;
}

}  // namespace

std::vector<std::string> all_gather_object(const std::string& bytes, const GroupPtr& group) {
  check_member(group);
  const int size = group->getSize();
  if (size == 1) return {bytes};
  const auto device = object_device(group);
  const auto lengths = gather_lengths(bytes, device, group);
  const auto longest = piece_size(lengths);
  const auto gathered = at::empty({size, longest}, at::TensorOptions(at::kByte).device(device));
  all_gather_into_tensor(gathered, to_tensor(bytes, longest, device), group);
  return to_objects(gathered.unbind(0), lengths);
}

std::vector<std::string> gather_object(const std::string& bytes, int root, const GroupPtr& group) {
  check_member(group);
  const int size = group->getSize();
  TORCH_CHECK(root >= 0 && root < size, "[lockstep/comm] gather_object: root ", root, " is not in a group of ", size);
  if (size == 1) return {bytes};
  const auto device = object_device(group);
  const auto lengths = gather_lengths(bytes, device, group);
  const auto longest = piece_size(lengths);
  std::vector<at::Tensor> pieces;
  if (group->getRank() == root) {
    pieces = at::empty({size, longest}, at::TensorOptions(at::kByte).device(device)).unbind(0);
  }
  gather(to_tensor(bytes, longest, device), pieces, root, group);
  return to_objects(pieces, lengths);
}

std::string broadcast_object(const std::string& bytes, int root, const GroupPtr& group) {
  check_member(group);
  if (group->getSize() == 1) return bytes;
  const auto device = object_device(group);
  const bool is_root = group->getRank() == root;
  auto length = at::tensor({static_cast<int64_t>(bytes.size())}, at::kLong).to(device);
  broadcast(length, root, group);
  const auto size = length.cpu().item<int64_t>();
  if (size == 0) return "";
  auto tensor =
      is_root ? to_tensor(bytes, size, device) : at::empty({size}, at::TensorOptions(at::kByte).device(device));
  broadcast(tensor, root, group);
  return to_bytes(tensor, size);
}

}  // namespace lockstep
