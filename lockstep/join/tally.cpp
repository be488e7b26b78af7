#include "lockstep/join/tally.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <optional>

#include "lockstep/comm/collectives.h"

namespace lockstep {
namespace {

// Well below the width of a word, so that a union never looks negative.
constexpr int kRanksPerWord = 32;

int64_t words_per_set(int ranks) {
  return (ranks + kRanksPerWord - 1) / kRanksPerWord;
}

}  // namespace

struct JoinTally::State {
  const int ranks;
  const int64_t progress;  // this rank's
  at::Tensor message;
  Pending pending = {};

  /// Off the CPU: where the reduced message is going, in memory that a device can write beside its other work.
  at::Tensor arriving = {};
  std::optional<c10::Event> arrived = std::nullopt;

  std::mutex mutex = {};
  at::Tensor words = {};  // guarded by mutex: the message on the CPU, once it was read

  at::Tensor read() {
    const std::lock_guard lock(mutex);
    if (words.defined()) return words;
    if (arrived) {
      arrived->synchronize();
      words = arriving;
    } else {
      pending.wait();
      words = message;
    }
    return words;
  }

  /// By a stream of its own, so that neither the message waits for what the program computes nor the other way round.
  void send_on_device(const GroupPtr& group, c10::Device device) {
    const auto side = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    const c10::StreamGuard on_side(side);
    arriving = at::empty(message.sizes(), message.options().pinned_memory(true));
    message = message.pin_memory().to(device, /*non_blocking=*/true);
    pending = launch_all_reduce(message, group);
    pending.wait();  // lets the stream wait
    arriving.copy_(message, /*non_blocking=*/true);
    arrived.emplace(device.type());
    arrived->record(side);
  }
};

std::vector<int> JoinTally::ranks_in(Set set) const {
  TORCH_CHECK(state_,
              "[lockstep/join] this tally is empty: it was made outside a Join scope, or by a joinable that is ",
              "not the first. Ask is_open(), or Join::current_tally().");
  const auto words = state_->read();
  const auto* bits = words.const_data_ptr<int64_t>() + set * words_per_set(state_->ranks);
  std::vector<int> ranks;
  for (int rank = 0; rank < state_->ranks; ++rank) {
    if ((bits[rank / kRanksPerWord] >> (rank % kRanksPerWord)) & 1) ranks.push_back(rank);
  }
  return ranks;
}

bool JoinTally::has_same_progress() const {
  const auto words = state_->read();
  const auto sum = words.const_data_ptr<int64_t>()[kSets * words_per_set(state_->ranks)];
  return sum == state_->progress * state_->ranks;
}

bool JoinTally::is_ready() const {
  return state_->arrived ? state_->arrived->query() : state_->pending.is_completed();
}

JoinTally detail::send_flags(const ControlFlags& flags, const GroupPtr& group, c10::Device device, Sending sending) {
  const auto words = words_per_set(group->getSize());
  auto message = at::zeros({JoinTally::kSets * words + 1}, at::kLong);
  auto* bits = message.mutable_data_ptr<int64_t>();
  const auto add_me_to = [&](JoinTally::Set set) {
    bits[set * words + group->getRank() / kRanksPerWord] |= int64_t{1} << (group->getRank() % kRanksPerWord);
  };
  if (flags.is_live) add_me_to(JoinTally::kLive);
  if (flags.will_reduce) add_me_to(JoinTally::kReducing);
  if (flags.gives_leftovers) add_me_to(JoinTally::kLeftovers);
  if (flags.leaves_grad) add_me_to(JoinTally::kLeavingGrad);
  if (flags.wants_stop) add_me_to(JoinTally::kStopping);
  if (flags.is_attentive) add_me_to(JoinTally::kAttentive);
  bits[JoinTally::kSets * words] = flags.progress;
  JoinTally tally;
  tally.state_ = std::make_shared<JoinTally::State>(group->getSize(), flags.progress, message);
  const LabelScope label(
      {flags.was_local ? "Join's control message after no_sync() or no_grad" : "Join's control message"});
  if (!device.is_cpu()) {
    tally.state_->send_on_device(group, device);
    if (sending == Sending::kBlocking) tally.state_->read();
  } else if (sending == Sending::kAsync) {
    tally.state_->pending = launch_all_reduce(tally.state_->message, group);
  } else {
    all_reduce(tally.state_->message, group);
  }
  return tally;
}

}  // namespace lockstep
