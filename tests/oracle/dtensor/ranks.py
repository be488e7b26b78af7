"""Runs a function on ranks that are forked from this process, over gloo: modules are imported once. And counts what they
send."""

import logging
import os
import sys
import tempfile
import traceback
import warnings

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor.debug import CommDebugMode

WORLD = 4
# What is compared with. Older ones refuse some of it.
IS_OLDER = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def _run_child(rank, work, directory):
    """Ends the process, whatever happens: what follows is the parent's."""
    try:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
        torch.save(work(), f"{directory}/{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_on_ranks(work):
    """What `work()` returned on each of four ranks. To be called before anything has threads."""
    with tempfile.TemporaryDirectory() as directory:
        pids = []
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                _run_child(rank, work, directory)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
        return [torch.load(f"{directory}/{rank}") for rank in range(WORLD)]


def unless_refused(name, work):
    """What `work()` returns on this rank, or None if a Python that is older than the one compared with refuses it."""
    try:
        return work()
    except Exception as error:
        if not IS_OLDER:
            raise RuntimeError(name) from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"skipped, as torch {torch.__version__} refuses it: rank {dist.get_rank()}: {name}: {reason}", file=sys.stderr)
        return None


def plain(tensor):
    """A tensor of its own that can be saved, when it is there."""
    return (tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor).detach().clone()


class Collectives(CommDebugMode):
    """How many collectives ran inside, by name: {"all_reduce": 1}. Gloo has no all-to-all of DTensors: Python gathers
    instead, and that is counted."""

    def counts(self):
        counts = {}
        for operator, count in self.get_comm_counts().items():
            name = str(operator).split(".")[1].replace("_into_tensor", "").replace("_tensor", "")
            counts[name] = counts.get(name, 0) + count
        return counts
