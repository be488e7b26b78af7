// The layout a parameter carries. Whoever shards a parameter says so here; optimizers, clipping and checkpoints ask.
//
// A layout belongs to the tensor object, the one all copies of a handle share. It stays through set_data() and set_(),
// and so through Module::to(), torch::load() and a move into a flat buffer; through requires_grad_() and backward(). A
// detach(), a clone(), a view or Cloneable::clone() is another tensor and has none. It goes with the tensor, and with
// it what the layout keeps alive: its mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "lockstep/shard/layout.h"

namespace lockstep {

/// Null if the tensor carries none. Local; may be called from several threads at once, as long as none sets.
std::shared_ptr<const Layout> layout_of(const at::Tensor& tensor);

/// Replaces the one it carries. `tensor` is a leaf and has the layout's local sizes; they are not looked at again, so
/// whoever gives it other ones later sets another layout. Local.
void set_layout(const at::Tensor& tensor, Layout layout);

/// The same for a part that somebody gathers before its module computes, and whose gradient they reduce: a shard of
/// FSDP. With what only carries a layout, as tensor parallelism leaves it, modules compute as it is.
/// `wholes` are what modules compute with, tensors whose memory comes and goes; they are not kept alive.
void set_gathered_layout(const at::Tensor& tensor, Layout layout, const std::vector<at::Tensor>& wholes);
bool has_gathered_layout(const at::Tensor& tensor);
/// Those that still are; none of a tensor that is not gathered. Several of one that is many parameters, flat.
std::vector<at::Tensor> gathered_wholes(const at::Tensor& tensor);

/// Whether somebody else has hooked its gradient: a layout is held by a hook too.
bool has_gradient_hooks(const at::Tensor& tensor);

/// Does nothing if there is none.
void clear_layout(const at::Tensor& tensor);

}  // namespace lockstep
