// CRC-32C (Castagnoli): the checksum of iSCSI, ext4 and many file formats, which processors compute as fast as memory
// is read. It finds bits that a disk or a copy has lost, not somebody's intent.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

/// Of `size` bytes that come after others whose checksum is `before`; 0 at the beginning. Local, thread-safe.
uint32_t crc32c(uint32_t before, const void* bytes, std::size_t size);

}  // namespace lockstep
