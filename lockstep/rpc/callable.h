// A function that can be called by name. Behind function() and class_().
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/rpc/future.h"

namespace lockstep::rpc::detail {

/// What a function answered: a value, or a future of one.
struct Answer {
  c10::IValue value;
  FuturePtr pending = nullptr;
};

/// How the answer is wanted: to be sent, or to be kept behind an RRef.
enum class Form { kWire, kBoxed };

class Callable {
 public:
  virtual ~Callable() = default;
  /// "(Tensor, int) -> Tensor"
  virtual std::string signature() const = 0;
  /// Throws Refused if the arguments do not fit, else what the function throws.
  virtual Answer call(const std::vector<c10::IValue>& arguments, Form form) const = 0;
};

/// Throws if the name is taken.
void register_function(const std::string& name, std::shared_ptr<const Callable> callable);

[[noreturn]] void refuse_count(const std::string& signature, std::size_t got);
[[noreturn]] void refuse_argument(const std::string& signature, std::size_t position, const std::string& why);

}  // namespace lockstep::rpc::detail
