#include "lockstep/rpc/remote_error.h"

#include <c10/util/Exception.h>

#include <optional>
#include <string_view>

#include "lockstep/base/str.h"

namespace lockstep::rpc {

RemoteError::RemoteError(Kind kind, std::string worker, std::string function, const std::string& text)
    : std::runtime_error(text), kind_(kind), worker_(std::move(worker)), function_(std::move(function)) {}

namespace detail {
namespace {

using Kind = RemoteError::Kind;

constexpr std::string_view kOpening = "[lockstep/rpc] worker '";
constexpr std::string_view kMiddle = "': function '";

struct Way {
  Kind kind;
  std::string_view text;
};
constexpr Way kWays[] = {{Kind::kThrown, "' threw: "},
                         {Kind::kRefused, "' was refused: "},
                         {Kind::kTimeout, "' gave no answer in time: "},
                         {Kind::kConnection, "' failed on the way: "}};

std::string sentence(Kind kind, const std::string& worker, const std::string& function, const std::string& why) {
  std::string_view way;
  for (const auto& each : kWays) {
    if (each.kind == kind) way = each.text;
  }
  return str(kOpening, worker, kMiddle, function, way, why);
}

/// Finds the sentence of a worker in `text`, which may stand behind words of libtorch.
std::optional<RemoteError> parse(const std::string& text) {
  const auto begin = text.find(kOpening);
  if (begin == std::string::npos) return std::nullopt;
  const auto name = begin + kOpening.size();
  const auto middle = text.find(kMiddle, name);
  if (middle == std::string::npos) return std::nullopt;
  const auto function = middle + kMiddle.size();
  for (const auto& [kind, way] : kWays) {
    const auto end = text.find('\'', function);
    if (end == std::string::npos || text.compare(end, way.size(), way) != 0) continue;
    return RemoteError(kind, text.substr(name, middle - name), text.substr(function, end - function),
                       text.substr(begin));
  }
  return std::nullopt;
}

/// libtorch marks errors that it knows so (rpc/utils.cpp: makeRPCError); 1 is a timeout.
constexpr std::string_view kMark = "RPCErr:";

std::string without_mark(const std::string& text) {
  const auto mark = text.find(kMark);
  if (mark == std::string::npos) return text;
  const auto end = text.find(':', mark + kMark.size());
  return end == std::string::npos ? text : text.substr(end + 1);
}

template <class E>
bool holds(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const E&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "something that is no std::exception";
  }
}

std::string failure_text(const std::string& worker, const std::string& function, const std::exception_ptr& error) {
  const auto text = text_of(error);
  // Of a call that this one made, passed on as it is: its own words say more.
  if (text.starts_with(kOpening) && parse(text)) return text;
  return sentence(holds<Refused>(error) ? Kind::kRefused : Kind::kThrown, worker, function, text);
}

RemoteError translate(const std::exception_ptr& error, const std::string& worker, const std::string& function) {
  const auto text = text_of(error);
  if (auto known = parse(text)) return *known;
  const bool is_timeout = text.find(str(kMark, "1:")) != std::string::npos;
  const auto kind = is_timeout ? Kind::kTimeout : Kind::kConnection;
  const auto* const advice =
      is_timeout ? ". It may still run there, and its answer will be dropped. Callee::within() gives a call more time."
                 : "";
  return {kind, worker, function, str(sentence(kind, worker, function, without_mark(text)), advice)};
}

}  // namespace detail
}  // namespace lockstep::rpc
