// The text the demo learns: short tales about animals, told by a grammar. Made here, so nothing has to be shipped, read
// or licensed. The same seed tells the same tales on every machine.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::examples {

/// Whole tales, an empty line after each, of `length` characters or a little more. Only ASCII.
std::string tell_tales(std::size_t length, std::uint64_t seed);

}  // namespace lockstep::examples
