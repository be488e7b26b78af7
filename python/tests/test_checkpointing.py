"""Checkpoints of C++ in a process with Python's engine of autograd: both have their saved-tensor hooks, in each other too."""

import torch
from torch.utils.checkpoint import checkpoint

from lockstep_torch import _lockstep_torch


def gradient(x):
    return (x.exp().cos() * x.exp()).detach()


def test_cpp_checkpoints_work_with_pythons_engine():
    x = torch.linspace(0, 1, 5, requires_grad=True)
    y, runs = _lockstep_torch.checkpointed_sine(x)
    y.sum().backward(retain_graph=True)
    assert runs() == 2
    assert torch.allclose(x.grad, gradient(x))
    y.sum().backward()
    assert runs() == 3


def test_python_hooks_work_after_and_around_cpp_checkpoints():
    x = torch.linspace(0, 1, 5, requires_grad=True)
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, runs = _lockstep_torch.checkpointed_sine(x)
        z = y.tanh()
    assert len(packed) == 2  # what goes into the checkpoint, and what tanh saves
    z.sum().backward()
    assert runs() == 2
    expected = gradient(x) * (1 - torch.tanh(x.exp().sin()) ** 2)
    assert torch.allclose(x.grad, expected.detach())


def test_cpp_checkpoints_nest_in_pythons():
    x = torch.linspace(0, 1, 5, requires_grad=True)

    def body(tensor):
        return _lockstep_torch.checkpointed_sine(tensor * 2)[0].tanh()

    body(x).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    checkpoint(body, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, expected)
