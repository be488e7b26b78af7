#include "lockstep/zero/parameter_sync.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>

#include "lockstep/comm/collectives.h"
#include "lockstep/nn/gradient_copy.h"
#include "lockstep/shard/buffer.h"
#include "lockstep/shard/flat.h"

namespace lockstep::detail {
namespace {

// In elements: moving so few takes no longer than another message.
constexpr int64_t kFreePadding = 256 << 10;

void copy_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from, c10::Device device) {
  if (!device.is_cpu() && !to.empty()) return at::_foreach_copy_(to, from);
  for (std::size_t i = 0; i < to.size(); ++i) copy_plain(to[i], from[i]);
}

}  // namespace

ParameterSync::ParameterSync(const std::vector<std::vector<at::Tensor>>& per_rank, GroupPtr group)
    : group_(std::move(group)), large_(per_rank.size()) {
  if (group_->getSize() == 1) return;
  for (std::size_t rank = 0; rank < per_rank.size(); ++rank) {
    for (const auto& parameter : per_rank[rank]) {
      if (parameter.numel() >= kLargeElements && parameter.is_non_overlapping_and_dense()) {
        large_[rank].push_back({parameter, memory_order_of(parameter)});
      } else if (parameter.numel() > 0) {
        packed_with(parameter).parameters[rank].push_back(parameter);
      }
    }
  }
  for (auto& packed : packed_) allocate(packed);
}

ParameterSync::Packed& ParameterSync::packed_with(const at::Tensor& parameter) {
  for (auto& packed : packed_) {
    if (packed.device == parameter.device() && packed.dtype == parameter.scalar_type()) return packed;
  }
  return packed_.emplace_back(Packed{.device = parameter.device(),
                                     .dtype = parameter.scalar_type(),
                                     .parameters = std::vector<std::vector<at::Tensor>>(large_.size())});
}

void ParameterSync::allocate(Packed& packed) const {
  std::vector<int64_t> lengths;
  at::TensorOptions options;
  for (const auto& parameters : packed.parameters) {
    lengths.push_back(0);
    for (const auto& parameter : parameters) lengths.back() += parameter.numel();
    if (!parameters.empty()) options = parameters.front().options().requires_grad(false);
  }
  const auto longest = *std::max_element(lengths.begin(), lengths.end());
  const auto total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const auto ranks = static_cast<int64_t>(lengths.size());
  // One all-gather, unless most of it would be padding and that is much.
  packed.is_even = longest * ranks <= std::max(2 * total, kFreePadding);
  packed.buffer = allocate_buffer(packed.is_even ? longest * ranks : total, options, group_);
  int64_t begin = 0;
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    const auto length = packed.is_even ? longest : lengths[rank];
    const auto run = packed.runs.emplace_back(packed.buffer.narrow(0, begin, length));
    auto& places = packed.places.emplace_back();
    int64_t at = 0;
    for (const auto& parameter : packed.parameters[rank]) {
      places.push_back(unflattened_like(run.narrow(0, at, parameter.numel()), parameter));
      at += parameter.numel();
    }
    begin += length;
  }
}

void ParameterSync::send(Packed& packed) const {
  const auto me = static_cast<std::size_t>(group_->getRank());
  copy_each(packed.places[me], packed.parameters[me], packed.device);
  if (packed.is_even) {
    all_gather_into_tensor(packed.buffer, packed.runs[me], group_);
  } else {
    for (std::size_t rank = 0; rank < packed.runs.size(); ++rank) {
      if (packed.runs[rank].numel() > 0) broadcast(packed.runs[rank], static_cast<int>(rank), group_);
    }
  }
  for (std::size_t rank = 0; rank < packed.runs.size(); ++rank) {
    if (rank != me) copy_each(packed.parameters[rank], packed.places[rank], packed.device);
  }
}

void ParameterSync::sync() {
  const at::NoGradGuard no_grad;
  std::vector<Pending> pending;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // of those that lie otherwise now
  for (std::size_t rank = 0; rank < large_.size(); ++rank) {
    if (group_->getSize() == 1) break;
    for (const auto& [parameter, memory_order] : large_[rank]) {
      const auto row = flattened_like(parameter, memory_order);
      if (!row.is_alias_of(parameter)) copies.emplace_back(parameter, row.as_strided(parameter.sizes(), memory_order));
      pending.push_back(launch_broadcast(row, static_cast<int>(rank), group_));
    }
  }
  for (auto& packed : packed_) send(packed);
  for (auto& each : pending) each.wait();
  for (const auto& [parameter, received] : copies) parameter.detach().copy_(received);
}

int64_t ParameterSync::bytes() const {
  int64_t bytes = 0;
  for (const auto& packed : packed_) bytes += static_cast<int64_t>(packed.buffer.nbytes());
  return bytes;
}

}  // namespace lockstep::detail
