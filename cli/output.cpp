#include "cli/output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <system_error>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"

namespace lockstep::cli {
namespace {

bool wants_color(int fd) {
  return ::isatty(fd) == 1 && !env("NO_COLOR") && env("TERM").value_or("dumb") != "dumb";
}

std::string prefix(int rank, bool colored) {
  if (!colored) return str("[", rank, "] ");
  return str("\033[", 31 + rank % 6, "m[", rank, "]\033[0m ");
}

UniqueFd create_file(const std::filesystem::path& path) {
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file) throw std::runtime_error(str("cannot write ", path.string(), ": ", std::strerror(errno)));
  return file;
}

}  // namespace

Output::Output(OutputOptions options)
    : options_(std::move(options)),
      stdout_{STDOUT_FILENO, wants_color(STDOUT_FILENO)},
      stderr_{STDERR_FILENO, wants_color(STDERR_FILENO)} {}

void Output::begin_attempt(int attempt, const std::vector<RankSpec>& ranks) {
  logs_.clear();
  if (!options_.log_dir) return;
  const auto directory = std::filesystem::path(*options_.log_dir) / str("attempt_", attempt);
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) throw std::runtime_error(str("cannot create ", directory.string(), ": ", error.message()));
  for (const auto& spec : ranks) {
    const std::string name = str("rank_", spec.rank);
    logs_[{spec.rank, OutputStream::kStdout}] = create_file(directory / (name + ".out"));
    logs_[{spec.rank, OutputStream::kStderr}] = create_file(directory / (name + ".err"));
  }
}

void Output::write_line(int rank, OutputStream stream, std::string_view line) {
  Terminal& terminal = stream == OutputStream::kStdout ? stdout_ : stderr_;
  if (terminal.open) {
    // One write per line keeps lines whole where several processes share the terminal.
    std::string text = options_.prefix ? prefix(rank, terminal.colored) : std::string();
    text.append(line).push_back('\n');
    terminal.open = write_all(terminal.fd, text);
  }
  const auto log = logs_.find({rank, stream});
  if (log == logs_.end()) return;
  if (!write_all(log->second.get(), str(line, '\n'))) {
    std::cerr << "lockstep-run: a log file of rank " << rank << " can no longer be written\n";
    logs_.erase(log);
  }
}

// False if nothing can be written there any more.
bool Output::write_all(int fd, std::string_view text) const {
  while (!text.empty()) {
    if (options_.in_a_hurry && options_.in_a_hurry()) {
      pollfd event{fd, POLLOUT, 0};
      if (::poll(&event, 1, 0) == 0) return true;
    }
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written > 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (written < 0 && errno == EAGAIN) {
      pollfd event{fd, POLLOUT, 0};
      ::poll(&event, 1, 1000);
    } else if (written < 0 && errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace lockstep::cli
