"""Makes many small tensors quick to save, and to load in C++: a file entry for each costs more than its numbers.

Packed, every tensor is a tuple with its place in a table, and all numbers of a dtype lie in one flat tensor.
reference.cpp reads it.
"""

import torch

MOST_DIMS = 4


class _Packer:
    def __init__(self):
        self.parts = {}  # by dtype, flat
        self.lengths = {}
        self.rows = []

    def add(self, tensor):
        """The place of a dense tensor. Kept in the order of memory, so that strides mean the same as before."""
        parts = self.parts.setdefault(tensor.dtype, [])
        offset = self.lengths.get(tensor.dtype, 0)
        parts.append(tensor.as_strided((tensor.numel(),), (1,)))
        self.lengths[tensor.dtype] = offset + tensor.numel()
        padding = [0] * (MOST_DIMS - tensor.dim())
        dtype = list(self.parts).index(tensor.dtype)
        self.rows.append([dtype, offset, tensor.dim(), *tensor.shape, *padding, *tensor.stride(), *padding])
        return len(self.rows) - 1

    def replaced(self, tree):
        if isinstance(tree, torch.Tensor):
            return (self.add(tree),)
        if isinstance(tree, dict):
            return {key: self.replaced(part) for key, part in tree.items()}
        return [self.replaced(part) for part in tree] if isinstance(tree, list) else tree


def packed(tree):
    packer = _Packer()
    tree = packer.replaced(tree)
    flats = [torch.cat(parts) for parts in packer.parts.values()]
    return {"tree": tree, "places": torch.tensor(packer.rows), "flats": flats}
