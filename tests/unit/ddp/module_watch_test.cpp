// What a module is made of, compared without names.
#include "lockstep/ddp/module_watch.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

namespace lockstep::detail {
namespace {

//
TEST(ModuleWatch, NoticesWhatHasComeGoneOrChanged) {
  torch::nn::ModuleList model(torch::nn::Linear(2, 2), torch::nn::ModuleList(torch::nn::Linear(2, 2)));
  ModuleWatch watch;
  watch.note(*model);
  const auto expect_noticed = [&] {
    EXPECT_TRUE(watch.has_changed(*model));
    watch.note(*model);
    EXPECT_FALSE(watch.has_changed(*model));
  };
  EXPECT_FALSE(watch.has_changed(*model));
  model->push_back(torch::nn::Linear(2, 2));
  expect_noticed();
  model->parameters()[3].requires_grad_(false);
  expect_noticed();
  const auto removed = model->children().back();
  model->unregister_module("2");
  expect_noticed();
  model->register_module("2", removed);
  expect_noticed();
  model->replace_module("2", torch::nn::Linear(2, 2));
  expect_noticed();
  model->children()[0]->register_parameter("more", at::zeros({1}));
  expect_noticed();
  // Values and memory are no part of it.
  model->to(at::kDouble);
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
  EXPECT_FALSE(watch.has_changed(*model));
}

}  // namespace
}  // namespace lockstep::detail
