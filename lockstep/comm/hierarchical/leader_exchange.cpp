#include "lockstep/comm/hierarchical/leader_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "lockstep/comm/call.h"
#include "lockstep/comm/hierarchical/packing.h"

namespace lockstep::detail {
namespace {

// Up to here a second trip over the network costs more than reducing everything on every leader.
constexpr std::size_t kMostBytesGathered = std::size_t{32} << 10;
// What one leader sends another at a time, unless that makes too many messages.
constexpr int64_t kLeastShareBytes = int64_t{512} << 10;
constexpr int64_t kMostSlices = 64;
constexpr int64_t kAnnouncementBytes = 128;
// Data has tags 0, 1, …, and so have the program's own messages.
constexpr int kAnnouncementTag = std::numeric_limits<int>::max();

std::size_t at_host(int host) {
  return static_cast<std::size_t>(host);
}

}  // namespace

void LeaderExchange::receive(const std::vector<at::Tensor>& parts, int tag, Works& works) {
  for (int step = 1; step < hosts(); ++step) {
    const int peer = (host() + hosts() - step) % hosts();
    if (parts[at_host(peer)].numel() == 0) continue;
    std::vector<at::Tensor> bytes = {bytes_of(parts[at_host(peer)])};
    works.push_back(transport_->recv(bytes, peer, tag));
  }
}

void LeaderExchange::send(const std::vector<at::Tensor>& parts, int tag, Works& works) {
  for (int step = 1; step < hosts(); ++step) {
    const int peer = (host() + step) % hosts();
    if (parts[at_host(peer)].numel() == 0) continue;
    std::vector<at::Tensor> bytes = {bytes_of(parts[at_host(peer)])};
    works.push_back(transport_->send(bytes, peer, tag));
  }
}

void LeaderExchange::wait(const Works& works, const Deadline& deadline) {
  for (const auto& work : works) work->wait(deadline.left());
}

void LeaderExchange::announce(Announcement call, const Deadline& deadline) {
  call_ = std::move(call);
  const auto told = at::zeros({hosts(), kAnnouncementBytes}, at::kByte);
  for (int each = 0; each < hosts(); ++each) {
    const auto& text = call_.told[at_host(each)];
    std::memcpy(told[each].mutable_data_ptr(), text.data(), std::min<std::size_t>(text.size(), kAnnouncementBytes - 1));
  }
  announced_ = at::zeros({hosts(), kAnnouncementBytes}, at::kByte);
  announced_until_ = deadline;
  receive(announced_.unbind(0), kAnnouncementTag, announcing_);
  send(told.unbind(0), kAnnouncementTag, announcing_);
}

void LeaderExchange::check_same_call() {
  wait(std::exchange(announcing_, {}), *announced_until_);
  for (int each = 0; each < hosts(); ++each) {
    if (each == host()) continue;
    const std::string told(reinterpret_cast<const char*>(announced_[each].const_data_ptr<uint8_t>()));
    const auto expected = call_.expected[at_host(each)].substr(0, kAnnouncementBytes - 1);
    TORCH_CHECK(told == expected, each_, "s disagree: this one, ", each_, " ", host(), ", calls ", expected, ", ",
                each_, " ", each, " calls ", told);
  }
}

void LeaderExchange::swap(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received,
                          const Deadline& deadline) {
  // Receives first: gloo asks the peer for data on the connection that carries ours, so it would ask behind it.
  Works works;
  receive(received, 0, works);
  send(sent, 0, works);
  wait(works, deadline);
}

std::vector<at::Tensor> LeaderExchange::room_for_others(const at::Tensor& run) const {
  return at::empty({hosts(), run.numel()}, run.options()).unbind(0);
}

void LeaderExchange::reduce_onto(const at::Tensor& mine, const std::vector<at::Tensor>& others,
                                 const shm::Reduction& reduction) const {
  if (mine.numel() == 0) return;
  std::vector<const std::byte*> inputs;
  for (int each = 0; each < hosts(); ++each) {
    const auto& input = each == host() ? mine : others[at_host(each)];
    inputs.push_back(static_cast<const std::byte*>(input.const_data_ptr()));
  }
  std::byte* const outputs[] = {static_cast<std::byte*>(mine.mutable_data_ptr())};
  shm::reduce(reduction, inputs, {}, outputs, static_cast<std::size_t>(mine.numel()));
}

void LeaderExchange::reduce_scatter(const std::vector<at::Tensor>& parts, const shm::Reduction& reduction,
                                    const Deadline& deadline) {
  const auto& mine = parts.at(at_host(host()));
  const auto others = room_for_others(mine);
  swap(parts, others, deadline);
  reduce_onto(mine, others, reduction);
}

void LeaderExchange::all_reduce(const at::Tensor& run, const shm::Reduction& reduction, const Deadline& deadline) {
  if (run.nbytes() <= kMostBytesGathered) {
    const auto others = room_for_others(run);
    swap(std::vector(at_host(hosts()), run), others, deadline);
    return reduce_onto(run, others, reduction);
  }
  all_reduce_slices(run, reduction, deadline);
}

void LeaderExchange::all_reduce_slices(const at::Tensor& run, const shm::Reduction& reduction,
                                       const Deadline& deadline) {
  struct Slice {
    std::vector<at::Tensor> shares;  // of this host's slice: share h is reduced by host h
    std::vector<at::Tensor> others;  // what the others have in place of this host's share
    Works arriving;
  };
  const auto least = kLeastShareBytes / run.element_size() * hosts();
  std::vector<Slice> slices;
  Works works;
  // All that is to come is asked for before anything is sent. A peer's reduced share cannot overwrite what is still to
  // be sent to it: it is made from that.
  int tag = 0;
  for (const auto& part : run.split(std::max(least, (run.numel() + kMostSlices - 1) / kMostSlices))) {
    auto& slice = slices.emplace_back();
    slice.shares = part.tensor_split(hosts());
    slice.others = room_for_others(slice.shares[at_host(host())]);
    receive(slice.others, tag++, slice.arriving);
    receive(slice.shares, tag++, works);
  }
  tag = 0;
  for (const auto& slice : slices) {
    send(slice.shares, tag, works);
    tag += 2;
  }
  tag = 1;
  for (const auto& slice : slices) {
    const auto& mine = slice.shares[at_host(host())];
    wait(slice.arriving, deadline);
    reduce_onto(mine, slice.others, reduction);
    send(std::vector(at_host(hosts()), mine), tag, works);
    tag += 2;
  }
  wait(works, deadline);
}

void LeaderExchange::reduce(const at::Tensor& run, int root, const shm::Reduction& reduction,
                            const Deadline& deadline) {
  std::vector<at::Tensor> parts(at_host(hosts()), run.narrow(0, 0, 0));
  parts.at(at_host(root)) = run;
  reduce_scatter(parts, reduction, deadline);
}

void LeaderExchange::all_gather(const std::vector<at::Tensor>& parts, const Deadline& deadline) {
  swap(std::vector(at_host(hosts()), parts.at(at_host(host()))), parts, deadline);
}

void LeaderExchange::broadcast(const at::Tensor& run, int root, const Deadline& deadline) {
  if (run.numel() == 0) return;
  dispatch(*transport_, {.kind = CallKind::kBroadcast,
                         .inputs = {bytes_of(run)},
                         .root = root,
                         .is_async = false,
                         .timeout = deadline.left()})
      ->wait();
}

void LeaderExchange::barrier(const Deadline& deadline) {
  dispatch(*transport_, {.kind = CallKind::kBarrier, .is_async = false, .timeout = deadline.left()})->wait();
}

}  // namespace lockstep::detail
