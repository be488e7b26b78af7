// Storages that give no address away for a while: what reads one without an operator, which an owner would see, throws.
// Internal to intercept and the layers above it.
#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace lockstep::detail {

/// Releases before 2.13 cannot take the message back: there nothing is done.
template <class Storage>
constexpr bool kHasAddressMessages = requires(Storage& storage) { storage.clear_data_ptr_access_error_msg_(); };

/// Reading the address throws this. Memory is not freed, whatever libtorch's name says.
template <class Storage>
void set_address_message(Storage& storage, const std::string& message) {
  if constexpr (kHasAddressMessages<Storage>) storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

template <class Storage>
void clear_address_message(Storage& storage) {
  if constexpr (kHasAddressMessages<Storage>) storage.clear_data_ptr_access_error_msg_();
}

}  // namespace lockstep::detail
