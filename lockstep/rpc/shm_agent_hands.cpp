// The threads of an agent: they take turns at the mailbox, run requests and complete futures.
#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/rpc/shm_agent_envelope.h"
#include "lockstep/rpc/shm_agent_record.h"

namespace lockstep::rpc {

void ShmAgent::add_task(Task task) {
  {
    const std::lock_guard lock(tasks_mutex_);
    if (!task.future && is_closing_) return;
    auto& queue = task.future ? completions_ : requests_;
    queue.push_back(std::move(task));
    waiting_tasks_.fetch_add(1, std::memory_order_relaxed);
  }
  mailbox_.ring(workerInfo_.id_);
}

bool ShmAgent::has_task() const {
  if (waiting_tasks_.load(std::memory_order_relaxed) == 0) return false;
  const std::lock_guard lock(tasks_mutex_);
  return !completions_.empty() || (!requests_.empty() && running_requests_ < options_.num_worker_threads);
}

/// Also sees to it that somebody looks after the rest.
bool ShmAgent::take_task(Task& task, Hand& hand) {
  if (waiting_tasks_.load(std::memory_order_seq_cst) == 0) return false;
  bool is_more_to_do = false;
  {
    const std::lock_guard lock(tasks_mutex_);
    if (!completions_.empty()) {
      task = std::move(completions_.front());
      completions_.pop_front();
    } else if (!requests_.empty() && running_requests_ < options_.num_worker_threads) {
      task = std::move(requests_.front());
      requests_.pop_front();
      ++running_requests_;
    } else {
      return false;
    }
    waiting_tasks_.fetch_sub(1, std::memory_order_relaxed);
    is_more_to_do = !completions_.empty() || (!requests_.empty() && running_requests_ < options_.num_worker_threads);
    hand.is_busy = true;
    // One call at a time is enough: who follows it calls the next, and who is awake anyway may be quicker.
    if (!hand.was_busy) is_one_called_.store(false);
    is_more_to_do = is_more_to_do && !is_one_called_.exchange(true);
    if (--idle_hands_ == 0 && !is_stopping_) start_hand();
  }
  if (is_more_to_do) mailbox_.ring(workerInfo_.id_);
  return true;
}

/// REQUIRES: tasks_mutex_ is held.
void ShmAgent::start_hand() {
  // Those that ended or were let go have joined already.
  auto& hand = *hands_.emplace_back(std::make_unique<Hand>());
  ++idle_hands_;
  hand.thread = std::thread([this, &hand] { work(hand); });
}

void ShmAgent::work(Hand& hand) {
  const auto is_let_go = hand.is_let_go;
  Task task;
  bool has_completed = false;
  while (true) {
    const auto seen = mailbox_.bell();
    if (take_task(task, hand)) {
      {
        // The program may drop the agent while its code runs here, or have given this thread up. Null if the agent is
        // ending already: its end waits for this.
        const auto self = weak_from_this().lock();
        const bool is_request = !task.future;
        has_completed = !is_request;
        run(task);
        task = {};
        const std::lock_guard lock(tasks_mutex_);
        if (is_request) --running_requests_;
        ++idle_hands_;
        hand.is_busy = false;
        if (is_closing_) tasks_changed_.notify_all();
      }
      if (is_let_go->load()) return;
      hand.was_busy = true;
      continue;
    }
    hand.was_busy = false;
    if (is_stopping_.load()) {
      const std::lock_guard lock(tasks_mutex_);
      hand.has_ended = true;
      tasks_changed_.notify_all();
      return;
    }
    if (mailbox_.try_attend()) {
      attend(has_completed ? kPatienceWithCaller : kPatience);
    } else {
      mailbox_.doze(seen);
    }
  }
}

/// Looks after the mail until there is something to do, and sleeps if there is nothing for a while.
void ShmAgent::attend(const shm::Patience& patience) {
  while (true) {
    const auto seen = mailbox_.bell();
    read_all();
    if (has_task() || is_stopping_.load()) {
      if (mailbox_.leave()) mailbox_.ring(workerInfo_.id_);
      return;
    }
    if (mailbox_.stay_awake(seen, patience)) continue;
    mailbox_.leave();
    return mailbox_.doze(seen);
  }
}

/// What happened to a task that is user code's affair is told to the caller; nothing leaves this.
void ShmAgent::run(Task& task) {
  if (task.future) return complete(task);
  server_calls_.fetch_add(1);
  serve(task);
  server_calls_.fetch_sub(1);
}

/// The task's message, read from the sender's memory if it is a long one. Throws BadRecord.
ShmAgent::MessagePtr ShmAgent::open(Task& task) {
  if (task.message) return std::move(task.message);
  auto& peer = *peers_[peer_place(task.peer)];
  const auto* at = team_->resolve(task.peer, task.block.location);
  auto message = read_message({at, static_cast<std::size_t>(task.block.bytes)}, static_cast<int64_t>(task.call));
  if (task.future ? !message->isResponse() : !message->isRequest()) throw BadRecord("a message of the wrong type");
  release(peer, task.block);
  return message;
}

void ShmAgent::serve(Task& task) {
  const int from = task.peer;
  const auto call = task.call;
  FuturePtr answer;
  try {
    const auto request = open(task);
    answer = (*cb_)(*request, {});
  } catch (const BadRecord& error) {
    return spoil(*peers_[peer_place(from)], str("it sent ", error.what()));
  } catch (const std::exception& error) {
    return respond(from, call, torch::distributed::rpc::createExceptionResponse(error, static_cast<int64_t>(call)));
  } catch (...) {
    return respond(from, call,
                   torch::distributed::rpc::createExceptionResponse("an error that is no std::exception",
                                                                    static_cast<int64_t>(call)));
  }
  const auto answer_with = [from, call](ShmAgent& agent, Future& done) {
    if (done.hasError()) {
      return agent.respond(
          from, call,
          torch::distributed::rpc::createExceptionResponse(done.tryRetrieveErrorMessage(), static_cast<int64_t>(call)));
    }
    agent.respond(from, call, done.constValue().toCustomClass<Message>());
  };
  if (answer->completed()) return answer_with(*this, *answer);
  server_async_calls_.fetch_add(1);
  answer->addCallback([self = weak_from_this(), answer_with](Future& done) {
    const auto agent = self.lock();
    if (!agent) return;
    agent->server_async_calls_.fetch_sub(1);
    answer_with(*agent, done);
  });
}

void ShmAgent::complete(Task& task) {
  MessagePtr message;
  if (task.error.empty()) {
    try {
      message = open(task);
      if (message->type() == torch::distributed::rpc::MessageType::EXCEPTION) {
        task.error.assign(message->payload().begin(), message->payload().end());
        message.reset();
      }
    } catch (const std::exception& error) {
      auto& peer = *peers_[peer_place(task.peer)];
      task.error = str("[lockstep/rpc] ", name_of(peer), " cannot be understood: it sent ", error.what());
      spoil(peer, str("it sent ", error.what()));
    }
  }
  try {
    if (message) {
      auto storages = message->getStorages();
      task.future->markCompleted(c10::IValue(std::move(message)), std::move(storages));
    } else {
      task.future->setError(std::make_exception_ptr(std::runtime_error(task.error)));
    }
  } catch (const std::exception& error) {
    TORCH_WARN(who(), ": a callback of a future threw: ", error.what());
  }
  count_end();
}

void ShmAgent::wait(Future& future) {
  if (future.completed() || !rpcAgentRunning_.load() || !mailbox_.try_attend()) return future.wait();
  Task mine;
  while (!future.completed()) {
    const auto seen = mailbox_.bell();
    read_all();
    bool is_work_for_others = false;
    if (waiting_tasks_.load(std::memory_order_relaxed) > 0) {
      const std::lock_guard lock(tasks_mutex_);
      const auto found = std::find_if(completions_.begin(), completions_.end(),
                                      [&](const Task& task) { return task.future.get() == &future; });
      if (found != completions_.end()) {
        mine = std::move(*found);
        completions_.erase(found);
        waiting_tasks_.fetch_sub(1, std::memory_order_relaxed);
        if (is_closing_) tasks_changed_.notify_all();
      }
      is_work_for_others = waiting_tasks_.load(std::memory_order_relaxed) > 0;
    }
    if (mine.future) break;
    if (is_work_for_others) mailbox_.call_one();
    if (!mailbox_.stay_awake(is_work_for_others ? seen + 1 : seen, kPatience)) break;
  }
  if (mailbox_.leave() || waiting_tasks_.load(std::memory_order_relaxed) > 0) mailbox_.ring(workerInfo_.id_);
  if (mine.future) complete(mine);
  future.wait();
}

}  // namespace lockstep::rpc
