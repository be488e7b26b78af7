// Notices writes to shards, and forwards that read them. Versions do not tell: libtorch's optimizers write through
// data(), which has a version of its own. Internal to fsdp.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/intercept/operator_call.h"
#include "lockstep/intercept/part_mark.h"
#include "lockstep/intercept/storage_owner.h"

namespace lockstep::detail {

class ShardWatch final : public StorageOwner {
 public:
  explicit ShardWatch(bool is_divided) : is_divided_(is_divided) {}

  void before_operator(OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) override {
    for (const auto& each : touched) {
      check_recurrent(call.name(), each.tensor);
      if (each.is_written) {
        written_ = each.tensor.storage_offset();
      } else if (at::GradMode::is_enabled() && each.tensor.requires_grad() && is_computation(call.name())) {
        TORCH_WARN_ONCE("[lockstep/fsdp] ", call.name(), " reads the shard of a parameter, of sizes ",
                        each.tensor.sizes(), ", with gradients recorded. What it computes is of this rank's part, and ",
                        "its gradients are not averaged: right for a penalty that is a sum over elements, but in a ",
                        "forward use the module's member, which is whole, not parameters().");
      }
    }
  }

  /// Module::clone() copies shards as if they were the parameters.
  void on_result(OperatorCall& call) override {
    if (is_divided_ && call.name() == "aten::clone") mark_copy_of_part(call.result(0).toTensor());
  }

  /// Where in the storage something was written since the last clear(), in elements.
  std::optional<int64_t> written() const {
    const int64_t at = written_;
    return at < 0 ? std::nullopt : std::optional(at);
  }
  void clear() { written_ = -1; }
  /// For errors. Before operators come.
  void add_name(const at::Tensor& shard, const std::string& name) {
    names_.emplace_back(shard.unsafeGetTensorImpl(), name);
  }

 private:
  void check_recurrent(const std::string& name, const at::Tensor& shard) const {
    if (name != "aten::lstm" && name != "aten::gru" && name != "aten::rnn_tanh" && name != "aten::rnn_relu") return;
    for (const auto& [impl, parameter] : names_) {
      TORCH_CHECK(impl != shard.unsafeGetTensorImpl(), "[lockstep/fsdp] ", name, " gets the shard of parameter '",
                  parameter, "': to() of a recurrent layer takes its weights from parameters(), where shards are. ",
                  "Call to() before fully_shard(), or give a mp_policy.");
    }
  }

  /// Copies, casts and exchanges are what to(), save() and averages of parameters do.
  static bool is_computation(const std::string& name) {
    return name != "aten::detach" && name != "aten::clone" && name != "aten::to" && name != "aten::_to_copy" &&
           name != "aten::set_data" && name != "aten::_has_compatible_shallow_copy_type";
  }

  const bool is_divided_;
  std::atomic<int64_t> written_ = -1;
  std::vector<std::pair<const c10::TensorImpl*, std::string>> names_;
};

/// Notices that the program zeroes a gradient, which one that is zero and added to does not show.
class ZeroWatch final : public StorageOwner {
 public:
  void before_operator(OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) override {
    const auto& name = call.name();
    if (name != "aten::zero_" && name != "aten::fill_" && name != "aten::_foreach_zero_") return;
    for (const auto& each : touched) is_zeroed_ = is_zeroed_ || each.is_written;
  }
  bool is_zeroed() const { return is_zeroed_; }

 private:
  std::atomic<bool> is_zeroed_ = false;
};

}  // namespace lockstep::detail
