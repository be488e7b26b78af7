"""The same training steps by Python's fully_shard, for the benchmark `fsdp`.

The contenders are "python-local" and "python-fully_shard".
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.append(str(Path(__file__).parents[1] / "kit"))
from training_peer import Contender, forget_gradients, nothing, run  # noqa: E402


def contender(name, module, batch):
    if name == "python-fully_shard":
        mesh = init_device_mesh(batch.device.type, (dist.get_world_size(),))
        for block in module.blocks if hasattr(module, "blocks") else module.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)

    def step():
        forget_gradients(module)
        module(batch).pow(2).mean().backward()

    return Contender(name, [("step", step, nothing)])


run(contender)
