"""The same work by Python's tensor parallelism, DTensor and torch.utils.checkpoint, for the benchmark `tp`.

The contenders are "python" and, without any of them, "python-local"; "python-deep" and "python-deep-local" are for memory.
"""

import ctypes
import sys
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  what checkpoint() imports when it is first used; that is not its memory
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parents[1] / "kit"))
from training_peer import Contender, forget_gradients, nothing, peak_growth_of, run  # noqa: E402

BATCH, LENGTH, WIDTH, HEADS = 4, 128, 128, 4
CALLS = 1000
REGIONS, REGION_WIDTH, REGION_ROWS = 300, 32, 4
DEEP_BLOCKS, DEEP_WIDTH, DEEP_ROWS = 16, 128, 2048


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(WIDTH, WIDTH)
        self.k = torch.nn.Linear(WIDTH, WIDTH)
        self.v = torch.nn.Linear(WIDTH, WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        # The heads of this rank: -1 is what is left of them.
        parts = [layer(x).view(BATCH, LENGTH, -1, WIDTH // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, -1))


class Mlp(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = torch.nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = torch.nn.LayerNorm(WIDTH)
        self.mlp = Mlp(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def plan(is_sequence_parallel):
    """One input of q, k and v, so that its gradient is reduced once."""
    outside = Shard(1) if is_sequence_parallel else Replicate()
    plan = {
        "attention": PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate()),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=outside),
        "mlp": PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=outside),
    }
    if is_sequence_parallel:
        plan["attention_norm"] = SequenceParallel()
        plan["mlp_norm"] = SequenceParallel()
    return plan


def step_of(module, batch, forward=None):
    def step():
        forget_gradients(module)
        (forward or module)(batch).pow(2).mean().backward()

    return step


def block_step(device, mesh=None, is_sequence_parallel=False):
    torch.manual_seed(1)
    block = Block().to(device)
    batch = torch.randn(BATCH, LENGTH, WIDTH, device=device)
    if mesh is not None:
        parallelize_module(block, mesh, plan(is_sequence_parallel))
    if is_sequence_parallel:
        batch = batch.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()
    return step_of(block, batch)


def calls(function):
    def run_calls():
        with torch.no_grad():
            for _ in range(CALLS):
                function()

    return run_calls


def dispatch(device, mesh):
    """Calls that send nothing."""
    local = torch.randn(32, 64, device=device)
    a, b = (DTensor.from_local(local.clone(), mesh, [Shard(0)]) for _ in range(2))
    whole = DTensor.from_local(torch.ones(64, 64, device=device), mesh, [Replicate()])
    return [
        ("add", calls(lambda: a + b), nothing),
        ("redistribute", calls(lambda: whole.redistribute(placements=[Shard(0)])), nothing),
        ("redistribute-same", calls(lambda: a.redistribute(placements=[Shard(0)])), nothing),
    ]


def local_dispatch(device):
    a, b = (torch.randn(32, 64, device=device) for _ in range(2))
    return [("add", calls(lambda: a + b), nothing)]


def regions_step(device, is_checkpointed):
    torch.manual_seed(1)
    layers = torch.nn.ModuleList(torch.nn.Linear(REGION_WIDTH, REGION_WIDTH) for _ in range(REGIONS)).to(device)

    def forward(value):
        for layer in layers:
            if is_checkpointed:
                value = checkpoint(lambda x, layer=layer: torch.relu(layer(x)), value, use_reentrant=False)
            else:
                value = torch.relu(layer(value))
        return value

    return step_of(layers, torch.randn(REGION_ROWS, REGION_WIDTH, device=device), forward)


def deep_step(is_checkpointed):
    """On the host, as is the memory that is measured. What is freed goes back at once, so that what is resident is what
    tensors take."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    torch.manual_seed(1)
    blocks = torch.nn.ModuleList(Mlp(DEEP_WIDTH) for _ in range(DEEP_BLOCKS))

    def forward(value):
        for block in blocks:
            value = value + (checkpoint(block, value, use_reentrant=False) if is_checkpointed else block(value))
        return value

    return step_of(blocks, torch.randn(DEEP_ROWS, DEEP_WIDTH), forward)


def contender(name, module, batch):
    device = batch.device
    if name.startswith("python-deep"):
        step = deep_step(name == "python-deep")
        return Contender(name, [("deep", step, nothing)], lambda: {"deep-peak": peak_growth_of(step)})
    if name == "python-local":
        timed = [
            ("block", block_step(device), nothing),
            ("regions", regions_step(device, False), nothing),
            *local_dispatch(device),
        ]
        return Contender(name, timed)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    timed = [
        ("block", block_step(device, mesh), nothing),
        ("block-sequence-parallel", block_step(device, mesh, True), nothing),
        ("regions", regions_step(device, True), nothing),
        *dispatch(device, mesh),
    ]
    return Contender(name, timed)


def own_models(name, width):
    """Contenders make what they need: what one does not use must not count as its memory."""
    return torch.nn.Module(), torch.empty(0)


run(contender, own_models)
