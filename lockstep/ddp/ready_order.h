// The order in which gradients came in the first reduced backwards: what buckets are laid out by. Internal to ddp.
#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::detail {

class ReadyOrder {
 public:
  explicit ReadyOrder(std::size_t parameters) : is_in_(parameters) {}

  /// Buckets are a guess until they are laid out by it.
  bool is_wanted() const { return use_ == Use::kToCome; }
  /// Buckets are laid out by it, or by another that is as good. Forgets it.
  void set_used();
  /// Buckets are given: it is never wanted.
  void set_unwanted() { use_ = Use::kNone; }
  /// Other ranks may see another order.
  void want_again();

  bool is_empty() const { return order_.empty(); }
  void add(std::size_t parameter);
  /// For a rank without inputs, whose order nobody asks for: that of registration.
  void fill();
  /// With parameters that never came at the end.
  std::vector<std::size_t> complete() const;
  void clear();

 private:
  enum class Use { kToCome, kDone, kNone };

  Use use_ = Use::kToCome;
  std::vector<std::size_t> order_;
  std::vector<bool> is_in_;  // by parameter
};

}  // namespace lockstep::detail
