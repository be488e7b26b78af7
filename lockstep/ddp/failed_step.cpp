#include "lockstep/ddp/failed_step.h"

#include <string>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/call_label.h"

namespace lockstep::detail {

void FailedStep::note(std::size_t launched, bool may_be_stepped) {
  launched_ = launched;
  may_be_stepped_ = may_be_stepped;
}

void FailedStep::compare(const ReducerSetup& setup) {
  if (launched_ == 0) return;
  if (setup.group->getSize() > 1) {
    const LabelScope label({"DDP after a backward that failed"});
    check_same_on_all_ranks("DistributedDataParallel's backward that failed",
                            Facts{{"buckets it had launched", std::to_string(launched_)}}, setup.group);
  }
  launched_ = 0;
}

void FailedStep::check_not_stepped(const ReducerSetup& setup) const {
  if (!may_be_stepped_) return;
  setup.fail(str(setup.who(), ": an earlier backward failed after optimizers in backward may have stepped some ",
                 "parameters, on some ranks more than on others. Wrap the module again, which makes all ranks' ",
                 "parameters the same."));
}

}  // namespace lockstep::detail
