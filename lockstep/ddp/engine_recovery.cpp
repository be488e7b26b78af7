// The part of DdpEngine that goes on after a peer died. See step_recovery.h for why no rank can be too far ahead.
#include "lockstep/base/str.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/objects.h"
#include "lockstep/ddp/engine.h"
#include "lockstep/ddp/step_recovery.h"

namespace lockstep {

Recovered DdpEngine::recover(const GroupPtr& group) {
  check_member(group);
  TORCH_CHECK(options_.recoverable, who(), ": recover() needs DdpOptions::recoverable when the module is wrapped: ",
              "without it ranks may have ended a step that others have not.");
  TORCH_CHECK(!is_joining(), who(),
              ": recover() inside of a Join scope, whose group has failed: leave the scope by the ",
              "exception, recover, and open another one for the inputs that are left.");
  auto& reducer = reducer_for("recover()");
  group_ = group;
  replicas_.stop();
  reducer.move_to_survivors(group);
  const auto mine = reducer.failed_reduction();
  std::vector<detail::FailedReduction> all;
  double weights = 0;
  {
    const LabelScope label({"DDP's recovery"});
    for (const auto& text : all_gather_object(detail::encode(mine), group)) {
      all.push_back(detail::decode_failed_reduction(text));
      weights += all.back().weight;
    }
  }
  switch (detail::repair_for(mine, all)) {
    case detail::Repair::kKeep:
      return Recovered::kStep;
    case detail::Repair::kWriteSums:
      reducer.write_arrived_sums();
      return Recovered::kStep;
    case detail::Repair::kReduceAgain:
      TORCH_CHECK(weights > 0, who(), ": recover(): none of the ranks that are left has samples in this step");
      reducer.reduce_again(weights);
      return Recovered::kStep;
    case detail::Repair::kRepeatStep:
      break;
  }
  reducer.drop_failed_step();
  weighted_->forget();
  return Recovered::kRepeatStep;
}

}  // namespace lockstep
