// What ranks must agree on is compared once, before anything depends on it, and a disagreement reads the same on every
// rank.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep {

/// Named values as text, in the order they are compared: {{"parameter 'fc.weight'", "Float[3, 4]"}, …}.
using Facts = std::vector<std::pair<std::string, std::string>>;

/// Throws the same c10::Error on every rank of `group` unless all ranks pass the same facts: it says which fact differs
/// and what each rank has. Collective and blocking; the group stays usable.
void check_same_on_all_ranks(const std::string& what, const Facts& facts, const GroupPtr& group = default_group());
void check_same_on_all_ranks(const std::string& what, const std::string& value,
                             const GroupPtr& group = default_group());

/// Whether ranks of `group` whose calls do not match are told so by all its backends. Local.
bool compares_calls(const GroupPtr& group = default_group());

/// To be called before a collective that some ranks might leave out, on backends that would not notice: waits until all
/// ranks of `group` have come here after as many collectives. Returns "", or who is in another one instead: "rank 1
/// waits for all_gather(…)". Blocks, by the store, so it is for what happens seldom. Does nothing where the backend
/// compares calls itself.
std::string meet(const std::string& what, const GroupPtr& group = default_group());

}  // namespace lockstep
