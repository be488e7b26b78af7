// Asks every other worker now and then whether it is there. Internal to rpc.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::rpc::detail {

class Heartbeat {
 public:
  using Report = std::function<void(const std::string& worker)>;

  /// Calls `report` once, from a thread of its own, for each worker that has not answered within `limit`.
  Heartbeat(std::chrono::milliseconds limit, Report report);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// Names of those who are silent now.
  std::vector<std::string> silent() const;

 private:
  void beat();
  void ask_all();
  bool sleep_for(std::chrono::milliseconds time);

  const std::chrono::milliseconds limit_;
  const Report report_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool is_ending_ = false;
  std::set<std::string> silent_;
  std::thread thread_;
};

}  // namespace lockstep::rpc::detail
