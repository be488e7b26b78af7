#include "lockstep/shm/peer_watch.h"

#include "lockstep/base/deadline.h"
#include "lockstep/base/str.h"
#include "lockstep/shm/errors.h"

namespace lockstep::shm {

void PeerWatch::give_up(const std::string& why) const {
  throw PeerError(
      str(team_.seat().who(), ": ", describe(request_, sequence_), " on group '", team_.seat().group, "': ", why));
}

int PeerWatch::find_gone() const {
  for (int rank = 0; rank < team_.size(); ++rank) {
    // Both: who only gives has nothing to finish reading, and may yet die before it has shown everything.
    const auto& lane = team_.lane(rank);
    const bool is_done = has_reached(lane.finished, end_) && has_reached(lane.ready, end_);
    if (rank != team_.rank() && !is_done && team_.is_gone(rank)) return rank;
  }
  return -1;
}

void PeerWatch::check() {
  const auto& seat = team_.seat();
  if (seat.interrupt) seat.interrupt();
  const auto now = std::chrono::steady_clock::now();
  if (!deadline_) deadline_ = deadline_after(request_.timeout);
  if (const auto reason = team_.failure()) give_up(str("another rank gave up: ", *reason));
  // All ranks, not only the one whose turn it is: that one may be late for a good reason, the other never comes.
  const int gone = find_gone();
  if (gone >= 0 && gone == seen_gone_) {
    give_up(team_.has_left(gone) ? str("rank ", seat.name_of(gone), " has left the group without taking part")
                                 : str("rank ", seat.name_of(gone), " is gone: its process ended"));
  }
  // Twice, since it may have done its part and gone between the two looks of find_gone().
  seen_gone_ = gone;
  if (now >= *deadline_) {
    give_up(str("rank ", seat.name_of(rank_), " did not take part within ", request_.timeout.count(),
                " ms: it is hung, late or makes other calls. Look there for an earlier error."));
  }
}

}  // namespace lockstep::shm
