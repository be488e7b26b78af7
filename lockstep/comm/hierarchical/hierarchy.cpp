#include "lockstep/comm/hierarchical/hierarchy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/hierarchical/byte_calls.h"
#include "lockstep/comm/hierarchical/packing.h"
#include "lockstep/comm/shm/shm_messages.h"

namespace lockstep::detail {
namespace {

at::Tensor index_unless_sorted(const std::vector<int64_t>& order) {
  return std::is_sorted(order.begin(), order.end()) ? at::Tensor() : at::tensor(order, at::kLong);
}

/// How the hosts' partial results are put together. An average is a sum up to here and divided once.
shm::Reduction across_hosts(const Call& call, int ranks) {
  const auto op = call.op == ReduceOp::PREMUL_SUM ? ReduceOp(ReduceOp::SUM) : call.op;
  return {.dtype = shm_dtype(call.inputs[0].scalar_type()),
          .op = static_cast<shm::ReduceOp>(op),
          .divisor = static_cast<std::size_t>(ranks)};
}

bool has_leader_stage(CallKind kind) {
  switch (kind) {
    case CallKind::kGather:
    case CallKind::kScatter:
    case CallKind::kAllToAll:
    case CallKind::kAllToAllSingle:
      return false;  // all ranks talk to each other
    default:
      return true;
  }
}

int64_t elements_of(const std::vector<at::Tensor>& tensors) {
  int64_t elements = 0;
  for (const auto& tensor : tensors) elements += tensor.numel();
  return elements;
}

/// How many elements go to, or come from, each rank.
std::vector<int64_t> elements_by_rank(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& splits,
                                      int ranks) {
  std::vector<int64_t> elements;
  if (tensors.size() > 1) {
    for (const auto& tensor : tensors) elements.push_back(tensor.numel());
    return elements;
  }
  const auto total = tensors[0].numel();
  if (splits.empty()) return std::vector<int64_t>(static_cast<std::size_t>(ranks), total / ranks);
  for (const auto split : splits) elements.push_back(split == 0 ? 0 : split * (total / tensors[0].size(0)));
  return elements;
}

/// In words, since it is shown if another has something else.
LeaderExchange::Announcement what_is_compared(const Call& call, int members) {
  const auto text = [&](int64_t elements, const char* unit) {
    return str(name_of(call.kind), is_reduction(call.kind) ? str("(", name_of(call.op), ")") : "", " of ", elements,
               " ", c10::toString(call.subjects()[0].scalar_type()), " elements per ", unit,
               has_root(call.kind) ? str(", root ", call.root) : "");
  };
  const auto to_all = [&](const std::string& words) {
    const std::vector<std::string> same(static_cast<std::size_t>(members), words);
    return LeaderExchange::Announcement{same, same};
  };
  switch (call.kind) {
    case CallKind::kBarrier:
      return to_all(name_of(call.kind));
    case CallKind::kScatter:
      return to_all(text(elements_of(call.outputs), "rank"));
    case CallKind::kAllToAll:
    case CallKind::kAllToAllSingle: {
      LeaderExchange::Announcement words;
      for (const auto count : elements_by_rank(call.inputs, call.input_splits, members)) {
        words.told.push_back(text(count, "message"));
      }
      for (const auto count : elements_by_rank(call.outputs, call.output_splits, members)) {
        words.expected.push_back(text(count, "message"));
      }
      return words;
    }
    default:
      return to_all(text(elements_of(call.inputs), "rank"));
  }
}

/// A leader reduces in place; where that is not the result's place, the caller's tensor stays as it is.
at::Tensor unlike_inputs(const at::Tensor& run, const Call& call) {
  return run.data_ptr() == call.inputs[0].data_ptr() ? run.clone() : run;
}

}  // namespace

Hierarchy::Hierarchy(HostLayout layout, int rank, c10::intrusive_ptr<ShmBackend> local, const BackendPtr& leaders,
                     BackendPtr flat)
    : layout_(std::move(layout)),
      rank_(rank),
      host_(layout_.host_of(rank)),
      host_order_(index_unless_sorted(layout_.host_order())),
      local_(std::move(local)),
      flat_(std::move(flat)),
      leaders_(leaders ? std::make_shared<LeaderExchange>(leaders, layout_.largest() == 1 ? "rank" : "host") : nullptr),
      // Where every rank leads a host, it hears of every call in one place, whatever the other one calls.
      all_(layout_.largest() == 1 ? leaders_ : std::make_shared<LeaderExchange>(flat_, "rank")) {}

void Hierarchy::run(const Call& call) {
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), "an earlier call failed: ", failure_);
  if (call.kind != CallKind::kBarrier && call.subjects().empty()) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  try {
    const Deadline deadline(call.timeout);
    // On its way while the host is busy with the first stage.
    if (is_leader() && has_leader_stage(call.kind)) {
      leaders_->announce(what_is_compared(call, layout_.hosts()), deadline);
    }
    run_stages(call, deadline);
  } catch (const std::exception& error) {
    failure_ = first_line(error);
    leaders_.reset();
    all_.reset();
    throw;
  }
}

void Hierarchy::run_stages(const Call& call, const Deadline& deadline) {
  switch (call.kind) {
    case CallKind::kAllReduce:
      return all_reduce(call, deadline);
    case CallKind::kReduce:
      return reduce(call, deadline);
    case CallKind::kBroadcast:
      return broadcast(call, deadline);
    case CallKind::kAllGather:
    case CallKind::kAllGatherSingle:
      return all_gather(call, deadline);
    case CallKind::kReduceScatter:
    case CallKind::kReduceScatterSingle:
      return reduce_scatter(call, deadline);
    case CallKind::kBarrier:
      return barrier(deadline);
    default:
      all_->announce(what_is_compared(call, ranks()), deadline);
      all_->check_same_call();
      return run_as_bytes(*flat_, call, deadline);
  }
}

void Hierarchy::on_host(Call call, const Deadline& deadline) {
  call.is_async = false;
  call.timeout = deadline.left();
  local_->start(std::move(call))->wait();
}

void Hierarchy::reduce_to_leader(const at::Tensor& run, const Call& call, const Deadline& deadline) {
  const auto op = call.op == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : call.op;
  on_host({.kind = CallKind::kReduce, .inputs = {run}, .op = op, .factor = call.factor}, deadline);
}

void Hierarchy::broadcast_on_host(const at::Tensor& run, int root, const Deadline& deadline) {
  on_host({.kind = CallKind::kBroadcast, .inputs = {run}, .root = root}, deadline);
}

template <class Stage>
void Hierarchy::across(const Stage& stage) {
  if (!is_leader()) return;
  try {
    leaders_->check_same_call();
    stage();
  } catch (const std::exception& error) {
    // The others of this host wait for what will not come.
    local_->fail(first_line(error));
    throw;
  }
}

void Hierarchy::all_reduce(const Call& call, const Deadline& deadline) {
  const auto run = pack(call.inputs);
  reduce_to_leader(run, call, deadline);
  across([&] { leaders_->all_reduce(run, across_hosts(call, ranks()), deadline); });
  broadcast_on_host(run, 0, deadline);
  unpack(run, call.inputs);
}

void Hierarchy::reduce(const Call& call, const Deadline& deadline) {
  const bool is_root = rank_ == call.root;
  const int root_host = layout_.host_of(call.root);
  auto run = pack(call.inputs);
  if (is_leader() && !is_root) run = unlike_inputs(run, call);
  reduce_to_leader(run, call, deadline);
  across([&] { leaders_->reduce(run, root_host, across_hosts(call, ranks()), deadline); });
  if (host_ == root_host && layout_.place_of(call.root) != 0) {
    if (!is_leader() && !is_root) run = at::empty_like(run);
    broadcast_on_host(run, 0, deadline);
  }
  if (is_root) unpack(run, call.inputs);
}

void Hierarchy::broadcast(const Call& call, const Deadline& deadline) {
  const int root_host = layout_.host_of(call.root);
  const auto run = pack(call.inputs);
  if (host_ == root_host) broadcast_on_host(run, layout_.place_of(call.root), deadline);
  across([&] { leaders_->broadcast(run, root_host, deadline); });
  if (host_ != root_host) broadcast_on_host(run, 0, deadline);
  // The root's may be a view that cannot be written.
  if (rank_ != call.root) unpack(run, call.inputs);
}

std::vector<at::Tensor> Hierarchy::by_host(const at::Tensor& table) const {
  std::vector<int64_t> elements;
  for (int host = 0; host < layout_.hosts(); ++host) {
    elements.push_back(static_cast<int64_t>(layout_.ranks_on(host).size()) * (table.numel() / ranks()));
  }
  return table.split_with_sizes(elements);
}

void Hierarchy::all_gather(const Call& call, const Deadline& deadline) {
  const auto row = pack(call.inputs);
  const auto table = room_for(call.outputs);
  const bool is_moved = host_order_.defined();
  const auto in_host_order = is_leader() && is_moved ? at::empty_like(table) : table;
  const auto parts = by_host(in_host_order);
  Call gather{.kind = CallKind::kGather, .inputs = {row}};
  if (is_leader()) gather.outputs = rows_of(parts[host_index()], places()).unbind(0);
  on_host(std::move(gather), deadline);
  across([&] {
    leaders_->all_gather(parts, deadline);
    // As bytes: not every dtype can be indexed.
    if (is_moved)
      rows_of(bytes_of(table), ranks()).index_copy_(0, host_order_, rows_of(bytes_of(in_host_order), ranks()));
  });
  broadcast_on_host(table, 0, deadline);
  if (call.kind == CallKind::kAllGather) return unpack(table, call.outputs);
  unpack_rows(table, call.outputs, ranks());
}

void Hierarchy::reduce_scatter(const Call& call, const Deadline& deadline) {
  const bool is_list = call.kind == CallKind::kReduceScatter;
  auto table = is_list ? pack(call.inputs) : pack_rows(call.inputs, ranks());
  if (is_leader()) table = unlike_inputs(table, call);
  reduce_to_leader(table, call, deadline);
  Call scatter{.kind = CallKind::kScatter, .outputs = {room_for(call.outputs)}};
  across([&] {
    if (host_order_.defined()) table = rows_of(table, ranks()).index_select(0, host_order_).view({-1});
    const auto parts = by_host(table);
    leaders_->reduce_scatter(parts, across_hosts(call, ranks()), deadline);
    scatter.inputs = rows_of(parts[host_index()], places()).unbind(0);
  });
  const auto room = scatter.outputs[0];
  on_host(std::move(scatter), deadline);
  unpack(room, call.outputs);
}

void Hierarchy::barrier(const Deadline& deadline) {
  on_host({.kind = CallKind::kBarrier}, deadline);
  across([&] { leaders_->barrier(deadline); });
  on_host({.kind = CallKind::kBarrier}, deadline);
}

}  // namespace lockstep::detail
