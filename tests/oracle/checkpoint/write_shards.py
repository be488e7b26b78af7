"""Writes FOLDER as torch.distributed.checkpoint does from two ranks, as safetensors: a model under fully_shard() whose names and sizes are
those of Net in tests/support/checkpoint_runs.h, one weight of it divided by columns. Saves the whole tensors.

Usage: write_shards.py RESULT FOLDER.
"""

import logging
import os
import sys
import tempfile
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

WORLD = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.randn(1))


def made():
    torch.manual_seed(5)
    model = Net()
    for buffer in model.buffers():
        torch.nn.init.normal_(buffer) if buffer.is_floating_point() else buffer.fill_(3)
    return model


def write(folder):
    mesh = init_device_mesh("cpu", (WORLD,))
    model = made()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    state["down.weight"] = distribute_tensor(state["down.weight"].full_tensor(), mesh, [Shard(1)])
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))


def run_child(rank, folder, store):
    """Ends the process, whatever happens: what follows is the parent's."""
    try:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
        write(folder)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main():
    result, folder = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        pids = []
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                run_child(rank, folder, f"{directory}/store")
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")
    torch.save(dict(made().state_dict()), result)


if __name__ == "__main__":
    main()
