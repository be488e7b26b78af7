// Products: indices of operands and result by letter, as in einsum. A cut of an index that is summed over leaves terms,
// a cut of any other is a cut of the result.
#include <algorithm>
#include <string>

#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {
namespace {

/// Of the operands at these positions; others are left replicated.
struct Product {
  std::string first;
  std::string second;
  std::string result;
  std::size_t first_position = 0;
  std::size_t second_position = 1;
};

int64_t index_of(const std::string& letters, char letter) {
  const auto at = letters.find(letter);
  return at == std::string::npos ? -1 : static_cast<int64_t>(at);
}

/// The ways of a product, for its two operands and its result; others are left replicated.
std::vector<Choice> product_choices(const RuleCall& call, const Product& product, int64_t axis) {
  std::vector<Choice> choices;
  const std::size_t positions[] = {product.first_position, product.second_position};
  const std::string* letters[] = {&product.first, &product.second};
  for (int operand = 0; operand < 2; ++operand) {
    const auto& placement = call.operands()[positions[operand]].on(axis);
    if (const auto dim = sharded_dim(placement)) {
      const auto letter = (*letters[operand])[static_cast<std::size_t>(*dim)];
      auto choice = replicate_all(call);
      for (int each = 0; each < 2; ++each) {
        const auto at = index_of(*letters[each], letter);
        if (at >= 0) choice.operands[positions[each]] = cut_of(placement, at);
      }
      const auto at = index_of(product.result, letter);
      choice.results.front() = at >= 0 ? cut_of(placement, at) : Placement(Partial());
      choices.push_back(std::move(choice));
    } else if (is_linear_partial(placement)) {
      auto choice = replicate_all(call);
      choice.operands[positions[operand]] = placement;
      choice.results.front() = placement;
      choices.push_back(std::move(choice));
    }
  }
  choices.push_back(replicate_all(call));
  return choices;
}

Sizes product_sizes(const RuleCall& call, const Product& product) {
  Sizes sizes;
  for (const auto letter : product.result) {
    const auto at = index_of(product.first, letter);
    const auto& operand = call.operands()[at >= 0 ? product.first_position : product.second_position];
    sizes.push_back(operand.sizes()[static_cast<std::size_t>(at >= 0 ? at : index_of(product.second, letter))]);
  }
  return sizes;
}

Plan product_plan(const RuleCall& call, const Product& product) {
  Plan plan;
  plan.result_sizes = {product_sizes(call, product)};
  plan.choices = [&call, product](int64_t axis) { return product_choices(call, product, axis); };
  return plan;
}

Plan mm(const RuleCall& call) {
  return product_plan(call, {.first = "mk", .second = "kn", .result = "mn"});
}

Plan bmm(const RuleCall& call) {
  return product_plan(call, {.first = "bmk", .second = "bkn", .result = "bmn"});
}

Plan mv(const RuleCall& call) {
  return product_plan(call, {.first = "mk", .second = "k", .result = "m"});
}

Plan dot(const RuleCall& call) {
  return product_plan(call, {.first = "k", .second = "k", .result = ""});
}

/// What is added to a product, with the letters of the result's last dims: cut as the result is where it is not
/// repeated.
void add_summand(const RuleCall& call, const Sizes& sizes, Choice& choice, const Placement& held) {
  const auto& summand = call.operands().front();
  const auto& result = choice.results.front();
  if (const auto dim = sharded_dim(result)) {
    const auto at = *dim - static_cast<int64_t>(sizes.size()) + summand.dim();
    const bool is_repeated =
        at < 0 || summand.sizes()[static_cast<std::size_t>(at)] != sizes[static_cast<std::size_t>(*dim)];
    if (!is_repeated) choice.operands.front() = cut_of(result, at);
  } else if (is_partial(result) && held == result) {
    choice.operands.front() = result;
  }
}

/// A summand that all ranks hold is added by one of those whose results will be summed, and by all if it is the average
/// that will be taken.
torch::jit::Stack run_with_summand(LocalCall& local) {
  const auto& coordinate = *local.call.mesh().get_coordinate();
  for (std::size_t axis = 0; axis < coordinate.size(); ++axis) {
    const bool is_added_once = local.results.front()->placements()[axis] == Placement(Partial()) &&
                               !is_partial(local.operands.front()->placements()[axis]);
    if (is_added_once && coordinate[axis] != 0) local.arguments[3] = at::Scalar(0);  // beta
  }
  return local.run();
}

Plan with_summand(const RuleCall& call, const Product& product) {
  auto plan = product_plan(call, product);
  plan.choices = [&call, product, sizes = plan.result_sizes.front()](int64_t axis) {
    auto choices = product_choices(call, product, axis);
    for (auto& choice : choices) add_summand(call, sizes, choice, call.operands().front().on(axis));
    return choices;
  };
  plan.run = &run_with_summand;
  return plan;
}

Plan addmm(const RuleCall& call) {
  return with_summand(call, {.first = "mk", .second = "kn", .result = "mn", .first_position = 1, .second_position = 2});
}

Plan baddbmm(const RuleCall& call) {
  return with_summand(call,
                      {.first = "bmk", .second = "bkn", .result = "bmn", .first_position = 1, .second_position = 2});
}

Plan addmv(const RuleCall& call) {
  return with_summand(call, {.first = "mk", .second = "k", .result = "m", .first_position = 1, .second_position = 2});
}

Plan addbmm(const RuleCall& call) {
  return with_summand(call,
                      {.first = "bmk", .second = "bkn", .result = "mn", .first_position = 1, .second_position = 2});
}

}  // namespace

void add_matrix_rules(RuleTable& table) {
  table["aten::mm"] = {.plan = &mm};
  table["aten::bmm"] = {.plan = &bmm};
  table["aten::mv"] = {.plan = &mv};
  table["aten::dot"] = {.plan = &dot};
  table["aten::addmm"] = {.plan = &addmm};
  table["aten::baddbmm"] = {.plan = &baddbmm};
  table["aten::addmv"] = {.plan = &addmv};
  table["aten::addbmm"] = {.plan = &addbmm};
}

}  // namespace lockstep::detail
