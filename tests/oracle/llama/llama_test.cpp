// The Llama of the examples against Hugging Face's: the same folder gives the same logits and gradients, and a folder
// that we saved opens there.
#include "examples/llama/model.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "lockstep/checkpoint/weights.h"
#include "lockstep/intercept/deferred_init.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/oracle_reference.h"

namespace lockstep {
namespace {

using examples::LlamaForCausalLM;
using oracle::at_key;
using oracle::tensors_by_name;
using testing::check_equal;
using testing::TempDir;

constexpr testing::Tolerance kTolerance{.relative = 1e-5, .absolute = 1e-5};

/// Of all models in folders below `folder`; makes some if there is none. None without transformers.
c10::IValue computed_in(const std::string& folder) {
  return oracle::run_reference("llama/llama_reference.py", folder);
}

LlamaForCausalLM opened(const std::string& folder) {
  const auto config = examples::read_config(folder + "/config.json");
  auto model = deferred_init([&] { return LlamaForCausalLM(config); });
  load_weights(*model, folder);
  return model;
}

/// As transformers has it: of each token but the first, from those before it.
at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& tokens) {
  return at::cross_entropy_loss(logits.slice(1, 0, -1).flatten(0, 1), tokens.slice(1, 1).flatten());
}

void expect_computes(LlamaForCausalLM model, const std::string& name, const c10::IValue& expected) {
  const auto tokens = at_key(expected, "tokens").toTensor();
  model->zero_grad();
  const auto logits = model(tokens);
  const auto loss = loss_of(logits, tokens);
  loss.backward();
  check_equal(name + ", logits", logits.detach(), at_key(expected, "logits").toTensor(), kTolerance);
  check_equal(name + ", loss", loss.detach(), at_key(expected, "loss").toTensor(), kTolerance);
  const auto parameters = model->named_parameters();
  for (const auto& [parameter, gradient] : tensors_by_name(at_key(expected, "gradients"))) {
    check_equal(name + ", gradient of " + parameter, parameters[parameter].grad(), gradient, kTolerance);
  }
}

/// The models that transformers has made, and what they compute there.
class LlamaOracle : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_.emplace();
    expected_ = computed_in(theirs());
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override {
    if (expected_.isNone()) GTEST_SKIP() << "there is no Python with transformers to compare with";
  }

  static std::string theirs() { return folder_->file("theirs"); }

  static inline std::optional<TempDir> folder_;
  static inline c10::IValue expected_;
};

TEST_F(LlamaOracle, LogitsAndGradientsAreThoseOfTransformers) {
  for (const auto& entry : expected_.toGenericDict()) {
    const auto& name = entry.key().toStringRef();
    auto model = opened(theirs() + "/" + name);
    expect_computes(model, name, entry.value());
    model->model->checkpoints_activations = true;
    expect_computes(model, name + ", checkpointed", entry.value());
  }
}

/// Trains the model in `from` for a step, and saves it in `to`.
void train(int ranks, const std::string& parallel, const std::string& from, const std::string& to) {
  const auto command =
      str("'", std::getenv("LOCKSTEP_RUN"), "' --timeout 60s -n ", ranks, " '", std::getenv("LOCKSTEP_EXAMPLES"),
          "/llama' --steps 1 --batch-size 8 --context 32 --write 0 ", "--progress none --parallel ", parallel,
          " --model '", from, "' --save '", to, "' >/dev/null");
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
}

TEST_F(LlamaOracle, OpensWhatWeHaveSaved) {
  const auto ours = folder_->file("ours");
  std::filesystem::create_directory(ours);
  for (const auto& entry : expected_.toGenericDict()) {
    const auto& name = entry.key().toStringRef();
    const auto model = opened(theirs() + "/" + name);
    save_weights(*model, ours + "/" + name, {.texts = {{"config.json", config_json(model->model->config)}}});
  }
  train(1, "ddp", theirs() + "/tied", ours + "/trained by one");
  train(4, "fsdp+tp", theirs() + "/tied", ours + "/trained by four");

  const auto reopened = computed_in(ours);
  const auto logits = [&](const std::string& name) { return at_key(at_key(reopened, name), "logits").toTensor(); };
  for (const auto& entry : expected_.toGenericDict()) {
    const auto& name = entry.key().toStringRef();
    check_equal(name, logits(name), at_key(entry.value(), "logits").toTensor(), kTolerance);
  }
  const auto trained = logits("trained by one");
  EXPECT_GT((trained - logits("tied")).abs().max().item<double>(), 1e-2);
  check_equal("trained", logits("trained by four"), trained, {.relative = 1e-3, .absolute = 1e-3});
}

}  // namespace
}  // namespace lockstep
