// Generators that a rank's operators draw from without being told to, beside the devices' default ones. Internal to the
// wrappers: whoever makes one adds it, and whoever has to run a forward again brings them back to where they stood.
#pragma once

#include <ATen/core/Generator.h>

#include <vector>

namespace lockstep::detail {

/// Kept as long as the rank.
void add_own_generator(const at::Generator& generator);
/// Of the calling rank.
std::vector<at::Generator> own_generators();

}  // namespace lockstep::detail
