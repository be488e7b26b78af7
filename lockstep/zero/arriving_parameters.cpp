#include "lockstep/zero/arriving_parameters.h"

#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/intercept/address_message.h"
#include "lockstep/intercept/key.h"
#include "lockstep/intercept/storage_owner.h"

namespace lockstep::detail {

void Arrival::wait() {
  for (auto& each : pending) each.wait();
  pending.clear();
  if (!unpack) return;
  const at::NoGradGuard no_grad;
  std::exchange(unpack, nullptr)();
}

void wait_for_others(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    // Any operator will do.
    if (is_marked_intercepted(parameter) && storage_owner_of(parameter)) static_cast<void>(parameter.detach());
  }
}

class ArrivingParameters::Watch final : public StorageOwner {
 public:
  explicit Watch(std::vector<Arrival> arrivals) : arrivals_(std::move(arrivals)) {}

  /// Makes `self`, which is this, the owner of all storages that something arrives in. Until they are released they
  /// give no address away, with this message.
  void take_storages(const std::shared_ptr<Watch>& self, const std::string& message) {
    for (std::size_t i = 0; i < arrivals_.size(); ++i) {
      for (const auto& parameter : arrivals_[i].parameters) {
        if (parameter.numel() == 0) continue;  // its storage may be the buffer's
        mark_intercepted(parameter);
        auto* storage = parameter.storage().unsafeGetStorageImpl();
        auto found = expected_.find(storage);
        if (found == expected_.end()) {
          Expected expected{.storage = parameter.storage(), .owned = OwnedStorage(parameter, self)};
          found = expected_.emplace(storage, std::move(expected)).first;
        }
        found->second.arrivals.push_back(i);
      }
    }
    for (const auto& [storage, expected] : expected_) {
      set_address_message(*storage, message);
    }
  }

  void before_operator(OperatorCall& /*call*/, c10::ArrayRef<TouchedTensor> touched) override {
    const std::lock_guard lock(mutex_);
    for (const auto& each : touched) {
      const auto found = expected_.find(each.tensor.storage().unsafeGetStorageImpl());
      if (found == expected_.end()) continue;
      for (const auto arrival : found->second.arrivals) arrivals_[arrival].wait();
      clear_address_message(*found->first);
      expected_.erase(found);
    }
  }

  void wait() {
    const std::lock_guard lock(mutex_);
    for (auto& arrival : arrivals_) arrival.wait();
    release();
  }

  void abandon() {
    const std::lock_guard lock(mutex_);
    release();
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    expected_.clear();
  }

 private:
  /// A storage and the arrivals that fill it.
  struct Expected {
    c10::Storage storage;
    OwnedStorage owned;
    std::vector<std::size_t> arrivals = {};
  };

  void release() {
    for (const auto& [storage, expected] : expected_) clear_address_message(*storage);
    expected_.clear();
  }

  // Guarded by mutex_: operators of all threads come here.
  std::mutex mutex_;
  std::vector<Arrival> arrivals_;
  std::unordered_map<c10::StorageImpl*, Expected> expected_;
};

ArrivingParameters::ArrivingParameters(std::vector<Arrival> arrivals, const std::string& who)
    : watch_(std::make_shared<Watch>(std::move(arrivals))) {
  watch_->take_storages(
      watch_, str(who, ": the memory of a parameter was asked for while the parameter was on its way from another ",
                  "rank, or after it had failed to come (overlap_parameter_sync). Operators wait by themselves; call ",
                  "the optimizer's wait_for_parameters() before what is none: taking addresses, torch::save() of the ",
                  "model, collectives on parameters."));
}

ArrivingParameters::~ArrivingParameters() {
  watch_->leave();
}

void ArrivingParameters::wait() {
  watch_->wait();
}

void ArrivingParameters::abandon() {
  watch_->abandon();
}

}  // namespace lockstep::detail
