#include "lockstep/base/rank_local.h"

#include <utility>

namespace lockstep {
namespace {

thread_local RankScope* current_scope = nullptr;

}  // namespace

RankScope& RankScope::current() {
  // Leaked on purpose: threads may still ask for their rank while statics are destroyed.
  static RankScope& process = *new RankScope;
  return current_scope != nullptr ? *current_scope : process;
}

EnterRank::EnterRank(RankScope& scope) : previous_(std::exchange(current_scope, &scope)) {}

EnterRank::~EnterRank() {
  current_scope = previous_;
}

}  // namespace lockstep
