// Compares checkpointing with Python's: gradients bit by bit, the generator afterwards, and which kernels run in
// backward.
#include <mutex>

#include "lockstep/intercept/operator_call.h"
#include "lockstep/intercept/operator_scope.h"
#include "tests/support/oracle_reference.h"

namespace lockstep::checkpoint_oracle_test {

using oracle::at_key;
using oracle::tensors_of;

struct Kernels : OperatorScope {
  Kernels() : OperatorScope(Sees::kKernels) {}
  void on_operator(OperatorCall& call) override {
    // Gradients are added up in place where Python, under a mode, does not.
    const auto& name = call.name();
    if (name != "aten::detach") names.push_back(name == "aten::add_" ? "aten::add" : name);
    call.proceed();
  }
  std::vector<std::string> names;
};

at::Tensor block(const at::Tensor& w, const at::Tensor& x) {
  const auto hidden = at::gelu(at::mm(x, w));
  return at::sigmoid(at::mm(at::dropout(hidden, 0.5, true), w)) * x;
}

at::Tensor run(const std::string& name, const std::vector<at::Tensor>& leaves) {
  using Layer = std::function<at::Tensor(const at::Tensor&)>;
  const Layer first = [&](const at::Tensor& in) { return block(leaves[0], in); };
  const Layer second = [&](const at::Tensor& in) { return block(leaves[1], in); };
  const Layer both = [=](const at::Tensor& in) { return second(first(in)); };
  const auto& x = leaves[2];
  if (name == "plain") return both(x);
  if (name == "checkpoint") return checkpoint(both, x);
  if (name == "each") return checkpoint(second, checkpoint(first, x));
  if (name == "no early stop") return checkpoint({.early_stop = false}, both, x);
  if (name == "nested") {
    return checkpoint([=](const at::Tensor& in) { return checkpoint(second, checkpoint(first, in.tanh())).sin(); }, x);
  }
  if (name == "sequential") {
    const Layer third = [](const at::Tensor& in) { return in.tanh(); };
    return checkpoint_sequential(std::vector{first, second, third}, 2, x);
  }
  if (name == "selective") return checkpoint({.policy = save_operators({"aten::mm"})}, both, x);
  TORCH_INTERNAL_ASSERT(name == "on cpu");
  const auto scope = save_on_cpu();
  return both(x);
}

TEST(CheckpointOracle, GradientsAndKernelsAreThoseOfPython) {
  const auto cases = oracle::run_reference("checkpointing/checkpoint_reference.py");
  if (cases.isNone()) GTEST_SKIP() << "there is no Python to compare with";
  ASSERT_EQ(cases.toGenericDict().size(), 8U);
  for (const auto& entry : cases.toGenericDict()) {
    const auto name = entry.key().toStringRef();
    SCOPED_TRACE(name);
    const auto& wanted = entry.value();
    std::vector<at::Tensor> leaves;
    for (const auto& tensor : tensors_of(at_key(wanted, "inputs"))) leaves.push_back(tensor.clone().requires_grad_());
    torch::manual_seed(3);
    const auto output = run(name, leaves);
    const auto kernels = std::make_shared<Kernels>();
    {
      const EnterScope scope(kernels);
      output.sum().backward();
    }
    EXPECT_TRUE(output.detach().equal(at_key(wanted, "output").toTensor()));
    const auto gradients = tensors_of(at_key(wanted, "gradients"));
    for (std::size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(leaves[i].grad().equal(gradients[i])) << i;
    EXPECT_TRUE(at::rand({3}).equal(at_key(wanted, "next").toTensor()));
    std::vector<std::string> names;
    // Where there is a GPU, Python takes its generator's state as well, into a tensor each time.
    for (const auto& each : at_key(wanted, "kernels").toListRef()) {
      if (each.toStringRef() != "aten::empty") names.push_back(each.toStringRef());
    }
    std::erase(kernels->names, "aten::empty");
    EXPECT_EQ(kernels->names, names);
  }
}

}  // namespace lockstep::checkpoint_oracle_test
