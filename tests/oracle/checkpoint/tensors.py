"""Tensors as what any reader of pickles understands: dtype, sizes and bytes."""

import torch


def described(tensors):
    return {name: [str(tensor.dtype), list(tensor.shape), bytes_of(tensor)] for name, tensor in tensors.items()}


def bytes_of(tensor):
    # An empty tensor has no memory, and a scalar no dim, to be viewed otherwise.
    return tensor.reshape(-1).view(torch.uint8).clone() if tensor.numel() else torch.empty(0, dtype=torch.uint8)
