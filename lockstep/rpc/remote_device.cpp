#include "lockstep/rpc/remote_device.h"

#include <charconv>

#include "lockstep/base/str.h"

namespace lockstep::rpc {
namespace {

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  TORCH_CHECK(false, "[lockstep/rpc] remote device '", text, "': ", why,
              ". Write worker/device, worker, rank:N/device or rank:N, such as 'trainer0/cuda:1'.");
}

Callee worker_in(const std::string& text, const std::string& part) {
  constexpr std::string_view kRank = "rank:";
  if (part.empty()) refuse(text, "it names no worker");
  if (!part.starts_with(kRank)) return part;
  int rank = -1;
  const auto* const end = part.data() + part.size();
  const auto [rest, error] = std::from_chars(part.data() + kRank.size(), end, rank);
  if (error != std::errc() || rest != end || rank < 0) refuse(text, str("'", part, "' is no rank"));
  return rank;
}

c10::Device device_in(const std::string& text, const std::string& part) {
  try {
    return c10::Device(part);
  } catch (const c10::Error&) {
    refuse(text, str("'", part, "' is no device"));
  }
}

bool is_device(const std::string& text) {
  try {
    return !c10::Device(text).str().empty();
  } catch (const c10::Error&) {
    return false;
  }
}

std::string before_slash(const std::string& text) {
  return text.substr(0, text.find('/'));
}

std::string after_slash(const std::string& text) {
  const auto slash = text.find('/');
  if (slash == std::string::npos) {
    if (is_device(text)) refuse(text, "a device alone does not say whose it is");
    return "cpu";
  }
  if (text.find('/', slash + 1) != std::string::npos) refuse(text, "it has more than one '/'");
  return text.substr(slash + 1);
}

}  // namespace

RemoteDevice::RemoteDevice(const std::string& text)
    : text_(text), worker_(worker_in(text, before_slash(text))), device_(device_in(text, after_slash(text))) {}

}  // namespace lockstep::rpc
