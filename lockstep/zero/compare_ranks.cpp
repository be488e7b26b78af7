// What ZeRO's ranks compare once, because nothing else would show it: that they list parameters in the same order, and
// that they have loaded the same state.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/shard/flat.h"
#include "lockstep/zero/optimizer.h"
#include "lockstep/zero/parameter_checks.h"

namespace lockstep {
namespace {

// Of each tensor: enough to tell tensors apart that are not the same.
constexpr int64_t kSampledElements = 16;

/// A few elements from all over the tensor, as doubles.
at::Tensor sample_of(const at::Tensor& tensor) {
  auto row = detail::row_of(tensor);
  if (!row.defined()) row = tensor.detach().reshape({-1});
  if (row.is_complex()) row = at::view_as_real(row.resolve_conj()).reshape({-1});
  const auto step = std::max<int64_t>(1, row.numel() / kSampledElements);
  return row.slice(0, 0, std::min(row.numel(), step * kSampledElements), step).to(at::kDouble);
}

/// What a parameter can be recognised by on another rank: all ranks have its values and, if DDP has averaged it, its
/// gradient.
struct ParameterMark {
  std::string name = "";
  std::string value = "";
  std::string gradient = "";
};

std::string bytes_of_sample(const at::Tensor& samples, int64_t begin, int64_t count) {
  const auto* first = reinterpret_cast<const char*>(samples.const_data_ptr<double>() + begin);
  return {first, first + count * static_cast<int64_t>(sizeof(double))};
}

std::vector<ParameterMark> marks_of(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> samples;
  for (const auto& parameter : parameters) {
    samples.push_back(sample_of(parameter).cpu());
    const auto& gradient = parameter.grad();
    const bool is_whole = gradient.defined() && gradient.layout() == at::kStrided && gradient.has_storage();
    samples.push_back(is_whole ? sample_of(gradient).cpu() : at::empty({0}, at::kDouble));
  }
  const auto all = at::cat(samples);
  std::vector<ParameterMark> marks;
  int64_t begin = 0;
  const auto next = [&](const at::Tensor& sample) {
    begin += sample.numel();
    return bytes_of_sample(all, begin - sample.numel(), sample.numel());
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto form = lockstep::str(parameters[i].sizes());
    auto value = form + next(samples[2 * i]);
    auto gradient = value + next(samples[2 * i + 1]);
    marks.push_back({names[i], str(std::hash<std::string>()(value)), str(std::hash<std::string>()(gradient))});
  }
  return marks;
}

/// Throws if a rank has, by one of these marks, at one position what the first rank has at another one, and not there.
void check_order(const std::vector<std::vector<std::string>>& by_rank, const std::string& who) {
  std::unordered_map<std::string, std::size_t> first;
  for (std::size_t i = 0; i < by_rank[0].size(); ++i) first.emplace(by_rank[0][i], i);
  for (std::size_t rank = 1; rank < by_rank.size(); ++rank) {
    const auto& mine = by_rank[rank];
    for (std::size_t i = 0; i < mine.size() && i < by_rank[0].size(); ++i) {
      if (mine[i] == by_rank[0][i] || mine[i].empty()) continue;
      const auto elsewhere = first.find(mine[i]);
      if (elsewhere == first.end() || std::find(mine.begin(), mine.end(), by_rank[0][i]) == mine.end()) continue;
      TORCH_CHECK(false, who, ": what rank ", rank, " of the group lists as parameter ", i, " is parameter ",
                  elsewhere->second, " of rank 0. All ranks must list the same parameters in the same order.");
    }
  }
}

}  // namespace

void ZeroOptimizer::compare_once() {
  // Without a division it does not matter, and nothing else of a step is collective.
  if (!must_compare_ || group_->getSize() == 1 || options_.stage == ZeroStage::kReplicated) return;
  constexpr char kWhat[] = "ZeRO's comparison of parameters and loaded state";
  // In the first step all ranks compare; later some may have no reason to, and step.
  if (std::exchange(has_compared_, true)) {
    announce_if_throws([&] {
      const auto elsewhere = meet(kWhat, group_);
      TORCH_CHECK(elsewhere.empty(), who(),
                  ": since the last step state was loaded or a group was added on this rank, ", "but ", elsewhere,
                  ". Do both on all ranks, or on none.");
    });
  }
  const LabelScope label({kWhat});
  auto facts = detail::facts_of(parameter_groups());
  facts.emplace_back("ZeroOptions::master_dtype",
                     options_.master_dtype ? lockstep::str(*options_.master_dtype) : "not given");
  facts.emplace_back("how often state was loaded", str(loads_));
  facts.emplace_back("the state loaded last", loaded_);
  std::string all_facts;
  for (const auto& [name, value] : facts) all_facts += str(name, "=", value, "\n");
  const auto marks = marks_of(all_parameters(), parameter_names());
  std::string all_marks;
  for (const auto& mark : marks) all_marks += str(mark.name, " ", mark.value, " ", mark.gradient, "\n");
  // Two numbers from each rank, as long as they are the same.
  const auto as_number = [](const std::string& text) { return static_cast<int64_t>(std::hash<std::string>()(text)); };
  const auto mine = at::tensor({as_number(all_facts), as_number(all_marks)}, at::kLong).to(default_device_);
  const auto gathered = at::empty({int64_t{2} * group_->getSize()}, mine.options());
  all_gather_into_tensor(gathered, mine, group_);
  const auto numbers = gathered.cpu().view({-1, 2});
  if (!numbers.select(1, 0).eq(numbers[0][0]).all().item<bool>()) {
    lockstep::check_same_on_all_ranks("the parameters and the state of ZeroRedundancyOptimizer", facts, group_);
  }
  if (!numbers.select(1, 1).eq(numbers[0][1]).all().item<bool>()) {
    std::vector<std::vector<std::string>> names;
    std::vector<std::vector<std::string>> values;
    std::vector<std::vector<std::string>> gradients;
    for (const auto& text : all_gather_object(all_marks, group_)) {
      auto& of_names = names.emplace_back();
      auto& of_values = values.emplace_back();
      auto& of_gradients = gradients.emplace_back();
      for (std::size_t at = 0; at < text.size();) {
        const auto end = text.find('\n', at);
        const auto line = text.substr(at, end - at);
        const auto last = line.rfind(' ');
        const auto middle = line.rfind(' ', last - 1);
        of_names.push_back(line.substr(0, middle));
        of_values.push_back(line.substr(middle + 1, last - middle - 1));
        of_gradients.push_back(line.substr(last + 1));
        at = end + 1;
      }
    }
    check_order(names, who());
    check_order(values, who());
    check_order(gradients, who());
  }
  must_compare_ = false;
}

}  // namespace lockstep
