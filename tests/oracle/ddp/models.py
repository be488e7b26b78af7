"""The models of the DDP oracle. models.h holds their twins: the same names, and the same operators in the same order.

Every forward takes one tensor and a list of branch numbers; models without branches ignore the latter. A sample has
INPUT and yields OUTPUT elements per dim; those of models with WORDS are integers below that.
"""

import math

import torch
from torch import nn


class Mlp(nn.Module):
    INPUT, OUTPUT = (6,), (3,)

    def __init__(self):
        super().__init__()
        self.layer0 = nn.Linear(6, 9)
        self.layer1 = nn.Linear(9, 7)
        self.layer2 = nn.Linear(7, 3)

    def forward(self, input, uses):
        return self.layer2(torch.tanh(self.layer1(torch.tanh(self.layer0(input)))))


class ConvNet(nn.Module):
    INPUT, OUTPUT = (2, 5, 5), (3,)

    def __init__(self):
        super().__init__()
        self.conv0 = nn.Conv2d(2, 4, 3, padding=1)
        self.norm0 = nn.BatchNorm2d(4)
        self.conv1 = nn.Conv2d(4, 5, 3)
        self.norm1 = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, input, uses):
        hidden = torch.relu(self.norm0(self.conv0(input)))
        hidden = torch.relu(self.norm1(self.conv1(hidden)))
        return self.head(hidden.mean([2, 3]))


class Block(nn.Module):
    """Attention with one head, and a small MLP."""

    def __init__(self, width):
        super().__init__()
        self.norm0 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        normed = self.norm0(hidden)
        scores = torch.matmul(self.query(normed), self.key(normed).transpose(1, 2))
        shares = torch.softmax(scores / math.sqrt(hidden.size(2)), -1)
        hidden = hidden + torch.matmul(shares, self.value(normed))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm1(hidden))))


class Transformer(nn.Module):
    """The head has the embedding's weight, and the second block is the first one."""

    INPUT, OUTPUT = (3,), (3, 7)
    WORDS = 7

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(3, 4))
        self.embed = nn.Embedding(7, 4)
        self.block = Block(4)
        self.again = self.block
        self.other = Block(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, input, uses):
        hidden = self.embed(input) + self.places
        return self.head(self.other(self.again(self.block(hidden))))


class Bags(nn.Module):
    """Gradients of the two tables are sparse."""

    INPUT, OUTPUT = (4,), (3,)
    WORDS = 13

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(13, 4, mode="mean", sparse=True)
        self.firsts = nn.Embedding(5, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, input, uses):
        # Times 2, so that the tables do not get the same gradient tensor: PyTorch divides sparse gradients in place,
        # and with them what they are made of.
        return self.head(torch.tanh(self.words(input) + 2 * self.firsts(input.select(1, 0) % 5)))


class Branchy(nn.Module):
    """Uses those of its branches that a step names."""

    INPUT, OUTPUT = (4,), (3,)

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.branch0 = nn.Linear(5, 3)
        self.branch1 = nn.Linear(5, 3)
        self.branch2 = nn.Linear(5, 3)

    def forward(self, input, uses):
        hidden = torch.tanh(self.trunk(input))
        output = hidden.narrow(1, 0, 3)
        for branch in uses:
            output = output + (self.branch0, self.branch1, self.branch2)[branch](hidden)
        return output


class Reused(nn.Module):
    """Uses a layer twice and another one never."""

    INPUT, OUTPUT = (4,), (3,)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, input, uses):
        return self.last(torch.tanh(self.first(torch.tanh(self.first(input)))))


class TwoDtypes(nn.Module):
    INPUT, OUTPUT = (5,), (3,)

    def __init__(self):
        super().__init__()
        self.single0 = nn.Linear(5, 6)
        self.double0 = nn.Linear(6, 6).double()
        self.single1 = nn.Linear(6, 4)
        self.double1 = nn.Linear(4, 3).double()

    def forward(self, input, uses):
        hidden = torch.tanh(self.double0(torch.tanh(self.single0(input)).double()))
        return self.double1(torch.tanh(self.single1(hidden.float())).double()).float()


class Phases(nn.Module):
    """Has complex parameters."""

    INPUT, OUTPUT = (4,), (6,)

    def __init__(self):
        super().__init__()
        self.turns = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.layer = nn.Linear(4, 6)

    def forward(self, input, uses):
        turned = self.layer(input) * self.turns
        return torch.real(turned) + torch.imag(turned)


class FourLinears(nn.Module):
    """Large enough for the default caps to matter."""

    INPUT, OUTPUT = (600,), (600,)

    def __init__(self):
        super().__init__()
        for i in range(4):
            self.add_module(f"layer{i}", nn.Linear(600, 600))

    def forward(self, input, uses):
        for layer in self.children():
            input = layer(input)
        return input
