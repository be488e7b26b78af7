"""The models that tensor parallelism is compared on, in double precision. The C++ test has the same ones, by the same
names of parameters."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH, WIDTH, HEADS = 4, 8, 8, 4


class Mlp(nn.Module):
    def __init__(self, hidden=4 * WIDTH):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Works on the heads it finds: those of a rank, or all of them."""

    def __init__(self, is_manual=False):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.is_manual = is_manual

    def forward(self, x):
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        return self.out(merged(attend(q, k, v, self.is_manual)))


class FusedAttention(nn.Module):
    """Head by head q, k and v lie side by side, so that ranks have whole heads."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(merged(attend(*heads(self.qkv(x), 3 * WIDTH // HEADS).chunk(3, -1))))


def heads(x, size=WIDTH // HEADS):
    return x.view(x.size(0), x.size(1), x.size(2) // size, size).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).reshape(x.size(0), x.size(2), -1)


def attend(q, k, v, is_manual=False):
    if is_manual:
        return torch.softmax(q @ k.transpose(2, 3) / q.size(3) ** 0.5, -1) @ v
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Classifier(nn.Module):
    """Gives the loss."""

    def __init__(self, classes, reduction="mean", ignore_index=-100, is_weighted=False):
        super().__init__()
        self.head = nn.Linear(WIDTH, classes)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.is_weighted = is_weighted

    def forward(self, x, target):
        logits = self.head(x).flatten(0, 1)
        weight = torch.linspace(0.5, 1.5, self.head.out_features, dtype=x.dtype) if self.is_weighted else None
        return F.cross_entropy(
            logits, target.flatten(), weight, ignore_index=self.ignore_index, reduction=self.reduction
        )


class Transformer(nn.Module):
    """Gives the loss."""

    def __init__(self, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens, target):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


MODELS = {
    "linear": lambda features=2 * WIDTH, bias=True: nn.Linear(WIDTH, features, bias=bias),
    "embedding": lambda rows=12: nn.Embedding(rows, WIDTH),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "mlp": Mlp,
    "attention": Attention,
    "fused_attention": FusedAttention,
    "block": Block,
    "classifier": Classifier,
    "transformer": Transformer,
}
