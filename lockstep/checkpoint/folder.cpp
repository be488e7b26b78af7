#include "lockstep/checkpoint/folder.h"

#include <c10/util/Exception.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>

#include "lockstep/base/str.h"
#include "lockstep/state/disk.h"

namespace lockstep::detail {
namespace {

bool is_kind(const std::string& path, mode_t kind) {
  struct stat about = {};
  return ::stat(path.c_str(), &about) == 0 && (about.st_mode & S_IFMT) == kind;
}

std::string without_last_slash(const std::string& path) {
  const auto [above, name] = split_path(path);
  return above + name;
}

/// Of two folders; false if the file system cannot.
bool exchange(const std::string& one, const std::string& other) {
  return ::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0;
}

/// In the name of what is replaced where folders cannot be exchanged.
constexpr const char* kBefore = ".before";

/// The folder as it is locked; none if somebody else has locked it. Where there are no locks, nobody has.
UniqueFd locked(const std::string& folder) {
  UniqueFd opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened && ::flock(opened.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return {};
  return opened;
}

/// Where a link leads to; else the path itself, without slashes at its end.
std::string resolved(const std::string& path) {
  struct stat about = {};
  const auto plain = without_last_slash(path);
  if (::lstat(plain.c_str(), &about) != 0 || !S_ISLNK(about.st_mode)) return plain;
  const std::unique_ptr<char, void (*)(void*)> target(::realpath(plain.c_str(), nullptr), &std::free);
  return target ? std::string(target.get()) : plain;
}

void check_is_checkpoint(const std::string& path) {
  if (!is_folder(path)) return;
  const auto names = names_in(path);
  const bool has_index = std::find(names.begin(), names.end(), "lockstep.json") != names.end();
  for (const auto& name : names) {
    const bool is_part =
        has_index && (name == "lockstep.json" || (name.starts_with("rank-") && name.ends_with(".safetensors")));
    TORCH_CHECK(is_part, "[lockstep/checkpoint] ", path, " is there, and '", name,
                "' in it is no part of a checkpoint that could be replaced. Save to another name, or remove it.");
  }
}

/// Files of `from` that are no weights, into the folder that replaces it.
void take_along(const std::string& from, const std::string& to) {
  if (!is_folder(from)) return;
  for (const auto& name : names_in(from)) {
    if (name.ends_with(".safetensors") || name == "model.safetensors.index.json") continue;
    const auto path = str(from, "/", name);
    TORCH_CHECK(is_file(path), "[lockstep/checkpoint] ", from, " is there, and '", name,
                "' in it is no file: it cannot be replaced. Save to another name, or remove it.");
    write_text(str(to, "/", name), text_of(path));
  }
}

}  // namespace

bool is_folder(const std::string& path) {
  return is_kind(path, S_IFDIR);
}

bool is_file(const std::string& path) {
  return is_kind(path, S_IFREG);
}

int64_t bytes_of_file(const std::string& path) {
  struct stat about = {};
  TORCH_CHECK(::stat(path.c_str(), &about) == 0, "[lockstep/checkpoint] cannot read ", path, ": ",
              std::strerror(errno));
  return about.st_size;
}

std::string text_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  TORCH_CHECK(in, "[lockstep/checkpoint] cannot read ", path, ": ", std::strerror(errno));
  return std::move(text).str();
}

std::vector<std::string> names_in(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(folder.c_str()), &::closedir);
  TORCH_CHECK(open != nullptr, "[lockstep/checkpoint] cannot read ", folder, ": ", std::strerror(errno));
  std::vector<std::string> names;
  while (const auto* each = ::readdir(open.get())) {  // NOLINT(concurrency-mt-unsafe): a stream of our own
    const std::string name = each->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void make_folder(const std::string& path) {
  if (path.empty() || is_folder(path)) return;
  make_folder(split_path(path).first);
  const bool is_made = ::mkdir(path.c_str(), 0777) == 0 || (errno == EEXIST && is_folder(path));
  TORCH_CHECK(is_made, "[lockstep/checkpoint] cannot make the folder ", path, ": ", std::strerror(errno));
}

void remove_folder(const std::string& path) noexcept {
  struct stat about = {};
  if (::lstat(path.c_str(), &about) != 0) return;
  if (S_ISDIR(about.st_mode)) {
    try {
      for (const auto& name : names_in(path)) remove_folder(str(path, "/", name));
    } catch (const std::exception&) {
      return;
    }
    ::rmdir(path.c_str());
  } else {
    ::unlink(path.c_str());
  }
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  TORCH_CHECK(out, "[lockstep/checkpoint] cannot write ", path, ": ", std::strerror(errno));
  flush_to_disk(path);
}

std::pair<std::string, std::string> split_path(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return {"", path};
  return {path.substr(0, slash + 1), path.substr(slash + 1)};
}

NewFolder::NewFolder(const std::string& path, Replaces replaces) : path_(resolved(path)) {
  const auto [above, name] = split_path(path_);
  TORCH_CHECK(!name.empty() && name != "." && name != "..", "[lockstep/checkpoint] '", path,
              "' is no name for a folder that is replaced as a whole");
  if (replaces == Replaces::kCheckpoint) check_is_checkpoint(path_);
  make_folder(above);
  std::random_device random;
  made_ = str(above, ".", name, kUnfinished, std::hex, random(), random());
  make_folder(made_);
  lock_ = locked(made_);
  if (replaces == Replaces::kWeights) take_along(path_, made_);
}

NewFolder::~NewFolder() {
  if (is_owner_) remove_folder(made_);
}

void clear_unfinished(const std::string& folder, const std::string& prefix) {
  if (!is_folder(folder)) return;
  const std::string end = kBefore;
  for (const bool is_first_round : {true, false}) {
    for (const auto& name : names_in(folder)) {
      const auto mark = name.find(kUnfinished);
      if (!name.starts_with("." + prefix) || mark == std::string::npos) continue;
      const auto path = str(folder, "/", name);
      if (!locked(path)) continue;  // somebody writes to it
      const auto final_path = str(folder, "/", name.substr(1, mark - 1));
      const bool is_whole = name.ends_with(end) && is_file(str(path, "/lockstep.json"));
      if (is_first_round && is_whole && !is_folder(final_path)) rename_on_disk(path, final_path);
      if (!is_first_round) remove_folder(path);
    }
  }
}

void NewFolder::put_in_place() const {
  if (!is_folder(path_)) return rename_on_disk(made_, path_);
  if (exchange(made_, path_)) {
    flush_folder_of(path_);  // before what had the name is gone
    return remove_folder(made_);
  }
  const auto aside = made_ + kBefore;
  rename_on_disk(path_, aside);
  rename_on_disk(made_, path_);
  remove_folder(aside);
}

}  // namespace lockstep::detail
