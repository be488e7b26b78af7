// Shim: see README.md in this folder. Made and destroyed by libtorch only.
#pragma once

namespace gloo::transport {
class Device;
}  // namespace gloo::transport
