"""The buckets that torch.compile's DDPOptimizer makes of some models, by model and caps."""
import sys

import torch
from torch._dynamo.backends.distributed import DDPOptimizer


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x):
        x = x * 2
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Convs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)])
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm2d(4) for _ in range(4)])
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms):
            x = torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.ups = torch.nn.ModuleList([torch.nn.Linear(16, 64) for _ in range(3)])
        self.downs = torch.nn.ModuleList([torch.nn.Linear(64, 16) for _ in range(3)])
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(16) for _ in range(3)])

    def forward(self, ids):
        x = self.embedding(ids)
        for up, down, norm in zip(self.ups, self.downs, self.norms):
            x = x + down(torch.relu(up(norm(x))))
        return x


def plain_name(name):
    """'L_self_modules_layers_modules_0_parameters_weight_' as 'layers.0.weight'."""
    name = name[name.index("_modules_") + len("_modules_"):]
    return name.replace("_modules_", ".").replace("_parameters_", ".").rstrip("_")


def buckets_of(model, x, cap, first):
    torch._dynamo.reset()
    optimizer = DDPOptimizer(bucket_bytes_cap=cap, first_bucket_cap=first, backend_compile_fn=lambda module, _: module)
    torch.compile(model, backend=optimizer.compile_fn)(x)
    return [{"bytes": bucket.size, "names": sorted(plain_name(n) for n in bucket.params)} for bucket in optimizer.buckets]


def main():
    models = {
        "mlp": (Mlp(), torch.randn(4, 16)),
        "convs": (Convs(), torch.randn(2, 4, 5, 5)),
        "normed": (Normed(), torch.randint(32, (2, 5))),
    }
    caps = [(1, 1), (600, 600), (1088, 1088), (2200, 1088), (5000, 300), (9000, 4000)]
    result = {
        name: {f"{cap}/{first}": buckets_of(model, x, cap, first) for cap, first in caps}
        for name, (model, x) in models.items()
    }
    torch.save(result, sys.argv[1], _use_new_zipfile_serialization=True)


main()
