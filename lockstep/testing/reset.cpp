#include "lockstep/testing/reset.h"

#include <map>
#include <mutex>

namespace lockstep::testing {
namespace {

struct Hooks {
  std::mutex mutex;
  int next = 0;
  std::map<int, std::function<void()>> by_id;
};

Hooks& hooks() {
  static Hooks& instance = *new Hooks;
  return instance;
}

int add(std::function<void()> reset) {
  auto& all = hooks();
  const std::lock_guard lock(all.mutex);
  all.by_id[all.next] = std::move(reset);
  return all.next++;
}

}  // namespace

ResetHook::ResetHook(std::function<void()> reset) : id_(add(std::move(reset))) {}

ResetHook::~ResetHook() {
  auto& all = hooks();
  const std::lock_guard lock(all.mutex);
  all.by_id.erase(id_);
}

void reset_all() {
  std::map<int, std::function<void()>> current;
  {
    const std::lock_guard lock(hooks().mutex);
    current = hooks().by_id;
  }
  for (const auto& [id, reset] : current) reset();
}

}  // namespace lockstep::testing
