"""Training by Python's torch over gloo (NCCL on a GPU): what the peer scripts of benchmarks share.

A script calls run(), once per rank, with the launcher's variables set. It has the models of workload.cpp and prints what
training_rank.cpp prints.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist


class Layers(torch.nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))

    def forward(self, value):
        for layer in self.layers:
            value = torch.relu(layer(value))
        return value


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = torch.nn.LayerNorm(width)
        self.attention_in = torch.nn.Linear(width, 3 * width)
        self.attention_out = torch.nn.Linear(width, width)
        self.mlp_norm = torch.nn.LayerNorm(width)
        self.mlp_in = torch.nn.Linear(width, 4 * width)
        self.mlp_out = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.attention_in(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.mlp_out(torch.nn.functional.gelu(self.mlp_in(self.mlp_norm(x))))


class Gpt(torch.nn.Module):
    def __init__(self, vocabulary=64, context=128, layers=2, heads=4, width=128):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def workload(name, width):
    torch.manual_seed(1)
    if name == "mlp":
        return Layers(8, 1024), torch.randn(16, 1024)
    if name == "300-layers":
        return Layers(300, width), torch.randn(4, width)
    return Gpt(), torch.randint(64, (4, 128))


class Contender:
    """`timed` has (what, run, prepare) triples; `count_bytes` gives this rank's bytes by what was counted."""

    def __init__(self, name, timed, count_bytes=dict):
        self.name = name
        self.timed = timed
        self.count_bytes = count_bytes


def nothing():
    pass


def forget_gradients(module):
    for parameter in module.parameters():
        parameter.grad = None


def proc_bytes(file, field):
    with open(f"/proc/self/{file}") as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


def counted_by_others():
    return proc_bytes("status", "RssShmem") - proc_bytes("smaps_rollup", "Pss_Shmem")


def peak_bytes():
    return proc_bytes("status", "VmHWM") - counted_by_others()


def forget_peak():
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # what libraries needed to load then counts as well


def peak_growth_of(work):
    """By how many bytes this process's resident memory grows at most while `work` runs."""
    before = proc_bytes("status", "VmRSS") - counted_by_others()
    forget_peak()
    work()
    return peak_bytes() - before


def take_turns(contenders, seconds, device):
    """Milliseconds, a row per turn and a column per contender and work; of the slowest rank."""

    def wait_for_device():
        if device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(run, prepare):
        prepare()
        wait_for_device()
        dist.barrier()
        start = time.perf_counter()
        run()
        wait_for_device()
        return (time.perf_counter() - start) * 1000

    def turn():
        return [milliseconds(run, prepare) for each in contenders for _, run, prepare in each.timed]

    for _ in range(3):
        turn()
    start = time.perf_counter()
    turn()
    took = time.perf_counter() - start
    fewest = 5 if seconds > 0 else 1
    count = torch.tensor(min(max(int(seconds / took), fewest), 100), device=device)
    dist.broadcast(count, 0)
    times = torch.tensor([turn() for _ in range(int(count))], dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def run(make_contender, make_workload=workload):
    """`make_contender(name, module, batch)` gets a model and its batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--contenders", required=True)
    parser.add_argument("--seconds", type=float, default=1)
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu and int(os.environ["WORLD_SIZE"]) <= torch.cuda.device_count() else "gloo")
    before = proc_bytes("status", "VmRSS")
    forget_peak()

    def made(name):
        module, batch = make_workload(options.model, options.width)
        return make_contender(name, module.to(device), batch.to(device))

    contenders = [made(name) for name in options.contenders.split(",")]
    lines = []
    for row in take_turns(contenders, options.seconds, device):
        names = [(what, each.name) for each in contenders for what, _, _ in each.timed]
        lines += [f"{what} {name} {value:.6f}" for (what, name), value in zip(names, row)]
    if len(contenders) == 1:
        peak = peak_bytes() - before
        for what, value in {**contenders[0].count_bytes(), "peak": peak}.items():
            highest = torch.tensor(float(value), dtype=torch.float64, device=device)
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            lines.append(f"{what} {contenders[0].name} {highest.item():.6f}")
    if dist.get_rank() == 0:
        # The benchmark has what it needs, even if this process aborts while it ends.
        print(*lines, "delivered", sep="\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()
