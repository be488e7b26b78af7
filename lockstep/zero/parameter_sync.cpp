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

ParameterSync::ParameterSync(const std::vector<Sent>& parameters, GroupPtr group, bool is_awaited_later)
    : group_(std::move(group)), is_awaited_later_(is_awaited_later) {
  if (group_->getSize() == 1) return;
  for (const auto& sent : parameters) {
    const auto& parameter = sent.parameter;
    if (parameter.numel() >= kLargeElements && parameter.is_non_overlapping_and_dense()) {
      large_.push_back({sent, memory_order_of(parameter)});
    } else if (parameter.numel() > 0) {
      packed_with(parameter).parameters[static_cast<std::size_t>(sent.rank)].push_back(parameter);
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
                                     .parameters = std::vector<std::vector<at::Tensor>>(group_->getSize())});
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

at::Tensor ParameterSync::memory_of(const at::Tensor& parameter) const {
  return is_awaited_later_ ? with_own_storage(parameter) : parameter.detach();
}

std::vector<at::Tensor> ParameterSync::memory_of(const std::vector<at::Tensor>& parameters) const {
  if (!is_awaited_later_) return parameters;
  std::vector<at::Tensor> memory;
  for (const auto& parameter : parameters) memory.push_back(memory_of(parameter));
  return memory;
}

Arrival ParameterSync::launch(const Packed& packed) const {
  const auto me = static_cast<std::size_t>(group_->getRank());
  copy_each(packed.places[me], packed.parameters[me], packed.device);
  Arrival arrival;
  if (packed.is_even && is_awaited_later_) {
    arrival.pending.push_back(launch_all_gather_into_tensor(packed.buffer, packed.runs[me], group_));
  } else if (packed.is_even) {
    all_gather_into_tensor(packed.buffer, packed.runs[me], group_);  // saves a switch of threads
  } else {
    for (std::size_t rank = 0; rank < packed.runs.size(); ++rank) {
      if (packed.runs[rank].numel() == 0) continue;
      arrival.pending.push_back(launch_broadcast(packed.runs[rank], static_cast<int>(rank), group_));
    }
  }
  std::vector<std::vector<at::Tensor>> targets;
  for (const auto& parameters : packed.parameters) {
    arrival.parameters.insert(arrival.parameters.end(), parameters.begin(), parameters.end());
    targets.push_back(memory_of(parameters));
  }
  arrival.unpack = [me, targets = std::move(targets), places = packed.places, device = packed.device] {
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      if (rank != me) copy_each(targets[rank], places[rank], device);
    }
  };
  return arrival;
}

Arrival ParameterSync::launch(const Large& large) const {
  const auto& [sent, memory_order] = large;
  const auto memory = memory_of(sent.parameter);
  const auto row = flattened_like(memory, memory_order);
  Arrival arrival{.pending = {launch_broadcast(row, sent.rank, group_)}, .parameters = {sent.parameter}};
  // It lies otherwise now than when all ranks agreed how to send it.
  if (!row.is_alias_of(memory)) {
    arrival.unpack = [memory, received = row.as_strided(memory.sizes(), memory_order)] { memory.copy_(received); };
  }
  return arrival;
}

std::vector<Arrival> ParameterSync::launch() {
  const at::NoGradGuard no_grad;
  std::vector<Arrival> arrivals;
  // Small ones first: every layer has some.
  for (const auto& packed : packed_) arrivals.push_back(launch(packed));
  for (const auto& large : large_) arrivals.push_back(launch(large));
  return arrivals;
}

int64_t ParameterSync::bytes() const {
  int64_t bytes = 0;
  for (const auto& packed : packed_) bytes += static_cast<int64_t>(packed.buffer.nbytes());
  return bytes;
}

}  // namespace lockstep::detail
