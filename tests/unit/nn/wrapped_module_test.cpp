// What a module around another one does, in which order.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/nn/wrapped_module.h"
#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using testing::expect_error;

struct InnerImpl : torch::nn::Module {
  explicit InnerImpl(std::vector<std::string>& events) : events(events) {}
  at::Tensor forward(const at::Tensor& input, bool throws = false) {
    if (throws) throw std::runtime_error("the module failed");
    events.emplace_back("forward");
    return input + 1;
  }
  std::vector<std::string>& events;
};
TORCH_MODULE(Inner);

// U-8: others are told in a sentence
static_assert(detail::kHoldsModule<Inner> && detail::kHoldsModule<std::shared_ptr<InnerImpl>>);
static_assert(!detail::kHoldsModule<InnerImpl>);

class Wrapper : public WrappedModule<Inner> {
 public:
  explicit Wrapper(Inner inner) : WrappedModule("Wrapper", std::move(inner)) {}
  bool doubles_inputs = false;

 protected:
  void pre_forward() override { module()->events.emplace_back("pre"); }
  void post_forward(const std::vector<at::Tensor*>& outputs) override {
    module()->events.push_back("post " + std::to_string(outputs.size()));
    for (auto* output : outputs) *output = -*output;
  }
  void enter_inner() override { module()->events.emplace_back("enter"); }
  void leave_inner() noexcept override { module()->events.emplace_back("leave"); }
  bool changes_inputs() const override { return doubles_inputs; }
  at::Tensor prepare_input(const at::Tensor& input) const override { return 2 * input; }
};

TEST(WrappedModule, RunsTheModuleBetweenItsPhases) {
  std::vector<std::string> events;
  Wrapper wrapper{Inner(events)};
  const auto input = at::ones({2});
  EXPECT_TRUE(at::equal(wrapper(input), at::full({2}, -2.0)));
  EXPECT_EQ(events, (std::vector<std::string>{"pre", "enter", "forward", "leave", "post 1"}));
  wrapper.doubles_inputs = true;
  EXPECT_TRUE(at::equal(wrapper.forward(input), at::full({2}, -3.0)));
  EXPECT_TRUE(at::equal(input, at::ones({2}))) << "the caller's tensor is its own";
  events.clear();
  expect_error([&] { wrapper(input, true); }, {"the module failed"});
  EXPECT_EQ(events, (std::vector<std::string>{"pre", "enter", "leave"}));
  EXPECT_EQ(wrapper.named_children()["module"], wrapper.module().ptr());
}

TEST(WrappedModule, CallsWhatTookThePlaceOfForward) {
  std::vector<std::string> events;
  Wrapper wrapper{Inner(events)};
  const auto input = at::ones({2});
  using Forward = std::function<at::Tensor(const at::Tensor&)>;
  wrapper.replace_forward(Forward([&](const at::Tensor& given) { return 10 * wrapper.module()->forward(given); }));
  EXPECT_TRUE(at::equal(wrapper(input), at::full({2}, -20.0)));
  EXPECT_EQ(events, (std::vector<std::string>{"pre", "enter", "forward", "leave", "post 1"}));
  expect_error([&] { wrapper(input, false); }, {"Wrapper", "was replaced by", "called as"});
  wrapper.replace_forward(Forward());
  EXPECT_TRUE(at::equal(wrapper(input, false), at::full({2}, -2.0)));
}

}  // namespace
}  // namespace lockstep
