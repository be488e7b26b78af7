#include "lockstep/checkpoint/together.h"

#include <c10/util/Exception.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/world.h"

namespace lockstep::detail {
namespace {

constexpr char kDone = '1';
constexpr char kFailed = '0';
constexpr std::string_view kPrefix = "[lockstep/checkpoint] ";

/// What the work returned or threw, marked as one or the other.
std::string said_by(const std::function<std::string()>& work) {
  try {
    return kDone + work();
  } catch (const c10::Error& error) {
    return kFailed + std::string(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return kFailed + std::string(error.what());
  } catch (...) {
    return kFailed + std::string("an exception that is no std::exception");
  }
}

[[noreturn]] void throw_for(const std::string& what, int rank, int size, std::string_view reason) {
  if (reason.starts_with(kPrefix)) reason.remove_prefix(kPrefix.size());
  const auto who = size > 1 ? str("rank ", rank, ": ") : "";
  TORCH_CHECK(false, kPrefix, what, ": ", who, reason);
}

}  // namespace

Together::Together(GroupPtr group) : group_(std::move(group)) {
  if (!group_ && current_world()) group_ = default_group();
}

std::vector<std::string> Together::all_say(const std::string& what, const std::function<std::string()>& work) const {
  auto said = said_by(work);
  auto all = group_ ? all_gather_object(said, group_) : std::vector{std::move(said)};
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].front() == kFailed) {
      throw_for(what, static_cast<int>(rank), size(), std::string_view(all[rank]).substr(1));
    }
    all[rank].erase(0, 1);
  }
  return all;
}

void Together::all_do(const std::string& what, const std::function<void()>& work) const {
  all_say(what, [&] {
    work();
    return std::string();
  });
}

std::string Together::first_says(const std::string& what, const std::function<std::string()>& work) const {
  const auto own = rank() == 0 ? said_by(work) : "";
  auto said = group_ ? broadcast_object(own, 0, group_) : own;
  if (said.front() == kFailed) throw_for(what, 0, size(), std::string_view(said).substr(1));
  said.erase(0, 1);
  return said;
}

}  // namespace lockstep::detail
