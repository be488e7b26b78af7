#include "lockstep/checkpoint/folder.h"

#include <c10/util/Exception.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
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
      for (const auto& name : names_in(path)) remove_folder(path + "/" + name);
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

NewFolder::NewFolder(const std::string& path) : path_(without_last_slash(path)) {
  const auto [above, name] = split_path(path);
  make_folder(above);
  std::random_device random;
  made_ = str(above, ".", name, kUnfinished, std::hex, random(), random());
  make_folder(made_);
}

NewFolder::~NewFolder() {
  if (is_owner_) remove_folder(made_);
}

void NewFolder::put_in_place() const {
  if (!is_folder(path_)) return rename_on_disk(made_, path_);
  if (exchange(made_, path_)) {
    flush_folder_of(path_);  // before what had the name is gone
    return remove_folder(made_);
  }
  const auto aside = made_ + ".before";
  rename_on_disk(path_, aside);
  rename_on_disk(made_, path_);
  remove_folder(aside);
}

}  // namespace lockstep::detail
