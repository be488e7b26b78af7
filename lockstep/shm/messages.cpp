#include "lockstep/shm/messages.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "lockstep/base/deadline.h"
#include "lockstep/base/str.h"
#include "lockstep/shm/errors.h"

namespace lockstep::shm {
namespace {

// Looks at the channels before the thread sleeps.
constexpr int kLooks = 100;

}  // namespace

Messages::Messages(std::shared_ptr<Team> team)
    : team_(std::move(team)),
      sends_(static_cast<std::size_t>(team_->size())),
      incoming_(static_cast<std::size_t>(team_->size())),
      times_seen_gone_(static_cast<std::size_t>(team_->size())) {}

void Messages::add(Transfer transfer, std::deque<std::unique_ptr<Pending>>& list) {
  auto pending = std::make_unique<Pending>();
  pending->deadline = deadline_after(transfer.timeout);
  pending->transfer = std::move(transfer);
  {
    const std::lock_guard lock(mutex_);
    const auto reason = close_reason_ ? close_reason_ : team_->failure();
    if (reason) throw PeerError(str(describe(*pending, &list == &new_sends_), ": ", *reason));
    list.push_back(std::move(pending));
    if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->work(); });
  }
  ring(team_->lane(team_->rank()).bell);
}

void Messages::send(Transfer transfer) {
  add(std::move(transfer), new_sends_);
}

void Messages::receive(Transfer transfer) {
  add(std::move(transfer), new_receives_);
}

void Messages::close(const std::string& reason) {
  {
    if (!team_->is_at_home()) {
      if (thread_.joinable()) thread_.detach();  // a forked process has no such thread
      return;
    }
    const std::lock_guard lock(mutex_);
    if (close_reason_) return;
    close_reason_ = reason;
  }
  ring(team_->lane(team_->rank()).bell);
  if (!thread_.joinable()) return;
  // A callback may drop the last reference to the owner while it runs on this very thread.
  if (thread_.get_id() == std::this_thread::get_id()) return thread_.detach();
  thread_.join();
}

void Messages::finish(std::unique_ptr<Pending> pending, int peer, const std::string& problem) {
  // Told after the round: the callback may add transfers.
  auto error = problem.empty() ? nullptr : std::make_exception_ptr(PeerError(problem));
  finished_.emplace_back([done = std::move(pending->transfer.done), error, peer] { done(error, peer); });
}

std::string Messages::describe(const Pending& pending, bool is_send) const {
  const auto& transfer = pending.transfer;
  const auto peer = transfer.peer == kAnyRank ? "any rank" : str("rank ", team_->seat().name_of(transfer.peer));
  return str(team_->seat().who(), ": ", is_send ? "send(" : "recv(", name_of(transfer.dtype), "[",
             transfer.span.bytes / std::max<std::size_t>(1, transfer.element_bytes), "], ", is_send ? "to " : "from ",
             peer, ", tag ", transfer.tag, ") on group '", team_->seat().group, "'");
}

std::string Messages::describe_mismatch(const Pending& receiver, int from, std::size_t bytes, DType dtype) const {
  return str(describe(receiver, false), ": rank ", team_->seat().name_of(from), " sends ", bytes, " bytes of ",
             name_of(dtype), ", ", receiver.transfer.span.bytes, " bytes of ", name_of(receiver.transfer.dtype),
             " are expected");
}

bool Messages::push(int to) {
  auto& queue = sends_[static_cast<std::size_t>(to)];
  if (queue.empty()) return false;
  team_->open_channel(to);
  auto& channel = team_->channel(team_->rank(), to);
  bool has_moved = false;
  while (!queue.empty()) {
    auto& pending = *queue.front();
    const auto sent = channel.sent.value.load(std::memory_order_relaxed);
    if (sent - channel.taken.value.load(std::memory_order_acquire) >= kMessageSlots) break;
    const auto& span = pending.transfer.span;
    const auto bytes = std::min(kMessageChunkBytes, span.bytes - pending.moved);
    auto& slot = channel.slots[sent % kMessageSlots];
    slot = {.message_bytes = span.bytes,
            .offset = pending.moved,
            .tag = pending.transfer.tag,
            .dtype = pending.transfer.dtype};
    if (bytes > 0) std::memcpy(team_->message_chunk(team_->rank(), to, sent), span.at + pending.moved, bytes);
    channel.sent.value.store(sent + 1, std::memory_order_release);
    pending.moved += bytes;
    pending.has_begun = true;
    has_moved = true;
    if (pending.moved < span.bytes) continue;
    finish(std::move(queue.front()), to, "");
    queue.pop_front();
  }
  if (has_moved) ring(team_->lane(to).bell);
  return has_moved;
}

std::unique_ptr<Messages::Pending> Messages::take_receiver(int from, std::int64_t tag) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const auto& each) {
    const auto& wanted = each->transfer;
    return (wanted.peer == kAnyRank || wanted.peer == from) && wanted.tag == tag;
  });
  if (found == receives_.end()) return nullptr;
  auto receiver = std::move(*found);
  receives_.erase(found);
  return receiver;
}

bool Messages::wants_from(int from) const {
  return std::any_of(receives_.begin(), receives_.end(),
                     [&](const auto& each) { return each->transfer.peer == kAnyRank || each->transfer.peer == from; });
}

/// Decides where a message goes. False if it has to stay where it is.
bool Messages::begin_message(int from, const Channel::Slot& slot) {
  auto& incoming = incoming_[static_cast<std::size_t>(from)];
  incoming.receiver = take_receiver(from, slot.tag);
  if (!incoming.receiver && !wants_from(from)) return false;
  if (!incoming.receiver) {
    incoming.store = std::make_unique<Stored>(Stored{slot.tag, slot.dtype, std::vector<std::byte>(slot.message_bytes)});
  }
  incoming.moved = 0;
  incoming.bytes = slot.message_bytes;
  incoming.is_under_way = true;
  if (!incoming.receiver) return true;
  const auto& wanted = incoming.receiver->transfer;
  if (wanted.span.bytes != slot.message_bytes || wanted.dtype != slot.dtype) {
    // Refused here, and the message is thrown away, so that the next one finds its receiver.
    const auto problem = describe_mismatch(*incoming.receiver, from, slot.message_bytes, slot.dtype);
    finish(std::move(incoming.receiver), from, problem);
  }
  return true;
}

bool Messages::pull(int from) {
  auto& incoming = incoming_[static_cast<std::size_t>(from)];
  if (!incoming.is_under_way && !wants_from(from)) return false;
  auto& channel = team_->channel(from, team_->rank());
  bool has_moved = false;
  while (true) {
    const auto taken = channel.taken.value.load(std::memory_order_relaxed);
    if (channel.sent.value.load(std::memory_order_acquire) == taken) break;
    const auto& slot = channel.slots[taken % kMessageSlots];
    if (!incoming.is_under_way && !begin_message(from, slot)) break;
    if (slot.offset != incoming.moved || slot.message_bytes != incoming.bytes) {
      throw PeerError(str("rank ", team_->seat().name_of(from), " gave up half way through a message"));
    }
    const auto bytes = std::min<std::size_t>(kMessageChunkBytes, slot.message_bytes - slot.offset);
    std::byte* to = nullptr;
    if (incoming.receiver) to = incoming.receiver->transfer.span.at + slot.offset;
    if (incoming.store) to = incoming.store->bytes.data() + slot.offset;
    if (to != nullptr && bytes > 0) std::memcpy(to, team_->message_chunk(from, team_->rank(), taken), bytes);
    incoming.moved += bytes;
    const bool is_complete = incoming.moved >= slot.message_bytes;
    channel.taken.value.store(taken + 1, std::memory_order_release);
    has_moved = true;
    if (!is_complete) continue;
    incoming.is_under_way = false;
    if (incoming.receiver) finish(std::move(incoming.receiver), from, "");
    if (!incoming.store) continue;
    incoming.stored.push_back(std::move(*incoming.store));
    incoming.store.reset();
    // Its receiver may have come meanwhile, and goes before that of the next message.
    serve_from_store();
  }
  if (has_moved) ring(team_->lane(from).bell);
  return has_moved;
}

bool Messages::serve_from_store() {
  bool has_moved = false;
  for (int from = 0; from < team_->size(); ++from) {
    auto& stored = incoming_[static_cast<std::size_t>(from)].stored;
    for (auto each = stored.begin(); each != stored.end();) {
      auto receiver = take_receiver(from, each->tag);
      if (!receiver) {
        ++each;
        continue;
      }
      const auto& wanted = receiver->transfer;
      std::string problem;
      if (wanted.span.bytes == each->bytes.size() && wanted.dtype == each->dtype) {
        if (!each->bytes.empty()) std::memcpy(wanted.span.at, each->bytes.data(), each->bytes.size());
      } else {
        problem = describe_mismatch(*receiver, from, each->bytes.size(), each->dtype);
      }
      finish(std::move(receiver), from, problem);
      each = stored.erase(each);
      has_moved = true;
    }
  }
  return has_moved;
}

/// Fails every transfer for which match(pending, is_send) gives a reason.
template <class Match>
void Messages::fail_where(const Match& match) {
  const auto sweep = [&](std::deque<std::unique_ptr<Pending>>& list, bool is_send) {
    for (auto each = list.begin(); each != list.end();) {
      const std::string reason = match(**each, is_send);
      if (reason.empty()) {
        ++each;
        continue;
      }
      const int peer = (*each)->transfer.peer;
      const auto text = str(describe(**each, is_send), ": ", reason);
      finish(std::move(*each), peer, text);
      each = list.erase(each);
    }
  };
  for (auto& list : sends_) sweep(list, true);
  sweep(receives_, false);
  for (int peer = 0; peer < team_->size(); ++peer) {
    auto& incoming = incoming_[static_cast<std::size_t>(peer)];
    if (!incoming.receiver) continue;
    incoming.receiver->transfer.peer = peer;  // no longer any
    const std::string reason = match(*incoming.receiver, false);
    if (reason.empty()) continue;
    const auto text = str(describe(*incoming.receiver, false), ": ", reason);
    finish(std::move(incoming.receiver), peer, text);  // what still comes of it is thrown away
  }
}

/// Between naps: who is gone, and whose time is over?
void Messages::look_after() {
  int gone = 0;
  for (int rank = 0; rank < team_->size(); ++rank) {
    if (rank == team_->rank()) continue;
    auto& times = times_seen_gone_[static_cast<std::size_t>(rank)];
    // Twice, since its last words may have come between our look at the channel and this one.
    times = team_->is_gone(rank) ? times + 1 : 0;
    gone += times > 1 ? 1 : 0;
    const bool has_died = times == 2 && !team_->has_left(rank);
    // Collectives cannot go on either, and those who wait in one shall hear why.
    if (has_died) team_->fail(str(team_->seat().who(), ": rank ", team_->seat().name_of(rank), " is gone"));
  }
  const auto now = Clock::now();
  fail_where([&](const Pending& pending, bool) -> std::string {
    const auto peer = pending.transfer.peer;
    if (peer != kAnyRank && peer != team_->rank() && times_seen_gone_[static_cast<std::size_t>(peer)] > 1) {
      return str("rank ", team_->seat().name_of(peer), " is gone");
    }
    if (peer == kAnyRank && gone == team_->size() - 1) return "all other ranks are gone";
    if (now < pending.deadline) return "";
    // The other end cannot know that half a message will not come.
    if (pending.has_begun) team_->fail(str(team_->seat().who(), ": a message timed out half way"));
    return str("it did not happen within ", pending.transfer.timeout.count(), " ms: the other rank is hung or late");
  });
  // Half a message would be read as the beginning of the next.
  if (const auto reason = team_->failure()) fail_where([&](const Pending&, bool) { return *reason; });
  try {
    if (team_->seat().interrupt) team_->seat().interrupt();
  } catch (const std::exception& error) {
    const std::string reason = error.what();
    fail_where([&](const Pending&, bool) { return reason; });
  }
}

void Messages::accept_new() {
  const std::lock_guard lock(mutex_);
  for (auto& send : new_sends_) {
    const auto to = static_cast<std::size_t>(send->transfer.peer);
    sends_[to].push_back(std::move(send));
  }
  std::move(new_receives_.begin(), new_receives_.end(), std::back_inserter(receives_));
  new_sends_.clear();
  new_receives_.clear();
  if (close_reason_) is_ending_ = true;
}

bool Messages::move_all() {
  bool has_moved = serve_from_store();
  for (int rank = 0; rank < team_->size(); ++rank) {
    try {
      has_moved = push(rank) || has_moved;
    } catch (const MemoryError& error) {
      // The channel could not be opened, so nothing has begun.
      for (auto& send : std::exchange(sends_[static_cast<std::size_t>(rank)], {})) {
        const auto text = str(describe(*send, true), ": ", error.what());
        finish(std::move(send), rank, text);
      }
    }
    try {
      has_moved = pull(rank) || has_moved;
    } catch (const std::exception& error) {
      team_->fail(str(team_->seat().who(), ": receiving messages failed: ", error.what()));
      look_after();
    }
  }
  return has_moved;
}

bool Messages::is_idle() const {
  return receives_.empty() &&
         std::all_of(sends_.begin(), sends_.end(), [](const auto& list) { return list.empty(); }) &&
         std::none_of(incoming_.begin(), incoming_.end(), [](const auto& each) { return each.receiver != nullptr; });
}

void Messages::work() {
  auto& bell = team_->lane(team_->rank()).bell;
  int looks = 0;
  auto next_look = Clock::now() + kLongestNap;
  while (true) {
    const auto seen = bell.value.load(std::memory_order_acquire);
    accept_new();
    if (is_ending_) fail_where([&](const Pending&, bool) { return *close_reason_; });
    const bool has_moved = !is_ending_ && move_all();
    // By the clock, so that steady traffic with one rank does not hide that another is gone.
    if (!is_ending_ && Clock::now() >= next_look) {
      look_after();
      next_look = Clock::now() + kLongestNap;
    }
    for (auto& each : std::exchange(finished_, {})) each();
    if (is_ending_) return;
    looks = has_moved ? 0 : looks + 1;
    if (looks >= kLooks) nap(bell, seen, is_idle() ? std::chrono::milliseconds(10'000) : kLongestNap);
  }
}

}  // namespace lockstep::shm
