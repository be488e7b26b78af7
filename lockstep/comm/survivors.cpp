#include "lockstep/comm/survivors.h"

#include <algorithm>
#include <sstream>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/comm/process_home.h"
#include "lockstep/comm/rendezvous.h"

namespace lockstep {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(2);

std::string here_key(int rank) {
  return str("here/", rank);
}

std::vector<int> parse_ranks(const std::string& text) {
  std::istringstream numbers(text);
  std::vector<int> ranks;
  for (int rank = 0; numbers >> rank;) ranks.push_back(rank);
  return ranks;
}

/// Places in the old group of those who go on, the same on all of them: whoever first sees that nobody else will come
/// decides for all.
std::vector<int> agree_on_members(c10d::Store& store, const detail::GroupDescription& from,
                                  std::chrono::milliseconds patience) {
  store.set(here_key(from.rank), std::string("here"));
  const auto deadline = deadline_after(patience);
  while (!store.check({"members"})) {
    std::vector<int> here;
    bool may_come = false;
    for (int rank = 0; rank < from.size; ++rank) {
      if (store.check({here_key(rank)})) {
        here.push_back(rank);
      } else {
        may_come = may_come || !from.has_ended(rank);
      }
    }
    if (!may_come || std::chrono::steady_clock::now() > deadline) {
      const auto text = join(here, " ");
      store.compareSet("members", std::vector<uint8_t>{}, std::vector<uint8_t>(text.begin(), text.end()));
      break;
    }
    std::this_thread::sleep_for(kPoll);
  }
  return parse_ranks(store.get_to_str("members"));
}

/// Of the group that is made of `from`'s `members`.
detail::GroupDescription description_among(const std::vector<int>& members, const detail::GroupDescription& from,
                                           const StorePtr& root, int generation) {
  detail::GroupDescription mine = from;
  mine.store = c10::make_intrusive<c10d::PrefixStore>(str("generation/", generation, "/group"), root);
  mine.rank = static_cast<int>(std::find(members.begin(), members.end(), from.rank) - members.begin());
  mine.size = static_cast<int>(members.size());
  mine.name = str(from.name.substr(0, from.name.find(" after ")), " after ", generation,
                  generation == 1 ? " failure" : " failures");
  mine.survivors_meet_at = root;
  mine.generation = generation;
  mine.global_ranks = detail::picked(from.global_ranks, members);
  mine.homes = detail::picked(from.homes, members);
  return mine;
}

}  // namespace

GroupPtr surviving_group(const GroupPtr& failed, const SurvivorOptions& options) {
  const auto& state = detail::state_of(failed);
  TORCH_CHECK(state.description.store, "[lockstep/comm] ", state.who(), ": group '", state.description.name,
              "' has no store, so survivors cannot meet. Make it with lockstep::init().");
  // One place for all generations: a rank whose new group failed at once meets those for whom it failed later.
  const auto root = state.description.survivors_meet_at ? state.description.survivors_meet_at : state.description.store;
  auto from = state.description;
  std::string why;
  try {
    for (int generation = from.generation + 1;; ++generation) {
      const auto meeting = c10::make_intrusive<c10d::PrefixStore>(str("generation/", generation), root);
      const auto members = agree_on_members(*meeting, from, options.patience);
      TORCH_CHECK_WITH(DistBackendError, std::find(members.begin(), members.end(), from.rank) != members.end(),
                       "[lockstep/comm] ", state.who(), ": the other ranks of group '", state.description.name,
                       "' went on without this one, which did not come within ", options.patience.count(),
                       " ms. Raise SurvivorOptions::patience if it was only late.");
      from = description_among(members, from, root, generation);
      TORCH_CHECK_WITH(DistBackendError, from.size >= options.at_least, "[lockstep/comm] ", state.who(), ": only ",
                       from.size, " of ", state.description.size, " ranks of group '", state.description.name,
                       "' are left, and at least ", options.at_least, " are needed", why);
      try {
        return detail::connect_group(from);
      } catch (const c10::DistBackendError& error) {
        // Another one died meanwhile: the next generation is without it. Without a death it would fail for ever.
        const bool is_one_gone = std::any_of(from.homes.begin(), from.homes.end(), detail::is_gone);
        if (!is_one_gone) throw;
        why = str(": ", detail::first_line(error));
      }
    }
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    C10_THROW_ERROR(
        DistBackendError,
        str("[lockstep/comm] ", state.who(), ": the survivors of group '", state.description.name,
            "' cannot meet: the store is gone, and with it the rank that served it (", detail::first_line(error),
            "). Start the job by lockstep-run --survivors, or with a store ", "that outlives ranks."));
  }
}

std::vector<int> lost_ranks(const GroupPtr& before, const GroupPtr& after) {
  const auto left = global_ranks(after);
  auto lost = global_ranks(before);
  std::erase_if(lost, [&](int rank) { return std::find(left.begin(), left.end(), rank) != left.end(); });
  return lost;
}

}  // namespace lockstep
