#include "lockstep/nn/autocast.h"

#include <ATen/autocast_mode.h>

namespace lockstep {

Autocast::Autocast(c10::DeviceType device, std::optional<at::ScalarType> dtype, bool enabled)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      dtype_before_(at::autocast::get_autocast_dtype(device)) {
  at::autocast::set_autocast_enabled(device, enabled);
  if (dtype) at::autocast::set_autocast_dtype(device, *dtype);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  // Of weights in low precision, which are kept for the outermost scope's sake: the optimizer changes them after it.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
}

}  // namespace lockstep
