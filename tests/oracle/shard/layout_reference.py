"""Saves what PyTorch says every rank holds of tensors on meshes: sizes, offsets, and the indices themselves.

Usage: layout_reference.py RESULT. No rank runs: sizes and offsets are computed from coordinates, and the indices by
cutting a tensor of numbers placement by placement.
"""

import itertools
import sys

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

MESHES = [(1,), (2,), (3,), (4,), (7,), (2, 2), (2, 3), (3, 2), (4, 1), (2, 2, 2)]
TENSORS = [(1,), (2,), (5,), (8,), (13,), (0,), (7, 3), (4, 9), (6, 1), (2, 3, 5)]


def placements_for(ndim):
    yield 0, 0, 0
    for dim in range(ndim):
        yield 1, dim, 0
    for dim in range(ndim):
        for split in (2, 3):
            yield 2, dim, split


def made(kind, dim, split):
    return [Replicate(), Shard(dim), _StridedShard(dim, split_factor=split) if split else None][kind]


def cut(numbers, mesh, coordinate, placements):
    for size, index, placement in zip(mesh, coordinate, placements):
        if not isinstance(placement, Replicate):
            numbers = placement._split_tensor(numbers, size, with_padding=False, contiguous=False)[0][index]
    return numbers.flatten().clone()


def main():
    cases = []
    for mesh, sizes in itertools.product(MESHES, TENSORS):
        numbers = torch.arange(torch.Size(sizes).numel()).view(sizes)
        choices = list(itertools.product(placements_for(len(sizes)), repeat=len(mesh)))
        # All of the small products, every few of the large ones.
        for chosen in choices[:: max(1, len(choices) // 40)]:
            placements = [made(*each) for each in chosen]
            ranks = []
            for coordinate in itertools.product(*(range(size) for size in mesh)):
                local, offset = _compute_local_shape_and_global_offset(sizes, mesh, list(coordinate), placements)
                ranks.append([list(local), list(offset), cut(numbers, mesh, coordinate, placements).tolist()])
            cases.append({"mesh": list(mesh), "sizes": list(sizes), "placements": [list(p) for p in chosen], "ranks": ranks})
    torch.save(cases, sys.argv[1])


if __name__ == "__main__":
    main()
