// Numeric checks and error checks. All throw CheckFailure, so they work on any rank in any framework.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/testing/run.h"

namespace lockstep::testing {

/// |actual - expected| <= absolute + relative * |expected|. Two NaNs are equal.
struct Tolerance {
  double relative = 0;
  double absolute = 0;
  bool compare_dtype = true;

  /// Bit for bit: for parameters on the CPU and wherever data only moves.
  static Tolerance exact() { return {}; }
  /// The library's defaults for a dtype, as torch.testing.assert_close has them: 1.3e-6 / 1e-5 for float, 1e-3 / 1e-5
  /// for half, 1.6e-2 / 1e-5 for bfloat16, 1e-7 / 1e-7 for double, exact for integers.
  static Tolerance of(at::ScalarType dtype);
};

/// Sizes, dtype (unless told not to), device and values. The message has the name, the largest difference and where it
/// is.
void check_equal(const std::string& name, const at::Tensor& actual, const at::Tensor& expected,
                 Tolerance tolerance = Tolerance::exact());

/// Exact on the CPU, the dtype's defaults elsewhere.
void check_parameter(const std::string& name, const at::Tensor& actual, const at::Tensor& expected);

/// Runs `check` on one rank only; a failure there fails the run.
void check_on_rank(int rank, const World& world, const std::function<void()>& check);

/// `action` must throw, with a message that holds every one of `words` (parameter, rank, value). Returns the message.
std::string expect_error(const std::function<void()>& action, const std::vector<std::string>& words);

/// As expect_error on the ranks in `failing`; on the others `action` must end without an error. Local: a rank whose
/// peers fail must not wait for them inside `action`.
void expect_error_on_ranks(const World& world, const std::vector<int>& failing, const std::function<void()>& action,
                           const std::vector<std::string>& words);

}  // namespace lockstep::testing
