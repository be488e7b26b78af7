// What a wrapper tells about itself: settings at construction, and figures of steps, under Python's keys. Internal to
// ddp.
#pragma once

#include <c10/util/Logging.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/ddp/options.h"
#include "lockstep/ddp/reducer.h"

namespace lockstep::detail {

class DdpLogger {
 public:
  struct Wrapper {
    std::string module_name = "";
    std::string device_ids = "";
    int64_t output_device = -1;
    bool broadcast_buffers = true;
    bool has_sync_bn = false;
    bool is_multi_device = false;
    bool is_static_graph = false;
  };

  DdpLogger(std::shared_ptr<Reducer> reducer, const DdpOptions& options, const Wrapper& wrapper);
  ~DdpLogger();

  /// At the beginning of a synced forward: the figures of the step before, if it is one of those that are sampled.
  void set_runtime_stats_and_log();
  /// Iterations 1 to 10 are sampled, then one in this many.
  void set_sample_rate(int sample_rate);
  void set_error_and_log(const std::string& error);
  void set_comm_hook(const std::string& name) { set("comm_hook", name); }
  void set_static_graph() { set("static_graph", 1); }
  void set_uneven_input_join() { set("join_uneven_inputs", 1); }
  void set_mixed_precision(const std::string& text) { set("mixed_precision", text); }

  c10::DDPLoggingData data() const;
  /// Share of the reduction's time that backward still computed in, in the last sampled step; none before.
  std::optional<double> overlap_share() const;

 private:
  void set(const std::string& key, const std::string& value);
  void set(const std::string& key, int64_t value);
  void set_environment();
  void set_times();
  /// Of the last sampled step.
  std::string times_text() const;

  const std::shared_ptr<Reducer> reducer_;
  const bool has_times_;

  mutable std::mutex mutex_;  // guards what follows
  c10::DDPLoggingData data_;
  int sample_rate_ = 100;
  int64_t samples_ = 0;
  bool has_warned_of_times_ = false;
};

/// "env:NAME=value" or "env:NAME=N/A", a line for each variable that matters to a job, as Python dumps them.
std::string relevant_environment();

}  // namespace lockstep::detail
