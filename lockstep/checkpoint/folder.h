// Folders and whole small files, without <filesystem>. Internal to checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/unique_fd.h"

namespace lockstep::detail {

/// In the names of folders that are not finished.
inline constexpr const char* kUnfinished = ".saving-";

bool is_folder(const std::string& path);
bool is_file(const std::string& path);
/// Throw, naming the path, if it cannot be read.
int64_t bytes_of_file(const std::string& path);
std::string text_of(const std::string& path);
/// Without "." and "..", sorted.
std::vector<std::string> names_in(const std::string& folder);

/// With all folders above it. Does nothing if it is there.
void make_folder(const std::string& path);
/// With what is in it; a link is removed, not followed. Does nothing if there is nothing, and leaves what it cannot
/// remove.
void remove_folder(const std::string& path) noexcept;
/// Flushed, before it returns. Throws, naming the file, if it cannot.
void write_text(const std::string& path, const std::string& text);
/// "run/" and "step-100" of "run/step-100" and of "run/step-100/"; the first is empty without a slash.
std::pair<std::string, std::string> split_path(std::string path);

/// What may be in a folder that is replaced: anything else must not be lost.
enum class Replaces {
  kCheckpoint,  ///< files of a checkpoint of ours; others are refused
  kWeights,     ///< files of weights; others are taken along
};

/// A folder under a name that no other has, beside the one it is to get: removed with its owner unless it got that. It
/// is locked while it is written.
class NewFolder {
 public:
  /// Follows a link that has the name. Throws, naming what is in the way, if there is a folder that must not be
  /// replaced.
  NewFolder(const std::string& path, Replaces replaces);
  /// One that another process has made; it is theirs to remove.
  NewFolder(std::string path, std::string made) : path_(std::move(path)), made_(std::move(made)), is_owner_(false) {}
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::string& path() const { return made_; }
  std::string file(const std::string& name) const { return made_ + "/" + name; }
  /// In place of a folder that had the name before, which is removed: at no moment is there none, where the file system
  /// can exchange two. Throws, naming the folder, if it cannot.
  void put_in_place() const;

 private:
  const std::string path_;
  std::string made_;
  const bool is_owner_ = true;
  UniqueFd lock_;
};

/// What saves that were cut off have left in `folder`, of names that begin with `prefix`: a whole checkpoint that was
/// about to be replaced gets its name back, the rest is removed. What somebody is writing to stays.
void clear_unfinished(const std::string& folder, const std::string& prefix);

}  // namespace lockstep::detail
