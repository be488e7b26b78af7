"""Saves values and gradients of PyTorch's differentiable collectives on two ranks over gloo.

Usage: functional_collectives_reference.py RESULT. Each case holds, by rank, input, output, the output's gradient and the
input's.
"""

import os
import socket
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as older
import torch.multiprocessing as multiprocessing

RANKS = 2
SPLITS = [[1, 3], [2, 2]]  # what rank r sends to each


def first_of(*names):
    """The function, under whichever of its names this release has."""
    return next(getattr(functional, name) for name in names if hasattr(functional, name))


def all_to_all(tensor, rank):
    received = [splits[rank] for splits in SPLITS]
    return first_of("all_to_all_single_autograd")(tensor, received, SPLITS[rank], dist.group.WORLD)


GATHER = first_of("all_gather_tensor_autograd", "all_gather_single_autograd")
SCATTER = first_of("reduce_scatter_tensor_autograd", "reduce_scatter_single_autograd")
CASES = {
    "all_reduce": lambda tensor, rank: older.all_reduce(tensor),
    "all_gather 0": lambda tensor, rank: GATHER(tensor, 0, dist.group.WORLD),
    "all_gather 1": lambda tensor, rank: GATHER(tensor, 1, dist.group.WORLD),
    "reduce_scatter 0": lambda tensor, rank: SCATTER(tensor, "sum", 0, dist.group.WORLD),
    "reduce_scatter 1": lambda tensor, rank: SCATTER(tensor, "sum", 1, dist.group.WORLD),
    "all_to_all_single": all_to_all,
    "broadcast": lambda tensor, rank: older.broadcast(tensor, 1),
}


def run(rank, port, path):
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    results = {}
    for index, (name, collective) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(10 * index + rank)
        tensor = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()
        output = collective(tensor, rank)
        gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        (output * gradient).sum().backward()
        results[name] = [tensor.detach(), (output * 1).detach(), gradient, tensor.grad]
    torch.save(results, f"{path}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def main():
    path = sys.argv[1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(run, args=(port, path), nprocs=RANKS)
    by_rank = [torch.load(f"{path}.{rank}") for rank in range(RANKS)]
    torch.save({name: [results[name] for results in by_rank] for name in CASES}, path)


if __name__ == "__main__":
    main()
