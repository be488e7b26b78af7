// libtorch's RPC agent over shared memory: workers of one host, each a process or several in one. Internal to rpc.
//
// Threads take turns at the mailbox (shm/mailbox.h). Whoever finds something to do there gives the seat up and does it,
// a request or the completion of a future; so what a call takes is two looks at memory and no switch of threads, and
// user code may block for as long as it likes. At most num_worker_threads requests run at once; another thread is
// started whenever none is left to look after the mail. One more thread, the *watcher*, sleeps until a call's time is
// over or a peer's process ends.
//
// Long messages lie in a block of the sender's pool: copied in by who sends, out by who receives, who then releases it.
#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "lockstep/shm/mailbox.h"
#include "lockstep/shm/pool.h"

namespace lockstep::rpc {

struct ShmAgentOptions {
  int num_worker_threads = 16;
  float rpc_timeout_seconds = 60;  // 0: none
  /// How long to wait for the other workers at the start.
  std::chrono::milliseconds start_timeout = std::chrono::minutes(5);
};

class MessageRecord;

class ShmAgent final : public torch::distributed::rpc::RpcAgent, public std::enable_shared_from_this<ShmAgent> {
 public:
  using Message = torch::distributed::rpc::Message;
  using MessagePtr = c10::intrusive_ptr<Message>;
  using Future = torch::distributed::rpc::JitFuture;
  using FuturePtr = c10::intrusive_ptr<Future>;
  using WorkerInfo = torch::distributed::rpc::WorkerInfo;

  /// See make_shm_agent().
  ShmAgent(const std::vector<std::string>& names, int id, std::shared_ptr<shm::Team> team,
           const ShmAgentOptions& options, std::unique_ptr<torch::distributed::rpc::RequestCallback> callback);
  ~ShmAgent() override;

  /// Copies the message at once. Throws what the caller can mend (a tensor on a GPU, an unknown worker, an agent that
  /// does not run); a peer that is gone or late is the future's error. Seconds: 0 is no limit.
  FuturePtr send(const WorkerInfo& to, MessagePtr message,
                 float timeout_seconds = torch::distributed::rpc::kUnsetRpcTimeout,
                 const torch::distributed::rpc::DeviceMap& device_map = {}) override;

  /// future.wait() that looks after the mail meanwhile: the answer of a quick call needs no other thread.
  void wait(Future& future);

  using RpcAgent::getWorkerInfo;
  const WorkerInfo& getWorkerInfo(const std::string& name) const override;
  const WorkerInfo& getWorkerInfo(torch::distributed::rpc::worker_id_t id) const override;
  std::vector<WorkerInfo> getWorkerInfos() const override;

  /// Collective. Returns once no worker has a call under way; throws when the time (in seconds, 0: none) is over, or
  /// naming a worker that is gone.
  void join(bool shutdown = false, float timeout_seconds = 0) override;
  /// Collective: a barrier, as long as a call may take.
  void sync() override;
  void startImpl() override;
  /// Local. Fails what this worker waits for, waits for requests that run, for a few seconds at most, and leaves.
  void shutdownImpl() override;

  std::unordered_map<std::string, std::string> getMetrics() override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Envelope;
  /// Part of a pool: where a long message lies.
  struct Block {
    uint64_t location = 0;
    uint64_t bytes = 0;  // 0: there is none
  };
  /// Another worker, or this one.
  struct Peer {
    explicit Peer(WorkerInfo info) : info(std::move(info)) {}

    const WorkerInfo info;
    std::atomic<bool> has_ended = false;  // its process
    std::atomic<bool> has_backlog = false;
    std::atomic<bool> is_spoiled = false;
    bool is_closed = false;  // of the thread that attends: nothing more is read

    std::mutex mutex;     // guards all below, and writing to the mailbox
    std::string over;     // why nothing more can be sent; empty while it can
    std::string spoiled;  // what it wrote that makes no sense, for who attends to cut it off
    std::deque<std::vector<std::byte>> backlog;
    std::unordered_set<uint64_t> blocks;  // of mine, that it has not released
  };
  /// Something to do that may run user code.
  struct Task {
    int peer = -1;
    uint64_t call = 0;
    MessagePtr message;  // or
    Block block;         // where it is to be read from
    FuturePtr future;    // to be completed; none for a request
    std::string error;   // to complete it with
  };
  struct Call {
    FuturePtr future;
    int peer = -1;
    std::chrono::milliseconds limit{0};
    std::multimap<Clock::time_point, uint64_t>::iterator deadline;
    bool has_deadline = false;
  };
  /// One of my threads.
  struct Hand {
    std::thread thread;
    bool was_busy = false;   // until now: of its thread alone
    bool is_busy = false;    // guarded by tasks_mutex_, and
    bool has_ended = false;  // this
    std::shared_ptr<std::atomic<bool>> is_let_go = std::make_shared<std::atomic<bool>>(false);
  };

  std::string name_of(const Peer& peer) const;
  std::string who() const;

  // Sending.
  void post(Peer& peer, Envelope envelope, const MessageRecord* record);
  void put(Peer& peer, const Envelope& envelope, const MessageRecord* record);
  void flush(Peer& peer);
  void release(Peer& peer, const Block& block);
  void spoil(Peer& peer, const std::string& why);
  void respond(int peer, uint64_t call, const MessagePtr& response);

  // Reading, by the thread that attends.
  void read_all();
  void take(Peer& peer, std::span<const std::byte> mail);
  void read_from(Peer& peer);
  void cut(Peer& peer, const std::string& why, bool is_told = false);

  // Calls under way.
  void add_call(uint64_t call, const FuturePtr& future, int peer, std::chrono::milliseconds limit);
  FuturePtr remove_call(uint64_t call, int peer);
  void fail_calls(int peer, const std::string& why);  // -1: all
  void count_end();
  int64_t active_calls() const { return begun_calls_.load() - ended_calls_.load(); }

  // Tasks and those who do them.
  void add_task(Task task);
  bool take_task(Task& task, Hand& hand);
  bool has_task() const;
  void work(Hand& hand);
  void attend(const shm::Patience& patience);
  void run(Task& task);
  void serve(Task& task);
  void complete(Task& task);
  MessagePtr open(Task& task);
  void start_hand();
  bool is_own_hand(const Hand& hand) const;
  void finish_work(Clock::time_point until);
  void deliver(Clock::time_point until);
  void stop_hands(Clock::time_point until);
  void leave_team();

  void watch();
  void wake_watcher();
  int64_t exchange(int64_t count, Clock::time_point deadline, const char* what);

  void addGilWaitTime(std::chrono::microseconds) override {}

  const std::shared_ptr<shm::Team> team_;
  const std::shared_ptr<shm::Pool> pool_;
  const ShmAgentOptions options_;
  shm::Mailbox mailbox_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by id
  std::unordered_map<std::string, int> ids_;

  mutable std::mutex tasks_mutex_;
  std::condition_variable tasks_changed_;
  std::deque<Task> requests_;
  std::deque<Task> completions_;
  std::vector<std::unique_ptr<Hand>> hands_;
  int idle_hands_ = 0;
  int running_requests_ = 0;
  bool is_closing_ = false;                  // no request is begun any more
  std::atomic<bool> is_stopping_ = false;    // no thread stays
  std::atomic<int> waiting_tasks_ = 0;       // that could run now or soon
  std::atomic<bool> is_one_called_ = false;  // an idle hand is on its way to take a task

  std::mutex calls_mutex_;
  std::unordered_map<uint64_t, Call> calls_;
  std::multimap<Clock::time_point, uint64_t> deadlines_;
  Clock::time_point watched_until_ = Clock::time_point::max();  // when the watcher wakes by itself
  bool are_calls_closed_ = false;

  std::mutex rounds_mutex_;
  std::condition_variable rounds_changed_;
  std::map<uint64_t, std::map<int, int64_t>> rounds_;  // round, worker, its count
  std::map<int, std::string> over_;                    // workers that will take part in no more

  uint64_t next_round_ = 0;  // of the thread that calls join() or sync()
  std::atomic<uint64_t> next_call_ = 1;
  std::atomic<int64_t> begun_calls_ = 0;  // of mine, since the start
  std::atomic<int64_t> ended_calls_ = 0;
  std::atomic<int> server_calls_ = 0;
  std::atomic<int> server_async_calls_ = 0;

  std::thread watcher_;
  UniqueFd watcher_bell_;
  std::atomic<bool> is_over_ = false;  // shutdownImpl() has run
};

/// The agent of worker `id` of `world_size`, called `name`; start() follows. Collective over all workers, which meet at
/// `store`: it must be new, or prefixed by something new. Names, ids and sizes that do not fit are an error on every
/// worker that still waits, as is a worker that does not come.
std::shared_ptr<ShmAgent> make_shm_agent(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int id,
                                         int world_size, const ShmAgentOptions& options,
                                         std::unique_ptr<torch::distributed::rpc::RequestCallback> callback);

}  // namespace lockstep::rpc
