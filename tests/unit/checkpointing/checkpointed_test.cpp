// Checkpointed<M>: a module that is an M, but for the memory of its activations.

namespace lockstep::checkpointed_test {

struct LayerImpl : torch::nn::Cloneable<LayerImpl> {
  explicit LayerImpl(int64_t width) : width_(width) { LayerImpl::reset(); }
  void reset() override {
    linear = register_module("linear", torch::nn::Linear(width_, width_));
    norm = register_module("norm", torch::nn::BatchNorm1d(width_));
  }
  at::Tensor forward(const at::Tensor& x, double scale = 1.0) {
    ++runs;
    return norm(at::tanh(linear(x))) * scale;
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  int runs = 0;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(1.0)})

 private:
  int64_t width_;
};
TORCH_MODULE(Layer);

std::vector<std::string> names_of(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  for (const auto& item : module.named_buffers()) names.push_back(item.key());
  for (const auto& item : module.named_modules()) names.push_back(item.key());
  return names;
}

at::Tensor input() {
  torch::manual_seed(2);
  return at::randn({6, 4});
}

// FSDP-84
TEST(Checkpointed, AddsNoLevelToNames) {
  EXPECT_EQ(names_of(*Checkpointed<Layer>(4)), names_of(*Layer(4)));
  const torch::nn::Sequential plain(Layer(4), torch::nn::Linear(4, 4));
  const torch::nn::Sequential wrapped(Checkpointed<Layer>(4), Checkpointed<torch::nn::Linear>(4, 4));
  EXPECT_EQ(names_of(*plain), names_of(*wrapped));
}

// FSDP-84: a running statistic is updated once; Python does it twice.
TEST(Checkpointed, TrainsAsTheModuleItIs) {
  torch::manual_seed(1);
  Layer plain(4);
  torch::manual_seed(1);
  Checkpointed<Layer> wrapped(4);
  for (int step = 0; step < 3; ++step) {
    const auto x = input() + step;
    plain(x, 2.0).pow(3).sum().backward();
    wrapped(x, 2.0).pow(3).sum().backward();
    EXPECT_EQ(wrapped->runs, 2 * plain->runs);
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(wrapped->parameters()[i].grad().equal(plain->parameters()[i].grad())) << i;
    }
    for (std::size_t i = 0; i < plain->buffers().size(); ++i) {
      EXPECT_TRUE(wrapped->buffers()[i].equal(plain->buffers()[i])) << i;
    }
  }
  // Also where functions are holders, and in parts of a Sequential.
  const auto once = plain->norm->num_batches_tracked.item<int64_t>() + 1;
  checkpoint(plain, input()).pow(3).sum().backward();
  EXPECT_EQ(plain->norm->num_batches_tracked.item<int64_t>(), once);
  torch::nn::Sequential both(plain, wrapped);
  checkpoint_sequential(both, 2, input()).pow(3).sum().backward();
  EXPECT_EQ(plain->norm->num_batches_tracked.item<int64_t>(), once + 1);
  // A function does not tell which modules it uses: twice, as in Python.
  checkpoint([&](const at::Tensor& in) { return plain(in); }, input()).pow(3).sum().backward();
  EXPECT_EQ(plain->norm->num_batches_tracked.item<int64_t>(), once + 3);
}

TEST(Checkpointed, FitsSequentialAndAnyModule) {
  torch::manual_seed(1);
  torch::nn::Sequential model(Checkpointed<Layer>(4), torch::nn::Tanh(), Checkpointed<torch::nn::Linear>(4, 2));
  auto& first = model->at<CheckpointedImpl<LayerImpl>>(0);
  EXPECT_EQ(&first, first.as<LayerImpl>());
  model->forward(input()).pow(2).sum().backward();
  EXPECT_EQ(first.runs, 2);
  torch::nn::AnyModule any(Checkpointed<Layer>(4));
  EXPECT_EQ(any.forward(input(), 2.0).sizes(), at::IntArrayRef({6, 4}));
  EXPECT_EQ(any.forward(input()).sizes(), at::IntArrayRef({6, 4}));  // with the default
  Checkpointed<torch::nn::Sequential> inner(torch::nn::Linear(4, 4), torch::nn::GELU());
  torch::nn::Sequential outer(inner, torch::nn::Linear(4, 1));
  outer->forward(input()).pow(2).sum().backward();
  EXPECT_TRUE(outer->parameters()[0].grad().defined());
  EXPECT_EQ(outer->named_parameters().keys()[0], "0.0.weight");
}

TEST(Checkpointed, TakesModulesOfLibtorchWithTheirDefaults) {
  const auto options = torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.3);
  torch::manual_seed(1);
  torch::nn::TransformerEncoderLayer plain(options);
  torch::manual_seed(1);
  Checkpointed<torch::nn::TransformerEncoderLayer> wrapped(options);
  const auto x = at::randn({3, 2, 8});
  torch::manual_seed(2);
  plain(x).pow(2).sum().backward();
  torch::manual_seed(2);
  wrapped(x).pow(2).sum().backward();
  for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(wrapped->parameters()[i].grad().equal(plain->parameters()[i].grad())) << i;
  }
  Checkpointed<torch::nn::LSTM> lstm(torch::nn::LSTMOptions(8, 4));
  std::get<0>(lstm(x)).sum().backward();
  EXPECT_TRUE(lstm->parameters()[0].grad().defined());
}

TEST(Checkpointed, CanShareAModuleThatIsThere) {
  Layer plain(4);
  Checkpointed<Layer> wrapped(*plain);
  wrapped(input()).pow(3).sum().backward();
  EXPECT_TRUE(plain->linear->weight.grad().defined());
  EXPECT_TRUE(wrapped->linear->weight.is_same(plain->linear->weight));
}

TEST(Checkpointed, IsClonedAsOne) {
  Checkpointed<Layer> wrapped(4);
  wrapped->set_checkpoint_options({.early_stop = false});
  const auto copy = std::dynamic_pointer_cast<CheckpointedImpl<LayerImpl>>(wrapped->clone());
  ASSERT_TRUE(copy);
  EXPECT_FALSE(copy->checkpoint_options().early_stop);
  EXPECT_FALSE(copy->linear->weight.is_same(wrapped->linear->weight));
  copy->forward(input(), 1.0).pow(3).sum().backward();
  EXPECT_EQ(copy->runs, 2);
  EXPECT_FALSE(wrapped->linear->weight.grad().defined());
}

TEST(Checkpointed, LivesUntilBackwardHasRun) {
  auto wrapped = std::make_unique<Checkpointed<Layer>>(4);
  const auto weight = (*wrapped)->linear->weight;
  const auto y = (*wrapped)(input());
  wrapped.reset();
  y.pow(3).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

}  // namespace lockstep::checkpointed_test
