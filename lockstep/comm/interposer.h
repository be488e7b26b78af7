// Stands between the library and its groups: sees every collective of the current rank before it runs and may delay it,
// change it, run something else or throw. Tests use it to break things on purpose; the library itself never does.
#pragma once

#include <functional>
#include <memory>

#include "lockstep/comm/call.h"
#include "lockstep/comm/pending.h"

namespace lockstep {

/// Runs the call further down: the next interposer, or the group itself.
using NextCall = std::function<Pending(const Call& call)>;
using Interposer = std::function<Pending(const Call& call, const GroupPtr& group, const NextCall& next)>;

/// Installs an interposer for the current rank while it lives. Scopes nest; the innermost sees a call first.
class InterposerScope {
 public:
  explicit InterposerScope(Interposer interposer);
  ~InterposerScope();
  InterposerScope(const InterposerScope&) = delete;
  InterposerScope& operator=(const InterposerScope&) = delete;

 private:
  struct PerRank;
  PerRank& rank_;
  const std::shared_ptr<const Interposer> interposer_;

  friend Pending launch(Call call, const GroupPtr& group);
};

}  // namespace lockstep
