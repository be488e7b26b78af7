// The one process that ranks are compared with.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>

#include <sstream>

#include "lockstep/testing/combinations/trainer.h"

namespace lockstep::testing::combinations {
namespace {

class OneProcess : public Trainer {
 public:
  explicit OneProcess(const Program& program) : Trainer(program) {
    set_up(kFirstSeed);
    result_.push_back(snapshot());
  }

  std::vector<Snapshot> run() {
    train();
    return std::move(result_);
  }

  void backward(const at::Tensor& loss) override { (loss / program_.data_ranks).backward(); }
  void weighted_backward(const at::Tensor& loss) override {
    const auto total = total_over_ranks([&](int rank) { return weight_of(rank); });
    (loss * (weight_of(rank_) / total)).backward();
  }
  void penalize_weights() override {
    // Once for all ranks that are played.
    (weight_penalty() / total_over_ranks([](int) { return 1; })).backward();
  }
  void without_sync(const std::function<void()>& body) override { body(); }
  void backward_with(Fault fault) override {
    // What failed on the ranks has changed buffers, if it came so far.
    if (fault != Fault::kInForward && is_special(step_)) loss();
    backward(loss());
  }

 protected:
  void wrap(Part& /*part*/) override {}
  AnyOptimizer made_optimizer(const std::vector<at::Tensor>& parameters, const Part& part) override {
    return ways().front().make(parameters, program_.kind, part.ddp);
  }
  std::string saved(const AnyOptimizer& optimizer) override { return saved_optimizer(*optimizer.optimizer); }
  const Forward& forward_of(const Part& part) const override { return part.model.forward; }
  bool has_step(int /*step*/) const override { return true; }
  void play_ranks() override {
    for (rank_ = 0; rank_ < program_.data_ranks; ++rank_) {
      if (has_inputs(rank_, step_)) play_rank();
    }
  }
  void on_step(int /*step*/) override { result_.push_back(snapshot()); }
  bool counts_buffers() const override { return true; }

 private:
  /// Buffers are one rank's; the others' own are forgotten at the next forward.
  void play_rank() {
    std::vector<std::pair<at::Tensor, at::Tensor>> kept;
    if (rank_ != leader()) {
      for (const auto& each : parts_) {
        for (const auto& buffer : each.model.net->buffers()) kept.emplace_back(buffer, buffer.clone());
      }
    }
    program_.loop.run(*this);
    const at::NoGradGuard no_grad;
    for (auto& [buffer, value] : kept) buffer.copy_(value);
  }

  double total_over_ranks(const std::function<double(int rank)>& value_of) const {
    double total = 0;
    for (int rank = 0; rank < program_.data_ranks; ++rank) {
      if (has_inputs(rank, step_)) total += value_of(rank);
    }
    return total;
  }

  std::vector<Snapshot> result_;  // at the beginning, and after each step
};

}  // namespace

std::vector<Snapshot> train_in_one_process(const Program& program) {
  return OneProcess(program).run();
}

std::string difference(const Snapshot& actual, const Snapshot& expected, double tolerance) {
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const auto& [name, value] = actual[i];
    const auto& wanted = expected[i].second;
    const auto mine = value.to(wanted.scalar_type());
    if (mine.sizes() == wanted.sizes() && at::allclose(mine, wanted, tolerance, tolerance)) continue;
    const auto off = (mine - wanted).abs().reshape({-1});
    const auto at = off.nan_to_num(1e30).argmax().item<int64_t>();
    std::ostringstream text;
    text << name << "[" << at << "] is " << mine.reshape({-1})[at].item() << " instead of "
         << wanted.reshape({-1})[at].item();
    return text.str();
  }
  return "";
}

}  // namespace lockstep::testing::combinations
