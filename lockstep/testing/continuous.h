// Continuous mode: rank processes kept over a whole suite, one group for all of its tests, because starting them anew
// for each small test costs more than the test. Parent and ranks walk through the same tests in the same order; a store
// file says what is next.
#pragma once

#include <memory>
#include <string>

#include "lockstep/testing/process_ranks.h"

namespace lockstep::testing {

class ContinuousRanks {
 public:
  /// In the parent: starts the ranks. In a rank: joins the others. `call` leads a fresh process to this constructor.
  ContinuousRanks(RunOptions options, const ProcessCall& call);
  ~ContinuousRanks();
  ContinuousRanks(const ContinuousRanks&) = delete;
  ContinuousRanks& operator=(const ContinuousRanks&) = delete;

  /// Runs one test on all ranks, with a barrier and fresh seeds around it. In the parent: waits and reports; after a
  /// failure all further tests report as skipped, saying which one failed. In a rank: runs `body` and returns; after a
  /// failure it ends.
  RunReport run(const std::string& test, const RankBody& body);

 private:
  class Parent;
  class Rank;
  std::unique_ptr<Parent> parent_;
  std::unique_ptr<Rank> rank_;
};

}  // namespace lockstep::testing
