// Random operators: a tensor's values are those that one device would draw for it. Each rank draws the whole tensor
// and keeps its part, so that replicas are equal and parts fit together whatever the placements are.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "lockstep/dtensor/mesh_generator.h"
#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {
namespace {

/// Replaces an absent generator argument.
void put_generator(LocalCall& local, at::Device device) {
  const auto& arguments = local.call.op().schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator" && local.arguments[i].isNone()) {
      local.arguments[i] = mesh_generator(local.call.mesh(), device);
    }
  }
}

void warn_of_cost(const Layout& layout) {
  if (layout.dividing_axes().empty()) return;
  TORCH_WARN_ONCE(
      "[lockstep/dtensor] random values of a tensor that is cut are drawn for all of it on every rank, "
      "which keeps its part: they are those of one device, at the cost of one device.");
}

/// As one device would hold it: memory is filled in the order of the strides.
at::Tensor whole_like(const at::Tensor& dtensor, const at::TensorOptions& options) {
  return at::empty_strided(dtensor.sizes(), dtensor.strides(), options.requires_grad(false));
}

/// Written in place: probabilities and the like beside it are whole.
Plan fill_randomly(const RuleCall& call) {
  const auto& written = call.operands().front();
  TORCH_CHECK(!written.layout->has_partial(), call.describe(),
              ": a tensor of terms cannot be filled with random values. Use redistribute() first.");
  Plan plan;
  plan.result_sizes = {written.sizes()};
  const Placements whole(written.layout->placements().size(), Replicate());
  plan.operand_placements.assign(call.operands().size(), whole);
  plan.operand_placements.front() = written.layout->placements();
  plan.result_placements = {written.layout->placements()};
  plan.run = [&written](LocalCall& local) -> torch::jit::Stack {
    const auto part = local.arguments.front().toTensor();
    put_generator(local, part.device());
    if (written.layout->is_replicated()) return local.run();
    warn_of_cost(*written.layout);
    const auto all = whole_like(written.tensor, part.options());
    local.arguments.front() = all;
    local.run();
    part.copy_(written.layout->cut(all));
    return {part};
  };
  return plan;
}

/// Made beside a tensor: whole where that has terms, else cut as it is. `fill` draws into the whole tensor.
Plan make_randomly(const RuleCall& call, std::size_t options_at, std::function<void(at::Tensor&, LocalCall&)> fill) {
  const auto& like = call.operands().front();
  Plan plan;
  plan.result_sizes = {like.sizes()};
  plan.operand_placements = {like.layout->placements()};
  plan.result_placements = {gradient_placements(like.layout->placements())};
  plan.run = [&like, options_at, fill = std::move(fill)](LocalCall& local) -> torch::jit::Stack {
    auto options = local.arguments.front().toTensor().options();
    const auto& dtype = local.arguments[options_at];
    if (!dtype.isNone()) options = options.dtype(dtype.toScalarType());
    const auto& layout = *local.results.front();
    warn_of_cost(layout);
    auto all = whole_like(like.tensor, options);
    fill(all, local);
    return {layout.is_replicated() ? all : layout.cut(all).clone()};
  };
  return plan;
}

at::Generator generator_of(const LocalCall& local, const at::Tensor& drawn, std::optional<std::size_t> argument) {
  if (argument && !local.arguments[*argument].isNone()) return local.arguments[*argument].toGenerator();
  return mesh_generator(local.call.mesh(), drawn.device());
}

Plan rand_like(const RuleCall& call) {
  return make_randomly(
      call, 1, [](at::Tensor& all, LocalCall& local) { all.uniform_(0, 1, generator_of(local, all, std::nullopt)); });
}

Plan rand_like_of(const RuleCall& call) {
  return make_randomly(call, 2,
                       [](at::Tensor& all, LocalCall& local) { all.uniform_(0, 1, generator_of(local, all, 1)); });
}

Plan randn_like(const RuleCall& call) {
  return make_randomly(
      call, 1, [](at::Tensor& all, LocalCall& local) { all.normal_(0, 1, generator_of(local, all, std::nullopt)); });
}

Plan randn_like_of(const RuleCall& call) {
  return make_randomly(call, 2,
                       [](at::Tensor& all, LocalCall& local) { all.normal_(0, 1, generator_of(local, all, 1)); });
}

Plan randint_like(const RuleCall& call) {
  return make_randomly(call, 2, [](at::Tensor& all, LocalCall& local) {
    all.random_(0, local.arguments[1].toInt(), generator_of(local, all, std::nullopt));
  });
}

Plan randint_like_from(const RuleCall& call) {
  return make_randomly(call, 3, [](at::Tensor& all, LocalCall& local) {
    all.random_(local.arguments[1].toInt(), local.arguments[2].toInt(), generator_of(local, all, std::nullopt));
  });
}

/// Draws by probabilities that are the tensor itself: needs them all, and so does the result.
Plan bernoulli(const RuleCall& call) {
  Plan plan;
  plan.result_sizes = {call.operands().front().sizes()};
  plan.choices = [&call](int64_t) -> std::vector<Choice> { return {replicate_all(call)}; };
  plan.run = [](LocalCall& local) {
    put_generator(local, local.arguments.front().toTensor().device());
    return local.run();
  };
  return plan;
}

/// input, p, train: the result, and what was kept.
Plan native_dropout(const RuleCall& call) {
  const auto& input = call.operands().front();
  Plan plan;
  plan.result_sizes = {input.sizes(), input.sizes()};
  plan.operand_placements = {gradient_placements(input.layout->placements())};
  plan.result_placements.assign(2, plan.operand_placements.front());
  plan.run = [&input](LocalCall& local) -> torch::jit::Stack {
    const auto part = local.arguments[0].toTensor();
    const auto p = local.arguments[1].toDouble();
    const bool trains = local.arguments[2].isNone() || local.arguments[2].toBool();
    if (!trains || p == 0 || p == 1) return local.run();
    const auto& layout = *local.results.front();
    warn_of_cost(layout);
    auto kept = whole_like(input.tensor, part.options());
    kept.bernoulli_(1 - p, mesh_generator(local.call.mesh(), part.device()));
    const auto mask = layout.cut(kept).clone();
    return {part * mask.div(1 - p), mask.to(at::kBool)};
  };
  return plan;
}

}  // namespace

void add_random_rules(RuleTable& table) {
  for (const auto* name : {"aten::bernoulli_", "aten::normal_", "aten::uniform_", "aten::exponential_",
                           "aten::log_normal_", "aten::geometric_", "aten::cauchy_", "aten::random_"}) {
    table[name] = {.plan = &fill_randomly};
  }
  table["aten::rand_like."] = {.plan = &rand_like};
  table["aten::rand_like.generator"] = {.plan = &rand_like_of};
  table["aten::randn_like."] = {.plan = &randn_like};
  table["aten::randn_like.generator"] = {.plan = &randn_like_of};
  table["aten::randint_like."] = {.plan = &randint_like};
  table["aten::randint_like.low_dtype"] = {.plan = &randint_like_from};
  table["aten::bernoulli."] = {.plan = &bernoulli};
  table["aten::native_dropout."] = {.plan = &native_dropout};
}

}  // namespace lockstep::detail
