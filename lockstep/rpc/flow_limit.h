// How many bytes of requests may be on their way to one worker: further ones wait. Internal to rpc.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <unordered_map>

namespace lockstep::rpc::detail {

class FlowLimit {
 public:
  /// Zero: no limit.
  void set_limit(std::size_t bytes);

  /// Waits until they fit; a request larger than the limit goes alone.
  void take(int worker, std::size_t bytes);
  void give_back(int worker, std::size_t bytes);

  /// The most that has been on its way to one worker.
  std::size_t peak() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t limit_ = 0;
  std::size_t peak_ = 0;
  std::unordered_map<int, std::size_t> under_way_;
};

}  // namespace lockstep::rpc::detail
