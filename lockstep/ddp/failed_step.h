// What a backward that failed leaves to the next one, whatever it was that failed. Internal to ddp.
#pragma once

#include <cstddef>

#include "lockstep/ddp/reducer_setup.h"

namespace lockstep::detail {

class FailedStep {
 public:
  /// A step failed after `launched` buckets had been launched; optimizers in backward may have stepped.
  void note(std::size_t launched, bool may_be_stepped);
  /// Before the next step: ranks of which some failed would sum buckets of different steps. Collective on those that
  /// had launched any.
  void compare(const ReducerSetup& setup);
  /// Throws if parameters may be stepped in part: nothing mends that.
  void check_not_stepped(const ReducerSetup& setup) const;
  /// Nobody has to compare.
  void forget_launched() { launched_ = 0; }

 private:
  std::size_t launched_ = 0;
  bool may_be_stepped_ = false;
};

}  // namespace lockstep::detail
