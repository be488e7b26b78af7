// Compares ZeRO's step inside of DDP's backward with Python's, after every step.
#include "tests/support/oracle_reference.h"
#include "tests/support/zero_overlap_fixtures.h"

namespace lockstep::overlap_test {
namespace {

using namespace zero_overlap_fixtures;
using oracle::at_key;
using oracle::tensors_of;

template <class Optim, class Options>
void compare(const World& world, const c10::IValue& subject, const Options& options) {
  const auto before = tensors_of(at_key(subject, "before"));
  const auto batches = tensors_of(at_key(subject, "batches"));
  const auto after = at_key(subject, "after").toList();
  const bool is_static = at_key(subject, "static_graph").toBool();
  const bool shards = at_key(subject, "shard_buckets").toBool();
  for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
    SCOPED_TRACE(str(at_key(subject, "optimizer").toStringRef(), is_static ? ", static" : "", shards ? ", shards" : "",
                     form == Form::kInterleaved ? ", interleaved" : ""));
    auto model = mlp(kSizes);
    {
      const at::NoGradGuard no_grad;
      const auto parameters = model->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(before.at(i));
    }
    auto settings = small_buckets();
    settings.static_graph = is_static;
    DistributedDataParallel ddp(model, world.group(), settings);
    ZeroRedundancyOptimizer<Optim> zero(ddp.parameters(), options, overlapped(world.group()));
    ddp.register_comm_hook(hook_of(form, ddp, zero, shards));
    for (std::size_t step = 0; step < batches.size(); ++step) {
      zero_grads(ddp);
      ddp(my_rows(batches[step], world)).pow(2).mean().backward();
      expect_same(ddp.parameters(), tensors_of(after.get(step)), str("step ", step), kClose);
    }
  }
}

// ZERO-49, ZERO-55, ZERO-56, ZERO-57
TEST(ZeroOverlapOracle, ParametersAgreeWithPythonAfterEveryStep) {
  const auto cases = oracle::run_reference("zero/overlap_reference.py");
  if (cases.isNone()) GTEST_SKIP() << "there is no Python to compare with";
  ASSERT_FALSE(cases.toListRef().empty());
  for (const auto& subject : cases.toListRef()) {
    const auto optimizer = at_key(subject, "optimizer").toStringRef();
    const auto world_size = static_cast<int>(at_key(subject, "world_size").toInt());
    testing::run_threads_in_gtest({.world_size = world_size}, [&](const World& world) {
      if (optimizer == "SGD") {
        compare<SGD>(world, subject, sgd());
      } else if (optimizer == "AdamW") {
        compare<torch::optim::AdamW>(world, subject, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
      } else {
        compare<optim::Adam>(world, subject, optim::AdamOptions{.lr = 0.01, .amsgrad = true});
      }
    });
  }
}

}  // namespace
}  // namespace lockstep::overlap_test
