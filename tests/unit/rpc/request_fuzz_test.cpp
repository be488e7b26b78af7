// Requests that are spoiled in every way: a worker answers them with an error, and serves on.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdlib>
#include <random>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/message_check.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/request_callback.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/session.h"
#include "lockstep/rpc/switched_agent.h"

namespace lockstep::rpc::request_fuzz_test {
namespace {

using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;

struct Sample {
  std::vector<char> payload;
  std::vector<at::Tensor> tensors;
  MessageType type;
};

struct Record {
  at::Tensor tensor;
  std::map<std::string, std::vector<double>> values;
  std::optional<std::string> text;
};
auto rpc_fields(Record& record) {
  return std::tie(record.tensor, record.values, record.text);
}

const auto echo = function("fuzz.echo", [](Record record) { return record; });
const auto add = function("fuzz.add", [](at::Tensor a, at::Tensor b) { return a + b; });
const auto take = function("fuzz.take", [](RRef<at::Tensor> ref) { return ref.is_owner(); });

/// What workers send each other: calls, creations, references, contexts, backwards.
std::vector<Sample> real_requests() {
  std::vector<Sample> samples;
  detail::switched_agent()->set_send_hook([&](const auto& /*to*/, const Message& message) {
    samples.push_back({message.payload(), message.tensors(), message.type()});
  });
  const auto x = at::ones({2, 3}).requires_grad_();
  rpc_sync(0, echo, Record{at::arange(4), {{"a", {1, 2}}, {"b", {}}}, "text"});
  rpc_sync(0, add, x, x);
  rpc_sync(0, builtin<at::Tensor(at::Tensor, at::Tensor)>("aten::mul.Tensor"), x, x);
  const auto there = remote(0, add, x, x);
  there.to_here();
  rpc_sync(0, take, there);
  {
    const dist_autograd::Context context;
    const auto loss = rpc_sync(0, add, x, x).sum();
    dist_autograd::backward(context.id(), {loss});
  }
  barrier();
  detail::switched_agent()->set_send_hook(nullptr);
  return samples;
}

/// More of them by hand: LOCKSTEP_FUZZ_COUNT=1000000.
int fuzz_count() {
  const auto* const given = std::getenv("LOCKSTEP_FUZZ_COUNT");
  return given != nullptr ? std::atoi(given) : 20'000;
}

void spoil(Sample& sample, std::mt19937& random) {
  const auto below = [&](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random);
  };
  auto& bytes = sample.payload;
  for (auto left = 1 + below(4); left > 0; --left) {
    switch (below(9)) {
      case 0:
      case 1:
      case 2:
        if (!bytes.empty()) bytes[below(bytes.size())] = static_cast<char>(below(256));
        break;
      case 3:
        if (!bytes.empty()) bytes[below(bytes.size())] ^= static_cast<char>(1U << below(8));
        break;
      case 4:
        bytes.resize(below(bytes.size() + 1));
        break;
      case 5:
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size() + 1)), 1 + below(9),
                     static_cast<char>(below(256)));
        break;
      case 6:  // a stretch of it somewhere else
        if (bytes.size() > 8) {
          const auto size = 1 + below(8);
          std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size() - size)), size,
                      bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size() - size)));
        }
        break;
      case 7:
        if (below(3) == 0) sample.tensors.clear();
        if (below(3) == 0) sample.tensors.emplace_back();
        if (below(3) == 0) sample.tensors.push_back(at::ones({2}, at::kInt));
        break;
      default:
        sample.type = static_cast<MessageType>(below(60));
    }
  }
}

}  // namespace

// RPC-12, RPC-14
TEST(RequestFuzz, SpoiledRequestsAreAnsweredWithErrors) {
  const int count = fuzz_count();
  init_rpc("worker0", 0, 1, {.store = c10::make_intrusive<c10d::HashStore>(), .agent = Agent::kShm});
  const auto samples = real_requests();
  std::map<MessageType, int> types;
  for (const auto& sample : samples) ++types[sample.type];
  EXPECT_GE(types.size(), 5);
  const auto callback = detail::make_request_callback();
  std::mt19937 random(17);
  int errors = 0;
  for (int i = 0; i < count; ++i) {
    auto sample = samples[random() % samples.size()];
    spoil(sample, random);
    const auto message =
        c10::make_intrusive<Message>(std::move(sample.payload), std::move(sample.tensors), sample.type, 1);
    if (!message->isRequest()) continue;
    try {
      const auto answer = (*callback)(*message, {});
      if (answer->completed() && answer->hasError()) ++errors;
      if (answer->completed() && !answer->hasError() &&
          answer->constValue().toCustomClass<Message>()->type() == MessageType::EXCEPTION) {
        ++errors;
      }
    } catch (const std::exception&) {
      ++errors;
    }
  }
  EXPECT_GT(errors, count / 4);
  const auto x = at::ones({2});
  EXPECT_TRUE(at::equal(rpc_sync(0, add, x, x), x + x)) << "it serves on";
  shutdown(/*graceful=*/false);
}

// RPC-14
TEST(RequestFuzz, SpoiledAnswersAreErrorsToo) {
  const auto value = Wire<Record>::to(Record{at::arange(4), {{"a", {1, 2}}, {"b", {}}}, "text"});
  const auto answer = torch::distributed::rpc::ScriptResp(c10::IValue(value)).toMessage();
  detail::check_answer(*answer);
  std::mt19937 random(18);
  int errors = 0;
  for (int i = 0; i < fuzz_count(); ++i) {
    Sample sample{answer->payload(), answer->tensors(), answer->type()};
    spoil(sample, random);
    const auto message =
        c10::make_intrusive<Message>(std::move(sample.payload), std::move(sample.tensors), answer->type());
    try {
      detail::check_answer(*message);
      Wire<Record>::from(torch::distributed::rpc::deserializeRespToIValue(*message));
    } catch (const std::exception&) {
      ++errors;
    }
  }
  EXPECT_GT(errors, fuzz_count() / 4);
}

// RPC-14
TEST(RequestFuzz, NestingIsBounded) {
  const auto nested = [](int depth) {
    c10::IValue value(1);
    for (int i = 0; i < depth; ++i) value = c10::ivalue::Tuple::create({value});
    return torch::jit::pickle(value);
  };
  detail::check_pickle(nested(detail::kMostNesting));
  EXPECT_THROW(detail::check_pickle(nested(detail::kMostNesting + 1)), detail::Refused);
  // Many values are fine.
  detail::check_pickle(torch::jit::pickle(Wire<std::vector<std::int64_t>>::to(std::vector<std::int64_t>(100'000, 7))));
}

}  // namespace lockstep::rpc::request_fuzz_test
