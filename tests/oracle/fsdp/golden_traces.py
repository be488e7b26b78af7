"""Trains the models of lockstep/testing/fsdp with Python's fully_shard over gloo and writes down their traces: losses,
gradients and the order of what units do.

Usage: golden_traces.py FILE. tests/threads/testing/golden_traces.txt is such a file: written anew by this script when
models or Python's torch change, compared on machines without Python, and with this script's output where there is one.

    model nested                        a model, all in double precision, on two ranks
    step 0 -3.25 1.5                    losses of the ranks
    grad module.0.weight 1.5 2 -0.25    of rank 0 and 1's mean: sum, sum of magnitudes, product with a ramp
    event unshard forward module.1      what rank 0 did, in order; the root is "."

Values follow from formulas, not from generators, which draw otherwise in other versions.
"""

import os
import sys
import tempfile
import traceback
import warnings

import torch
import torch._dynamo  # noqa: F401  what fully_shard imports when it is first used
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_models import MODELS, Nested

RANKS = 2
STEPS = 2


class AlwaysWrap(Nested):
    UNITS = ["module.0", "module.1.0", "module.1.1", "module.1", "module.2", "module.3", "module"]


def wave(count, phase):
    return (torch.arange(count, dtype=torch.double) * 0.7 + phase).sin()


def inputs_of(name, model, rank):
    if name == "transformer":
        return [torch.arange(rows * 2).view(rows, 2) for rows in (6, 4)]
    rows, width = (4, 8) if isinstance(model, Nested) else (3, 5) if name == "mlp_stack" else (3, 6)
    return [wave(rows * width, rank + 1).view(rows, width)]


def loss_of(name, model, inputs):
    output = model(*inputs)
    if name == "transformer":
        return model.loss(inputs, output)
    return output.sum() if isinstance(model, Nested) else output.pow(2).sum()


def record_events(events):
    """What a unit does, by the names and states of its parameter group."""
    for kind in ("unshard", "reshard", "post_backward"):

        def recorded(group, *args, original=getattr(FSDPParamGroup, kind), kind=kind, **kwargs):
            states = {"FORWARD": "forward", "PRE_BACKWARD": "backward", "POST_BACKWARD": "backward"}
            state = "backward" if kind == "post_backward" else states.get(group._training_state.name, "idle")
            event = f"{kind} {state} {group._module_fqn or '.'}"
            was_whole = group.is_unsharded
            is_new = not was_whole and group._all_gather_result is None
            if kind == "post_backward" or (kind == "unshard" and is_new):
                events.append(event)
            result = original(group, *args, **kwargs)
            # The root is asked to as well, and stays whole.
            if kind == "reshard" and was_whole and not group.is_unsharded:
                events.append(event)
            return result

        setattr(FSDPParamGroup, kind, recorded)


def trace(name, model_type, rank, mesh, events, lines):
    model = model_type().double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            phase = sum(key.encode()) % 97
            parameter.copy_(wave(parameter.numel(), phase).view(parameter.shape) * 0.3)
    for unit in model_type.UNITS:
        fully_shard(model.get_submodule(unit), mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    lines.append(f"model {name}")
    for step in range(STEPS):
        events.clear()
        optimizer.zero_grad()
        loss = loss_of(name, model, inputs_of(name, model, rank))
        loss.backward()
        done = list(events)
        losses = [None] * RANKS
        dist.all_gather_object(losses, loss.item())
        lines.append(" ".join([f"step {step}"] + [f"{each:.13g}" for each in losses]))
        for key, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            whole = parameter.grad.full_tensor().flatten()
            numbers = [whole.sum(), whole.abs().sum(), whole.dot(wave(whole.numel(), 0))]
            lines.append(" ".join([f"grad {key}"] + [f"{each.item():.10g}" for each in numbers]))
        lines.extend(f"event {event}" for event in done)
        optimizer.step()


def run_rank(rank, folder, queue):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    events, lines = [], []
    record_events(events)
    for name, model_type in {**MODELS, "always_wrap": AlwaysWrap}.items():
        trace(name, model_type, rank, mesh, events, lines)
    if rank == 0:
        queue.put(lines)
    dist.barrier()
    dist.destroy_process_group()


def guarded(rank, folder, queue):
    try:
        run_rank(rank, folder, queue)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(path):
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=guarded, args=(rank, folder, queue), daemon=True) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        lines = queue.get(timeout=300)
        for each in ranks:
            each.join(60)
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")
    return 0 if all(each.exitcode == 0 for each in ranks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
