#include "lockstep/rpc/distributed_optimizer.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/serialize/archive.h>

#include <map>
#include <mutex>
#include <sstream>

#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/session.h"

namespace lockstep::rpc::detail {
namespace {

struct Steppers {
  std::mutex mutex;
  std::map<std::string, StepperMaker> by_key;
};

template <class... Optimizers>
void add_functional(Steppers& all) {
  (all.by_key.emplace(optim::functional_key<Optimizers>(),
                      functional_stepper<typename OptionsOf<Optimizers>::Type>(optim::functional_key<Optimizers>())),
   ...);
}

Steppers& steppers() {
  static auto* const all = [] {
    auto* made = new Steppers;
    add_functional<torch::optim::Adagrad, torch::optim::Adam, torch::optim::AdamW, torch::optim::RMSprop,
                   torch::optim::SGD, optim::Adadelta, optim::Adagrad, optim::Adam, optim::Adamax, optim::AdamW,
                   optim::RMSprop, optim::Rprop, optim::SGD>(*made);
    return made;
  }();
  return *all;
}

StepperMaker maker_of(const std::string& key) {
  auto& all = steppers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_key.find(key);
  TORCH_CHECK(found != all.by_key.end(), "[lockstep/rpc] DistributedOptimizer: ", key,
              " is not known on this worker. Call register_optimizer() there.");
  return found->second;
}

/// Steps of several DistributedOptimizers share parameters, perhaps.
std::mutex& step_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

const auto make_part =
    function("lockstep.optimizer", [](const std::string& key, const at::Tensor& options, const Parameters& parameters) {
      return RRef<OwnedOptimizer>(std::make_shared<OwnedOptimizer>(key, options, parameters));
    });
[[maybe_unused]] const auto owned_optimizer =
    class_<OwnedOptimizer>("lockstep.OwnedOptimizer").method("step", &OwnedOptimizer::step);

/// Waits for all, then throws one error with all texts.
void wait_for_all(const std::vector<FuturePtr>& futures, const char* what) {
  std::vector<std::string> failures;
  for (const auto& each : futures) {
    each->wait();
    if (each->hasError()) failures.push_back(text_of(each->exception_ptr()));
  }
  TORCH_CHECK(failures.empty(), "[lockstep/rpc] ", what, " failed on ", failures.size(), " of ", futures.size(),
              " workers:\n  ", join(failures, "\n  "));
}

}  // namespace

at::Tensor pack(const torch::optim::OptimizerOptions& options) {
  torch::serialize::OutputArchive archive;
  options.serialize(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  auto bytes = std::move(stream).str();
  return at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte).clone();
}

void unpack(const at::Tensor& bytes, torch::optim::OptimizerOptions& options) {
  torch::serialize::InputArchive archive;
  archive.load_from(reinterpret_cast<const char*>(bytes.const_data_ptr<std::uint8_t>()),
                    static_cast<std::size_t>(bytes.numel()));
  options.serialize(archive);
}

void register_stepper(const std::string& key, StepperMaker maker) {
  auto& all = steppers();
  const std::lock_guard lock(all.mutex);
  all.by_key.emplace(key, std::move(maker));
}

void with_gradients(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients,
                    const std::function<void()>& step) {
  std::vector<at::Tensor> before;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto& grad = parameters[i].mutable_grad();
    before.push_back(grad);
    grad = gradients[i];
  }
  std::exception_ptr error;
  try {
    step();
  } catch (...) {
    error = std::current_exception();
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = before[i];
  if (error) std::rethrow_exception(error);
}

OwnedOptimizer::OwnedOptimizer(const std::string& key, const at::Tensor& options, const Parameters& parameters) {
  for (const auto& each : parameters) parameters_.push_back(each.local_value());
  stepper_ = maker_of(key)(parameters_, options);
}

void OwnedOptimizer::step(std::int64_t context_id) {
  const auto all = dist_autograd::get_gradients(context_id);
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters_) {
    gradients.push_back(all.contains(parameter) ? all.at(parameter) : at::Tensor());
  }
  const std::lock_guard lock(step_mutex());
  stepper_(gradients);
}

std::vector<RRef<OwnedOptimizer>> make_parts(const std::string& key, const at::Tensor& options,
                                             const Parameters& parameters) {
  current_agent("a DistributedOptimizer");
  TORCH_CHECK(!parameters.empty(), "[lockstep/rpc] DistributedOptimizer: there are no parameters.");
  std::map<std::string, Parameters> by_owner;
  for (const auto& each : parameters) by_owner[each.owner_name()].push_back(each);
  std::vector<Future<RRef<OwnedOptimizer>>> made;
  std::vector<FuturePtr> futures;
  for (const auto& [owner, own] : by_owner) {
    made.push_back(rpc_async(owner, make_part, key, options, own));
    futures.push_back(made.back().impl());
  }
  wait_for_all(futures, "DistributedOptimizer");
  std::vector<RRef<OwnedOptimizer>> parts;
  for (const auto& each : made) parts.push_back(each.wait());
  return parts;
}

void step_all(const std::vector<RRef<OwnedOptimizer>>& parts, std::int64_t context_id) {
  dist_autograd::get_gradients(context_id);  // throws if there is no such context here
  std::vector<FuturePtr> futures;
  for (const auto& part : parts) futures.push_back(part.rpc_async(&OwnedOptimizer::step, context_id).impl());
  wait_for_all(futures, "DistributedOptimizer.step");
}

}  // namespace lockstep::rpc::detail
