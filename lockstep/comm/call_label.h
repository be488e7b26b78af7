// What a collective is for: "DDP bucket 3". Messages, events and timelines show it beside the operation.
//
// A label is two words and is read only where something is shown, so it costs next to nothing. Code that launches sets
// one for all collectives it starts on this thread, those of a user's hook included, by a LabelScope.
#pragma once

#include <string>

namespace lockstep {

struct CallLabel {
  /// Lives as long as the program: a literal, or what interned() returned. Null: no label.
  const char* text = nullptr;
  /// Shown behind the text; negative: not shown.
  int index = -1;
  /// All ranks must give the same: two that differ are a mismatch on backends that compare calls. Where calls for
  /// different things look alike.
  bool is_compared = false;

  bool empty() const { return text == nullptr; }
  /// "DDP bucket 3"; empty without a text.
  std::string str() const;
};

/// A copy of `text` that lives as long as the program, the same one for the same text. For names made at run time (of
/// parameters, of units): call it once for each, not once for each collective. Thread-safe.
const char* interned(const std::string& text);

/// Labels the collectives launched on this thread while it lives, unless a Call has a label of its own. Scopes nest;
/// the innermost counts.
class LabelScope {
 public:
  explicit LabelScope(CallLabel label);
  ~LabelScope();
  LabelScope(const LabelScope&) = delete;
  LabelScope& operator=(const LabelScope&) = delete;

  /// The label of the innermost scope of this thread.
  static CallLabel current();

 private:
  const CallLabel before_;
};

}  // namespace lockstep
