"""The same training steps by Python's DistributedDataParallel, for the benchmark `ddp`.

The contenders are "python-local" and "python-ddp".
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "kit"))
from training_peer import Contender, forget_gradients, nothing, run  # noqa: E402


def contender(name, module, batch):
    wrapped = torch.nn.parallel.DistributedDataParallel(module) if name == "python-ddp" else module

    def step():
        forget_gradients(module)
        wrapped(batch).pow(2).mean().backward()

    return Contender(name, [("step", step, nothing)])


run(contender)
