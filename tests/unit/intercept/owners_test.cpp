// Owners of storages and rules of tensors: who is asked, in which order, and what they may do.
#include <stdexcept>

#include "lockstep/intercept/key.h"
#include "lockstep/intercept/operator_call.h"
#include "lockstep/intercept/operator_scope.h"
#include "lockstep/intercept/storage_owner.h"
#include "lockstep/intercept/tensor_rule.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;

/// Notes what touches its storages.
class Noting : public StorageOwner {
 public:
  explicit Noting(std::string name = "", std::vector<std::string>* log = nullptr)
      : name_(std::move(name)), log_(log != nullptr ? log : &own_log_) {}

  void before_operator(OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) override {
    auto text = name_ + call.name().substr(std::string("aten::").size()) + ":" + std::to_string(touched.size());
    for (const auto& tensor : touched) {
      if (tensor.is_written) text += "w";
    }
    log_->push_back(text);
    if (should_throw) throw std::runtime_error("refused");
    touched[0].tensor.sum();  // not intercepted
  }
  void after_operator(const OperatorCall& call) noexcept override {
    log_->push_back(name_ + "after " + call.name().substr(std::string("aten::").size()));
    ++after_count;
  }

  std::vector<std::string> take() { return std::exchange(*log_, {}); }

  bool should_throw = false;
  int after_count = 0;

 private:
  const std::string name_;
  std::vector<std::string> own_log_;
  std::vector<std::string>* const log_;
};

struct Owned {
  at::Tensor tensor = torch::ones({4, 4});
  std::shared_ptr<Noting> owner = std::make_shared<Noting>();
  OwnedStorage ownership{tensor, owner};
};

TEST(StorageOwner, IsToldBeforeAndAfter) {
  Owned owned;
  owned.tensor.neg();
  EXPECT_THAT(owned.owner->take(), ElementsAre("neg:1", "after neg"));
  torch::ones({4}).neg();
  EXPECT_THAT(owned.owner->take(), ElementsAre());
}

TEST(StorageOwner, IsToldOfViewsDetachedCopiesListsOptionalsAndWrites) {
  Owned owned;
  const auto& t = owned.tensor;
  const auto view = t.select(0, 1).narrow(0, 1, 2);
  const auto detached = t.detach();
  owned.owner->take();
  view.neg();
  EXPECT_THAT(owned.owner->take(), ElementsAre("neg:1", "after neg"));
  detached.neg();
  t.data().neg();
  EXPECT_EQ(owned.owner->take().size(), 4);
  torch::cat({torch::ones({1, 4}), t, t.data()});
  EXPECT_THAT(owned.owner->take(), ElementsAre("cat:2", "after cat"));
  at::layer_norm(torch::ones({2, 2}), {2}, view);
  EXPECT_THAT(owned.owner->take(), ElementsAre("layer_norm:1", "after layer_norm"));
  torch::ones({4, 4}).index({t.to(torch::kLong)});
  EXPECT_THAT(owned.owner->take(), ElementsAre("to:1", "after to"));  // what is computed from it is not owned
  t.add_(1);
  EXPECT_THAT(owned.owner->take(), ElementsAre("add_:1w", "after add_"));
  auto out = t.data();
  at::add_out(out, t, torch::ones({4, 4}));
  EXPECT_THAT(owned.owner->take(), ElementsAre("add:2w", "after add"));
  at::_foreach_mul_({t, out}, 2);
  EXPECT_THAT(owned.owner->take(), ElementsAre("_foreach_mul_:2ww", "after _foreach_mul_"));
}

TEST(StorageOwner, IsToldInBackwardAndGradientsAreNotOwned) {
  Owned owned;
  auto weight = owned.tensor.requires_grad_();
  const auto loss = torch::ones({2, 4}, torch::requires_grad()).mm(weight.t()).sum();
  owned.owner->take();
  loss.backward();
  EXPECT_THAT(owned.owner->take(), ::testing::Contains("mm:1"));
  EXPECT_FALSE(is_marked_intercepted(weight.grad()));
}

TEST(StorageOwner, IsToldInInferenceModeAndWithoutGradients) {
  Owned owned;
  {
    const c10::InferenceMode mode;
    owned.tensor.neg();
  }
  const torch::NoGradGuard no_grad;
  owned.tensor.neg();
  EXPECT_EQ(owned.owner->take().size(), 4);
}

TEST(StorageOwner, SeveralAreToldInOrderOfArgumentsAndBackwards) {
  std::vector<std::string> log;
  const auto a = torch::ones({2});
  const auto b = torch::ones({2});
  const OwnedStorage first(a, std::make_shared<Noting>("a ", &log));
  const OwnedStorage second(b, std::make_shared<Noting>("b ", &log));
  a.add(b);
  EXPECT_THAT(log, ElementsAre("a add:1", "b add:1", "b after add", "a after add"));
}

TEST(StorageOwner, ThatThrowsStopsTheOperatorAndTheOthersAreToldItsEnd) {
  const auto a = torch::ones({2});
  const auto b = torch::ones({2});
  const auto calm = std::make_shared<Noting>();
  const auto angry = std::make_shared<Noting>();
  const OwnedStorage first(a, calm);
  const OwnedStorage second(b, angry);
  angry->should_throw = true;
  EXPECT_THROW(a.add_(b), std::runtime_error);
  EXPECT_EQ(calm->after_count, 1);
  EXPECT_EQ(angry->after_count, 0);
  angry->should_throw = false;
  EXPECT_EQ(a.add(b).sum().item<double>(), 4);  // a was not written, and all goes on
  // An operator that throws has ended too.
  EXPECT_THROW(a.mm(b), c10::Error);
  EXPECT_EQ(angry->after_count, 2);
}

TEST(StorageOwner, EndsWithItsRegistration) {
  const auto tensor = torch::ones({2});
  const auto owner = std::make_shared<Noting>();
  {
    const OwnedStorage ownership(tensor, owner);
    EXPECT_EQ(storage_owner_of(tensor), owner);
  }
  EXPECT_EQ(storage_owner_of(tensor), nullptr);
  tensor.neg();
  EXPECT_THAT(owner->take(), ElementsAre());
  unmark_intercepted(tensor);
  EXPECT_FALSE(is_marked_intercepted(tensor));
}

TEST(StorageOwner, OfAStorageThatHasOneIsRefused) {
  const auto tensor = torch::ones({2});
  const OwnedStorage ownership(tensor, std::make_shared<Noting>());
  EXPECT_THROW(OwnedStorage(tensor, std::make_shared<Noting>()), c10::Error);
  EXPECT_THROW(OwnedStorage(tensor.narrow(0, 0, 1), std::make_shared<Noting>()), c10::Error);
  EXPECT_THROW(OwnedStorage(torch::ones({2}), nullptr), c10::Error);
}

/// Holds twice what it shows.
class Doubled : public RuledTensorImpl {
 public:
  class Rule : public TensorRule {
   public:
    void run(OperatorCall& call) override {
      names.push_back(call.name().substr(std::string("aten::").size()));
      for (std::size_t i = 0; i < call.argument_count(); ++i) {
        auto& value = call.argument(i);
        if (!value.isTensor()) continue;
        if (auto* doubled = dynamic_cast<Doubled*>(value.toTensor().unsafeGetTensorImpl())) {
          value = doubled->local.mul(2);  // intercepted: the local tensor may be owned
        }
      }
      call.proceed();
    }
    std::vector<std::string> names;
  };

  Doubled(at::Tensor tensor, std::shared_ptr<Rule> its_rule)
      : RuledTensorImpl(c10::DispatchKeySet(kInterceptKey), tensor.dtype(), tensor.device()),
        local(std::move(tensor)),
        rule_(std::move(its_rule)) {
    set_sizes_contiguous(local.sizes());
    set_storage_access_should_throw();
  }
  TensorRule* rule() const override { return rule_.get(); }

  const at::Tensor local;

 private:
  const std::shared_ptr<Rule> rule_;
};

class Names : public OperatorScope {
 public:
  explicit Names(Sees sees) : OperatorScope(sees) {}
  void on_operator(OperatorCall& call) override {
    seen.push_back(call.name().substr(std::string("aten::").size()));
    call.proceed();
  }
  std::vector<std::string> seen;
};

TEST(TensorRule, AnswersForItsTensorAndOwnersOfLocalTensorsAreAsked) {
  install_interceptor();
  Owned owned;
  const auto rule = std::make_shared<Doubled::Rule>();
  const auto doubled = at::detail::make_tensor<Doubled>(owned.tensor, rule);
  EXPECT_EQ(torch::ones({4, 4}).add(doubled).sum().item<double>(), 16 * 3);
  EXPECT_THAT(rule->names, ElementsAre("add"));
  EXPECT_THAT(owned.owner->take(), ElementsAre("mul:1", "after mul"));
}

TEST(TensorRule, AutogradRecordsWhatItCalls) {
  install_interceptor();
  auto local = torch::ones({3}, torch::requires_grad());
  const auto doubled = at::detail::make_tensor<Doubled>(local, std::make_shared<Doubled::Rule>());
  torch::full({3}, 5.0).mul(doubled).sum().backward();
  EXPECT_TRUE(local.grad().equal(torch::full({3}, 10.0)));
}

TEST(TensorRule, ProgramScopesSeeTheCallLeafScopesWhatItIsMadeOf) {
  install_interceptor();
  const auto doubled = at::detail::make_tensor<Doubled>(torch::ones({3}), std::make_shared<Doubled::Rule>());
  const auto program = std::make_shared<Names>(OperatorScope::Sees::kProgram);
  const auto leaves = std::make_shared<Names>(OperatorScope::Sees::kLeaves);
  {
    const EnterScope outer(program);
    const EnterScope inner(leaves);
    torch::full({3}, 5.0).mul(doubled);
  }
  EXPECT_THAT(program->seen, ElementsAre("full", "mul"));
  EXPECT_THAT(leaves->seen, ElementsAre("full", "mul", "mul"));  // the rule's product with 2, then the program's
}

TEST(Interceptor, LeavesOperatorsWithoutMarkAlone) {
  install_interceptor();
  const auto tensor = torch::ones({2});
  EXPECT_FALSE(is_marked_intercepted(tensor));
  EXPECT_FALSE(is_marked_intercepted(at::Tensor()));
  mark_intercepted(tensor);
  EXPECT_EQ(tensor.add(tensor).sum().item<double>(), 4);  // a mark nobody answers for
  EXPECT_FALSE(is_marked_intercepted(tensor.add(tensor)));
}

TEST(StorageOwner, CallsNoKernelsThatScopesSee) {
  struct Kernels : OperatorScope {
    Kernels() : OperatorScope(Sees::kKernels) {}
    void on_operator(OperatorCall& call) override {
      names.push_back(call.name());
      call.proceed();
    }
    std::vector<std::string> names;
  };
  const Owned owned;
  const auto kernels = std::make_shared<Kernels>();
  const EnterScope scope(kernels);
  owned.tensor.exp();
  EXPECT_THAT(owned.owner->take(), ElementsAre("exp:1", "after exp"));
  EXPECT_THAT(kernels->names, ElementsAre("aten::exp"));
}

}  // namespace
}  // namespace lockstep
