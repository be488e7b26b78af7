"""Runs PyTorch's Join with a simple joinable, two and three ranks over gloo, and saves what every rank saw.

Usage: join_reference.py RESULT. The file holds a list of plain dictionaries, which the C++ test beside this file reads:
the settings of a case, and by rank the sum of all that was reduced, the iterations it completed, how often main hooks
ran, whether it was a last joiner (-1 if no post hook ran), whether it threw, and the value broadcast at the end.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

BEFORE = 41.0
AFTER = 42.0


class Hook(JoinHook):
    def __init__(self, reducer, times):
        self.reducer = reducer
        self.times = times

    def main_hook(self):
        self.reducer.mains += 1
        for _ in range(self.times):
            self.reducer.reduce(0.0)

    def post_hook(self, is_last_joiner):
        self.reducer.is_last = int(is_last_joiner)
        root = torch.tensor([dist.get_rank() if is_last_joiner else -1])
        dist.all_reduce(root, op=dist.ReduceOp.MAX)
        if is_last_joiner:
            self.reducer.final.fill_(AFTER)
        dist.broadcast(self.reducer.final, src=int(root.item()))


class AllReducer(Joinable):
    def __init__(self):
        super().__init__()
        self.mains = 0
        self.is_last = -1
        self.final = torch.tensor([BEFORE])

    def reduce(self, value):
        tensor = torch.tensor([value])
        dist.all_reduce(tensor)
        return tensor.item()

    def __call__(self, times):
        Join.notify_join_context(self)
        return sum(self.reduce(1.0) for _ in range(times))

    def join_hook(self, **kwargs):
        return Hook(self, kwargs["num_allreduces"])

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


def cases(world_size):
    staircase = [3 + rank for rank in range(world_size)]
    for joinables in (1, 3):
        for times in (1, 2):
            yield {"inputs": staircase, "joinables": joinables, "times": times, "throws": False, "enable": True}
        yield {"inputs": staircase, "joinables": joinables, "times": 1, "throws": True, "enable": True}
        yield {"inputs": [4] * world_size, "joinables": joinables, "times": 1, "throws": True, "enable": True}
        yield {"inputs": [4] * world_size, "joinables": joinables, "times": 1, "throws": False, "enable": False}
    for inputs in ([0, 2, 5], [5, 2, 0], [4, 4, 1], [2, 2, 2], [0, 0, 0], [1, 6, 6]):
        yield {"inputs": inputs[:world_size], "joinables": 1, "times": 1, "throws": False, "enable": True}


def run_case(case, rank):
    reducers = [AllReducer() for _ in range(case["joinables"])]
    total = 0.0
    iterations = 0
    threw = 0
    try:
        with Join(
            reducers,
            enable=case["enable"],
            throw_on_early_termination=case["throws"],
            num_allreduces=case["times"],
        ):
            for _ in range(case["inputs"][rank]):
                total += sum(reducer(case["times"]) for reducer in reducers)
                iterations += 1
    except RuntimeError:
        threw = 1
    last = reducers[-1]
    return {
        "total": total,
        "iterations": iterations,
        "mains": last.mains,
        "is_last": last.is_last,
        "threw": threw,
        "final": last.final.item(),
    }


def run_rank(rank, world_size, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results = [run_case(case, rank) for case in cases(world_size)]
    torch.save(results, os.path.join(folder, f"rank{rank}"))
    dist.destroy_process_group()


def main():
    saved = []
    with tempfile.TemporaryDirectory() as folder:
        for world_size in (2, 3):
            multiprocessing.spawn(run_rank, args=(world_size, folder), nprocs=world_size)
            by_rank = [torch.load(os.path.join(folder, f"rank{rank}")) for rank in range(world_size)]
            for index, case in enumerate(cases(world_size)):
                saved.append(case | {"ranks": [results[index] for results in by_rank]})
    torch.save(saved, sys.argv[1])


if __name__ == "__main__":
    main()
