// Internal to intercept. The protected members of TensorImpl this layer needs.
#pragma once

#include <c10/core/TensorImpl.h>

namespace lockstep::detail {

struct TensorAccess : c10::TensorImpl {
  static c10::DispatchKeySet& keys_of(c10::TensorImpl& tensor) {
    constexpr auto kMember = &TensorAccess::key_set_;
    return tensor.*kMember;
  }

  static c10::Storage& storage_of(c10::TensorImpl& tensor) {
    constexpr auto kMember = &TensorAccess::storage_;
    return tensor.*kMember;
  }

  /// Makes `tensor` another handle on `source`'s memory: storage, geometry, device, dtype and keys. Autograd's part and
  /// the version stay, and so does every handle that points to `tensor`.
  static void adopt(c10::TensorImpl& tensor, const c10::TensorImpl& source) {
    auto version =
        tensor.is_inference() ? c10::VariableVersion(c10::VariableVersion::DISABLED) : tensor.version_counter();
    copy_tensor_metadata(&source, &tensor, std::move(version), tensor.allow_tensor_metadata_change());
  }
};

}  // namespace lockstep::detail
