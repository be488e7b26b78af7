// What workers tell each other before any agent exists, through the store. Internal to rpc.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/rpc/rpc.h"

namespace lockstep::rpc::detail {

struct WorkerCard {
  std::string name = "";
  std::string host = "";
  Agent agent = Agent::kAuto;                                   // what it asks for
  std::map<std::string, std::string> functions = {};            // signatures by name
  std::unordered_map<std::string, DeviceMap> device_maps = {};  // by callee
  std::vector<c10::Device> devices = {};                        // that others may map to
  std::int64_t device_count = 0;
};

std::vector<std::uint8_t> bytes_of(const WorkerCard& card);
WorkerCard card_of(const std::vector<std::uint8_t>& bytes);

/// Waits until `count` workers have been here, as `key` of the store counts, but not longer than `patience`: for those
/// with whom the store may end.
void wait_for_others(c10d::Store& store, const std::string& key, int64_t count, std::chrono::milliseconds patience);

/// Every worker's card, by rank. Throws naming the ranks that do not come in time.
std::vector<WorkerCard> exchange(const WorkerCard& own, int rank, int world_size, c10d::Store& store,
                                 std::chrono::milliseconds timeout);

/// Throws for what does not fit together; the same on every worker.
void check_cards(const std::vector<WorkerCard>& cards);
/// The same, but a worker that throws lets the others read the cards first: the store may end with it.
void check_cards_together(const std::vector<WorkerCard>& cards, c10d::Store& store);

/// kShm or kTensorPipe; the same for all. Throws if some cannot have what they ask for.
Agent choose_agent(const std::vector<WorkerCard>& cards);

}  // namespace lockstep::rpc::detail
