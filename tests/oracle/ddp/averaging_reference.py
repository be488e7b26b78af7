"""Trains a small model with PyTorch's model averagers and PostLocalSGDOptimizer over gloo, and saves every step.

Usage: averaging_reference.py RESULT. The file holds a plain dictionary, which the C++ test beside this file reads:
weights, batches by step and rank, and by case and rank the losses of every step, the parameters at the end, and the
averager's step.
"""

import logging
import os
import sys
import tempfile
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from small_mlp import made_batches_of, made_mlp

SIZES = [8, 24, 24, 5]
STEPS = 20
LARGEST_WORLD = 4


def made_model():
    return made_mlp(SIZES, seed=21)


def made_batches():
    return made_batches_of(SIZES[0], LARGEST_WORLD, STEPS, seed=22)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def two_groups(model):
    first, *rest = model.parameters()
    return torch.optim.Adam([{"params": [first], "lr": 0.02}, {"params": rest}], lr=0.01)


def run(model, optimizer, batches, rank, after_step):
    losses = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model(batch[rank]).pow(2).mean()
        loss.backward()
        optimizer.step()
        after_step(step)
        losses.append(loss.detach())
    return {"losses": losses, "parameters": [parameter.detach().clone() for parameter in model.parameters()]}


def averaged_by_hand(averager, batches, rank):
    model = made_model()
    result = run(model, sgd(model), batches, rank, lambda step: averager.average_parameters(model.parameters()))
    return result | {"step": averager.step}


def averaged_by_optimizer(averager, made_optimizer, batches, rank, state=None):
    """With a hook's state: in DDP. Half way the learning rate changes, and all is saved and loaded."""
    model = made_model()
    if state is not None:
        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(made_optimizer(model), averager)

    def after_step(step):
        if step != STEPS // 2:
            return
        saved = optimizer.state_dict()
        averager.step = 0
        optimizer.load_state_dict(saved)
        # Its own list is the one from before the load.
        for group in optimizer.optim.param_groups:
            group["lr"] *= 0.5

    return run(model, optimizer, batches, rank, after_step) | {"step": averager.step}


def results_of(world_size, rank):
    batches = made_batches()
    if world_size == 4:
        sizes = {2: 2, 4: 4}
        yield "hierarchical", averaged_by_hand(HierarchicalModelAverager(sizes, 3), batches, rank)
        averager = HierarchicalModelAverager(sizes, 0)
        yield "hierarchical_optimizer", averaged_by_optimizer(averager, sgd, batches, rank)
        return
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    yield "periodic", averaged_by_hand(PeriodicModelAverager(4, 3), batches, rank)
    yield "optimizer", averaged_by_optimizer(PeriodicModelAverager(3), two_groups, batches, rank)
    state = PostLocalSGDState(None, alone, 5)
    yield "hook_subgroup", averaged_by_optimizer(PeriodicModelAverager(4, 5), sgd, batches, rank, state)
    state = PostLocalSGDState(None, alone, 6, False)
    yield "hook_none", averaged_by_optimizer(PeriodicModelAverager(3, 6), two_groups, batches, rank, state)


def run_rank(rank, world_size, folder):
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(dict(results_of(world_size, rank)), os.path.join(folder, f"rank{rank}"))
    dist.destroy_process_group()


def cases_of(world_size):
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (world_size, folder), nprocs=world_size)
        by_rank = [torch.load(os.path.join(folder, f"rank{rank}")) for rank in range(world_size)]
    return {name: [results[name] for results in by_rank] for name in by_rank[0]}


def main():
    result = {
        "weights": [parameter.detach() for parameter in made_model().parameters()],
        "batches": made_batches(),
        "cases": {str(world_size): cases_of(world_size) for world_size in (2, LARGEST_WORLD)},
    }
    torch.save(result, sys.argv[1])


if __name__ == "__main__":
    main()
