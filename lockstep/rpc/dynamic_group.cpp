#include "lockstep/rpc/dynamic_group.h"

#include <thread>

#include "lockstep/base/str.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/session.h"
#include "lockstep/rpc/switched_agent.h"
#include "lockstep/rpc/tensorpipe.h"

namespace lockstep::rpc::detail {
namespace {

constexpr auto kLockKey = "changing";
constexpr auto kNobody = "nobody";
/// Of a member that is asked: it may have died without leaving.
constexpr std::chrono::seconds kPatience(20);

std::string card_key(const std::string& worker) {
  return "card/" + worker;
}

const auto take_note = function("lockstep.member", [](const WorkerInfo& worker, bool joins) {
  update_membership(*switched_agent()->real(), worker, joins);
});

std::vector<WorkerInfo> others() {
  const auto own = worker_info();
  std::vector<WorkerInfo> infos;
  for (const auto& info : worker_infos()) {
    if (info.id_ != own.id_) infos.push_back(info);
  }
  return infos;
}

}  // namespace

MembershipLock::MembershipLock(StorePtr store, std::string worker, std::chrono::milliseconds timeout)
    : store_(std::move(store)), worker_(std::move(worker)) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto try_to_hold = [&] {
    const auto holder = store_->compareSet(kLockKey, std::vector<std::uint8_t>(kNobody, kNobody + 6),
                                           std::vector<std::uint8_t>(worker_.begin(), worker_.end()));
    return std::string(holder.begin(), holder.end());
  };
  if (store_->add("began", 1) == 1) store_->set(kLockKey, std::vector<std::uint8_t>(kNobody, kNobody + 6));
  store_->wait({kLockKey}, timeout);
  for (auto holder = try_to_hold(); holder != worker_; holder = try_to_hold()) {
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "[lockstep/rpc] worker '", worker_, "' waited ",
                timeout.count(), " ms for worker '", holder, "', which is about to join or leave the group.");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

MembershipLock::~MembershipLock() {
  try {
    store_->set(kLockKey, std::vector<std::uint8_t>(kNobody, kNobody + 6));
  } catch (const std::exception& error) {
    TORCH_WARN("[lockstep/rpc] worker '", worker_, "' cannot let others join: ", error.what());
  }
}

void compare_with_members(const WorkerCard& own, c10d::Store& store) {
  for (const auto& info : others()) {
    check_cards({own, card_of(store.get(card_key(info.name_)))});
  }
  store.set(card_key(own.name), bytes_of(own));
}

void tell_members(bool joins) {
  const auto own = worker_info();
  for (const auto& info : others()) {
    try {
      rpc_sync(Callee(info).within(kPatience), take_note, own, joins);
    } catch (const RemoteError& error) {
      TORCH_WARN("[lockstep/rpc] worker '", info.name_,
                 "' of the group does not answer and is left out: ", error.what());
      update_membership(*switched_agent()->real(), info, /*joins=*/false);
    }
  }
}

}  // namespace lockstep::rpc::detail
