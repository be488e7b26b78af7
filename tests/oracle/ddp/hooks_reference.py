"""Trains a small model with PyTorch's DDP and each of its comm hooks, two ranks over gloo, and saves every step's gradients.

Usage: hooks_reference.py RESULT. The file holds a plain dictionary, which the C++ test beside this file reads:
weights, batches by step and rank, and by case and rank the gradients of every step and, for PowerSGD, its statistics.
"""

import logging
import os
import sys
import tempfile
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # PyTorch's PowerSGD waits for a GPU, if there is one, whatever it is given

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

from small_mlp import made_batches_of, made_mlp

WORLD_SIZE = 2
SIZES = [8, 24, 24, 24, 5]
STEPS = 5
LEARNING_RATE = 0.1


def made_model():
    return made_mlp(SIZES, seed=11)


def made_batches():
    return made_batches_of(SIZES[0], WORLD_SIZE, STEPS, seed=12)


def accept_single_matrices():
    """The batched hook passes a matrix where a batch of them is asked for, and is refused."""
    original = powerSGD_hook._orthogonalize

    def orthogonalize(matrices, epsilon=0):
        original(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

    powerSGD_hook._orthogonalize = orthogonalize


class Gathered:
    """What NCCL's all_gather gives: a future of one tensor for all ranks. Gloo's holds one for each, which is refused."""

    group = dist.group
    get_rank = staticmethod(dist.get_rank)

    @classmethod
    def all_gather(cls, outputs, tensor, group, async_op):
        dist.all_gather(outputs, tensor, group=group)
        gathered = cls()
        gathered.future = torch.futures.Future()
        gathered.future.set_result([torch.stack(outputs)])
        return gathered

    def get_future(self):
        return self.future


def power_sgd(**options):
    options = {"start_powerSGD_iter": 2, "min_compression_rate": 1, "random_seed": 3} | options
    return powerSGD_hook.PowerSGDState(None, **options)


def cases(alone):
    """Name, state and hook of each case; `alone` is a group of this rank only."""
    yield "allreduce", None, default_hooks.allreduce_hook
    yield "fp16", None, default_hooks.fp16_compress_hook
    yield "bf16", None, default_hooks.bf16_compress_hook
    yield "noop", None, debugging_hooks.noop_hook
    yield "fp16_wrapper", None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    yield "per_tensor", None, quantization_hooks.quantization_pertensor_hook
    yield "per_channel", None, quantization_hooks.quantization_perchannel_hook
    local = post_localSGD_hook.PostLocalSGDState
    yield "post_local_subgroup", local(None, alone, 2), post_localSGD_hook.post_localSGD_hook
    yield "post_local_none", local(None, alone, 3, False), post_localSGD_hook.post_localSGD_hook
    hook = powerSGD_hook.powerSGD_hook
    yield "power_sgd", power_sgd(), hook
    yield "power_sgd_rank2", power_sgd(matrix_approximation_rank=2), hook
    yield "power_sgd_rank4", power_sgd(matrix_approximation_rank=4), hook
    yield "power_sgd_cold", power_sgd(warm_start=False), hook
    yield "power_sgd_forgetful", power_sgd(use_error_feedback=False), hook
    yield "power_sgd_epsilon", power_sgd(orthogonalization_epsilon=1e-2), hook
    yield "power_sgd_choosy", power_sgd(min_compression_rate=6), hook
    yield "power_sgd_stacked", power_sgd(batch_tensors_with_same_shape=True), hook
    batched = powerSGD_hook.batched_powerSGD_hook
    yield "batched_power_sgd", power_sgd(), batched
    yield "batched_power_sgd_rank2", power_sgd(matrix_approximation_rank=2, warm_start=False), batched


def train(state, hook, batches, rank):
    model = torch.nn.parallel.DistributedDataParallel(made_model())
    # The check by name asks for CUDA, though gloo sums bfloat16 well.
    model._check_comm_hook = lambda hook: None
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    gradients = []
    for batch in batches:
        optimizer.zero_grad()
        model(batch[rank]).pow(2).mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    result = {"gradients": gradients}
    if isinstance(state, powerSGD_hook.PowerSGDState):
        _, before, after = state.compression_stats()
        result |= {"iter": state.iter, "before": before, "after": after}
    return result


def run_rank(rank, folder):
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    accept_single_matrices()
    quantization_hooks.dist = Gathered
    store = dist.FileStore(os.path.join(folder, "store"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    groups = [dist.new_group([each]) for each in range(WORLD_SIZE)]
    batches = made_batches()
    results = {name: train(state, hook, batches, rank) for name, state, hook in cases(groups[rank])}
    torch.save(results, os.path.join(folder, f"rank{rank}"))
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (folder,), nprocs=WORLD_SIZE)
        by_rank = [torch.load(os.path.join(folder, f"rank{rank}")) for rank in range(WORLD_SIZE)]
    result = {
        "weights": [parameter.detach() for parameter in made_model().parameters()],
        "batches": made_batches(),
        "cases": {name: [results[name] for results in by_rank] for name in by_rank[0]},
    }
    torch.save(result, sys.argv[1])


if __name__ == "__main__":
    main()
