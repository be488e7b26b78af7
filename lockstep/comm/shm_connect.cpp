// Makes the backend behind the name "shm": who shares a host, and who shares a process.
#include <unistd.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/builtin_backends.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/comm/shm_backend.h"
#include "lockstep/comm/thread_backend.h"
#include "lockstep/shm/errors.h"

namespace lockstep::detail {
namespace {

GroupDescription description_of(const BackendRequest& request) {
  return {.store = request.store,
          .rank = request.rank,
          .size = request.size,
          .name = request.group_name,
          .global_ranks = request.global_ranks.empty() ? first_ranks(request.size) : request.global_ranks,
          .timeout = request.timeout};
}

}  // namespace

BackendPtr make_shm_backend(const BackendRequest& request) {
  const auto group = description_of(request);
  const auto what = str("making group '", request.group_name, "'");
  const auto mine = str(host_id(), " ", ::getpid());
  const auto places = request.size == 1 ? std::vector{mine} : check_in(*request.store, "places", what, group, mine);
  const bool is_one_process = std::all_of(places.begin(), places.end(), [&](const auto& each) { return each == mine; });

  int round = 0;
  const auto agree = [&](const std::string& value) {
    if (request.size == 1) return value;
    return check_in(*request.store, str("agreed/", round++), what, group, value)[0];
  };
  shm::Seat seat{.rank = request.rank,
                 .size = request.size,
                 .names = group.global_ranks,
                 .group = request.group_name,
                 .timeout = request.timeout,
                 .interrupt = [run = ThreadRun::current(), who = str("[lockstep/comm] rank ", request.rank, ": ")] {
                   run->throw_if_aborted(who);
                 }};
  try {
    if (!is_one_process) {
      return c10::make_intrusive<ShmBackend>(shm::Team::of_processes(std::move(seat), agree), request.timeout);
    }
    static std::atomic<uint64_t> next_room = 0;
    const auto key = agree(str("room-", next_room++));
    return c10::make_intrusive<ShmBackend>(shm::Team::of_threads(std::move(seat), key), request.timeout);
  } catch (const shm::PeerError& error) {
    throw c10::DistBackendError(error.what());
  } catch (const shm::MemoryError& error) {
    TORCH_CHECK_WITH(DistBackendError, false, error.what());
  }
}

}  // namespace lockstep::detail
