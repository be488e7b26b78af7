#include "lockstep/checkpoint/state.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <map>

#include "lockstep/base/str.h"
#include "lockstep/nn/distributed_sampler.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/schedules.h"
#include "lockstep/state/archive_bridge.h"

namespace lockstep::dcp {
namespace {

/// Made of two functions.
class MadeStateful : public Stateful {
 public:
  MadeStateful(std::function<void(Outgoing&)> save, std::function<void(Incoming&)> load)
      : save_(std::move(save)), load_(std::move(load)) {}
  void save(Outgoing& out) override { save_(out); }
  void load(Incoming& in) override { load_(in); }

 private:
  const std::function<void(Outgoing&)> save_;
  const std::function<void(Incoming&)> load_;
};

StatefulPtr made(std::function<void(Outgoing&)> save, std::function<void(Incoming&)> load) {
  return std::make_shared<MadeStateful>(std::move(save), std::move(load));
}

/// Whether a saved value can become a number of this type without being another then.
template <class Number>
bool is_a(const c10::IValue& saved) {
  if constexpr (std::is_same_v<Number, bool>) return saved.isBool();
  if constexpr (std::is_same_v<Number, double>) return saved.isDouble() || saved.isInt();
  return saved.isInt();
}

/// One value, by the entry's own name.
template <class Number>
StatefulPtr number(Number& value) {
  return made(
      [&value](Outgoing& out) { out.value("", c10::IValue(value)); },
      [&value](Incoming& in) {
        const auto saved = in.value("");
        if (saved.isNone()) return;
        if (!is_a<Number>(saved)) {
          return in.refuse(str("'", in.name_there(""), "' is a ", saved.tagKind(), ", which does not fit here"));
        }
        in.then([&value, saved] { value = saved.toScalar().to<Number>(); });
      });
}

/// What has a state_dict() of numbers by name; `has_state` tells whether it needs one.
template <class Object>
StatefulPtr numbers(Object& object, const std::function<bool()>& has_state) {
  const auto save = [&object](Outgoing& out) {
    NamedValues values;
    for (const auto& [name, value] : object.state_dict()) values.emplace(name, value);
    out.values("", values);
  };
  const auto load = [&object, has_state](Incoming& in) {
    std::map<std::string, double> values;
    for (const auto& [name, value] : in.values("")) {
      if (!value.isDouble()) return in.refuse(str("'", in.name_there(name), "' is no number"));
      values.emplace(name, value.toDouble());
    }
    if (values.empty() && has_state() && in.find_value("")) {
      return in.refuse(str("'", in.name_there(""), "' was disabled when it was saved, and is enabled here"));
    }
    in.then([&object, values] {
      if (!values.empty()) object.load_state_dict(values);
    });
  };
  return made(save, load);
}

/// How many samples a rank had in an epoch when its sampler was saved.
constexpr const char* kSize = "size";

/// Its count of steps, which is protected.
struct CountedSteps : torch::optim::LRScheduler {
  static unsigned LRScheduler::*member() { return &CountedSteps::step_count_; }
};

std::string own_name(const char* what, int rank) {
  return str("rank", rank, ".", what);
}

/// The generators that programs draw from without naming one.
std::vector<std::pair<const char*, at::Generator>> default_generators() {
  std::vector<std::pair<const char*, at::Generator>> generators = {
      {"cpu", at::globalContext().defaultGenerator(at::kCPU)}};
  if (at::globalContext().hasCUDA()) {
    generators.emplace_back("cuda", at::globalContext().defaultGenerator(at::Device(at::kCUDA)));
  }
  return generators;
}

}  // namespace

State& State::add(const std::string& name, StatefulPtr object) {
  TORCH_CHECK(object != nullptr, "[lockstep/checkpoint] nothing was given for '", name, "'");
  TORCH_CHECK(!name.ends_with('.'), "[lockstep/checkpoint] an entry cannot be called '", name, "'");
  const bool is_alone = std::none_of(entries_.begin(), entries_.end(), [&](const auto& entry) {
    return entry.first == name || entry.first.empty() || name.empty();
  });
  TORCH_CHECK(is_alone, "[lockstep/checkpoint] there is an entry '", name, "' already, or one without a name");
  entries_.emplace_back(name, std::move(object));
  return *this;
}

StatefulPtr stateful(bool& value) {
  return number(value);
}
StatefulPtr stateful(int64_t& value) {
  return number(value);
}
StatefulPtr stateful(int& value) {
  return number(value);
}
StatefulPtr stateful(double& value) {
  return number(value);
}

StatefulPtr stateful(std::string& bytes) {
  return made([&bytes](Outgoing& out) { out.bytes("", bytes); },
              [&bytes](Incoming& in) {
                if (auto saved = in.bytes("")) in.then([&bytes, saved] { bytes = *saved; });
              });
}

StatefulPtr stateful(at::Tensor& tensor) {
  return made([&tensor](Outgoing& out) { out.tensor("", tensor); }, [&tensor](Incoming& in) { in.tensor("", tensor); });
}

StatefulPtr stateful(at::Generator& generator) {
  return made([&generator](Outgoing& out) { out.tensor("", generator.get_state()); },
              [&generator](Incoming& in) {
                const auto state = in.tensor("");
                if (state.defined()) in.then([&generator, state] { generator.set_state(state); });
              });
}

StatefulPtr stateful(GradScaler& scaler) {
  return numbers(scaler, [&scaler] { return scaler.is_enabled(); });
}

StatefulPtr stateful(optim::CurveLR& schedule) {
  return numbers(schedule, [] { return true; });
}

StatefulPtr stateful(torch::optim::LRScheduler& schedule) {
  return made(
      [&schedule](Outgoing& out) { out.value("step_count", static_cast<int64_t>(schedule.*CountedSteps::member())); },
      [&schedule](Incoming& in) {
        const auto count = in.value("step_count");
        if (count.isNone()) return;
        in.then([&schedule, count] { schedule.*CountedSteps::member() = static_cast<unsigned>(count.toInt()); });
      });
}

StatefulPtr stateful(DistributedSampler& sampler) {
  const auto save = [&sampler](Outgoing& out) {
    torch::serialize::OutputArchive archive;
    sampler.save(archive);
    auto written = lockstep::detail::reopened(archive);
    auto values = lockstep::detail::values_in(written);
    values[kSize] = static_cast<int64_t>(sampler.size());
    out.values("", values);
  };
  const auto load = [&sampler](Incoming& in) {
    auto values = in.values("");
    if (!values.contains(kSize)) return;
    // Of more or fewer ranks each has another part of what all together had: no sample is left out.
    const auto then = values.at(kSize).toInt();
    const auto now = static_cast<int64_t>(sampler.size());
    values.erase(kSize);
    auto& position = values.at("position");
    if (then != now && then > 0) position = position.toInt() * now / then;
    in.then([&sampler, values] {
      torch::serialize::OutputArchive archive;
      for (const auto& [name, value] : values) archive.write(name, value);
      auto written = lockstep::detail::reopened(archive);
      sampler.load(written);
    });
  };
  return made(save, load);
}

StatefulPtr per_rank(StatefulPtr object) {
  const auto own = std::move(object);
  return made([own](Outgoing& out) { out.object(str("rank", out.rank()), *own); },
              [own](Incoming& in) {
                for (const auto& name : in.names()) in.pass_over(name);
                if (in.world_size() == in.saved_world_size()) return in.object(str("rank", in.rank()), *own);
                if (in.rank() != 0) return;
                TORCH_WARN("[lockstep/checkpoint] what ", in.saved_world_size(),
                           " ranks have saved each for itself is not ", "loaded by ", in.world_size());
              });
}

StatefulPtr random_state() {
  return made(
      [](Outgoing& out) {
        for (const auto& [what, generator] : default_generators()) {
          out.tensor(own_name(what, out.rank()), generator.get_state());
        }
      },
      [](Incoming& in) {
        for (const auto& name : in.names()) in.pass_over(name);
        for (auto& [what, generator] : default_generators()) {
          const auto name = own_name(what, in.rank());
          if (!in.form(name)) continue;
          in.then([generator = generator, state = in.tensor(name)]() mutable { generator.set_state(state); });
        }
      });
}

}  // namespace lockstep::dcp
