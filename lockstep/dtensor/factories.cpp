#include "lockstep/dtensor/factories.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <functional>

#include "lockstep/dtensor/dtensor_impl.h"
#include "lockstep/mesh/mesh_scope.h"

namespace lockstep::dtensor {
namespace {

DTensor make(const char* name, at::IntArrayRef sizes, const FactoryOptions& options,
             const std::function<at::Tensor(at::IntArrayRef, const at::TensorOptions&)>& make_part) {
  const auto mesh = mesh_or_current(options.mesh);
  const auto placements =
      options.placements.empty() ? Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()) : options.placements;
  auto layout = std::make_shared<const Layout>(mesh, placements, sizes.vec());
  TORCH_CHECK(!layout->has_partial(), "[lockstep/dtensor] rank ", mesh.get_rank(), ", ", mesh, ": ", name,
              "() cannot make terms of a sum, ", to_string(layout->placements()), ". Use DTensor::from_local().");
  const auto tensor_options =
      at::TensorOptions()
          .dtype(options.dtype ? *options.dtype : c10::typeMetaToScalarType(at::get_default_dtype()))
          .device(options.device ? *options.device : at::Device(mesh.device_type()));
  auto part = make_part(layout->local_sizes(), tensor_options);
  return DTensor(detail::wrap_local(std::move(part), std::move(layout)));
}

DTensor with_grad(DTensor made, const FactoryOptions& options) {
  made.tensor().set_requires_grad(options.requires_grad);
  return made;
}

at::Tensor empty_part(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

}  // namespace

DTensor zeros(at::IntArrayRef sizes, const FactoryOptions& options) {
  return full(sizes, 0, options);
}

DTensor ones(at::IntArrayRef sizes, const FactoryOptions& options) {
  return full(sizes, 1, options);
}

DTensor full(at::IntArrayRef sizes, const at::Scalar& fill_value, const FactoryOptions& options) {
  return with_grad(
      make("full", sizes, options,
           [&](at::IntArrayRef part, const at::TensorOptions& how) { return at::full(part, fill_value, how); }),
      options);
}

DTensor empty(at::IntArrayRef sizes, const FactoryOptions& options) {
  return with_grad(make("empty", sizes, options, &empty_part), options);
}

DTensor rand(at::IntArrayRef sizes, const FactoryOptions& options) {
  const at::NoGradGuard no_grad;
  auto made = make("rand", sizes, options, &empty_part);
  made.tensor().uniform_(0, 1, options.generator);
  return with_grad(std::move(made), options);
}

DTensor randn(at::IntArrayRef sizes, const FactoryOptions& options) {
  const at::NoGradGuard no_grad;
  auto made = make("randn", sizes, options, &empty_part);
  made.tensor().normal_(0, 1, options.generator);
  return with_grad(std::move(made), options);
}

}  // namespace lockstep::dtensor
