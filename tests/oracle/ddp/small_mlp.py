"""The model and the batches of scripts that train a small MLP beside C++ tests, which read both from a file."""

import torch


class Mlp(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in zip(sizes, sizes[1:]))

    def forward(self, value):
        for layer in self.layers[:-1]:
            value = torch.tanh(layer(value))
        return self.layers[-1](value)


def made_mlp(sizes, seed):
    model = Mlp(sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


def made_batches_of(features, world_size, steps, seed):
    """By step and rank."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(6, features, generator=generator) for _ in range(world_size)] for _ in range(steps)]
