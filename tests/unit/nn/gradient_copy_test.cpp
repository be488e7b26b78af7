#include "lockstep/nn/gradient_copy.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/view_as_real.h>
#include <gtest/gtest.h>

namespace lockstep {
namespace {

void copy(const at::Tensor& to, const at::Tensor& from, double scale) {
  scale == 1 ? detail::copy_plain(to, from) : detail::copy_scaled(to, from, scale);
}

// (D-7): a tensor may have its values conjugated or negated on reading, on either side
TEST(GradientCopy, MovesValuesNotMemory) {
  const auto complex = at::randn({3, 2}, at::kComplexFloat);
  const auto forms = [](const at::Tensor& tensor) {
    return std::vector<at::Tensor>{tensor.clone(), tensor.clone().conj(), tensor.clone().conj().t().contiguous().t()};
  };
  for (const double scale : {1.0, 0.5}) {
    for (const auto& from : forms(complex)) {
      for (const auto& to : forms(at::randn({3, 2}, at::kComplexFloat))) {
        copy(to, from, scale);
        EXPECT_TRUE(at::allclose(at::view_as_real(to.resolve_conj()), at::view_as_real((from * scale).resolve_conj())));
      }
    }
    // The imaginary part of a conjugate is negated on reading.
    const auto negated = at::imag(complex.clone().conj());
    ASSERT_TRUE(negated.is_neg());
    const auto plain = at::empty({3, 2});
    copy(plain, negated, scale);
    EXPECT_TRUE(at::allclose(plain, negated * scale));
    const auto ones = at::ones({3, 2});
    copy(negated, ones, scale);
    EXPECT_TRUE(at::allclose(negated.resolve_neg(), ones * scale));
  }
}

// (D-7, A-1): another dtype is cast, and rounded once; another size is an error
TEST(GradientCopy, CastsOtherDtypesAndRefusesOtherSizes) {
  for (const double scale : {1.0, 1.0 / 3}) {
    const auto low = at::empty({5}, at::kBFloat16);
    const auto full = at::full({5}, 1.5);
    copy(low, full, scale);
    EXPECT_TRUE(at::equal(low, (full * scale).to(at::kBFloat16)));
    copy(full, low, scale);
    EXPECT_TRUE(at::allclose(full, low.to(at::kFloat) * scale));
    EXPECT_THROW(copy(at::empty({5}), at::ones({3}), scale), c10::Error);
  }
}

}  // namespace
}  // namespace lockstep
