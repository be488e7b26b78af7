#include "lockstep/shm/mailbox.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/str.h"

namespace lockstep::shm {
namespace {

// A record begins with this, and at a multiple of its own kind.
struct alignas(16) MailHead {
  std::uint32_t bytes = 0;
  std::uint32_t mark = 0;
};
constexpr std::uint32_t kMailMark = 0x4c4d4149;
constexpr std::uint32_t kFillerMark = 0x4c46494c;  // nothing up to the end of the ring
constexpr std::uint32_t kMailGrain = 64;

static_assert((Mailbox::kRingBytes & (Mailbox::kRingBytes - 1)) == 0, "positions wrap around");
static_assert(Mailbox::kRingBytes % kMailGrain == 0);

std::uint32_t mail_length(std::size_t bytes) {
  return static_cast<std::uint32_t>((sizeof(MailHead) + bytes + kMailGrain - 1) / kMailGrain * kMailGrain);
}

std::size_t mail_place(int rank) {
  return static_cast<std::size_t>(rank);
}

}  // namespace

Mailbox::Mailbox(std::shared_ptr<Team> team)
    : team_(std::move(team)), outgoing_(mail_place(team_->size())), incoming_(mail_place(team_->size())) {
  own_bell().sleepers.store(1, std::memory_order_seq_cst);
}

std::byte* Mailbox::reserve(int to, std::size_t bytes) {
  auto& out = outgoing_[mail_place(to)];
  if (!out.is_open) {
    while (opening_.test_and_set(std::memory_order_acquire)) opening_.wait(true);
    try {
      team_->open_channel(to);
    } catch (...) {
      opening_.clear(std::memory_order_release);
      opening_.notify_one();
      throw;
    }
    opening_.clear(std::memory_order_release);
    opening_.notify_one();
    out.is_open = true;
  }
  const auto taken = team_->channel(team_->rank(), to).taken.value.load(std::memory_order_acquire);
  const auto used = out.sent - taken;
  if (used > kRingBytes) throw BadMail(str("claims to have read ", taken, " of ", out.sent, " bytes"));
  const auto offset = out.sent % kRingBytes;
  const auto until_end = kRingBytes - offset;
  const auto length = mail_length(bytes);
  const auto skipped = length > until_end ? until_end : 0;
  if (length + skipped > kRingBytes - used) return nullptr;
  auto* ring = ring_of(team_->rank(), to);
  if (skipped > 0) {
    const MailHead filler{.bytes = 0, .mark = kFillerMark};
    std::memcpy(ring + offset, &filler, sizeof(filler));
  }
  auto* at = ring + (out.sent + skipped) % kRingBytes;
  const MailHead head{.bytes = static_cast<std::uint32_t>(bytes), .mark = kMailMark};
  std::memcpy(at, &head, sizeof(head));
  out.pending = out.sent + skipped + length;
  return at + sizeof(head);
}

void Mailbox::send(int to) {
  auto& out = outgoing_[mail_place(to)];
  out.sent = out.pending;
  team_->channel(team_->rank(), to).sent.value.store(out.sent, std::memory_order_release);
  ring(to);
}

void Mailbox::ask_for_room(int to) {
  // The receiver takes, then looks here; the sender asks here, then looks what was taken.
  team_->channel(team_->rank(), to).sent.sleepers.store(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

std::optional<std::span<const std::byte>> Mailbox::next(int from) {
  auto& in = incoming_[mail_place(from)];
  if (in.is_closed.load(std::memory_order_relaxed)) return std::nullopt;
  const auto sent = team_->channel(from, team_->rank()).sent.value.load(std::memory_order_acquire);
  const auto* ring = ring_of(from, team_->rank());
  while (sent != in.taken) {
    const auto unread = sent - in.taken;
    const auto offset = in.taken % kRingBytes;
    const auto until_end = kRingBytes - offset;
    if (unread > kRingBytes || unread % kMailGrain != 0) throw BadMail(str("claims to have sent ", unread, " bytes"));
    MailHead head;
    std::memcpy(&head, ring + offset, sizeof(head));
    if (head.mark == kFillerMark && until_end < unread) {  // a record follows
      in.taken += until_end;
      continue;
    }
    const auto most = std::min(unread, until_end) - static_cast<std::uint32_t>(sizeof(head));
    if (head.mark != kMailMark || head.bytes > most) {
      throw BadMail(str("sent a record of ", head.bytes, " bytes where there are ", most));
    }
    in.length = mail_length(head.bytes);
    return std::span(ring + offset + sizeof(head), head.bytes);
  }
  return std::nullopt;
}

void Mailbox::drop(int from) {
  auto& in = incoming_[mail_place(from)];
  auto& channel = team_->channel(from, team_->rank());
  in.taken += in.length;
  channel.taken.value.store(in.taken, std::memory_order_seq_cst);
  if (channel.sent.sleepers.load(std::memory_order_seq_cst) == 0) return;
  channel.sent.sleepers.store(0, std::memory_order_seq_cst);
  ring(from);
}

void Mailbox::close(int from) {
  incoming_[mail_place(from)].is_closed.store(true, std::memory_order_relaxed);
}

bool Mailbox::has_mail() const {
  for (int from = 0; from < team_->size(); ++from) {
    const auto& in = incoming_[mail_place(from)];
    if (from == team_->rank() || in.is_closed.load(std::memory_order_relaxed)) continue;
    const auto& channel = team_->channel(from, team_->rank());
    // As published by me: who reads now may be ahead of it, and has seen what lies between.
    if (channel.sent.value.load(std::memory_order_seq_cst) != channel.taken.value.load(std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

std::uint32_t Mailbox::bell() const {
  return own_bell().value.load(std::memory_order_seq_cst);
}

bool Mailbox::try_attend() {
  if (is_attended_.load(std::memory_order_relaxed) || is_attended_.exchange(true, std::memory_order_acquire)) {
    return false;
  }
  own_bell().sleepers.store(0, std::memory_order_seq_cst);
  return true;
}

bool Mailbox::leave() {
  // In this order, and against the sender's: it writes, rings, and looks whether somebody attends.
  own_bell().sleepers.store(1, std::memory_order_seq_cst);
  is_attended_.store(false, std::memory_order_release);
  return has_mail();
}

bool Mailbox::stay_awake(std::uint32_t seen, const Patience& patience) const {
  return stay_awake_for(own_bell(), seen + 1, patience);
}

void Mailbox::doze(std::uint32_t seen) {
  shm::doze(own_bell(), seen);
}

void Mailbox::ring(int rank) {
  auto& bell = team_->lane(rank).bell;
  bell.value.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) wake_one(bell);
}

void Mailbox::call_one() {
  own_bell().value.fetch_add(1, std::memory_order_seq_cst);
  wake_one(own_bell());
}

void Mailbox::call_all() {
  own_bell().value.fetch_add(1, std::memory_order_seq_cst);
  wake_all(own_bell());
}

}  // namespace lockstep::shm
