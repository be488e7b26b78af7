// What makes files outlive a crash: bytes first, then the name under which they are read. Internal to state and the
// layers above it.
#pragma once

#include <string>

namespace lockstep::detail {

/// Waits until the file's bytes are on disk, and its name in its folder. Throws, naming the file, if it cannot.
void flush_to_disk(const std::string& file);

/// Waits until the folder that a file or folder is in has its name on disk, where file systems can.
void flush_folder_of(const std::string& file);

/// Gives a flushed file its final name, in place of what had it before, and waits until the folder has it on disk.
/// Throws, having removed the file, if it cannot.
void rename_on_disk(const std::string& from, const std::string& to);

}  // namespace lockstep::detail
