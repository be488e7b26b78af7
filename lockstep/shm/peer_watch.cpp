#include "lockstep/shm/peer_watch.h"

#include "lockstep/base/str.h"
#include "lockstep/shm/errors.h"

namespace lockstep::shm {

void PeerWatch::give_up(const std::string& why) const {
  throw PeerError(str(team_.seat().who(), ": ", describe(request_), " #", sequence_, " on group '", team_.seat().group,
                      "': ", why));
}

void PeerWatch::check() {
  const auto& seat = team_.seat();
  if (seat.interrupt) seat.interrupt();
  const auto now = std::chrono::steady_clock::now();
  if (!deadline_) deadline_ = now + request_.timeout;
  if (const auto reason = team_.failure()) give_up(str("another rank gave up: ", *reason));
  if (team_.is_gone(rank_)) {
    // It may have done its part and gone between our look at the counter and this one: look once more.
    if (was_gone_) {
      give_up(team_.has_left(rank_) ? str("rank ", seat.name_of(rank_), " has left the group without taking part")
                                    : str("rank ", seat.name_of(rank_), " is gone: its process ended"));
    }
    was_gone_ = true;
    return;
  }
  if (now >= *deadline_) {
    give_up(str("rank ", seat.name_of(rank_), " did not take part within ", request_.timeout.count(),
                " ms: it is hung, late or makes other calls. Look there for an earlier error."));
  }
}

}  // namespace lockstep::shm
