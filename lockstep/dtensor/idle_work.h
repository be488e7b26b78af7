// Work that can be done while a collective is under way: whoever is about to wait does it first. Per thread. Internal
// to dtensor and tp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace lockstep::detail {

/// A tensor that is computed when it is first needed, or while the thread waits for something else.
class LateTensor {
 public:
  /// What is left to the calling thread's next wait.
  static std::shared_ptr<LateTensor> make(std::function<at::Tensor()> compute);

  explicit LateTensor(std::function<at::Tensor()> compute) : compute_(std::move(compute)) {}
  const at::Tensor& get();

 private:
  std::function<at::Tensor()> compute_;
  at::Tensor tensor_;
};

/// Computes what the calling thread has left to do.
void do_idle_work();

}  // namespace lockstep::detail
