"""Trains with Python's ZeroRedundancyOptimizer inside of DDP's backward and saves parameters after every step.

Usage: overlap_reference.py RESULT. Python refuses gloo here, because its hooks may hang on it; the hook that steps after
the last bucket issues its collectives in one order on all ranks, and runs if the refusal is taken out.
"""

import os
import sys
import warnings
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from zero_reference import clone, free_port, values_of

SIZES = [6, 40, 30, 20, 3]
STEPS = 7
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
}


def made_model():
    layers = []
    for rows, columns in zip(SIZES[:-1], SIZES[1:]):
        layers += [torch.nn.Linear(rows, columns), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


def run_case(name, shard_buckets, static_graph, batches):
    rank = dist.get_rank()
    kind, options = OPTIMIZERS[name]
    model = made_model()
    before = values_of(model.parameters())
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002, static_graph=static_graph)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), kind, overlap_with_ddp=True, **options)
    with mock.patch.object(dist, "get_backend", return_value="not gloo"):
        hook = hook_with_zero_step(allreduce_hook, ddp, zero, shard_buckets=shard_buckets)
    ddp.register_comm_hook(None, hook)
    after = []
    for batch in batches:
        ddp.zero_grad()
        ddp(batch.tensor_split(dist.get_world_size())[rank]).pow(2).mean().backward()
        after.append(values_of(model.parameters()))
    return {
        "optimizer": name,
        "world_size": dist.get_world_size(),
        "shard_buckets": shard_buckets,
        "static_graph": static_graph,
        "before": before,
        "batches": batches,
        "after": clone(after),
    }


def run_rank(rank, world_size, port, result):
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    generator = torch.Generator().manual_seed(6)
    batches = [torch.randn(12, SIZES[0], generator=generator) for _ in range(STEPS)]
    cases = []
    for name in OPTIMIZERS:
        for shard_buckets in [False, True]:
            for static_graph in [False, True]:
                cases.append(run_case(name, shard_buckets, static_graph, batches))
    if rank == 0:
        torch.save(cases, f"{result}.{world_size}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    all_cases = []
    for size in [2, 3, 4]:
        multiprocessing.spawn(run_rank, (size, free_port(), sys.argv[1]), nprocs=size)
        all_cases += torch.load(f"{sys.argv[1]}.{size}")
        os.remove(f"{sys.argv[1]}.{size}")
    torch.save(all_cases, sys.argv[1])
