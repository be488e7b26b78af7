#include "lockstep/checkpoint/manager.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "lockstep/base/str.h"
#include "lockstep/checkpoint/catalog.h"
#include "lockstep/checkpoint/folder.h"
#include "lockstep/checkpoint/together.h"
#include "lockstep/checkpoint/verify.h"
#include "lockstep/state/disk.h"

namespace lockstep::dcp {
namespace {

constexpr const char* kPrefix = "step-";
constexpr const char* kLatest = "latest";
constexpr const char* kLeft = ".left-behind";

std::string name_of(int64_t step) {
  std::string name(32, '\0');
  name.resize(static_cast<std::size_t>(
      std::snprintf(name.data(), name.size(), "%s%08lld", kPrefix, static_cast<long long>(step))));
  return name;
}

/// None if it is not the name of a checkpoint.
std::optional<int64_t> step_in(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const auto digits = name.substr(std::char_traits<char>::length(kPrefix));
  const bool is_number =
      !digits.empty() && digits.size() < 19 &&
      std::all_of(digits.begin(), digits.end(), [](char each) { return each >= '0' && each <= '9'; });
  if (!is_number) return std::nullopt;
  const auto step = static_cast<int64_t>(std::stoll(digits));
  return name_of(step) == name ? std::optional(step) : std::nullopt;
}

bool looks_whole(const std::string& path) {
  try {
    lockstep::detail::open_catalog(path);
    return lockstep::detail::is_file(str(path, "/", lockstep::detail::kIndexName));
  } catch (const c10::Error&) {
    return false;
  }
}

/// Of all folders that have the name of a checkpoint.
std::vector<int64_t> named_steps(const std::string& folder) {
  std::vector<int64_t> steps;
  if (!lockstep::detail::is_folder(folder)) return steps;
  for (const auto& name : lockstep::detail::names_in(folder)) {
    const auto step = step_in(name);
    if (step && lockstep::detail::is_folder(str(folder, "/", name))) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

/// In place of the link that was there.
void link_to(const std::string& name, const std::string& link) {
  const auto made = str(link, lockstep::detail::kUnfinished, ::getpid());
  ::unlink(made.c_str());
  // Some file systems have no links: whoever needs the newest finds it by its number.
  if (::symlink(name.c_str(), made.c_str()) == 0) lockstep::detail::rename_on_disk(made, link);
}

}  // namespace

CheckpointManager::CheckpointManager(std::string folder, CheckpointManagerOptions options)
    : folder_(std::move(folder)), options_(std::move(options)) {
  TORCH_CHECK(!folder_.empty(), "[lockstep/checkpoint] a CheckpointManager needs a folder");
  TORCH_CHECK(options_.every > 0, "[lockstep/checkpoint] saves cannot come every ", options_.every, " steps");
  TORCH_CHECK(options_.keep_last >= 0 && options_.keep_every >= 0,
              "[lockstep/checkpoint] keep_last = ", options_.keep_last, " and keep_every = ", options_.keep_every,
              ": neither may be negative");
  if (options_.asynchronous) saver_ = std::make_unique<AsyncSaver>(options_.process_group);
}

CheckpointManager::~CheckpointManager() = default;

std::string CheckpointManager::path_of(int64_t step) const {
  return str(folder_, "/", name_of(step));
}

std::vector<int64_t> CheckpointManager::steps() const {
  auto steps = named_steps(folder_);
  std::erase_if(steps, [&](int64_t step) { return !looks_whole(path_of(step)); });
  return steps;
}

bool CheckpointManager::save_if_due(int64_t step, const State& state) {
  if (step % options_.every != 0) return false;
  save(step, state);
  return true;
}

void CheckpointManager::save(int64_t step, const State& state) {
  TORCH_CHECK(step >= 0, "[lockstep/checkpoint] step ", step, " cannot be saved");
  const SaveOptions options{.process_group = options_.process_group,
                            .step = step,
                            .max_file_bytes = options_.max_file_bytes,
                            .on_saved = [this, step] { on_saved(step); },
                            .progress = options_.progress};
  if (saver_) {
    saver_->save(path_of(step), state, options);
  } else {
    dcp::save(path_of(step), state, options);
  }
}

void CheckpointManager::wait() {
  if (saver_) saver_->wait();
}

void CheckpointManager::on_saved(int64_t step) const {
  link_to(name_of(step), str(folder_, "/", kLatest));
  for (const auto other : named_steps(folder_)) {
    // Of a course that was left for an earlier step: the next resume() must not go on with it.
    if (other <= step) continue;
    const auto left = str(path_of(other), kLeft);
    lockstep::detail::remove_folder(left);
    lockstep::detail::rename_on_disk(path_of(other), left);
    TORCH_WARN("[lockstep/checkpoint] step ", step, " was saved, so ", path_of(other), " is called ", left, " now.");
  }
  if (options_.keep_last == 0) return;
  const auto all = steps();
  const auto kept = static_cast<std::size_t>(options_.keep_last);
  for (std::size_t i = 0; i + kept < all.size(); ++i) {
    const bool stays = options_.keep_every > 0 && all[i] % options_.keep_every == 0;
    if (!stays && all[i] != step) lockstep::detail::remove_folder(path_of(all[i]));
  }
}

void CheckpointManager::remove_unfinished() const {
  lockstep::detail::clear_unfinished(folder_, kPrefix);
}

std::optional<int64_t> CheckpointManager::resume(const State& state, LoadOptions options) {
  wait();
  if (!options.process_group) options.process_group = options_.process_group;
  const lockstep::detail::Together together(options.process_group);
  const auto what = str("no checkpoint in ", folder_, " was found");
  const auto newest_before = [&](const std::optional<int64_t>& step) -> std::optional<int64_t> {
    const auto found = together.first_says(what, [&] {
      auto all = named_steps(folder_);
      std::erase_if(all, [&](int64_t each) { return step && each >= *step; });
      return all.empty() ? std::string() : std::to_string(all.back());
    });
    return found.empty() ? std::nullopt : std::optional<int64_t>(std::stoll(found));
  };
  together.first_says(what, [&] {
    remove_unfinished();
    return std::string();
  });
  bool has_any = false;
  for (auto step = newest_before(std::nullopt); step; step = newest_before(step)) {
    has_any = true;
    try {
      load(path_of(*step), state, options);
      return step;
    } catch (const c10::Error& error) {
      const auto damage = together.first_says(what, [&] { return join(verify(path_of(*step)), "\n"); });
      if (damage.empty()) throw;
      TORCH_WARN("[lockstep/checkpoint] ", path_of(*step), " is passed over: ", damage);
    }
  }
  TORCH_CHECK(!has_any, "[lockstep/checkpoint] none of the checkpoints in ", folder_,
              " can be read, see above. To begin anew, move them away.");
  return std::nullopt;
}

}  // namespace lockstep::dcp
