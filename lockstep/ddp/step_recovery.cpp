#include "lockstep/ddp/step_recovery.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/collectives.h"

namespace lockstep::detail {

Repair repair_for(const FailedReduction& mine, const std::vector<FailedReduction>& all) {
  using Left = FailedReduction::Left;
  const auto most = std::max_element(all.begin(), all.end(), [](const auto& one, const auto& other) {
                      return one.finished < other.finished;
                    })->finished;
  if (mine.finished < most) {
    TORCH_CHECK(mine.left == Left::kSums && mine.finished + 1 == most, "[lockstep/ddp] recover: this rank has ",
                "finished ", mine.finished, " reductions, another one ", most,
                ", and what is missing is not here. Were all of them made with the same wrapper?");
    return Repair::kWriteSums;
  }
  if (mine.left == Left::kDone) return Repair::kKeep;
  const auto all_of = [&](auto&& holds) { return std::all_of(all.begin(), all.end(), holds); };
  if (!all_of([&](const auto& each) { return each.finished == most; })) return Repair::kRepeatStep;
  if (all_of([](const auto& each) { return each.left == Left::kSums; })) return Repair::kWriteSums;
  if (all_of([](const auto& each) { return each.left == Left::kSums || each.left == Left::kLocal; })) {
    return Repair::kReduceAgain;
  }
  return Repair::kRepeatStep;
}

std::string encode(const FailedReduction& failed) {
  std::ostringstream text;
  text.precision(17);
  text << static_cast<int>(failed.left) << ' ' << failed.finished << ' ' << failed.weight;
  return text.str();
}

FailedReduction decode_failed_reduction(const std::string& text) {
  std::istringstream words(text);
  int left = 0;
  FailedReduction failed;
  words >> left >> failed.finished >> failed.weight;
  failed.left = static_cast<FailedReduction::Left>(left);
  return failed;
}

bool StepRecovery::puts_off(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistBackendError&) {
    put_off_ = error;
    return true;
  } catch (...) {
    return false;
  }
}

void StepRecovery::begin_end(FailedReduction::Left left) {
  left_ = left;
  if (put_off_) std::rethrow_exception(std::exchange(put_off_, nullptr));
}

void StepRecovery::vote(const GroupPtr& group, c10::Device device, std::vector<Sum> sums) {
  left_ = FailedReduction::Left::kSums;
  sums_ = std::move(sums);
  const LabelScope label({"DDP's vote to end a step"});
  const auto ballot = at::zeros({1}, at::TensorOptions(at::kInt).device(device));
  all_reduce(ballot, group);
  // On an accelerator the host has to wait too: what it writes next cannot be taken back.
  if (!device.is_cpu()) ballot.item();
}

void StepRecovery::end() {
  ++finished_;
  forget();
  left_ = FailedReduction::Left::kDone;
}

void StepRecovery::begin_forward() {
  if (left_ == FailedReduction::Left::kDone) left_ = FailedReduction::Left::kNothing;
}

void StepRecovery::forget() {
  put_off_ = nullptr;
  left_ = FailedReduction::Left::kNothing;
  sums_.clear();
  weight_ = 1;
  gives_zeros_ = false;
}

}  // namespace lockstep::detail
