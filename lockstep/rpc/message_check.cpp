#include "lockstep/rpc/message_check.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <string_view>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/rpc/remote_error.h"

namespace lockstep::rpc::detail {
namespace {

using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;

[[noreturn]] void refuse(const std::string& why) {
  throw Refused(str("it cannot be read: ", why));
}

/// What functions libtorch's pickles of values call.
bool is_known_name(std::string_view module, std::string_view name) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {{"torch.jit._pickle", "build_tensor_from_id"},
                                                                      {"torch.jit._pickle", "restore_type_tag"},
                                                                      {"torch.jit._pickle", "build_intlist"},
                                                                      {"torch.jit._pickle", "build_doublelist"},
                                                                      {"torch.jit._pickle", "build_boollist"},
                                                                      {"torch.jit._pickle", "build_tensorlist"},
                                                                      {"torch.distributed.rpc", "rref"},
                                                                      {"builtins", "complex"},
                                                                      {"torch", "device"}};
  return std::find(std::begin(kNames), std::end(kNames), std::pair(module, name)) != std::end(kNames);
}

/// Runs a pickle's instructions on what kinds of values they would leave, not on the values.
class PickleChecker {
 public:
  explicit PickleChecker(std::span<const char> bytes) : rest_(bytes), size_(bytes.size()) {}

  void run() {
    if (byte() != kProto || byte() != 2) refuse("it is no pickle of protocol 2");
    while (step()) {
    }
    if (!rest_.empty()) refuse("there is more behind its end");
    if (stack_.size() != 1 || !marks_.empty()) refuse("it leaves another number of values than one");
    if (stack_.front().kind == Kind::kName) refuse("its value is a name");
  }

 private:
  static constexpr unsigned char kProto = 0x80;
  enum class Kind { kOther, kName, kTuple, kList, kDict };
  struct Item {
    Kind kind = Kind::kOther;
    int nesting = 0;
  };

  unsigned char byte() { return static_cast<unsigned char>(take(1)[0]); }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::span<const char> take(std::size_t count) {
    if (count > rest_.size()) refuse("it ends too early");
    const auto taken = rest_.first(count);
    rest_ = rest_.subspan(count);
    return taken;
  }
  std::string_view line() {
    const auto end = std::find(rest_.begin(), rest_.end(), '\n');
    if (end == rest_.end()) refuse("a name has no end");
    const auto taken = take(static_cast<std::size_t>(end - rest_.begin()) + 1);
    return {taken.data(), taken.size() - 1};
  }

  void push(Kind kind = Kind::kOther, int nesting = 0) {
    if (nesting > kMostNesting) refuse(str("values are nested more than ", kMostNesting, " deep"));
    stack_.push_back({kind, nesting});
  }
  /// The values since the last mark, or as many as asked for, gone from the stack; how deep they are nested.
  int pop(std::size_t count) {
    const auto floor = marks_.empty() ? 0 : marks_.back();
    if (count > stack_.size() - floor) refuse("an instruction lacks values");
    int nesting = 0;
    for (; count > 0; --count) {
      nesting = std::max(nesting, stack_.back().nesting);
      stack_.pop_back();
    }
    return nesting;
  }
  std::size_t unmark() {
    if (marks_.empty()) refuse("a mark is missing");
    const auto count = stack_.size() - marks_.back();
    marks_.pop_back();
    return count;
  }
  /// Lets the container on top hold what is nested so.
  void nest(Kind container, int nesting) {
    const auto floor = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() <= floor || stack_.back().kind != container) refuse("values have no container");
    stack_.back().nesting = std::max(stack_.back().nesting, nesting + 1);
    if (stack_.back().nesting > kMostNesting) refuse(str("values are nested more than ", kMostNesting, " deep"));
  }
  void remember(std::size_t place) {
    // libtorch allots memory up to the place.
    if (stack_.empty() || place > size_) refuse("a value is kept at a place that cannot be");
    memo_[place] = stack_.back();
  }
  void recall(std::size_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) refuse("a value is taken from an empty place");
    push(found->second.kind, found->second.nesting);
  }
  void tuple_of(std::size_t count) {
    const auto nesting = pop(count);
    push(Kind::kTuple, nesting + 1);
  }
  void reduce() {
    if (stack_.empty() || stack_.back().kind != Kind::kTuple) refuse("arguments are no tuple");
    const auto nesting = pop(1);
    if (stack_.empty() || stack_.back().kind != Kind::kName) refuse("what is called is no name");
    pop(1);
    push(Kind::kOther, nesting);
  }

  bool step() {
    const auto instruction = byte();
    switch (instruction) {
      case '.':
        return false;
      case '(':
        marks_.push_back(stack_.size());
        break;
      case 'N':
      case 0x88:  // true
      case 0x89:  // false
        push();
        break;
      case 'K':
        take(1);
        push();
        break;
      case 'M':
        take(2);
        push();
        break;
      case 'J':
        take(4);
        push();
        break;
      case 'G':
        take(8);
        push();
        break;
      case 0x8a:  // an integer of so many bytes
        if (byte() != 8) refuse("an integer has no 8 bytes");
        take(8);
        push();
        break;
      case 'X':
        take(number<std::uint32_t>());
        push();
        break;
      case 'c': {
        const auto module = line();
        const auto name = line();
        if (!is_known_name(module, name)) refuse("it calls what no value needs");
        push(Kind::kName);
        break;
      }
      case 'R':
        reduce();
        break;
      case ')':
        push(Kind::kTuple, 1);
        break;
      case ']':
        push(Kind::kList, 1);
        break;
      case '}':
        push(Kind::kDict, 1);
        break;
      case 't': {
        const auto count = unmark();
        tuple_of(count);
        break;
      }
      case 0x85:
      case 0x86:
      case 0x87:
        tuple_of(instruction - 0x84U);
        break;
      case 'a':
        nest(Kind::kList, pop(1));
        break;
      case 'e':
        nest(Kind::kList, pop(unmark()));
        break;
      case 'u': {
        const auto count = unmark();
        if (count % 2 != 0) refuse("a key has no value");
        nest(Kind::kDict, pop(count));
        break;
      }
      case 's':
        nest(Kind::kDict, pop(2));
        break;
      case 'q':
        remember(byte());
        break;
      case 'r':
        remember(number<std::uint32_t>());
        break;
      case 'h':
        recall(byte());
        break;
      case 'j':
        recall(number<std::uint32_t>());
        break;
      default:
        refuse("it has an instruction that no value needs");
    }
    return true;
  }

  std::span<const char> rest_;
  const std::size_t size_;
  std::vector<Item> stack_;
  std::vector<std::size_t> marks_;
  std::map<std::size_t, Item> memo_;
};

/// A message of autograd: another message's payload, then a pickle, whose length stands last.
void check_wrapped(std::span<const char> payload) {
  std::uint64_t size = 0;
  if (payload.size() < sizeof(size)) refuse("it is too short");
  std::memcpy(&size, payload.last(sizeof(size)).data(), sizeof(size));
  if constexpr (std::endian::native == std::endian::little) size = __builtin_bswap64(size);
  const auto rest = payload.first(payload.size() - sizeof(size));
  if (size > rest.size()) refuse("a length in it is larger than itself");
  check_pickle(rest.last(size));
  check_pickle(rest.first(rest.size() - size));
}

}  // namespace

void check_pickle(std::span<const char> pickle) {
  PickleChecker(pickle).run();
}

void check_request(const Message& request) {
  const auto& payload = request.payload();
  switch (request.type()) {
    case MessageType::SCRIPT_CALL:
    case MessageType::SCRIPT_REMOTE_CALL:
    case MessageType::RREF_USER_DELETE:
    case MessageType::RREF_FORK_REQUEST:
    case MessageType::RREF_CHILD_ACCEPT:
    case MessageType::BACKWARD_AUTOGRAD_REQ:
    case MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ:
    case MessageType::RREF_BACKWARD_REQ:
      return check_pickle(payload);
    case MessageType::FORWARD_AUTOGRAD_REQ:
      return check_wrapped(payload);
    default:
      throw Refused(str("messages of type ", static_cast<int>(request.type()), " are not understood here"));
  }
}

void check_answer(const Message& answer) {
  switch (answer.type()) {
    case MessageType::SCRIPT_RET:
    case MessageType::REMOTE_RET:
      return check_pickle(answer.payload());
    case MessageType::FORWARD_AUTOGRAD_RESP:
      return check_wrapped(answer.payload());
    default:
      throw Refused(str("answers of type ", static_cast<int>(answer.type()), " are not understood here"));
  }
}

}  // namespace lockstep::rpc::detail
