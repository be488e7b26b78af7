// Parameters that a step has sent and nobody has waited for yet. Whoever touches one, by any operator, on any thread
// and through any view, waits for it first: the next forward begins before all are there. Internal to zero.
//
// What always holds: until a parameter is there, its storage gives no address away. What would read it without an
// operator throws, and so does a view from before the optimizer; old values are never read.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/pending.h"

namespace lockstep::detail {

/// Messages that bring values of parameters together.
struct Arrival {
  std::vector<Pending> pending = {};
  /// Of which it brings some elements at least.
  std::vector<at::Tensor> parameters = {};
  /// Brings what has come in a buffer to the parameters; may be empty.
  std::function<void()> unpack = nullptr;

  /// Blocks until the values are there. May be called again; a failure is thrown each time.
  void wait();
};

/// Waits for those of the parameters that another optimizer has sent.
void wait_for_others(const std::vector<at::Tensor>& parameters);

class ArrivingParameters {
 public:
  /// Collectives must be on other storages than the parameters', as with_own_storage() makes them. `who` opens
  /// messages.
  ArrivingParameters(std::vector<Arrival> arrivals, const std::string& who);
  /// Waits for nothing: what has not come by then can never be read.
  ~ArrivingParameters();
  ArrivingParameters(const ArrivingParameters&) = delete;
  ArrivingParameters& operator=(const ArrivingParameters&) = delete;

  /// Blocks until all are there.
  void wait();
  /// Parameters may be read as they are: the caller will give them values that are right.
  void abandon();

 private:
  class Watch;
  const std::shared_ptr<Watch> watch_;
};

}  // namespace lockstep::detail
