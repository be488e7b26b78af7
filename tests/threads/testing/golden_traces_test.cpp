// The kit's models against traces of Python's fully_shard, kept in golden_traces.txt: losses, gradients, and the order
// of what units do. No Python is needed; the oracle's test says whether the file is up to date.
#include "tests/support/golden_traces.h"
#include "lockstep/base/str.h"
#include "lockstep/nn/tied_parameters.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/testing/fsdp/nested_models.h"
#include "lockstep/testing/fsdp/small_models.h"
#include "lockstep/testing/fsdp/transformer.h"
#include "lockstep/testing/recorder.h"

namespace lockstep::golden_traces_test {

using namespace testing;
using golden_traces::Step;
using golden_traces::UnitEvent;

const golden_traces::Traces& golden() {
  const char* source_dir = std::getenv("LOCKSTEP_SOURCE_DIR");
  static const auto traces = golden_traces::read_traces(
      str(source_dir == nullptr ? "." : source_dir, "/tests/threads/testing/golden_traces.txt"));
  return traces;
}

at::Tensor wave(int64_t count, int64_t phase) {
  return (at::arange(count, at::kDouble) * 0.7 + phase).sin();
}

/// A sharded model, its input and what its loss is.
struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;
};

template <class Kind>
Model kit_model(const World& world, bool uses_words = false) {
  const TestModelOptions options{
      .fsdp_init_mode = FsdpInitMode::kRecursive, .deterministic = true, .dtype = at::kDouble};
  const auto model = Kind::init(world.group(), options);
  wrap_if(!unit_of(*model), *model, with_mesh({}, world.group()));
  const auto input = uses_words ? model->get_input(at::kCPU) : std::vector{wave(32, world.rank() + 1).view({4, 8})};
  return {model, [model, input] { return model->get_loss(input, model->forward(input)); }};
}

template <class Holder>
Model small_model(Holder model, int64_t width, const World& world) {
  const auto input = wave(3 * width, world.rank() + 1).view({3, width});
  return {model.ptr(), [model, input]() mutable {
            const auto output = model->forward(input);
            if constexpr (std::is_same_v<std::decay_t<decltype(output)>, at::Tensor>)
              return output.pow(2).sum();
            else
              return output.at(0).pow(2).sum();
          }};
}

Model make(const std::string& name, const World& world) {
  if (name == "nested") return kit_model<NestedWrappedModule>(world);
  if (name == "always_wrap") return kit_model<AlwaysWrapNestedWrappedModule>(world);
  if (name == "non_uniform") return kit_model<NonUniformReqGradNWM>(world);
  if (name == "transformer") return kit_model<TransformerWithSharedParams>(world, /*uses_words=*/true);
  const auto options = with_mesh({}, world.group());
  if (name == "mlp_stack") {
    auto stack = build_deterministically_as([] { return MLPStack(5, /*with_seq_parallel=*/true); });
    stack->to(at::kDouble);
    stack->parallelize(std::nullopt, *options.mesh, /*use_activation_checkpointing=*/false);
    return small_model(stack, 5, world);
  }
  TORCH_CHECK(name == "double_linear", "no model ", name);
  auto two = build_deterministically_as([] { return DoubleLinear(6, /*use_second_linear=*/false); });
  two->to(at::kDouble);
  fully_shard(two->lin1, options);
  fully_shard(two->lin2, options);
  fully_shard(two, options);
  return small_model(two, 6, world);
}

void fill(const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  std::set<const void*> seen;  // tied ones have the values of their first name
  for (const auto& item : model.named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    int64_t phase = 0;
    for (const auto letter : item.key()) phase += letter;
    const auto layout = layout_of(item.value());
    const auto whole = wave(c10::multiply_integers(layout->sizes()), phase % 97).view(layout->sizes()) * 0.3;
    item.value().copy_(layout->cut(whole));
  }
}

void check_gradients(const torch::nn::Module& model, const Step& step, const World& world) {
  std::size_t found = 0;
  const auto parameters = model.named_parameters();
  for (const auto& [name, numbers] : step.gradients) {
    const auto& shard = parameters[name];
    const auto grad = shard.grad().defined() ? shard.grad() : at::zeros_like(shard);
    const auto layout = layout_of(shard);
    const auto ramp = layout->cut(wave(c10::multiply_integers(layout->sizes()), 0).view(layout->sizes()));
    const auto sums = at::stack({grad.sum(), grad.abs().sum(), (grad * ramp).sum()});
    all_reduce(sums, world.group());
    check_equal(str("gradient of ", name), sums, at::tensor(numbers, at::kDouble),
                {.relative = 1e-8, .absolute = 1e-9});
    ++found;
  }
  std::size_t defined = 0;
  for (const auto& parameter : unique_parameters(model)) defined += parameter.grad().defined() ? 1 : 0;
  EXPECT_EQ(defined, found);
}

/// Units that hold no other: where one holds another, both have an order of their own.
bool is_innermost(const torch::nn::Module& model, const std::string& unit) {
  const auto prefix = unit + ".";
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (item.key().starts_with(prefix) && unit_of(*item.value())) return false;
  }
  return true;
}

class Events {
 public:
  Events(const torch::nn::Module& model, const Step& step) {
    for (const auto& item : model.named_modules("", /*include_self=*/false)) {
      if (!unit_of(*item.value()) || !is_innermost(model, item.key())) continue;
      units_.insert(item.key());
      for (const auto& [name, numbers] : step.gradients) {
        if (name.starts_with(item.key() + ".")) trained_.insert(item.key());
      }
    }
  }

  /// Names of units, in order.
  std::vector<std::string> of(const std::vector<UnitEvent>& events, const std::string& kind, const std::string& state,
                              bool is_trained = false) const {
    std::vector<std::string> names;
    for (const auto& each : events) {
      const bool is_asked_for = each.kind == kind && each.state == state;
      if (is_asked_for && (is_trained ? trained_ : units_).contains(each.unit)) names.push_back(each.unit);
    }
    return names;
  }

 private:
  std::set<std::string> units_;
  std::set<std::string> trained_;
};

bool is_part_of(const std::vector<std::string>& some, const std::vector<std::string>& all) {
  auto next = all.begin();
  for (const auto& each : some) {
    next = std::find(next, all.end(), each);
    if (next++ == all.end()) return false;
  }
  return true;
}

/// Units do what Python's do, in the same order, less what need not be done: backward does not gather a unit whose
/// parameters it does not need, or that stayed whole because backward begins with it.
void check_events(const torch::nn::Module& model, const Step& step, const std::vector<Event>& recorded) {
  std::vector<UnitEvent> events;
  for (const auto& each : recorded) events.push_back({each.kind, each.state, each.unit});
  const Events units(model, step);
  EXPECT_EQ(units.of(events, "unshard", "forward"), units.of(step.events, "unshard", "forward"));
  EXPECT_EQ(units.of(events, "post_backward", "backward", true),
            units.of(step.events, "post_backward", "backward", true));
  EXPECT_TRUE(is_part_of(units.of(events, "reshard", "forward"), units.of(step.events, "reshard", "forward")));
  EXPECT_TRUE(is_part_of(units.of(events, "unshard", "backward"), units.of(step.events, "unshard", "backward")));
  EXPECT_TRUE(
      is_part_of(units.of(events, "reshard", "backward", true), units.of(step.events, "reshard", "backward", true)));
}

// TEST-65
TEST(GoldenTraces, AreThoseOfPythonsFullyShard) {
  ASSERT_EQ(golden().size(), 6U);
  for (const auto& [name, steps] : golden()) {
    SCOPED_TRACE(name);
    run_threads_in_gtest({.world_size = 2}, [&name = name, &steps = steps](const World& world) {
      auto model = make(name, world);
      fill(*model.module);
      torch::optim::SGD optimizer(unique_parameters(*model.module), torch::optim::SGDOptions(0.05).momentum(0.9));
      for (const auto& step : steps) {
        optimizer.zero_grad();
        Recorder recorder;
        const auto loss = model.loss();
        loss.backward();
        const auto events = recorder.events();
        const double expected = step.losses.at(static_cast<std::size_t>(world.rank()));
        EXPECT_NEAR(loss.item<double>(), expected, 1e-9 * (1 + std::abs(expected)));
        check_gradients(*model.module, step, world);
        check_events(*model.module, step, events);
        optimizer.step();
      }
    });
  }
}

}  // namespace lockstep::golden_traces_test
