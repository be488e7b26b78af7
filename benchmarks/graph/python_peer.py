"""The same training steps by torch.compile around DistributedDataParallel, for the benchmark `graph`.

The contender is "python-ddpoptimizer": torch.compile cuts where DDP's buckets end; the backend is aot_eager.
"""

import sys
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.backends.distributed import DDPOptimizer

sys.path.append(str(Path(__file__).parents[1] / "kit"))
from training_peer import Contender, forget_gradients, nothing, run  # noqa: E402


def contender(name, module, batch):
    is_mlp = not hasattr(module, "tokens")
    cap_mb = 8 if is_mlp else 0.25
    # It must not be above the cap, and is a constant.
    dist._DEFAULT_FIRST_BUCKET_BYTES = int(min(cap_mb, 1) * 2**20)
    wrapped = torch.compile(torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=cap_mb), backend="aot_eager")

    def step():
        forget_gradients(module)
        wrapped(batch).pow(2).mean().backward()

    def capture():
        torch._dynamo.reset()
        backend = torch._dynamo.lookup_backend("aot_eager")
        cap = int(cap_mb * 2**20)
        optimizer = DDPOptimizer(cap, backend, min(cap, 2**20))
        torch.compile(module, backend=optimizer.compile_fn)(batch)

    # A capture forgets all there were: the step before the one that is timed captures anew.
    return Contender(name, [("step", step, step), ("capture", capture, nothing)])


run(contender)
