#include "benchmarks/collectives/contender.h"

#include <ATen/ATen.h>

#include <memory>

namespace lockstep::bench {
namespace {

/// Rank `rank` has this in part `part` of its input.
int value_at(int rank, int part) {
  return rank + 1 + 10 * part;
}

class Exchange {
 public:
  Exchange(BackendPtr backend, Operation operation, int64_t bytes, Tensors tensors)
      : backend_(std::move(backend)), operation_(operation) {
    const int64_t whole = bytes / static_cast<int64_t>(sizeof(float));
    const int64_t share = std::max<int64_t>(whole / ranks(), 1);
    const auto make = [&](int64_t numel) {
      if (tensors == Tensors::kOrdinary) return at::empty({numel}, at::kFloat);
      return backend_->allocateTensor(numel, at::TensorOptions().dtype(at::kFloat));
    };
    switch (operation) {
      case Operation::kAllReduce:
        input_ = output_ = make(std::max<int64_t>(whole, 1));
        break;
      case Operation::kAllGather:
        input_ = make(share);
        output_ = make(share * ranks());
        break;
      case Operation::kReduceScatter:
        input_ = make(share * ranks());
        output_ = make(share);
        break;
    }
    in_place_ = {input_};
    all_reduce_options_.asyncOp = false;
    all_gather_options_.asyncOp = false;
    reduce_scatter_options_.asyncOp = false;
  }

  void call() {
    switch (operation_) {
      case Operation::kAllReduce:
        backend_->allreduce(in_place_, all_reduce_options_)->wait();
        break;
      case Operation::kAllGather:
        backend_->_allgather_base(output_, input_, all_gather_options_)->wait();
        break;
      case Operation::kReduceScatter:
        backend_->_reduce_scatter_base(output_, input_, reduce_scatter_options_)->wait();
        break;
    }
  }

  void check(const std::string& name) {
    const bool gathers = operation_ == Operation::kAllGather;
    const bool scatters = operation_ == Operation::kReduceScatter;
    output_.zero_();
    auto parts = input_.chunk(gathers ? 1 : ranks());
    for (int part = 0; part < static_cast<int>(parts.size()); ++part) parts[part].fill_(value_at(rank(), part));
    call();
    parts = output_.chunk(scatters ? 1 : ranks());
    for (int part = 0; part < static_cast<int>(parts.size()); ++part) {
      const int expected = gathers ? value_at(part, 0) : sum_of(scatters ? rank() : part);
      TORCH_CHECK(parts[part].min().item<float>() == static_cast<float>(expected) &&
                      parts[part].max().item<float>() == static_cast<float>(expected),
                  name, ": ", name_of(operation_), " of ", input_.nbytes(), " bytes on ", ranks(),
                  " ranks is wrong in part ", part);
    }
    input_.zero_();
    output_.zero_();
  }

 private:
  int rank() const { return backend_->getRank(); }
  int ranks() const { return backend_->getSize(); }

  int sum_of(int part) const {
    int sum = 0;
    for (int rank = 0; rank < ranks(); ++rank) sum += value_at(rank, part);
    return sum;
  }

  // Fixed after construction.
  const BackendPtr backend_;
  const Operation operation_;
  at::Tensor input_;
  at::Tensor output_;
  std::vector<at::Tensor> in_place_;
  c10d::AllreduceOptions all_reduce_options_;
  c10d::AllgatherOptions all_gather_options_;
  c10d::ReduceScatterOptions reduce_scatter_options_;
};

}  // namespace

Contender make_contender(const std::string& name, const BackendPtr& backend, Operation operation, int64_t bytes,
                         Tensors tensors) {
  auto exchange = std::make_shared<Exchange>(backend, operation, bytes, tensors);
  exchange->check(name);
  return {name, bytes, [exchange] { exchange->call(); }};
}

}  // namespace lockstep::bench
