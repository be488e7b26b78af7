"""Saves what DTensor.redistribute gives for every pair of placements: values, gradients and numbers of collectives.

Usage: redistribute_reference.py RESULT. The file holds plain dicts, lists and tensors, for torch::pickle_load: a list of
cases. Each has "mesh" and "sizes", placements as [kind, dim, split factor] with the kinds replicate, shard, strided
shard and partial, "from" and "to"; by rank "ranks" with what it holds of the tensor, the loss's weights, the result and
the gradient, which is of the sum of weights and result, and "forward" and "backward" with counts of collectives. A case
that Python refuses has "error" instead. Meshes of two ranks are made of the first pair.
"""

import itertools
import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ranks import Collectives, plain, run_on_ranks

REPLICATE, SHARD, STRIDED, PARTIAL = range(4)
KINDS = [(REPLICATE, 0, 0), (SHARD, 0, 0), (SHARD, 1, 0), (PARTIAL, 0, 0)]
STRIDED_KIND = (STRIDED, 0, 2)
SIZES = [(8, 4), (5, 3)]  # the first is divisible by everything, the second by nothing


def made(written):
    kind, dim, split = written
    if kind == STRIDED:
        return _StridedShard(dim, split_factor=split)
    return {REPLICATE: Replicate(), SHARD: Shard(dim), PARTIAL: Partial()}[kind]


def cut(tensor, mesh, placements):
    """What this rank holds of it; all of a partial one."""
    for size, index, placement in zip(mesh.shape, mesh.get_coordinate(), placements):
        if isinstance(placement, (Shard, _StridedShard)):
            tensor = placement._split_tensor(tensor, size, with_padding=False, contiguous=True)[0][index]
    return tensor.contiguous().clone()


def terms(tensor, mesh, placements, generator):
    """What this rank holds, as terms that add up to it where placements are partial."""
    for size, index, placement in zip(mesh.shape, mesh.get_coordinate(), placements):
        if isinstance(placement, Partial):
            others = torch.randn(size - 1, *tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor = others[index] if index < size - 1 else tensor - others.sum(0)
    return cut(tensor, mesh, placements)


def refusal_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def run_case(mesh, sizes, source, target):
    generator = torch.Generator().manual_seed(1)
    whole, weights = torch.randn(2, *sizes, generator=generator, dtype=torch.float64)
    before, after = ([made(each) for each in written] for written in (source, target))
    case = {"mesh": list(mesh.shape), "sizes": list(sizes), "from": [list(p) for p in source], "to": [list(p) for p in target]}
    local = terms(whole, mesh, before, generator).requires_grad_()
    tensor = DTensor.from_local(local, mesh, before, run_check=False, shape=whole.shape, stride=whole.stride())
    if any(new[0] == PARTIAL != old[0] for old, new in zip(source, target)):
        return {**case, "error": refusal_of(lambda: tensor.redistribute(mesh, after))}
    with Collectives() as forward:
        result = tensor.redistribute(mesh, after).to_local()
    weight = cut(weights, mesh, after)
    with Collectives() as backward:
        (result * weight).sum().backward()
    if not any(isinstance(each, Partial) for each in after):
        torch.testing.assert_close(result, cut(whole, mesh, after))
    return {
        **case,
        "forward": forward.counts(),
        "backward": backward.counts(),
        "rank": [plain(local), weight, plain(result), plain(local.grad)],
    }


def run_cases():
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (4,))
    cases = []
    for mesh, sizes in itertools.product((grid["b"], line, grid), SIZES):
        choices = list(itertools.product(KINDS, repeat=mesh.ndim))
        # With other strided ones on two axes Python fails, or its ranks disagree on what they send.
        choices.append((STRIDED_KIND,) if mesh.ndim == 1 else (STRIDED_KIND, (SHARD, 0, 0)))
        cases += [run_case(mesh, sizes, *pair) for pair in itertools.product(choices, repeat=2)]
    return cases


def merged(ranks):
    cases = []
    for parts in zip(*ranks):
        first = parts[0]
        parts = parts[: torch.Size(first["mesh"]).numel()]
        case = {key: value for key, value in first.items() if key != "rank"}
        if "error" not in first:
            case["ranks"] = [part["rank"] for part in parts]
        cases.append(case)
    return cases


if __name__ == "__main__":
    torch.save(merged(run_on_ranks(run_cases)), sys.argv[1])
