// Shim: see README.md in this folder. libtorch defines setTimeout; only its name is needed to parse the c10d header.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class UnboundBuffer;
}  // namespace transport

}  // namespace gloo
