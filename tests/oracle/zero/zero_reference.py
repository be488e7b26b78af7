"""Trains with Python's ZeroRedundancyOptimizer over gloo and saves what becomes of parameters and state.

Usage: zero_reference.py RESULT [STATE_FROM_CPP]. The file holds a plain dictionary, which the C++ test beside this file
reads: "cases", each with parameters, the gradients of every step, parameters after every step and the consolidated
state; and "plain", the state_dict of an optimizer that is not sharded, as torch.save() writes it. If a state that C++
wrote is given, "loaded" holds the parameters after two more steps from it.
"""

import os
import socket
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS = 6
SHAPES = {
    "even": [(4, 3), (12,), (2, 6), (12,), (3, 4), (12,)],
    "uneven": [(40, 5), (5,), (3, 4, 2), (1,), (), (13,)],
    "few": [(7, 2)],
}
OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def made_parameters(shapes):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def made_gradients(shapes):
    generator = torch.Generator().manual_seed(6)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)]


def values_of(parameters):
    return [parameter.detach().clone() for parameter in parameters]


def set_gradients(parameters, gradients, step):
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients)):
        parameter.grad = None if (step == 2 and index == 1) else gradient.clone()


def run_case(name, shapes, has_groups, as_view):
    """Every rank has the same gradients, as after DDP's backward."""
    kind, options = OPTIMIZERS[name]
    parameters = made_parameters(shapes)
    before = values_of(parameters)
    gradients = made_gradients(shapes)
    given = parameters
    if has_groups:
        given = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.003}]
    optimizer = ZeroRedundancyOptimizer(given, kind, parameters_as_bucket_view=as_view, **options)
    after = []
    for step in range(STEPS):
        set_gradients(parameters, gradients[step], step)
        optimizer.step()
        after.append(values_of(parameters))
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if dist.get_rank() == 0 else None
    return {
        "optimizer": name,
        "has_groups": has_groups,
        "as_view": as_view,
        "world_size": dist.get_world_size(),
        "before": before,
        "gradients": gradients,
        "after": after,
        "state": state,
    }


def run_rank(rank, world_size, port, queue):
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    cases = []
    for name in OPTIMIZERS:
        for shapes in SHAPES.values():
            for has_groups in [False, True]:
                if has_groups and len(shapes) == 1:
                    continue
                for as_view in [False, True]:
                    cases.append(run_case(name, shapes, has_groups, as_view))
    if rank == 0:
        path = f"{queue}.{world_size}"
        torch.save(cases, path)
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train_plain(optimizer, parameters, gradients, steps):
    for step in steps:
        for parameter, gradient in zip(parameters, gradients[step]):
            parameter.grad = gradient.clone()
        optimizer.step()


def plain_states():
    """State of optimizers that are not sharded, two steps in, and how they go on."""
    shapes = SHAPES["uneven"]
    states = {}
    for name, (kind, options) in OPTIMIZERS.items():
        parameters = made_parameters(shapes)
        optimizer = kind(parameters, **options)
        train_plain(optimizer, parameters, made_gradients(shapes), [0, 1])
        values = values_of(parameters)
        state = optimizer.state_dict()
        state = {"state": {index: dict(each) for index, each in state["state"].items()}, "param_groups": state["param_groups"]}
        saved = {"values": values, "state": clone(state)}
        train_plain(optimizer, parameters, made_gradients(shapes), [2, 3])
        saved["after"] = values_of(parameters)
        states[name] = saved
    return states


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(each) for key, each in value.items()}
    if isinstance(value, list):
        return [clone(each) for each in value]
    return value


def loaded_states(path):
    """Goes on from states that C++ wrote, by name of the optimizer."""
    shapes = SHAPES["uneven"]
    results = {}
    for name, saved in torch.load(path).items():
        kind, _ = OPTIMIZERS[name]
        parameters = [value.clone().requires_grad_() for value in saved["values"]]
        optimizer = kind(parameters, lr=1.0)
        optimizer.load_state_dict(saved["state"])
        train_plain(optimizer, parameters, made_gradients(shapes), [2, 3])
        results[name] = values_of(parameters)
    return results


def main():
    if len(sys.argv) > 2:
        torch.save(loaded_states(sys.argv[2]), sys.argv[1])
        return
    cases = []
    for world_size in [2, 3, 4]:
        multiprocessing.spawn(run_rank, (world_size, free_port(), sys.argv[1]), nprocs=world_size)
        cases += torch.load(f"{sys.argv[1]}.{world_size}")
        os.remove(f"{sys.argv[1]}.{world_size}")
    torch.save({"cases": cases, "plain": plain_states(), "gradients": made_gradients(SHAPES["uneven"])}, sys.argv[1])


if __name__ == "__main__":
    main()
