// Ranks that save or load together: if one of them cannot go on, all throw, with its reason. Internal to checkpoint.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::detail {

class Together {
 public:
  /// Of the default group if `group` is null, and alone if there is none.
  explicit Together(GroupPtr group);

  int rank() const { return group_ ? group_->getRank() : 0; }
  int size() const { return group_ ? group_->getSize() : 1; }
  const GroupPtr& group() const { return group_; }

  /// What `work` returned on every rank, in rank order. If it threw on some, all throw: `what` opens the message.
  /// Collective.
  std::vector<std::string> all_say(const std::string& what, const std::function<std::string()>& work) const;
  /// The same for work that has no result.
  void all_do(const std::string& what, const std::function<void()>& work) const;
  /// What `work` returned on rank 0, the only one that does it. Collective.
  std::string first_says(const std::string& what, const std::function<std::string()>& work) const;

 private:
  GroupPtr group_;
};

}  // namespace lockstep::detail
