// The order in which gradients came in the first reduced backwards: what buckets are laid out by. Internal to ddp.
#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::detail {

class ReadyOrder {
 public:
  explicit ReadyOrder(std::size_t parameters) : is_in_(parameters) {}

  bool is_empty() const { return order_.empty(); }
  void add(std::size_t parameter);
  /// For a rank without inputs, whose order nobody asks for: that of registration.
  void fill();
  /// With parameters that never came at the end.
  std::vector<std::size_t> complete() const;
  void clear();

 private:
  std::vector<std::size_t> order_;
  std::vector<bool> is_in_;  // by parameter
};

}  // namespace lockstep::detail
