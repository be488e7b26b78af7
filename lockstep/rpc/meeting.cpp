#include "lockstep/rpc/meeting.h"

#include <algorithm>
#include <set>
#include <thread>

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/str.h"
#include "lockstep/rpc/wire.h"

namespace lockstep::rpc::detail {
namespace {

using DeviceNames = std::map<std::string, std::string>;

std::map<std::string, DeviceNames> texts_of(const std::unordered_map<std::string, DeviceMap>& maps) {
  std::map<std::string, DeviceNames> texts;
  for (const auto& [worker, map] : maps) {
    for (const auto& [from, to] : map) texts[worker].emplace(from.str(), to.str());
  }
  return texts;
}

struct CardOnWire {
  std::string name;
  std::string host;
  Agent agent = Agent::kAuto;
  std::map<std::string, std::string> functions;
  std::map<std::string, DeviceNames> device_maps;
  std::vector<std::string> devices;
  std::int64_t device_count = 0;
};

auto rpc_fields(CardOnWire& card) {
  return std::tie(card.name, card.host, card.agent, card.functions, card.device_maps, card.devices, card.device_count);
}

void check_names(const std::vector<WorkerCard>& cards) {
  std::map<std::string, std::vector<int>> ranks;
  for (std::size_t rank = 0; rank < cards.size(); ++rank) ranks[cards[rank].name].push_back(static_cast<int>(rank));
  for (const auto& [name, all] : ranks) {
    TORCH_CHECK(all.size() == 1, "[lockstep/rpc] init_rpc: name '", name, "' is used by ranks ", join(all, ", "),
                ". Each worker needs a name of its own.");
  }
}

void check_functions(const std::vector<WorkerCard>& cards) {
  std::map<std::string, std::pair<std::string, std::string>> known;  // signature and worker by function
  for (const auto& card : cards) {
    for (const auto& [name, signature] : card.functions) {
      const auto [place, is_new] = known.try_emplace(name, signature, card.name);
      const auto& [first, worker] = place->second;
      TORCH_CHECK(is_new || first == signature, "[lockstep/rpc] init_rpc: function '", name, "' is ", first,
                  " on worker '", worker, "' and ", signature, " on worker '", card.name,
                  "'. Register the same function on both, or choose another name.");
    }
  }
}

void check_device_map(const WorkerCard& card, const std::string& to, const DeviceMap& map,
                      const std::vector<WorkerCard>& cards) {
  const auto callee = std::find_if(cards.begin(), cards.end(), [&](const auto& each) { return each.name == to; });
  const auto where = str("[lockstep/rpc] init_rpc: device map of worker '", card.name, "' to '", to, "'");
  TORCH_CHECK(callee != cards.end(), where, ": there is no such worker.");
  std::set<c10::DeviceIndex> targets;
  for (const auto& [mine, theirs] : map) {
    for (const auto& [device, owner] : {std::pair{mine, &card}, std::pair{theirs, &*callee}}) {
      TORCH_CHECK(device.is_cpu() || (device.has_index() && device.index() < owner->device_count), where, ": ",
                  device.str(), " does not exist on worker '", owner->name, "', which has ", owner->device_count,
                  " devices.");
    }
    if (theirs.is_cpu()) continue;
    TORCH_CHECK(targets.insert(theirs.index()).second, where, ": two devices go to ", theirs.str(),
                ". A map is one to one, since answers come back by it.");
    const auto& listed = callee->devices;
    TORCH_CHECK(listed.empty() || std::find(listed.begin(), listed.end(), theirs) != listed.end(), where, ": ",
                theirs.str(), " is not among the devices that worker '", to, "' gave in RpcOptions::devices.");
  }
}

}  // namespace

std::vector<std::uint8_t> bytes_of(const WorkerCard& card) {
  CardOnWire wire{card.name, card.host, card.agent, card.functions, texts_of(card.device_maps), {}, card.device_count};
  for (const auto& device : card.devices) wire.devices.push_back(device.str());
  const auto bytes = torch::jit::pickle(Wire<CardOnWire>::to(wire));
  return {bytes.begin(), bytes.end()};
}

WorkerCard card_of(const std::vector<std::uint8_t>& bytes) {
  const auto wire =
      Wire<CardOnWire>::from(torch::jit::unpickle(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  WorkerCard card{.name = wire.name,
                  .host = wire.host,
                  .agent = wire.agent,
                  .functions = wire.functions,
                  .device_count = wire.device_count};
  for (const auto& [worker, map] : wire.device_maps) {
    for (const auto& [from, to] : map) card.device_maps[worker].emplace(c10::Device(from), c10::Device(to));
  }
  for (const auto& device : wire.devices) card.devices.emplace_back(device);
  return card;
}

std::vector<WorkerCard> exchange(const WorkerCard& own, int rank, int world_size, c10d::Store& store,
                                 std::chrono::milliseconds timeout) {
  const auto key = [](int each) { return str("worker/", each); };
  store.set(key(rank), bytes_of(own));
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<WorkerCard> cards;
  std::vector<int> missing;
  for (int each = 0; each < world_size; ++each) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    try {
      // A moment even after the deadline: the list of those who are missing shall be complete.
      store.wait({key(each)}, std::max(left, std::chrono::milliseconds(10)));
      cards.push_back(card_of(store.get(key(each))));
    } catch (const std::exception&) {
      missing.push_back(each);
    }
  }
  TORCH_CHECK(missing.empty(), "[lockstep/rpc] init_rpc: worker '", own.name, "' (rank ", rank, " of ", world_size,
              ") waited ", timeout.count(), " ms for rank ", join(missing, ", "), ", which did not come.");
  return cards;
}

void check_cards(const std::vector<WorkerCard>& cards) {
  check_names(cards);
  check_functions(cards);
  for (const auto& card : cards) {
    for (const auto& [worker, map] : card.device_maps) check_device_map(card, worker, map, cards);
  }
}

void wait_for_others(c10d::Store& store, const std::string& key, int64_t count, std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (store.add(key, 0) < count && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void check_cards_together(const std::vector<WorkerCard>& cards, c10d::Store& store) {
  constexpr auto kReaders = "readers";
  constexpr std::chrono::seconds kPatience(5);
  store.add(kReaders, 1);
  try {
    check_cards(cards);
  } catch (const c10::Error&) {
    wait_for_others(store, kReaders, static_cast<std::int64_t>(cards.size()), kPatience);
    throw;
  }
}

Agent choose_agent(const std::vector<WorkerCard>& cards) {
  const auto find = [&](const auto& matches) {
    const auto found = std::find_if(cards.begin(), cards.end(), matches);
    return found == cards.end() ? nullptr : &*found;
  };
  const auto* const shm = find([](const auto& card) { return card.agent == Agent::kShm; });
  const auto* const tensorpipe = find([](const auto& card) { return card.agent == Agent::kTensorPipe; });
  const auto* const far = find([&](const auto& card) { return card.host != cards.front().host; });
  const auto* const maps = find([](const auto& card) { return !card.device_maps.empty() || !card.devices.empty(); });
  if (shm == nullptr) return tensorpipe || far || maps ? Agent::kTensorPipe : Agent::kShm;
  const auto refuse = [&](const WorkerCard& other, const char* why) {
    TORCH_CHECK(false, "[lockstep/rpc] init_rpc: worker '", shm->name, "' asks for shared memory, but worker '",
                other.name, "' ", why, ". Choose Agent::kAuto on all workers.");
  };
  if (tensorpipe != nullptr) refuse(*tensorpipe, "asks for TensorPipe");
  if (far != nullptr) refuse(*far, "is on another host");
  if (maps != nullptr) refuse(*maps, "has device maps, which only TensorPipe follows");
  return Agent::kShm;
}

}  // namespace lockstep::rpc::detail
