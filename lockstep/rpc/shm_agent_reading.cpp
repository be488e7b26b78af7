// What the agent makes of its mail: the part of the thread that attends.
#include <cstring>

#include "lockstep/base/str.h"
#include "lockstep/rpc/shm_agent_envelope.h"
#include "lockstep/rpc/shm_agent_record.h"

namespace lockstep::rpc {

void ShmAgent::read_all() {
  for (const auto& peer : peers_) {
    if (!peer->is_closed && peer->info.id_ != workerInfo_.id_) read_from(*peer);
  }
}

void ShmAgent::read_from(Peer& peer) {
  const int from = peer.info.id_;
  // Asked first: what it sent before counts.
  const bool has_ended = peer.has_ended.load();
  const bool has_left = team_->has_left(from);
  try {
    while (const auto mail = mailbox_.next(from)) {
      take(peer, *mail);
      if (peer.is_closed) return;
      mailbox_.drop(from);
    }
    if (peer.has_backlog.load()) {
      const std::lock_guard lock(peer.mutex);
      if (peer.over.empty()) flush(peer);
    }
  } catch (const shm::BadMail& error) {
    return cut(peer, str("cannot be understood: it ", error.what()), true);
  } catch (const std::exception& error) {
    return cut(peer, str("cannot be understood: it sent ", error.what()), true);
  }
  if (peer.is_spoiled.load()) {
    std::string why;
    {
      const std::lock_guard lock(peer.mutex);
      why = peer.spoiled;
    }
    return cut(peer, str("cannot be understood: ", why), true);
  }
  if (has_left) return cut(peer, "has shut down");
  if (has_ended) cut(peer, "is gone: its process ended");
}

void ShmAgent::take(Peer& peer, std::span<const std::byte> mail) {
  Envelope envelope;
  if (mail.size() < sizeof(envelope)) throw BadRecord(str("a letter of ", mail.size(), " bytes"));
  std::memcpy(&envelope, mail.data(), sizeof(envelope));
  const int from = peer.info.id_;
  const auto& block = envelope.block;
  const auto read_task = [&] {
    Task task{.peer = from, .call = envelope.number, .message = {}, .block = block, .future = {}, .error = {}};
    if (block.bytes == 0) {
      task.message = read_message(mail.subspan(sizeof(envelope)), static_cast<int64_t>(envelope.number));
    } else if (team_->resolve_claim(from, block.location, block.bytes) == nullptr) {
      throw BadRecord(str("a message of ", block.bytes, " bytes outside of its memory"));
    }
    return task;
  };
  switch (envelope.kind) {
    case EnvelopeKind::kRequest: {
      auto task = read_task();
      if (task.message && !task.message->isRequest()) throw BadRecord("a request that is none");
      return add_task(std::move(task));
    }
    case EnvelopeKind::kResponse: {
      auto task = read_task();
      if (task.message && !task.message->isResponse()) throw BadRecord("an answer that is none");
      task.future = remove_call(envelope.number, from);
      if (task.future) return add_task(std::move(task));
      if (block.bytes > 0) release(peer, block);  // too late
      return;
    }
    case EnvelopeKind::kRelease: {
      {
        const std::lock_guard lock(peer.mutex);
        if (peer.blocks.erase(block.location) == 0) throw BadRecord("a block back that it was not given");
      }
      pool_->free(team_->resolve(workerInfo_.id_, block.location));
      return;
    }
    case EnvelopeKind::kRefusal:
      return cut(peer, "gave up: it does not understand what this worker sent");
    case EnvelopeKind::kRound: {
      const std::lock_guard lock(rounds_mutex_);
      rounds_[envelope.number][from] = envelope.count;
      rounds_changed_.notify_all();
      return;
    }
  }
  throw BadRecord(str("a letter of kind ", static_cast<std::uint32_t>(envelope.kind)));
}

/// Nothing more goes to the peer or comes from it, but a word that this is so if it shall be told.
void ShmAgent::cut(Peer& peer, const std::string& why, bool is_told) {
  const int id = peer.info.id_;
  const auto sentence = str("[lockstep/rpc] ", name_of(peer), " ", why);
  peer.is_closed = true;
  mailbox_.close(id);
  {
    const std::lock_guard lock(peer.mutex);
    if (peer.over.empty()) peer.over = sentence;
    peer.backlog.clear();
    try {
      if (is_told) put(peer, {.kind = EnvelopeKind::kRefusal}, nullptr);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): then it notices by its timeouts
    }
    peer.backlog.clear();
    peer.has_backlog.store(false);
    // One that was cut off may still read from them.
    if (peer.has_ended.load() || team_->has_left(id)) {
      for (const auto location : peer.blocks) pool_->free(team_->resolve(workerInfo_.id_, location));
      peer.blocks.clear();
    }
  }
  fail_calls(id, sentence);
  const std::lock_guard lock(rounds_mutex_);
  over_.emplace(id, sentence);
  rounds_changed_.notify_all();
}

}  // namespace lockstep::rpc
