// Parameters that leave the memory the optimizer laid them into: torch::load(), to(), set_data(), another optimizer.
#include <torch/serialize.h>

#include <sstream>

#include "lockstep/optim/clip_grad.h"
#include "tests/support/zero_overlap_fixtures.h"

namespace lockstep::moved_test {
namespace {

using namespace ddp_models;
using testing::expect_error;
using torch::optim::AdamW;
using zero_fixtures::adamw;
using zero_fixtures::copies_of;
using zero_fixtures::expect_same;
using zero_fixtures::kSizes;
using zero_fixtures::loss_of;
using zero_fixtures::on_ranks;
using zero_fixtures::set_gradients;
using Zero = ZeroRedundancyOptimizer<AdamW>;

template <class Ddp>
std::vector<std::pair<std::string, ZeroOptions>> ways_of(const World& world, Ddp& ddp) {
  auto ways = zero_fixtures::ways(world.group());
  ways.emplace_back("gradients", ZeroOptions{.stage = ZeroStage::kGradients, .ddp = ddp});
  return ways;
}

template <class Ddp>
void train_step(Ddp& ddp, torch::optim::Optimizer& optimizer, const World& world, int step) {
  optimizer.zero_grad();
  loss_of(ddp, world, step).backward();
  optimizer.step();
}

/// What a program may do to a module's parameters, to(float) being what gives them other memory.
void move(Mlp& model, int way) {
  if (way == 0) {
    std::stringstream file;
    torch::save(mlp(kSizes, 31), file);
    torch::load(model, file);
  } else if (way == 1) {
    model->to(at::kDouble);
    model->to(at::kFloat);
  } else {
    const auto others = mlp(kSizes, 32)->parameters();
    auto parameters = model->parameters();
    for (std::size_t i = 0; i < parameters.size(); i += 2) {
      // Also where it lies otherwise in memory.
      parameters[i].set_data(others[i].dim() > 1 ? others[i].detach().t().contiguous().t() : others[i].detach());
    }
  }
}

// Z-1: in every way
TEST(ZeroMoved, ParametersAreTakenBackWithTheirNewValues) {
  on_ranks(
      [](const World& world) {
        for (const auto& [way, moved_at] : {std::pair(0, 2), {1, 2}, {2, 2}, {2, 0}}) {
          auto plain_model = mlp(kSizes);
          DistributedDataParallel plain_ddp(plain_model, world.group());
          AdamW plain(plain_ddp.parameters(), adamw());
          for (int step = 0; step < 5; ++step) {
            if (step == moved_at) move(plain_model, way);
            train_step(plain_ddp, plain, world, step);
          }
          auto probe = mlp(kSizes);
          DistributedDataParallel any(probe, world.group());
          for (std::size_t i = 0; i < ways_of(world, any).size(); ++i) {
            auto model = mlp(kSizes);
            DistributedDataParallel ddp(model, world.group());
            const auto [name, zero] = ways_of(world, ddp)[i];
            Zero optimizer(ddp.parameters(), adamw(), zero);
            for (int step = 0; step < 5; ++step) {
              if (step == moved_at) move(model, way);
              train_step(ddp, optimizer, world, step);
            }
            expect_same(model->parameters(), plain_model->parameters(), name + " way " + std::to_string(way), {1e-5});
          }
        }
      },
      {1, 2, 3}, {"threads", "shm"});
}

// Z-1: state is counted in the order in which its parameter lies in the buffer, not in the order it has just now
TEST(ZeroMoved, StateIsLoadedForParametersThatLieOtherwise) {
  on_ranks(
      [](const World& world) {
        for (const auto stage : {ZeroStage::kState, ZeroStage::kGradients}) {
          auto plain_model = mlp(kSizes);
          DistributedDataParallel plain_ddp(plain_model, world.group());
          AdamW plain(plain_ddp.parameters(), adamw());
          auto model = mlp(kSizes);
          DistributedDataParallel ddp(model, world.group());
          Zero optimizer(ddp.parameters(), adamw(),
                         {.stage = stage, .ddp = ddp, .partition = ZeroPartition::kElements});
          for (int step = 0; step < 4; ++step) {
            if (step == 2) {
              optimizer.consolidate_state_dict(0);
              const auto state = optimizer.state_dict();
              move(plain_model, 2);
              move(model, 2);
              optimizer.load_state_dict(state);
            }
            train_step(plain_ddp, plain, world, step);
            train_step(ddp, optimizer, world, step);
          }
          expect_same(model->parameters(), plain_model->parameters(), std::to_string(static_cast<int>(stage)), {1e-5});
        }
      },
      {1}, {"threads"});
}

/// The same values in another order in memory, as to(channels_last) leaves them.
void lay_otherwise(const std::vector<at::Tensor>& parameters) {
  for (auto parameter : parameters) {
    if (parameter.dim() > 1) parameter.set_data(parameter.detach().t().contiguous().t());
  }
}

// (Z-1): between backward and step, where what is put in the place of a slice is counted in the parameter's order
TEST(ZeroMoved, ParametersMayLieOtherwiseWhileGradientsAreDivided) {
  enum class Way { kAdded, kReplaced, kPenalty };
  on_ranks(
      [](const World& world) {
        for (const auto way : {Way::kAdded, Way::kReplaced, Way::kPenalty}) {
          const auto train = [&](auto& ddp, torch::optim::Optimizer& optimizer, const auto& clip) {
            for (int step = 0; step < 4; ++step) {
              optimizer.zero_grad();
              loss_of(ddp, world, step).backward();
              if (step % 2 == 1) lay_otherwise(ddp.parameters());
              for (auto& parameter : ddp.parameters()) {
                const auto whole = at::arange(parameter.numel(), at::kFloat).view(parameter.sizes()) / 50;
                if (way == Way::kAdded) parameter.mutable_grad().add_(whole);
                if (way == Way::kReplaced) parameter.mutable_grad() = whole;
                if (way == Way::kPenalty) (parameter.pow(2) * whole).sum().backward();
              }
              clip();
              optimizer.step();
            }
          };
          const Warnings quiet;
          DistributedDataParallel plain_ddp(mlp(kSizes), world.group());
          AdamW plain(plain_ddp.parameters(), adamw());
          train(plain_ddp, plain, [&] { clip_grad_norm_(plain_ddp.parameters(), 3); });
          DistributedDataParallel ddp(mlp(kSizes), world.group());
          Zero zero(ddp.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp});
          train(ddp, zero, [&] { clip_grad_norm_(zero, 3); });
          expect_same(ddp.parameters(), plain_ddp.parameters(), std::to_string(static_cast<int>(way)), {1e-5});
        }
      },
      {1, 2, 3}, {"threads"});
}

// (Z-1): each parameter is sent in one order, however it lies on this rank and on that
TEST(ZeroMoved, LargeParametersMayLieOtherwiseOnSomeRanks) {
  on_ranks(
      [](const World& world) {
        const auto parameters = zero_fixtures::parameters_of({{500, 300}, {7, 5}, {300, 500}, {5}});
        const auto expected = copies_of(parameters);
        Zero zero(parameters, adamw(), world.group());
        AdamW plain(expected, adamw());
        for (int step = 0; step < 4; ++step) {
          if (step == world.rank() + 1) lay_otherwise(parameters);
          // With gaps.
          if (step == 3)
            parameters[0].set_data(at::stack({parameters[0].detach(), parameters[0].detach()}, -1).select(-1, 0));
          set_gradients(parameters, step);
          set_gradients(expected, step);
          zero.step();
          plain.step();
          expect_same(parameters, expected, std::to_string(step), {1e-6});
        }
      },
      {2, 3}, {"threads"});
}

// Z-1: where the step is part of backward
TEST(ZeroMoved, ParametersAreTakenBackInBackward) {
  using namespace zero_overlap_fixtures;
  on_ranks(
      [](const World& world) {
        // The first backward sets the optimizer up.
        for (const auto& [way, moved_at] : {std::pair(0, 2), {1, 2}, {2, 2}, {2, 0}}) {
          auto model = mlp(kSizes);
          DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
          zero_overlap_fixtures::Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
          ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero));
          auto plain_model = mlp(kSizes);
          DistributedDataParallel plain_ddp(plain_model, world.group());
          SGD plain(plain_ddp.parameters(), sgd());
          const Warnings quiet;
          for (int step = 0; step < 5; ++step) {
            if (step == moved_at) {
              move(model, way);
              move(plain_model, way);
            }
            train_once(ddp, world, step);
            train_once(plain_ddp, world, step);
            plain.step();
          }
          expect_same(model->parameters(), plain_model->parameters(), std::to_string(way), kClose);
        }
      },
      {1, 2}, {"threads", "shm"});
}

// Z-1, A-1: what cannot be taken back is refused before anything is changed
TEST(ZeroMoved, ParametersOfAnotherFormAreRefused) {
  on_ranks(
      [](const World& world) {
        auto probe = mlp(kSizes);
        DistributedDataParallel any(probe, world.group());
        for (std::size_t i = 1; i < ways_of(world, any).size(); ++i) {
          auto model = mlp(kSizes);
          DistributedDataParallel ddp(model, world.group());
          const auto [name, zero] = ways_of(world, ddp)[i];
          Zero optimizer(ddp.parameters(), adamw(), zero);
          train_step(ddp, optimizer, world, 0);
          optimizer.zero_grad();
          model->to(at::kBFloat16);
          const auto parameters = model->parameters();
          for (const auto& parameter : parameters) parameter.mutable_grad() = at::ones_like(parameter);
          const auto before = copies_of(parameters);
          expect_error([&] { optimizer.step(); }, {"parameter ", "BFloat16", "Make the optimizer anew"});
          expect_same(parameters, before, name);
          model->to(at::kFloat);
          optimizer.zero_grad();
          train_step(ddp, optimizer, world, 1);
          parameters[1].set_data(at::zeros({41}));
          expect_error([&] { optimizer.step(); }, {"parameter 1", "[41]"});
        }
      },
      {1, 2}, {"threads"});
}

// gradients of another dtype than the parameters
TEST(ZeroMoved, GradientsOfAnotherDtypeAreConverted) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : zero_fixtures::ways(world.group())) {
          if (name != "elements") continue;
          // One run of small parameters, and one parameter that is used where it lies.
          const auto parameters = zero_fixtures::parameters_of({{7, 5}, {400, 500}, {3}});
          const auto expected = copies_of(parameters);
          Zero optimizer(parameters, adamw(), zero);
          AdamW plain(expected, adamw());
          for (int step = 0; step < 2; ++step) {
            set_gradients(expected, step);
            for (std::size_t i = 0; i < parameters.size(); ++i) {
              const auto low = expected[i].grad().to(at::kBFloat16);
              parameters[i].mutable_grad() = low;
              expected[i].mutable_grad() = low.to(at::kFloat);
            }
            optimizer.step();
            plain.step();
            expect_same(parameters, expected, name);
          }
        }
      },
      {1, 2}, {"threads"});
}

// Z-10: naming both
TEST(ZeroMoved, ParametersThatShareMemoryAreRefused) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : zero_fixtures::ways(world.group())) {
          const auto a = at::ones({4, 3}).requires_grad_();
          const auto b = at::ones({5}).requires_grad_();
          const auto tied = a.detach().requires_grad_();
          expect_error([&] { Zero({b, a, tied}, adamw(), zero); }, {"parameter 1 and parameter 2 share memory"});
          const auto part = a.detach()[2].requires_grad_();
          expect_error([&] { Zero({part, b, a}, adamw(), zero); }, {"parameter 2 and parameter 0 share memory"});
          if (name == "parameters") {
            Zero optimizer(std::vector<at::Tensor>{a, b}, adamw(), zero);
            expect_error([&] { optimizer.add_param_group({{tied}}); }, {"share memory"});
          }
          // Columns have gaps, in which another parameter may lie or not.
          const auto columns = [&](int64_t from, int64_t count) {
            return a.detach().narrow(1, from, count).requires_grad_();
          };
          const auto refuses = [&](const at::Tensor& one, const at::Tensor& other) {
            expect_error([&] { Zero(std::vector<at::Tensor>{one, other}, adamw(), zero); },
                         {"parameter 0 and parameter 1 share memory"});
          };
          refuses(a, columns(0, 2));
          refuses(a, columns(2, 1));
          refuses(columns(0, 2), columns(1, 2));
          const auto corner = a.detach()[1].narrow(0, 1, 1).requires_grad_();
          refuses(columns(1, 1), corner);
          Zero beside(std::vector<at::Tensor>{columns(0, 1), corner, columns(2, 1)}, adamw(), zero);
          // Rows of one tensor are apart.
          const auto rows = at::ones({2, 6});
          Zero fine(std::vector<at::Tensor>{rows[0].detach().requires_grad_(), rows[1].detach().requires_grad_()},
                    adamw(), zero);
          if (name == "parameters") continue;
          // Tied afterwards.
          const auto c = at::zeros({4, 3}).requires_grad_();
          Zero later(std::vector<at::Tensor>{b, c, at::ones({4, 3}).requires_grad_()}, adamw(), zero);
          later.param_groups()[0].params()[2].set_data(c);
          expect_error([&] { later.step(); }, {"parameter 1 and parameter 2 share memory"});
        }
        const auto a = at::ones({4, 3}).requires_grad_();
        Zero(std::vector<at::Tensor>{a, a.detach().requires_grad_()}, adamw(),
             ZeroOptions{.process_group = world.group(), .stage = ZeroStage::kReplicated});
      },
      {1, 2}, {"threads"});
}

// two optimizers lay the same parameters out; each finds them again
TEST(ZeroMoved, ParametersOfTwoOptimizersAreSteppedByBoth) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : zero_fixtures::ways(world.group())) {
          const auto parameters = zero_fixtures::parameters_of({{7, 5}, {5}, {3, 4, 2}, {1}});
          const auto expected = copies_of(parameters);
          Zero one(parameters, adamw(), zero);
          ZeroRedundancyOptimizer<torch::optim::SGD> other(parameters, {0.1}, zero);
          AdamW plain_one(expected, adamw());
          torch::optim::SGD plain_other(expected, 0.1);
          for (int step = 0; step < 4; ++step) {
            set_gradients(parameters, step);
            set_gradients(expected, step);
            one.step();
            plain_one.step();
            if (step % 2 == 0) continue;
            other.step();
            plain_other.step();
            expect_same(parameters, expected, name);
          }
        }
        // With sharded gradients there are none in .grad for another one.
        DistributedDataParallel ddp(mlp(kSizes), world.group());
        Zero gradients(ddp.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp});
        AdamW plain(ddp.parameters(), adamw());
        loss_of(ddp, world, 1).backward();
        expect_error([&] { plain.step(); }, {"divided among the ranks"});
        const auto spare = new_group(world.group(), global_ranks(world.group()), {.name = "spare"});
        Zero elements(ddp.parameters(), adamw(), {.process_group = spare, .partition = ZeroPartition::kElements});
        // A rank may hear it from another one first, which expect_error() would leave to the harness.
        std::string error;
        try {
          elements.step();
        } catch (const std::exception& thrown) {
          error = thrown.what();
        }
        EXPECT_NE(error.find("divided among the ranks"), std::string::npos) << error;
      },
      {1, 2}, {"threads"});
}

}  // namespace
}  // namespace lockstep::moved_test
