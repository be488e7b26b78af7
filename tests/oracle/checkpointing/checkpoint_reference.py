"""Saves what torch.utils.checkpoint gives: gradients, and the kernels that run in backward, in order.

Usage: checkpoint_reference.py RESULT.
"""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

WIDTH = 6


class Kernels(TorchDispatchMode):
    """Names of what runs. Python detaches where C++ does not."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name != "aten::detach":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def block(w, x):
    hidden = torch.nn.functional.gelu(torch.mm(x, w))
    return torch.sigmoid(torch.mm(torch.nn.functional.dropout(hidden, 0.5, True), w)) * x


def save_mm(ctx, op, *args, **kwargs):
    is_saved = op == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def run(name, weights, x):
    def one(index):
        return lambda tensor: block(weights[index], tensor)

    def both(tensor):
        return one(1)(one(0)(tensor))

    if name == "plain":
        return both(x)
    if name == "checkpoint":
        return checkpoint(both, x, use_reentrant=False)
    if name == "each":
        first = checkpoint(one(0), x, use_reentrant=False)
        return checkpoint(one(1), first, use_reentrant=False)
    if name == "no early stop":
        return checkpoint(both, x, use_reentrant=False, early_stop=False)
    if name == "nested":

        def outer(tensor):
            hidden = checkpoint(one(0), tensor.tanh(), use_reentrant=False)
            return checkpoint(one(1), hidden, use_reentrant=False).sin()

        return checkpoint(outer, x, use_reentrant=False)
    if name == "sequential":
        return checkpoint_sequential([one(0), one(1), torch.tanh], 2, x, use_reentrant=False)
    if name == "selective":
        return checkpoint(
            both, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save_mm)
        )
    if name == "on cpu":
        with torch.autograd.graph.save_on_cpu():
            return both(x)
    raise ValueError(name)


NAMES = ["plain", "checkpoint", "each", "no early stop", "nested", "sequential", "selective", "on cpu"]


def main():
    torch.manual_seed(1)
    weights = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    x = torch.randn(WIDTH, WIDTH)
    cases = {}
    for name in NAMES:
        leaves = [tensor.clone().requires_grad_() for tensor in [*weights, x]]
        torch.manual_seed(3)
        output = run(name, leaves[:2], leaves[2])
        with Kernels() as kernels:
            output.sum().backward()
        cases[name] = {
            "inputs": [*weights, x],
            "output": output.detach(),
            "gradients": [leaf.grad for leaf in leaves],
            "next": torch.rand(3),
            "kernels": kernels.names,
        }
    torch.save(cases, sys.argv[1])


if __name__ == "__main__":
    main()
