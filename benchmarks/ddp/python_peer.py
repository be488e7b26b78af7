"""The same training steps by Python's DistributedDataParallel over gloo (NCCL on a GPU), for the benchmark `ddp`.

Started once per rank with the launcher's variables set. Prints what benchmarks/ddp/rank.cpp prints, for the contenders
"python-local" and "python-ddp".
"""

import argparse
import os
import resource
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--contenders", required=True)
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--as-view", action="store_true")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu and int(os.environ["WORLD_SIZE"]) <= torch.cuda.device_count() else "gloo")
    rank = dist.get_rank()

    def contender(name):
        module, batch = workload(options.model, options.width)
        module, batch = module.to(device), batch.to(device)
        wrapped = module
        if name == "python-ddp":
            wrapped = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=options.as_view)

        def step():
            for parameter in module.parameters():
                parameter.grad = None
            wrapped(batch).pow(2).mean().backward()

        return name, step

    def wait_for_device():
        if has_gpu:
            torch.cuda.synchronize()

    def milliseconds(step):
        wait_for_device()
        dist.barrier()
        start = time.perf_counter()
        step()
        wait_for_device()
        return (time.perf_counter() - start) * 1000

    contenders = [contender(name) for name in options.contenders.split(",")]
    turn = 0
    for _, step in contenders:
        for _ in range(3):
            step()
        turn += milliseconds(step) / 1000
    count = torch.tensor(min(max(int(options.seconds / turn), 5), 100), device=device)
    dist.broadcast(count, 0)
    times = torch.tensor(
        [[milliseconds(step) for _, step in contenders] for _ in range(int(count))], dtype=torch.float64, device=device
    )
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if rank == 0:
        for column, (name, _) in enumerate(contenders):
            for row in times[:, column].tolist():
                print(f"sample {name} {row:.6f}")
        if len(contenders) == 1:
            print(f"peak {contenders[0][0]} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}")
    dist.barrier()
    dist.destroy_process_group()


main()
