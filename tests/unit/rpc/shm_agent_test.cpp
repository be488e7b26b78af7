// Agents of several workers in one process: they meet, map and ring as processes do, and one test sees all ends.
#include "lockstep/rpc/shm_agent.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fcntl.h>

#include <future>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/rpc/shm_agent_directory.h"
#include "tests/support/rpc_workers.h"

namespace lockstep::rpc::shm_agent_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using Functions = std::map<std::string, TextCallback::Function>;

/// `size` workers called w0, w1, …, started; shut down at the end.
class Workers {
 public:
  explicit Workers(int size, Functions functions = {}, ShmAgentOptions options = {}) : agents(place(size)) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::future<void>> made;
    for (int id = 0; id < size; ++id) {
      made.push_back(std::async(std::launch::async, [&, id] {
        agents[place(id)] = make_shm_agent(store, "w" + std::to_string(id), id, size, options,
                                           std::make_unique<TextCallback>(functions));
        agents[place(id)]->start();
      }));
    }
    for (auto& each : made) each.get();
  }
  ~Workers() {
    for (auto& agent : agents) {
      if (agent) agent->shutdown();
    }
  }

  FuturePtr send(int from, int to, const MessagePtr& message, float timeout = -1) {
    auto& agent = *agents[place(from)];
    return agent.send(agent.getWorkerInfo(static_cast<torch::distributed::rpc::worker_id_t>(to)), message, timeout);
  }
  ShmAgent& operator[](int id) { return *agents[place(id)]; }

  static std::size_t place(int id) { return static_cast<std::size_t>(id); }
  std::vector<std::shared_ptr<ShmAgent>> agents;
};

void wait_for_figure(ShmAgent& agent, const std::string& name, const std::string& value) {
  const auto end = Clock::now() + 10s;
  while (agent.getMetrics()[name] != value) {
    ASSERT_LT(Clock::now(), end) << name << " is " << agent.getMetrics()[name];
    std::this_thread::sleep_for(1ms);
  }
}

TEST(ShmAgent, BringsAMessageThereAndItsAnswerBack) {
  Workers workers(3);
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      const auto tensor = at::rand({8, 64});
      const auto got = message_in(workers.send(from, to, text_message("echo hello", {tensor})));
      EXPECT_EQ(text_of(*got), "echo hello");
      EXPECT_TRUE(got->tensors()[0].equal(tensor));
      EXPECT_NE(got->tensors()[0].data_ptr(), tensor.data_ptr()) << "nobody writes to the sender's, itself neither";
    }
  }
}

// RPC-9
TEST(ShmAgent, KnowsItsWorkersByNameAndId) {
  Workers workers(2);
  EXPECT_EQ(workers[0].getWorkerInfo("w1").id_, 1);
  EXPECT_EQ(workers[0].getWorkerInfo(torch::distributed::rpc::worker_id_t{1}).name_, "w1");
  EXPECT_EQ(workers[1].getWorkerInfo().name_, "w1");
  EXPECT_EQ(workers[1].getWorkerInfos().size(), 2U);
  EXPECT_THROW(workers[0].getWorkerInfo("nobody"), c10::Error);
  EXPECT_THROW(workers[0].getWorkerInfo(torch::distributed::rpc::worker_id_t{2}), c10::Error);
  EXPECT_THROW(workers[0].send(WorkerInfo("nobody", int64_t{1}), text_message("echo")), c10::Error);
  EXPECT_TRUE(workers[0].getDevices().empty());
  EXPECT_TRUE(workers[0].getDeviceMap(workers[0].getWorkerInfo("w1")).empty());
}

TEST(ShmAgent, SendsMessagesOfAnySize) {
  Workers workers(2);
  // Around what fits a letter, what fits the ring, and far beyond.
  for (const int64_t bytes : {0, 1, 1000, 32'000, 32'600, 32'768, 40'000, 262'144, 1 << 20, 70 << 20}) {
    const auto tensor = at::arange(bytes, at::kLong).to(at::kByte);
    const auto got = message_in(workers.send(0, 1, text_message(std::string(100, 'x'), {tensor})));
    ASSERT_TRUE(got->tensors()[0].equal(tensor)) << bytes;
  }
  const std::string text(3 << 20, 'y');
  EXPECT_EQ(text_of(*message_in(workers.send(1, 0, text_message(text)))), text);
}

// RPC-13
TEST(ShmAgent, HasHundredsOfCallsInFlightFromManyThreads) {
  Workers workers(2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      const int from = caller % 2;
      std::vector<std::pair<at::Tensor, FuturePtr>> calls;
      for (int i = 0; i < 300; ++i) {
        const auto tensor = at::full({1 + i * 37 % 4000}, i);
        calls.emplace_back(tensor, workers.send(from, i % 5 == 0 ? from : 1 - from, text_message("echo", {tensor})));
      }
      for (const auto& [tensor, future] : calls) {
        if (caller >= 2) workers[from].wait(*future);
        EXPECT_TRUE(message_in(future)->tensors()[0].equal(tensor));
      }
    });
  }
  for (auto& caller : callers) caller.join();
}

// More than the ring holds, to a worker that is slow to look: nothing is lost, nobody blocks.
TEST(ShmAgent, KeepsWhatDoesNotFitTheRingUntilThereIsRoom) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto late = std::async(std::launch::async,
                         [&] { return make_shm_agent(store, "late", 1, 2, {}, std::make_unique<TextCallback>()); });
  const auto agent = make_shm_agent(store, "early", 0, 2, {}, std::make_unique<TextCallback>());
  agent->start();
  const auto other = late.get();
  std::vector<FuturePtr> calls;
  for (int i = 0; i < 2000; ++i) {
    calls.push_back(agent->send(agent->getWorkerInfo("late"), text_message("echo " + std::string(1000, 'x'))));
  }
  other->start();
  for (const auto& call : calls) EXPECT_EQ(text_of(*message_in(call)).size(), 1005U);
  agent->shutdown();
  other->shutdown();
}

// RPC-13
TEST(ShmAgent, ServesNestedCallsAndAnswersThatComeLater) {
  Workers* all = nullptr;
  FuturePtr later = new_answer();
  Functions functions;
  functions["nested"] = [&](Message& request) {
    const auto depth = std::stoi(text_of(request).substr(7));
    if (depth == 0) return TextCallback::answer_text("bottom");
    return TextCallback::answer_text(
        text_of(*message_in(all->send(depth % 2, 1 - depth % 2, text_message("nested " + std::to_string(depth - 1))))));
  };
  functions["later"] = [&](Message&) { return later; };
  Workers workers(2, functions);
  all = &workers;
  EXPECT_EQ(text_of(*message_in(workers.send(0, 1, text_message("nested 9")))), "bottom");
  const auto call = workers.send(0, 1, text_message("later"));
  wait_for_figure(workers[1], "agent.server_active_async_calls", "1");
  EXPECT_EQ(workers[1].getMetrics()["agent.server_active_calls"], "0");
  EXPECT_FALSE(call->completed());
  later->markCompleted(c10::IValue(text_message("at last", {}, MessageType::SCRIPT_RET)));
  EXPECT_EQ(text_of(*message_in(call)), "at last");
  // RPC-11
  wait_for_figure(workers[0], "agent.client_active_calls", "0");
  EXPECT_EQ(workers[1].getMetrics()["agent.server_active_async_calls"], "0");
}

// RPC-18: the second call into a pool of one waits for the first, which waits for it.
TEST(ShmAgent, LimitsRequestsThatRunAtOnceAndStillBringsAnswers) {
  Workers* all = nullptr;
  std::atomic<int> running = 0;
  std::atomic<int> most = 0;
  Functions functions;
  functions["count"] = [&](Message&) {
    most = std::max(most.load(), ++running);
    std::this_thread::sleep_for(5ms);
    --running;
    return TextCallback::answer_text("done");
  };
  functions["ask"] = [&](Message&) {
    const auto call = all->send(1, 0, text_message("echo"));
    all->agents[1]->wait(*call);
    return TextCallback::answer_text(text_of(*message_in(call)));
  };
  functions["again"] = [&](Message&) {
    return TextCallback::answer_text(text_of(*message_in(all->send(1, 1, text_message("echo"), 0.2F))));
  };
  Workers workers(2, functions, {.num_worker_threads = 1});
  all = &workers;
  std::vector<FuturePtr> calls;
  for (int i = 0; i < 10; ++i) calls.push_back(workers.send(0, 1, text_message("count")));
  for (const auto& call : calls) message_in(call);
  EXPECT_EQ(most, 1);
  EXPECT_EQ(text_of(*message_in(workers.send(0, 1, text_message("ask")))), "echo");
  EXPECT_THAT(error_in(workers.send(0, 1, text_message("again"))), HasSubstr("had no answer within 200 ms"));
  EXPECT_EQ(text_of(*message_in(workers.send(0, 1, text_message("echo")))), "echo");
}

TEST(ShmAgent, LetsCallbacksOfFuturesBlock) {
  Workers workers(2, {}, {.num_worker_threads = 1});
  std::vector<FuturePtr> outer;
  std::atomic<int> done = 0;
  for (int i = 0; i < 8; ++i) {
    outer.push_back(workers.send(0, 1, text_message("echo")));
    outer.back()->addCallback([&](torch::distributed::rpc::JitFuture&) {
      message_in(workers.send(0, 1, text_message("echo again")));
      ++done;
    });
  }
  const auto end = Clock::now() + 20s;
  while (done < 8 && Clock::now() < end) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(done, 8);
}

// RPC-32
TEST(ShmAgent, BringsErrorsOfTheOtherSide) {
  Functions functions;
  functions["throw"] = [](Message&) -> FuturePtr { throw std::runtime_error("no such luck"); };
  functions["fail"] = [](Message&) {
    auto future = new_answer();
    future->setError(std::make_exception_ptr(std::runtime_error("failed later")));
    return future;
  };
  functions["meta"] = [](Message&) {
    return TextCallback::answer_text("here", {at::empty({2}, at::device(at::kMeta))});
  };
  Workers workers(2, functions);
  for (const int to : {0, 1}) {
    EXPECT_THAT(error_in(workers.send(0, to, text_message("throw"))), HasSubstr("no such luck"));
    EXPECT_THAT(error_in(workers.send(0, to, text_message("fail"))), HasSubstr("failed later"));
  }
  EXPECT_THAT(error_in(workers.send(0, 1, text_message("meta"))), HasSubstr("Use the TensorPipe agent"));
  EXPECT_THROW(workers.send(0, 1, text_message("echo", {at::empty({2}, at::device(at::kMeta))})), c10::Error);
  EXPECT_EQ(text_of(*message_in(workers.send(0, 1, text_message("echo")))), "echo");
}

// RPC-31
TEST(ShmAgent, EndsCallsAtTheirLimitAndDropsLateAnswers) {
  std::atomic<int> served = 0;
  Functions functions;
  functions["slow"] = [&](Message& request) {
    std::this_thread::sleep_for(300ms);
    ++served;
    return TextCallback::answer_text("late", request.tensors());
  };
  Workers workers(2, functions, {.rpc_timeout_seconds = 0.05F});
  const auto large = at::ones({1 << 16});
  for (const int to : {0, 1}) {
    const auto begin = Clock::now();
    const auto call = workers.send(0, to, text_message("slow", {large}), 0.1F);
    const auto text = error_in(call);
    EXPECT_LT(Clock::now() - begin, 280ms);
    EXPECT_THAT(text, HasSubstr("100 ms"));
    EXPECT_THAT(text, HasSubstr("worker 'w" + std::to_string(to) + "' (id " + std::to_string(to) + ")"));
    EXPECT_EQ(torch::distributed::rpc::getRPCErrorType(*call), torch::distributed::rpc::RPCErrorType::TIMEOUT);
    EXPECT_THAT(error_in(workers.send(0, to, text_message("slow"))), HasSubstr("50 ms")) << "the default";
    EXPECT_EQ(error_in(workers.send(0, to, text_message("slow"), 0)), "") << "no limit";
  }
  workers[0].setRpcTimeout(10s);
  EXPECT_EQ(error_in(workers.send(0, 1, text_message("slow"))), "");
  EXPECT_EQ(served, 7);
  EXPECT_EQ(text_of(*message_in(workers.send(0, 1, text_message("echo")))), "echo");
}

// RPC-7
TEST(ShmAgent, JoinsOnlyWhenNobodyHasWork) {
  Workers* all = nullptr;
  std::atomic<int> ends = 0;
  Functions functions;
  functions["chain"] = [&](Message& request) {
    const auto depth = std::stoi(text_of(request).substr(6));
    std::this_thread::sleep_for(10ms);
    const int here = depth % 3;
    if (depth > 0) all->send(here, (here + 2) % 3, text_message("chain " + std::to_string(depth - 1)));
    if (depth == 0) ++ends;
    return TextCallback::answer_text("done");
  };
  Workers workers(3, functions);
  all = &workers;
  workers.send(0, 1, text_message("chain 31"));
  std::vector<std::future<void>> joined;
  for (int id = 0; id < 3; ++id) {
    joined.push_back(std::async(std::launch::async, [&, id] {
      workers[id].join(true, 20);
      EXPECT_EQ(ends, 1) << id;
    }));
  }
  for (auto& each : joined) each.get();
}

// RPC-7
TEST(ShmAgent, JoinEndsWithItsTimeoutAndCanBeTriedAgain) {
  Functions functions;
  functions["slow"] = [](Message&) {
    std::this_thread::sleep_for(200ms);
    return TextCallback::answer_text("done");
  };
  Workers workers(2, functions);
  const auto call = workers.send(0, 1, text_message("slow"));
  try {
    workers[0].join(true, 0.05F);
    FAIL() << "joined with a call under way";
  } catch (const c10::DistBackendError& error) {
    EXPECT_THAT(error.what(), HasSubstr("1 of this worker's calls are under way"));
  }
  message_in(call);
  try {
    workers[0].join(true, 0.05F);
    FAIL() << "joined alone";
  } catch (const c10::DistBackendError& error) {
    EXPECT_THAT(error.what(), HasSubstr("worker 'w1' (id 1) did not come"));
  }
  auto other = std::async(std::launch::async, [&] { workers[1].join(true, 10); });
  workers[0].join(true, 10);
  other.get();
  auto synced = std::async(std::launch::async, [&] { workers[1].sync(); });
  workers[0].sync();
  synced.get();
}

// RPC-6, RPC-7
TEST(ShmAgent, ShutsDownAtOnceAndTellsTheOthers) {
  std::promise<void> over;
  const auto is_over = over.get_future().share();
  Functions functions;
  functions["wait"] = [&](Message&) {
    is_over.wait_for(10s);
    return TextCallback::answer_text("done");
  };
  Workers workers(3, functions);
  const auto mine = workers.send(0, 1, text_message("wait"));
  const auto to_it = workers.send(1, 0, text_message("wait"), 30);
  wait_for_figure(workers[0], "agent.server_active_calls", "1");
  auto down = std::async(std::launch::async, [&] { workers[0].shutdown(); });
  EXPECT_THAT(error_in(mine), HasSubstr("RPC was shut down while the call was under way"));
  over.set_value();  // one that runs may still answer
  EXPECT_EQ(text_of(*message_in(to_it)), "done");
  down.get();
  EXPECT_THROW(workers.send(0, 1, text_message("echo")), c10::Error);
  EXPECT_THAT(error_in(workers.send(1, 0, text_message("echo"))), HasSubstr("worker 'w0' (id 0) has shut down"));
  EXPECT_EQ(text_of(*message_in(workers.send(1, 2, text_message("echo")))), "echo");
  try {
    workers[1].join(true, 10);
    FAIL() << "joined one that has left";
  } catch (const c10::DistBackendError& error) {
    EXPECT_THAT(error.what(), HasSubstr("worker 'w0' (id 0) has shut down"));
  }
}

TEST(ShmAgent, ShutdownDoesNotWaitForeverForUserCode) {
  const auto over = std::make_shared<std::promise<void>>();
  const auto is_over = over->get_future().share();
  const auto ended = std::make_shared<std::atomic<bool>>(false);
  Functions functions;
  functions["hang"] = [=](Message&) {
    is_over.wait();
    *ended = true;
    return TextCallback::answer_text("done");
  };
  {
    Workers workers(2, functions);
    workers.send(0, 1, text_message("hang"), 0);
    wait_for_figure(workers[1], "agent.server_active_calls", "1");
    const auto begin = Clock::now();
    workers[1].shutdown();
    EXPECT_LT(Clock::now() - begin, 9s);
  }
  over->set_value();
  while (!*ended) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(20ms);
}

// RPC-3
TEST(ShmAgent, RefusesNamesIdsAndSizesThatDoNotFitOnEveryWorker) {
  struct Identity {
    std::string name;
    int id;
    int size;
  };
  const auto errors_of = [](const std::vector<Identity>& identities) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::future<std::string>> ends;
    for (const auto& each : identities) {
      ends.push_back(std::async(std::launch::async, [&store, each]() -> std::string {
        try {
          make_shm_agent(store, each.name, each.id, each.size, {.start_timeout = 500ms},
                         std::make_unique<TextCallback>());
          return "";
        } catch (const std::exception& error) {
          return error.what();
        }
      }));
    }
    std::vector<std::string> errors;
    for (auto& end : ends) errors.push_back(end.get());
    return errors;
  };
  for (const auto& error : errors_of({{"same", 0, 3}, {"other", 1, 3}, {"same", 2, 3}})) {
    EXPECT_THAT(error, HasSubstr("the name 'same' is used by two workers, id 0 and id 2"));
  }
  for (const auto& error : errors_of({{"a", 0, 2}, {"b", 1, 3}})) {
    EXPECT_THAT(error, HasSubstr("has a world size of"));
  }
  for (const auto& error : errors_of({{"a", 0, 2}, {"b", 0, 2}})) {
    EXPECT_THAT(error, HasSubstr("id 0 is used by two workers"));
  }
  for (const auto& error : errors_of({{"a", 0, 3}, {"b", 2, 3}})) {
    EXPECT_THAT(error, HasSubstr("worker id 1 did not come within 500 ms"));
  }
  EXPECT_THAT(errors_of({{"", 0, 1}})[0], ::testing::Not(""));
  EXPECT_THAT(errors_of({{"a b", 0, 1}})[0], ::testing::Not(""));
  EXPECT_THAT(errors_of({{"a", 1, 1}})[0], HasSubstr("the id must be"));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto make = [&](const ShmAgentOptions& options) {
    make_shm_agent(store, "a", 0, 1, options, std::make_unique<TextCallback>());
  };
  EXPECT_THROW(make({.num_worker_threads = 0}), c10::Error);
  EXPECT_THROW(make({.rpc_timeout_seconds = -1}), c10::Error);
}

// RPC-5
TEST(ShmAgent, WorksAlone) {
  Workers workers(1);
  EXPECT_EQ(text_of(*message_in(workers.send(0, 0, text_message("echo me")))), "echo me");
  workers[0].join(true, 1);
  workers[0].sync();
}

/// Writes what is no message into the ring of worker 0 for worker 1, as a worker of another build might.
TEST(ShmAgent, CutsOffAWorkerWhoseMessagesMakeNoSense) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::shared_ptr<shm::Team> team;
  auto liar = std::async(std::launch::async, [&] {
    const auto names = std::vector<std::string>{"liar", "honest", "third"};
    const ShmWorker self{.name = "liar", .id = 0, .world_size = 3};
    exchange_names(*store, self, 10s);
    team = meet_workers(*store, self, names, 10s);
  });
  std::vector<std::shared_ptr<ShmAgent>> agents(2);
  auto third = std::async(std::launch::async, [&] {
    agents[1] = make_shm_agent(store, "third", 2, 3, {}, std::make_unique<TextCallback>());
  });
  agents[0] = make_shm_agent(store, "honest", 1, 3, {}, std::make_unique<TextCallback>());
  liar.get();
  third.get();
  for (const auto& agent : agents) agent->start();
  auto& honest = *agents[0];
  const auto pending = honest.send(honest.getWorkerInfo("liar"), text_message("echo"), 30);
  shm::Mailbox box(team);
  auto* at = box.reserve(1, 100);
  std::memset(at, 7, 100);
  box.send(1);
  EXPECT_THAT(error_in(pending), HasSubstr("worker 'liar' (id 0) cannot be understood: it sent"));
  EXPECT_THAT(error_in(honest.send(honest.getWorkerInfo("liar"), text_message("echo"))),
              HasSubstr("worker 'liar' (id 0) cannot be understood"));
  EXPECT_EQ(text_of(*message_in(honest.send(honest.getWorkerInfo("third"), text_message("echo")))), "echo");
  for (const auto& agent : agents) agent->shutdown();
}

double cpu_seconds() {
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(ShmAgent, UsesNoTimeWhileIdle) {
  Workers workers(2);
  message_in(workers.send(0, 1, text_message("echo")));
  std::this_thread::sleep_for(50ms);
  const auto before = cpu_seconds();
  std::this_thread::sleep_for(1s);
  EXPECT_LT(cpu_seconds() - before, 0.02);
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

TEST(ShmAgent, LeavesNothingBehind) {
  { const Workers warm(2); }
  const auto before = open_descriptors();
  for (int i = 0; i < 5; ++i) {
    Workers workers(3);
    message_in(workers.send(0, 1, text_message("echo", {at::ones({1 << 18})})));
    if (i % 2 == 0) workers[0].shutdown();
  }
  EXPECT_EQ(open_descriptors(), before);
}

// The program drops its last reference in the very code that runs.
TEST(ShmAgent, CanBeDroppedByTheCodeItRuns) {
  std::vector<std::shared_ptr<ShmAgent>>* agents = nullptr;
  Functions functions;
  std::atomic<bool> is_dropped = false;
  functions["drop"] = [&](Message&) {
    (*agents)[1].reset();
    is_dropped = true;
    return TextCallback::answer_text("dropped");
  };
  Workers workers(2, functions);
  agents = &workers.agents;
  EXPECT_EQ(text_of(*message_in(workers.send(0, 1, text_message("drop")))), "dropped");
  EXPECT_TRUE(is_dropped);
  const auto end = Clock::now() + 10s;
  while (error_in(workers.send(0, 1, text_message("echo"), 0.1F)).find("has shut down") == std::string::npos) {
    ASSERT_LT(Clock::now(), end);
  }
}

}  // namespace
}  // namespace lockstep::rpc::shm_agent_test
