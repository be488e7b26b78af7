#include "lockstep/comm/call_label.h"

#include <mutex>
#include <unordered_set>

namespace lockstep {
namespace {

// Of the thread, not of the rank: what a rank's other threads launch meanwhile is not meant.
thread_local CallLabel current_label;

}  // namespace

std::string CallLabel::str() const {
  if (empty()) return "";
  return index < 0 ? text : std::string(text) + " " + std::to_string(index);
}

const char* interned(const std::string& text) {
  struct Texts {
    std::mutex mutex;
    std::unordered_set<std::string> all;  // its elements stay where they are
  };
  static Texts& texts = *new Texts;
  const std::lock_guard lock(texts.mutex);
  return texts.all.insert(text).first->c_str();
}

LabelScope::LabelScope(CallLabel label) : before_(current_label) {
  current_label = label;
}

LabelScope::~LabelScope() {
  current_label = before_;
}

CallLabel LabelScope::current() {
  return current_label;
}

}  // namespace lockstep
