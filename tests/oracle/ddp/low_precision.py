"""What DistributedDataParallel computes with mixed_precision, written out with plain torch.

PyTorch's own needs a device with streams: its CPU build refuses events. A step here: a copy of the model in
param_dtype runs forward and backward, its gradients are summed in reduce_dtype, divided, and become the real
model's in full precision. It differs from PyTorch's in two things, on purpose: a parameter that is used several
times adds its gradients up in full precision, and buffers are low in forward only; what forward wrote is kept.
"""

import copy

import torch
import torch.distributed as dist


def _dtype(name):
    return getattr(torch, name) if name else None


class LowPrecision:
    """In the place of the wrapper, as far as reference.py uses it. Construct after the ranks' models are the same."""

    def __init__(self, model, mixed_precision):
        self.model = model
        self.param_dtype, self.reduce_dtype, self.buffer_dtype = map(_dtype, mixed_precision)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)

    @staticmethod
    def _cast(tensors, dtype):
        for tensor in tensors:
            if dtype and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)

    def parameters(self):
        return self.model.parameters()

    def zero_grad(self, set_to_none):
        self.model.zero_grad(set_to_none)

    def __call__(self, input, uses):
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
        self.low = copy.deepcopy(self.model)
        self.low.zero_grad()
        self._cast(self.low.parameters(), self.param_dtype)
        for low, real in zip(self.low.parameters(), self.model.parameters()):
            low.grad_dtype = real.dtype
        self._cast(self.low.buffers(), self.buffer_dtype)
        is_cast = self.param_dtype and input.is_floating_point()
        output = self.low(input.to(self.param_dtype) if is_cast else input, uses)
        for low, real in zip(self.low.buffers(), self.model.buffers()):
            real.copy_(torch.where(low == real.to(low.dtype), real, low.to(real.dtype)))
        return output

    def reduce(self):
        """After backward."""
        dtype = self.reduce_dtype or self.param_dtype
        for low, real in zip(self.low.parameters(), self.model.parameters()):
            grad = low.grad.to(dtype or low.grad.dtype)
            dist.all_reduce(grad)
            grad.div_(dist.get_world_size())
            real.grad = grad.to(real.dtype)

    def _get_ddp_logging_data(self):
        return {}
