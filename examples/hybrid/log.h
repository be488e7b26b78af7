// Lines on stderr that say where they come from: file and line, process, thread. Debug lines only if the environment
// has `debug`.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>

namespace hybrid {

enum class Level { kDebug, kInfo };

inline Level log_level() {
  return std::getenv("debug") != nullptr ? Level::kDebug : Level::kInfo;
}

/// "hybrid_model.h:12 INFO p:4711 t:1409: text", or nothing if the level is not wanted.
inline std::string log_line(Level level, const char* file, int line, const std::string& text) {
  if (level < log_level()) return "";
  const auto* const slash = std::strrchr(file, '/');
  std::ostringstream out;
  out << (slash != nullptr ? slash + 1 : file) << ':' << line << (level == Level::kDebug ? " DEBUG" : " INFO")
      << " p:" << ::getpid() << " t:" << std::this_thread::get_id() << ": " << text << '\n';
  return std::move(out).str();
}

inline void log(Level level, const std::string& text, const char* file = __builtin_FILE(),
                int line = __builtin_LINE()) {
  const auto whole = log_line(level, file, line, text);
  if (!whole.empty()) std::cerr << whole;  // in one piece
}

}  // namespace hybrid
