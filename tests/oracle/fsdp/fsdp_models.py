"""The models of lockstep/testing/fsdp, by the same names of parameters, and which of their modules are units."""

import torch
from torch import nn


class Nested(nn.Module):
    UNITS = ["module.1.0", "module.1", "module.2"]

    def __init__(self):
        super().__init__()
        pair = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16))
        self.module = nn.Sequential(nn.Linear(8, 4), pair, nn.Linear(16, 4), nn.Linear(4, 8))

    def forward(self, input):
        return self.module(input)

    def inputs(self, generator):
        return [torch.rand(4, 8, generator=generator)]

    def loss(self, inputs, output):
        return output.pow(2).mean()


class NonUniform(Nested):
    """All but the last layer are frozen."""

    UNITS = ["module.1.0", "module.1", "module.2"]

    def __init__(self):
        super().__init__()
        pair = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16))
        self.module = nn.Sequential(nn.Linear(8, 4), pair, nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 8)))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith("module.2.1."))


class Transformer(nn.Module):
    """In double precision: Python computes attention in another way than libtorch."""

    UNITS = [f"transformer.{side}.layers.{index}" for side in ("encoder", "decoder") for index in (0, 1)]

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(23, 16)
        self.transformer = nn.Transformer(16, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=8)
        self.output_proj = nn.Linear(16, 23)
        self.output_proj.weight = self.embed_tokens.weight
        self.register_buffer("vocab_bias", torch.ones(16))
        self.register_buffer("long_buffer", torch.zeros(16, dtype=torch.long))
        self.bn = nn.BatchNorm1d(2)
        self.double()
        self.eval()

    def forward(self, source_words, target_words):
        source = self.embed_tokens(source_words) + self.vocab_bias
        source = source + self.long_buffer.type_as(source)
        target = self.bn(self.embed_tokens(target_words))
        return self.output_proj(self.transformer(source, target))

    def inputs(self, generator):
        return [torch.randint(23, (rows, 2), generator=generator) for rows in (6, 4)]

    def loss(self, inputs, output):
        return nn.functional.cross_entropy(output.view(-1, 23), inputs[1].view(-1), reduction="sum")


class MLP(nn.Module):
    def __init__(self, dim, multiplier):
        super().__init__()
        self.in_proj = nn.Linear(dim, multiplier * dim)
        self.out_proj = nn.Linear(multiplier * dim, dim)

    def forward(self, input):
        return torch.relu(self.out_proj(torch.relu(self.in_proj(input))))


class MLPStack(nn.Sequential):
    """Rows that no number of ranks divides."""

    UNITS = ["0", "1", "2"]

    def __init__(self):
        super().__init__(MLP(5, 3), MLP(5, 4), MLP(5, 3), nn.LayerNorm(5, bias=False))

    def inputs(self, generator):
        return [torch.randn(3, 5, generator=generator)]

    def loss(self, inputs, output):
        return output.pow(2).sin().mean()


class DoubleLinear(nn.Module):
    """With a layer that nobody uses."""

    UNITS = ["lin1", "lin2"]

    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(6, 6)
        self.lin2 = nn.Linear(6, 6)

    def forward(self, input):
        return torch.relu(self.lin1(input))

    def inputs(self, generator):
        return [torch.randn(3, 6, generator=generator)]

    def loss(self, inputs, output):
        return output.pow(2).mean()


MODELS = {
    "nested": Nested,
    "non_uniform": NonUniform,
    "transformer": Transformer,
    "mlp_stack": MLPStack,
    "double_linear": DoubleLinear,
}
