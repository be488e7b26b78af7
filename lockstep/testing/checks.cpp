#include "lockstep/testing/checks.h"

#include <ATen/ops/isclose.h>
#include <ATen/ops/isnan.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/threads/thread_backend.h"

namespace lockstep::testing {

Tolerance Tolerance::of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return {.relative = 1e-3, .absolute = 1e-5};
    case at::kBFloat16:
      return {.relative = 1.6e-2, .absolute = 1e-5};
    case at::kFloat:
    case at::kComplexFloat:
      return {.relative = 1.3e-6, .absolute = 1e-5};
    case at::kDouble:
    case at::kComplexDouble:
      return {.relative = 1e-7, .absolute = 1e-7};
    default:
      return exact();
  }
}

void check_equal(const std::string& name, const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance) {
  if (!actual.defined() || !expected.defined()) {
    if (actual.defined() == expected.defined()) return;
    throw CheckFailure(str(name, ": ", actual.defined() ? "defined" : "undefined", ", expected ",
                           expected.defined() ? "defined" : "undefined"));
  }
  const bool has_other_dtype = tolerance.compare_dtype && actual.scalar_type() != expected.scalar_type();
  if (actual.sizes() != expected.sizes() || has_other_dtype || actual.device() != expected.device()) {
    throw CheckFailure(str(name, ": is ", describe(actual), " on ", actual.device().str(), ", expected ",
                           describe(expected), " on ", expected.device().str()));
  }
  const auto wide = at::isComplexType(actual.scalar_type()) ? at::kComplexDouble : at::kDouble;
  const auto got = actual.detach().cpu().to(wide).reshape({-1});
  const auto wanted = expected.detach().cpu().to(wide).reshape({-1});
  // Doubles cannot tell large integers apart.
  const bool are_integers =
      at::isIntegralType(actual.scalar_type(), true) && at::isIntegralType(expected.scalar_type(), true);
  if (are_integers) {
    if (actual.detach().cpu().to(at::kLong).equal(expected.detach().cpu().to(at::kLong))) return;
  } else if (at::isclose(got, wanted, tolerance.relative, tolerance.absolute, /*equal_nan=*/true).all().item<bool>())
    return;
  const auto distance = (got - wanted).abs().nan_to_num(INFINITY, INFINITY);
  const auto worst = distance.argmax().item<int64_t>();
  throw CheckFailure(lockstep::str(name, ": largest difference ", distance[worst].item<double>(), " at element ", worst,
                                   " of ", describe(expected), ": is ", got[worst].item().toComplexDouble(),
                                   ", expected ", wanted[worst].item().toComplexDouble(), " (tolerance ",
                                   tolerance.relative, " relative, ", tolerance.absolute, " absolute)"));
}

void check_parameter(const std::string& name, const at::Tensor& actual, const at::Tensor& expected) {
  check_equal(name, actual, expected, actual.is_cpu() ? Tolerance::exact() : Tolerance::of(actual.scalar_type()));
}

void check_on_rank(int rank, const World& world, const std::function<void()>& check) {
  if (world.rank() == rank) check();
}

std::string expect_error(const std::function<void()>& action, const std::vector<std::string>& words) {
  std::string message;
  try {
    action();
  } catch (const PeerFailure&) {
    throw;  // another rank failed; this one has nothing to say
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
  }
  if (message.empty())
    throw CheckFailure(str("expected an error with '", join(words, "', '"), "', but there was none"));
  for (const auto& word : words) {
    if (message.find(word) == std::string::npos) {
      throw CheckFailure(str("the error does not mention '", word, "': ", message));
    }
  }
  return message;
}

void expect_error_on_ranks(const World& world, const std::vector<int>& failing, const std::function<void()>& action,
                           const std::vector<std::string>& words) {
  if (std::find(failing.begin(), failing.end(), world.rank()) != failing.end()) {
    expect_error(action, words);
  } else {
    action();
  }
}

}  // namespace lockstep::testing
