// Where a remote module lives, from text: "worker/device", "worker", "rank:N/device" or "rank:N"; without a device it
// is the CPU.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "lockstep/rpc/callee.h"

namespace lockstep::rpc {

class RemoteDevice {
 public:
  /// Throws, showing the text and the forms there are, if it is none of them. Whether there is such a worker is seen
  /// when it is used.
  RemoteDevice(const std::string& text);                               // NOLINT(google-explicit-constructor)
  RemoteDevice(const char* text) : RemoteDevice(std::string(text)) {}  // NOLINT(google-explicit-constructor)

  const Callee& worker() const { return worker_; }
  c10::Device device() const { return device_; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  Callee worker_;
  c10::Device device_;
};

}  // namespace lockstep::rpc
