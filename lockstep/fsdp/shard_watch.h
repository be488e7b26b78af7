// Notices writes to shards. Versions do not tell: libtorch's optimizers write through data(), which has a version of
// its own. Internal to fsdp.
#pragma once

#include <atomic>
#include <optional>

#include "lockstep/intercept/storage_owner.h"

namespace lockstep::detail {

class ShardWatch final : public StorageOwner {
 public:
  void before_operator(OperatorCall& /*call*/, c10::ArrayRef<TouchedTensor> touched) override {
    for (const auto& each : touched) {
      if (each.is_written) written_ = each.tensor.storage_offset();
    }
  }

  /// Where in the storage something was written since the last clear(), in elements.
  std::optional<int64_t> written() const {
    const int64_t at = written_;
    return at < 0 ? std::nullopt : std::optional(at);
  }
  void clear() { written_ = -1; }

 private:
  std::atomic<int64_t> written_ = -1;
};

}  // namespace lockstep::detail
