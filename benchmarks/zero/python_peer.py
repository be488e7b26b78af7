"""The same training by Python's ZeroRedundancyOptimizer with AdamW under DistributedDataParallel, for the benchmark `zero`.

The contenders are "python-zero", with default options, and "python-zero-views", with parameters_as_bucket_view.
"""

import sys
from pathlib import Path

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

sys.path.append(str(Path(__file__).parents[1] / "kit"))
from training_peer import Contender, nothing, run  # noqa: E402


def contender(name, module, batch):
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, parameters_as_bucket_view=name == "python-zero-views", lr=1e-3
    )

    def backward():
        optimizer.zero_grad()
        ddp(batch).pow(2).mean().backward()

    def both():
        backward()
        optimizer.step()

    def count_bytes():
        values = [value for state in optimizer.optim.state.values() for value in state.values()]
        return {"state": sum(value.nbytes for value in values if torch.is_tensor(value))}

    return Contender(name, [("step", both, nothing), ("optimizer-step", optimizer.step, backward)], count_bytes)


run(contender)
