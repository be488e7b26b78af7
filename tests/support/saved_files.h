// Which files a save consists of.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::saved_files {

/// The index at `path`, and the parts beside it.
inline std::vector<std::string> files_of(const std::string& path) {
  std::vector<std::string> files;
  const std::filesystem::path index(path);
  const auto own = index.filename().string();
  for (const auto& entry : std::filesystem::directory_iterator(index.parent_path())) {
    const auto name = entry.path().filename().string();
    if (name == own || name.starts_with(own + ".")) files.push_back(entry.path().string());
  }
  return files;
}

/// The one whose name ends so; empty if there is none.
inline std::string file_of(const std::string& path, const std::string& end) {
  for (const auto& file : files_of(path)) {
    if (file.ends_with(end)) return file;
  }
  return "";
}

}  // namespace lockstep::saved_files
