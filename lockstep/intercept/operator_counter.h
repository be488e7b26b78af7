// Counts operators: how many calls, bytes and floating point operations a step takes, forward and backward, printed as
// a table.
//
//   lockstep::OperatorCounter counter;
//   {
//     const auto counting = counter.count("forward");
//     loss = loss_of(model(x));
//   }
//   {
//     const auto counting = counter.count("backward");
//     loss.backward();
//   }
//   std::cout << counter.to_string();
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "lockstep/intercept/operator_scope.h"

namespace lockstep {

struct OperatorCount {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;  // of the tensors it reads and writes; views move none
  std::int64_t flops = 0;  // of products, convolutions and attention; a multiplication and an addition are two

  OperatorCount& operator+=(const OperatorCount& other);
};

namespace detail {
class CounterScope;
}

/// Counts what really runs: the parts of composite operators, not they themselves. Thread-safe.
class OperatorCounter {
 public:
  OperatorCounter();
  ~OperatorCounter();
  OperatorCounter(const OperatorCounter&) = delete;
  OperatorCounter& operator=(const OperatorCounter&) = delete;

  /// Counts the calling thread's operators under `label` until the result is destroyed, and those of backward passes
  /// started meanwhile, in whichever of autograd's threads they run. Nested ones count for themselves: what runs inside
  /// of both is in both.
  [[nodiscard]] EnterScope count(const std::string& label = "");

  /// By operator, "aten::addmm", of all labels together or of one, which must have been counted under once: another is
  /// refused, naming those there are.
  std::map<std::string, OperatorCount> counts() const;
  std::map<std::string, OperatorCount> counts(const std::string& label) const;
  OperatorCount total() const;
  OperatorCount total(const std::string& label) const;

  /// A table: under each label, the operators with most floating point operations and bytes first.
  std::string to_string() const;

  /// Forgets the calls, not the labels.
  void reset();

 private:
  struct State;
  std::shared_ptr<State> state_;
  friend class detail::CounterScope;
};

}  // namespace lockstep
