// The logging data Python shows, to be compared with ours.
#pragma once

#include <c10/util/Logging.h>

#include <map>
#include <string>

#include "tests/oracle/ddp/reference.h"

namespace lockstep::ddp_oracle {

class ExpectedLog {
 public:
  /// What Python shows after construction.
  ExpectedLog(const Node& log, std::string backend, c10::Device device);
  /// Keys that have changed since construction.
  void change(const Node& log);
  /// EXPECTs every key with its value. Ours may have more keys: Python adds some only when they are set.
  void expect_in(const c10::DDPLoggingData& ours) const;

 private:
  const std::string backend_;
  const c10::Device device_;
  std::map<std::string, Node> values_;
};

}  // namespace lockstep::ddp_oracle
