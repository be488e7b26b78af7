// Makes the backend behind the name "shm": who shares a host, and who shares a process. Where ranks are on several
// hosts it is a hierarchy, also if no two share one: it compares what the ranks call, which gloo alone does not.
#include <unistd.h>

#include <algorithm>
#include <random>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/str.h"
#include "lockstep/comm/builtin_backends.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/comm/hierarchical/hierarchical_backend.h"
#include "lockstep/comm/shm/shm_backend.h"
#include "lockstep/comm/threads/thread_backend.h"
#include "lockstep/shm/errors.h"

namespace lockstep::detail {
namespace {

/// Tells processes apart, also in containers that number theirs alike, and a forked one from its parent.
std::string process_token() {
  static const std::string token = [] {
    std::random_device random;
    return str(random(), random());
  }();
  return str(::getpid(), "-", token);
}

GroupDescription description_of(const BackendRequest& request) {
  return {.store = request.store,
          .rank = request.rank,
          .size = request.size,
          .name = request.group_name,
          .global_ranks = request.global_ranks.empty() ? first_ranks(request.size) : request.global_ranks,
          .timeout = request.timeout,
          .homes = request.homes};
}

/// Among ranks of one host.
c10::intrusive_ptr<ShmBackend> make_local_backend(const BackendRequest& request, bool is_one_process) {
  const auto group = description_of(request);
  const auto what = str("making group '", request.group_name, "'");
  int round = 0;
  const auto agree = [&](const std::string& value) {
    if (request.size == 1) return value;
    const auto words = check_in(*request.store, str("agreed/", round++), what, group, value);
    for (std::size_t rank = 0; rank < words.size(); ++rank) {
      if (!words[rank].starts_with(shm::Team::kComplaint)) continue;
      throw shm::PeerError(str("[lockstep/shm] rank ", group.global_ranks[static_cast<std::size_t>(request.rank)], ": ",
                               what, " failed: rank ", group.global_ranks[rank], " gave up: ", words[rank].substr(1)));
    }
    return words[0];
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

/// The part of `request` that concerns `ranks`, of which this rank is one.
BackendRequest request_among(const std::vector<int>& ranks, const std::string& prefix, const BackendRequest& request) {
  const auto all = description_of(request);
  auto part = request;
  part.store = c10::make_intrusive<c10d::PrefixStore>(prefix, request.store);
  part.rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), request.rank) - ranks.begin());
  part.size = static_cast<int>(ranks.size());
  part.global_ranks = picked(all.global_ranks, ranks);
  part.homes = picked(all.homes, ranks);
  return part;
}

BackendPtr make_hierarchical_backend(const BackendRequest& request, HostLayout layout, bool is_one_process) {
  const int host = layout.host_of(request.rank);
  const auto local =
      make_local_backend(request_among(layout.ranks_on(host), str("host/", host), request), is_one_process);
  BackendPtr leaders;
  if (layout.place_of(request.rank) == 0) {
    std::vector<int> leading;
    for (int each = 0; each < layout.hosts(); ++each) leading.push_back(layout.ranks_on(each)[0]);
    leaders = make_backend("gloo", request_among(leading, "leaders", request));
  }
  const auto flat = make_backend("gloo", request_among(first_ranks(request.size), "flat", request));
  const auto name = description_of(request).global_ranks[static_cast<std::size_t>(request.rank)];
  return c10::make_intrusive<HierarchicalBackend>(
      std::make_shared<Hierarchy>(std::move(layout), request.rank, local, leaders, flat), request.rank, request.size,
      str("[lockstep/comm] rank ", name, " (group '", request.group_name, "')"), request.timeout);
}

}  // namespace

BackendPtr make_shm_backend(const BackendRequest& request) {
  const auto mine = str(host_id(), " ", process_token());
  const auto places = request.size == 1
                          ? std::vector{mine}
                          : check_in(*request.store, "places", str("making group '", request.group_name, "'"),
                                     description_of(request), mine);
  std::vector<std::string> hosts;
  for (const auto& place : places) hosts.push_back(place.substr(0, place.rfind(' ')));
  HostLayout layout(hosts);
  const auto& neighbours = layout.ranks_on(layout.host_of(request.rank));
  const bool is_one_process = std::all_of(neighbours.begin(), neighbours.end(),
                                          [&](int rank) { return places[static_cast<std::size_t>(rank)] == mine; });
  if (layout.hosts() == 1) return make_local_backend(request, is_one_process);
  TORCH_CHECK(!request.address.empty(), "[lockstep/comm] group '", request.group_name, "' has ranks on ",
              layout.hosts(), " hosts, but here backend shm serves ranks of one host only. Use gloo.");
  return make_hierarchical_backend(request, std::move(layout), is_one_process);
}

}  // namespace lockstep::detail
