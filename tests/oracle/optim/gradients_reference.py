"""Clips gradients and scales losses with PyTorch and saves what becomes of them.

Usage: gradients_reference.py RESULT. The file holds a plain dictionary, which the C++ test beside this file reads:
"gradients", what "clip_norm" and "clip_value" make of them, and "scaler", the scales and parameters of every step.
"""

import math
import sys

import torch

SHAPES = [(5, 3), (7,), (2, 3, 4), (), (0,)]


def parameters_with(gradients):
    parameters = []
    for gradient in gradients:
        parameters.append(torch.zeros(gradient.shape, dtype=gradient.dtype, requires_grad=True))
        parameters[-1].grad = gradient.clone()
    parameters.append(torch.zeros(3, requires_grad=True))  # has none
    return parameters


def gradients_of(parameters):
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def made_gradients(dtype):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def clipped_by_norm(gradients):
    cases = []
    for norm_type in [2.0, 1.0, 3.5, math.inf, 0.0]:
        for max_norm in [0.5, 1e3]:
            if norm_type == math.inf:
                gradients = gradients[:4]  # no element is the largest of none
            parameters = parameters_with(gradients)
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
            cases.append({"norm_type": norm_type, "max_norm": max_norm, "norm": norm, "count": len(gradients), "gradients": gradients_of(parameters)})
    return cases


def clipped_by_value(gradients):
    cases = []
    for value in [0.1, 0.7]:
        parameters = parameters_with(gradients)
        torch.nn.utils.clip_grad_value_(parameters, value)
        cases.append({"value": value, "gradients": gradients_of(parameters)})
    return cases


def scaled():
    """Two optimizers; in some steps the first has gradients that are not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, growth_factor=3.0, backoff_factor=0.25)
    parameters = [torch.ones(3, requires_grad=True), torch.full((2,), 2.0, requires_grad=True)]
    optimizers = [torch.optim.SGD([parameters[0]], lr=0.1), torch.optim.SGD([parameters[1]], lr=0.2, momentum=0.9)]
    steps = []
    for step in range(10):
        factor = {3: math.inf, 4: math.nan}.get(step, 0.3)
        losses = scaler.scale([(parameters[0] * factor).sum(), (parameters[1] ** 2).sum()])
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        if step % 2 == 0:
            scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update(7.0 if step == 7 else None)
        steps.append({"losses": [loss.detach() for loss in losses], "state": {name: float(value) for name, value in scaler.state_dict().items()}, "parameters": [parameter.detach().clone() for parameter in parameters]})
    return steps


def main():
    saved = {}
    for name, dtype in [("float32", torch.float32), ("float64", torch.float64), ("bfloat16", torch.bfloat16)]:
        gradients = made_gradients(dtype)
        saved[name] = {
            "gradients": gradients,
            "clip_norm": clipped_by_norm(gradients),
            "clip_value": clipped_by_value(gradients),
        }
    saved["scaler"] = scaled()
    torch.save(saved, sys.argv[1])


main()
