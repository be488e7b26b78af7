"""Steps PyTorch's optimizers on given gradients and saves what they make of the parameters.

Usage: optimizers_reference.py RESULT. The file holds a list of plain dictionaries, one per case, which the C++ test
beside this file reads: the optimizer, the options of its groups, parameters, the gradients of every step (None: there
is none), the parameters after every step and the state after the last.
"""

import sys

import torch

STEPS = 12
SHAPES = [(5, 3), (7,), (2, 3, 4, 4), (), (0,)]
LARGE = (40001,)  # worth several threads; only where options are the defaults
CHANGES_LR_AT = 6  # every learning rate, to a third
FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}

OPTIONS = {
    "Adam": [
        {},
        {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 1e-2, "amsgrad": True, "maximize": True},
        {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1, "maximize": True},
        {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    "AdamW": [
        {},
        {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 1e-2, "weight_decay": 0.0},
        {"lr": 1e-2, "amsgrad": True, "maximize": True},
    ],
    "SGD": [
        {},
        {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True},
    ],
    "Adagrad": [
        {},
        {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1, "eps": 1e-6},
        {"lr": 0.1, "initial_accumulator_value": 0.5, "maximize": True},
    ],
    "Adadelta": [
        {},
        {"lr": 0.5, "rho": 0.8, "eps": 1e-5, "weight_decay": 0.1},
        {"maximize": True},
    ],
    "RMSprop": [
        {},
        {"lr": 1e-3, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 1e-3, "momentum": 0.9, "maximize": True},
        {"lr": 1e-3, "centered": True},
        {"lr": 1e-3, "centered": True, "momentum": 0.5, "weight_decay": 0.1, "maximize": True},
    ],
    "Rprop": [
        {},
        {"lr": 0.1, "etas": (0.4, 1.5), "step_sizes": (1e-3, 0.2)},
        {"maximize": True},
    ],
    "Adamax": [
        {},
        {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.1},
        {"maximize": True, "weight_decay": 0.1},
    ],
}


def made(generator, shape, dtype, layout):
    """A tensor that is dense, or every other column of one, or has its channels last."""
    real = torch.float64 if dtype is not torch.complex64 else torch.complex128
    if layout == "strided" and len(shape) > 0:
        wide = torch.empty(*shape[:-1], 2 * shape[-1], dtype=dtype)
        tensor = wide[..., ::2]
    elif layout == "channels_last" and len(shape) == 4:
        tensor = torch.empty(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    return tensor.copy_(torch.randn(shape, dtype=real, generator=generator))


def has_gradient(parameter, step, kernel):
    """The second one has none now and then. Fused SGD cannot begin without one."""
    return parameter != 1 or step not in ((3, 4) if kernel == "fused" else (0, 3, 4))


def ran(name, options, kernel, dtype, layout, grouped):
    generator = torch.Generator().manual_seed(len(name))
    shapes = SHAPES + ([LARGE] if options == {} and dtype is torch.float32 else [])
    if layout == "strided":
        shapes = [shape for shape in shapes if shape != ()]  # is dense
    parameters = [made(generator, shape, dtype, layout) for shape in shapes]
    before = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_()
    second = {**options, "lr": 0.02, **({"weight_decay": 0.3} if name != "Rprop" else {})}
    groups = [{"params": parameters, **options}]
    if grouped:
        groups = [{"params": parameters[:2], **options}, {"params": parameters[2:], **second}]
    implementation = {"fused": True} if kernel == "fused" else {"foreach": False}
    optimizer = getattr(torch.optim, name)(groups, **options, **implementation)
    gradients, after = [], []
    for step in range(STEPS):
        if step == CHANGES_LR_AT:
            for group in optimizer.param_groups:
                group["lr"] /= 3
        gradients.append([])
        for index, parameter in enumerate(parameters):
            gradient = made(generator, parameter.shape, dtype, layout)
            given = has_gradient(index, step, kernel)
            parameter.grad = gradient.clone() if given else None
            gradients[-1].append(gradient if given else None)
        optimizer.step()
        after.append([parameter.detach().clone() for parameter in parameters])
    return {
        "optimizer": name,
        "options": [options, second] if grouped else [options],
        "kernel": kernel,
        "layout": layout,
        "before": before,
        "gradients": gradients,
        "after": after,
        "state": [dict(optimizer.state[parameter]) for parameter in parameters],
    }


def main():
    cases = []
    for name, all_options in OPTIONS.items():
        for options in all_options:
            if name in FUSED:
                cases.append(ran(name, options, "fused", torch.float32, "dense", grouped=False))
            cases.append(ran(name, options, "single", torch.float32, "dense", grouped=False))
            kernel = "fused" if name in FUSED else "single"
            cases.append(ran(name, options, kernel, torch.float64, "dense", grouped=True))
            # The fused SGD of half types does nothing to most elements.
            half = kernel if name != "SGD" else "single"
            cases.append(ran(name, options, half, torch.bfloat16, "channels_last", grouped=False))
            cases.append(ran(name, options, half, torch.float16, "dense", grouped=True))
            cases.append(ran(name, options, "single", torch.float32, "strided", grouped=True))
            cases.append(ran(name, options, "single", torch.complex64, "dense", grouped=False))
    torch.save(cases, sys.argv[1])


main()
