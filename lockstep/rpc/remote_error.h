// What a call failed by: which worker, which function, and in which way.
#pragma once

#include <stdexcept>
#include <string>

namespace lockstep::rpc {

class RemoteError : public std::runtime_error {
 public:
  enum class Kind {
    kThrown,      // the function threw
    kRefused,     // the worker has no such function, or it takes other arguments; nothing was run
    kTimeout,     // no answer in time; the function may still run
    kConnection,  // the worker is gone, or cannot be reached
  };

  RemoteError(Kind kind, std::string worker, std::string function, const std::string& text);

  Kind kind() const { return kind_; }
  const std::string& worker() const { return worker_; }
  const std::string& function() const { return function_; }

 private:
  Kind kind_;
  std::string worker_;
  std::string function_;
};

namespace detail {

/// A call that is refused before anything runs.
class Refused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What the exception says, without libtorch's stack. Of anything that was thrown.
std::string text_of(const std::exception_ptr& error);

/// What a worker answers instead of a result; understood by translate().
std::string failure_text(const std::string& worker, const std::string& function, const std::exception_ptr& error);

/// The error of a call as its caller sees it.
RemoteError translate(const std::exception_ptr& error, const std::string& worker, const std::string& function);

}  // namespace detail
}  // namespace lockstep::rpc
