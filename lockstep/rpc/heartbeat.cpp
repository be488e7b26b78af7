#include "lockstep/rpc/heartbeat.h"

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/rpc.h"

namespace lockstep::rpc::detail {
namespace {

const auto are_you_there = function("lockstep.are_you_there", [] {});

}  // namespace

Heartbeat::Heartbeat(std::chrono::milliseconds limit, Report report)
    : limit_(limit), report_(std::move(report)), thread_([this] { beat(); }) {}

Heartbeat::~Heartbeat() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

std::vector<std::string> Heartbeat::silent() const {
  const std::lock_guard lock(mutex_);
  return {silent_.begin(), silent_.end()};
}

bool Heartbeat::sleep_for(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  return !wake_.wait_for(lock, time, [this] { return is_ending_; });
}

void Heartbeat::beat() {
  // Half for the pause, half for the answer: whoever falls silent is told of within the limit.
  while (sleep_for(limit_ / 2)) ask_all();
}

void Heartbeat::ask_all() {
  std::vector<std::pair<std::string, Future<void>>> answers;
  const auto own = worker_info().name_;
  for (const auto& info : worker_infos()) {
    if (info.name_ == own) continue;
    try {
      answers.emplace_back(info.name_, rpc_async(Callee(info.name_).within(limit_ / 2), are_you_there));
    } catch (const std::exception&) {
      answers.emplace_back(info.name_, Future<void>());  // cannot even be sent
    }
  }
  for (const auto& [name, answer] : answers) {
    bool is_silent = false;
    try {
      answer.wait();
    } catch (const std::exception&) {
      is_silent = true;
    }
    bool is_new = false;
    {
      const std::lock_guard lock(mutex_);
      if (is_ending_) return;
      is_new = is_silent ? silent_.insert(name).second : (silent_.erase(name), false);
    }
    if (is_new) report_(name);
  }
}

}  // namespace lockstep::rpc::detail
