#include "lockstep/rpc/shm_agent.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "lockstep/base/deadline.h"
#include "lockstep/base/str.h"
#include "lockstep/rpc/shm_agent_directory.h"
#include "lockstep/rpc/shm_agent_envelope.h"
#include "lockstep/rpc/shm_agent_record.h"
#include "lockstep/shm/errors.h"

namespace lockstep::rpc {
namespace {

namespace trpc = torch::distributed::rpc;

// How long a worker that shuts down waits for requests that run, and for peers to take what it sent them.
constexpr auto kShutdownGrace = std::chrono::seconds(5);
constexpr auto kDeliveryGrace = std::chrono::seconds(1);

}  // namespace

std::chrono::milliseconds limit_of(float seconds) {
  constexpr float kMost = 3.0e8F;  // ten years
  return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(std::min(seconds, kMost) * 1000.0F)));
}

std::shared_ptr<ShmAgent> make_shm_agent(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int id,
                                         int world_size, const ShmAgentOptions& options,
                                         std::unique_ptr<trpc::RequestCallback> callback) {
  const ShmWorker self{.name = name, .id = id, .world_size = world_size};
  TORCH_CHECK(store, self.who(), ": there is no store");
  TORCH_CHECK(callback, self.who(), ": there is no request callback");
  TORCH_CHECK(id >= 0 && id < world_size && world_size <= std::numeric_limits<trpc::worker_id_t>::max(), self.who(),
              ": the id must be at least 0 and below the world size, which is at most 32767");
  TORCH_CHECK(options.num_worker_threads > 0, self.who(), ": num_worker_threads is ", options.num_worker_threads,
              ", but must be positive");
  TORCH_CHECK(options.rpc_timeout_seconds >= 0, self.who(), ": rpc_timeout_seconds is ", options.rpc_timeout_seconds,
              ", but must not be negative");
  const trpc::WorkerInfo checked(name, static_cast<trpc::worker_id_t>(id));  // throws if it is no name
  const auto names = exchange_names(*store, self, options.start_timeout);
  return std::make_shared<ShmAgent>(names, id, meet_workers(*store, self, names, options.start_timeout), options,
                                    std::move(callback));
}

ShmAgent::ShmAgent(const std::vector<std::string>& names, int id, std::shared_ptr<shm::Team> team,
                   const ShmAgentOptions& options, std::unique_ptr<trpc::RequestCallback> callback)
    : RpcAgent(WorkerInfo(names[peer_place(id)], static_cast<trpc::worker_id_t>(id)), std::move(callback),
               limit_of(options.rpc_timeout_seconds)),
      team_(std::move(team)),
      pool_(team_->pool()),
      options_(options),
      mailbox_(team_) {
  for (int each = 0; each < team_->size(); ++each) {
    peers_.push_back(std::make_unique<Peer>(WorkerInfo(names[peer_place(each)], static_cast<trpc::worker_id_t>(each))));
    ids_[names[peer_place(each)]] = each;
  }
}

ShmAgent::~ShmAgent() {
  if (rpcAgentRunning_.load()) shutdown();
  leave_team();
}

std::string ShmAgent::name_of(const Peer& peer) const {
  return str("worker '", peer.info.name_, "' (id ", peer.info.id_, ")");
}

std::string ShmAgent::who() const {
  return str("[lockstep/rpc] worker '", workerInfo_.name_, "' (id ", workerInfo_.id_, " of ", team_->size(), ")");
}

const ShmAgent::WorkerInfo& ShmAgent::getWorkerInfo(const std::string& name) const {
  const auto found = ids_.find(name);
  TORCH_CHECK(found != ids_.end(), who(), ": there is no worker '", name, "'");
  return peers_[peer_place(found->second)]->info;
}

const ShmAgent::WorkerInfo& ShmAgent::getWorkerInfo(trpc::worker_id_t id) const {
  TORCH_CHECK(id >= 0 && id < team_->size(), who(), ": there is no worker of id ", id);
  return peers_[peer_place(id)]->info;
}

std::vector<ShmAgent::WorkerInfo> ShmAgent::getWorkerInfos() const {
  std::vector<WorkerInfo> infos;
  for (const auto& peer : peers_) infos.push_back(peer->info);
  return infos;
}

std::unordered_map<std::string, std::string> ShmAgent::getMetrics() {
  const std::lock_guard lock(tasks_mutex_);
  return {{"agent.thread_pool_size", std::to_string(options_.num_worker_threads)},
          {"agent.num_idle_threads", std::to_string(options_.num_worker_threads - running_requests_)},
          {"agent.client_active_calls", std::to_string(active_calls())},
          {"agent.server_active_calls", std::to_string(server_calls_.load())},
          {"agent.server_active_async_calls", std::to_string(server_async_calls_.load())}};
}

ShmAgent::FuturePtr ShmAgent::send(const WorkerInfo& to, MessagePtr message, float timeout_seconds,
                                   const trpc::DeviceMap& device_map) {
  TORCH_CHECK(rpcAgentRunning_.load(), who(), ": RPC is not running: it was not started, or has been shut down");
  TORCH_CHECK(to.id_ >= 0 && to.id_ < team_->size() && peers_[peer_place(to.id_)]->info.name_ == to.name_, who(),
              ": there is no worker '", to.name_, "' (id ", to.id_, ")");
  TORCH_CHECK(device_map.empty(), who(),
              ": shared memory has no use for a device map. Use the TensorPipe agent to send tensors between GPUs.");
  TORCH_CHECK(message->isRequest(), who(), ": only requests are sent; answers go back by themselves");
  auto& peer = *peers_[peer_place(to.id_)];
  const auto limit = timeout_seconds == trpc::kUnsetRpcTimeout ? getRpcTimeout() : limit_of(timeout_seconds);
  const bool is_to_self = to.id_ == workerInfo_.id_;
  std::optional<MessageRecord> record;
  if (is_to_self) {
    message = copy_message(*message);
  } else {
    record.emplace(*message);
  }
  auto future = c10::make_intrusive<Future>(at::AnyClassType::get());
  const auto call = next_call_.fetch_add(1, std::memory_order_relaxed);
  message->setId(static_cast<int64_t>(call));
  add_call(call, future, to.id_, limit);
  if (is_to_self) {
    add_task({.peer = to.id_, .call = call, .message = std::move(message), .block = {}, .future = {}, .error = {}});
    return future;
  }
  try {
    post(peer, {.kind = EnvelopeKind::kRequest, .number = call}, &*record);
  } catch (const std::exception& error) {
    // Unless it was failed meanwhile by somebody who noticed the same.
    if (remove_call(call, to.id_)) {
      count_end();
      if (dynamic_cast<const PeerIsOver*>(&error) == nullptr) throw;
      future->setError(std::make_exception_ptr(std::runtime_error(error.what())));
    }
  }
  return future;
}

/// Throws PeerIsOver, and MemoryError if there is no room for a long one.
void ShmAgent::post(Peer& peer, Envelope envelope, const MessageRecord* record) {
  const auto check = [&peer] {
    if (!peer.over.empty()) throw PeerIsOver(peer.over);
  };
  if (record == nullptr || sizeof(envelope) + record->bytes() <= shm::Mailbox::kMostBytes) {
    const std::lock_guard lock(peer.mutex);
    check();
    return put(peer, envelope, record);
  }
  auto* at = pool_->allocate(record->bytes(), who());
  try {
    record->write(at);
    envelope.block = {.location = *pool_->locate(at, record->bytes()), .bytes = record->bytes()};
    const std::lock_guard lock(peer.mutex);
    check();
    put(peer, envelope, nullptr);
    peer.blocks.insert(envelope.block.location);
  } catch (...) {
    pool_->free(at);
    throw;
  }
}

/// REQUIRES: the peer's lock is held.
void ShmAgent::put(Peer& peer, const Envelope& envelope, const MessageRecord* record) {
  const auto bytes = sizeof(envelope) + (record != nullptr ? record->bytes() : 0);
  const auto write = [&](std::byte* at) {
    std::memcpy(at, &envelope, sizeof(envelope));
    if (record != nullptr) record->write(at + sizeof(envelope));
  };
  try {
    if (peer.backlog.empty()) {
      if (auto* at = mailbox_.reserve(peer.info.id_, bytes)) {
        write(at);
        return mailbox_.send(peer.info.id_);
      }
    }
    std::vector<std::byte> copy(bytes);
    write(copy.data());
    peer.backlog.push_back(std::move(copy));
    peer.has_backlog.store(true);
    flush(peer);
  } catch (const shm::BadMail& error) {
    peer.over = str("[lockstep/rpc] ", name_of(peer), " cannot be understood: it ", error.what());
    peer.spoiled = str("it ", error.what());
    peer.is_spoiled.store(true);
    mailbox_.ring(workerInfo_.id_);
    throw PeerIsOver(peer.over);
  }
}

/// What did not fit the ring, as far as it fits now. REQUIRES: the peer's lock is held.
void ShmAgent::flush(Peer& peer) {
  const int to = peer.info.id_;
  bool has_asked = false;
  while (!peer.backlog.empty()) {
    const auto& bytes = peer.backlog.front();
    if (auto* at = mailbox_.reserve(to, bytes.size())) {
      std::memcpy(at, bytes.data(), bytes.size());
      mailbox_.send(to);
      peer.backlog.pop_front();
      continue;
    }
    if (has_asked) return;
    mailbox_.ask_for_room(to);
    has_asked = true;
  }
  peer.has_backlog.store(false);
}

void ShmAgent::release(Peer& peer, const Block& block) {
  try {
    post(peer, {.kind = EnvelopeKind::kRelease, .number = 0, .block = block}, nullptr);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it is gone, and its blocks with it
  }
}

void ShmAgent::spoil(Peer& peer, const std::string& why) {
  {
    const std::lock_guard lock(peer.mutex);
    peer.spoiled = why;
    peer.is_spoiled.store(true);
  }
  mailbox_.ring(workerInfo_.id_);
}

void ShmAgent::respond(int id, uint64_t call, const MessagePtr& response) {
  response->setId(static_cast<int64_t>(call));
  if (id == workerInfo_.id_) {
    if (auto future = remove_call(call, id)) {
      Task task{.peer = id,
                .call = call,
                .message = copy_message(*response),
                .block = {},
                .future = std::move(future),
                .error = {}};
      complete(task);
    }
    return;
  }
  auto& peer = *peers_[peer_place(id)];
  const Envelope envelope{.kind = EnvelopeKind::kResponse, .number = call};
  try {
    try {
      const MessageRecord record(*response);
      post(peer, envelope, &record);
    } catch (const PeerIsOver&) {
      throw;
    } catch (const std::exception& error) {
      const auto refusal = trpc::createExceptionResponse(error, static_cast<int64_t>(call));
      const MessageRecord record(*refusal);
      post(peer, envelope, &record);
    }
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): nobody is left to be told
  }
}

void ShmAgent::startImpl() {
  watcher_bell_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  TORCH_CHECK(watcher_bell_, who(), ": eventfd failed: ", std::strerror(errno));
  watcher_ = std::thread([this] { watch(); });
  const std::lock_guard lock(tasks_mutex_);
  start_hand();
  start_hand();
}

void ShmAgent::shutdownImpl() {
  if (is_over_.load() || !watcher_.joinable()) return;
  fail_calls(-1, str(who(), ": RPC was shut down while the call was under way"));
  const auto grace = Clock::now() + kShutdownGrace;
  finish_work(grace);
  deliver(std::min(grace, Clock::now() + kDeliveryGrace));
  leave_team();
  stop_hands(std::max(grace, Clock::now() + kDeliveryGrace));
  is_over_.store(true);
  {
    const std::lock_guard lock(rounds_mutex_);
    rounds_changed_.notify_all();
  }
  wake_watcher();
  watcher_.join();
}

bool ShmAgent::is_own_hand(const Hand& hand) const {
  return hand.thread.get_id() == std::this_thread::get_id();
}

/// Requests that wait are not begun any more; those that run may still answer.
void ShmAgent::finish_work(Clock::time_point until) {
  std::unique_lock lock(tasks_mutex_);
  waiting_tasks_.fetch_sub(static_cast<int>(requests_.size()), std::memory_order_relaxed);
  requests_.clear();
  is_closing_ = true;
  const auto is_finished = [&] {
    const bool is_here =
        std::any_of(hands_.begin(), hands_.end(), [&](const auto& hand) { return is_own_hand(*hand); });
    const auto busy = static_cast<int>(hands_.size()) - idle_hands_ - (is_here ? 1 : 0);
    return completions_.empty() && busy <= 0;
  };
  if (tasks_changed_.wait_until(lock, until, is_finished)) return;
  lock.unlock();
  TORCH_WARN(who(), ": requests still run ", std::chrono::seconds(kShutdownGrace).count(),
             " s after RPC was shut down. They are left to themselves, and their answers are not sent.");
}

/// Waits until the peers have taken what this worker sent them last.
void ShmAgent::deliver(Clock::time_point until) {
  const auto is_delivered = [&] {
    return std::all_of(peers_.begin(), peers_.end(), [](const auto& peer) {
      const std::lock_guard lock(peer->mutex);
      return !peer->over.empty() || (peer->backlog.empty() && peer->blocks.empty());
    });
  };
  while (!is_delivered() && Clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void ShmAgent::leave_team() {
  if (team_->has_left(workerInfo_.id_)) return;
  team_->leave();
  for (const auto& peer : peers_) {
    if (peer->info.id_ != workerInfo_.id_) mailbox_.ring(peer->info.id_);
  }
}

/// Those whose user code does not end are let go: they keep the agent until it does.
void ShmAgent::stop_hands(Clock::time_point until) {
  std::vector<std::unique_ptr<Hand>> ended;
  {
    std::unique_lock lock(tasks_mutex_);
    is_stopping_ = true;
    lock.unlock();
    mailbox_.call_all();
    lock.lock();
    // Who is idle ends at once; who is busy has until then.
    const auto have_ended = [&](bool is_late) {
      return std::all_of(hands_.begin(), hands_.end(), [&](const auto& hand) {
        return hand->has_ended || is_own_hand(*hand) || (is_late && hand->is_busy);
      });
    };
    tasks_changed_.wait_until(lock, until, [&] { return have_ended(false); });
    tasks_changed_.wait(lock, [&] { return have_ended(true); });
    for (auto& hand : hands_) {
      if (hand->has_ended) {
        ended.push_back(std::move(hand));
      } else {
        hand->is_let_go->store(true);
        hand->thread.detach();
      }
    }
    std::erase(hands_, nullptr);
  }
  for (const auto& hand : ended) hand->thread.join();
}

}  // namespace lockstep::rpc
