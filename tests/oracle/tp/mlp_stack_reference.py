"""Trains MLPStack on a 2x2 mesh with tensor parallelism inside and fully_shard outside, and writes down what is to be
compared.

Usage: mlp_stack_reference.py FILE. The file holds plain dicts, lists and tensors, for torch::pickle_load: a list of
cases, with or without sequence parallelism, checkpointing and reshard_after_forward, and widths that two divides or does
not. Each has "state", whole "gradients" and "parameters" by name, gradients before each step and parameters after it, in
lists; by rank "ranks" with the "inputs" and "losses" of each step and, after the last one, "local_parameters" and
"local_gradients" by name: parts on (dp, tp).
"""

import itertools
import sys
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  what fully_shard imports when it is first used
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

sys.path.append(str(Path(__file__).parents[1] / "dtensor"))
from ranks import plain, run_on_ranks, unless_refused  # noqa: E402

STEPS = 3
LR = 0.05
BATCH, LENGTH = 3, 6


class MLP(nn.Module):
    def __init__(self, dim, multiplier):
        super().__init__()
        self.in_proj = nn.Linear(dim, multiplier * dim)
        self.out_proj = nn.Linear(multiplier * dim, dim)

    def forward(self, input):
        return torch.relu(self.out_proj(torch.relu(self.in_proj(input))))


class MLPStack(nn.Sequential):
    def __init__(self, dim, is_sequence_parallel):
        modules = [MLP(dim, 3), MLP(dim, 4), MLP(dim, 3)]
        if is_sequence_parallel:
            modules.append(nn.LayerNorm(dim, bias=False))
        super().__init__(*modules)

    def parallelize(self, case, mesh):
        plan = {}
        for index in range(3):
            plan[f"{index}.in_proj"] = ColwiseParallel(use_local_output=False)
            plan[f"{index}.out_proj"] = RowwiseParallel(use_local_output=False)
        plan["2.out_proj"] = RowwiseParallel()
        if case["is_sequence_parallel"]:
            plan["2.out_proj"] = RowwiseParallel(output_layouts=Shard(1))
            plan["3"] = SequenceParallel(sequence_dim=1)
        parallelize_module(self, mesh["tp"], plan)
        options = {"mesh": mesh["dp"], "reshard_after_forward": case["reshard_after_forward"]}
        for module in list(self)[:3]:
            if case["is_checkpointed"]:
                checkpoint(module)
            fully_shard(module, **options)
        fully_shard(self, **options)


def all_cases():
    # Two divides the activations of the one, and neither the rows nor the columns of the other's weights.
    for dim, is_sequence_parallel, is_checkpointed, reshard in itertools.product((16, 5), *[(False, True)] * 3):
        yield {
            "dim": dim,
            "is_sequence_parallel": is_sequence_parallel,
            "is_checkpointed": is_checkpointed,
            "reshard_after_forward": reshard,
        }


def input_of(case, number, step, dp_rank):
    generator = torch.Generator().manual_seed(1000 * number + 10 * step + dp_rank)
    return torch.randn(BATCH, LENGTH, case["dim"], generator=generator, dtype=torch.float64)


def whole(tensor):
    return plain(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def by_name(model, get):
    return {name: get(parameter) for name, parameter in model.named_parameters()}


def made(case, number):
    torch.manual_seed(number)
    model = MLPStack(case["dim"], case["is_sequence_parallel"]).double()
    # Ones would hide mistakes.
    if case["is_sequence_parallel"]:
        nn.init.normal_(model[3].weight)
    return model


def train(model, batches):
    """`batches` has those of each step: one on a rank, that of every data-parallel rank on one device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    result = {"losses": [], "gradients": [], "parameters": []}
    for step in batches:
        optimizer.zero_grad()
        for batch in step:
            loss = model(batch).pow(2).mean()
            (loss / len(step)).backward()
            result["losses"].append(whole(loss))
        result["gradients"].append(by_name(model, lambda parameter: whole(parameter.grad)))
        optimizer.step()
        result["parameters"].append(by_name(model, whole))
    return result


def run_case(case, number, mesh):
    dp_rank = mesh["dp"].get_local_rank()
    single = train(made(case, number), [[input_of(case, number, step, rank) for rank in (0, 1)] for step in range(STEPS)])

    model = made(case, number)
    state = by_name(model, plain)
    model.parallelize(case, mesh)
    inputs = [input_of(case, number, step, dp_rank) for step in range(STEPS)]
    result = train(model, [[each] for each in inputs])
    for what in ("gradients", "parameters"):
        torch.testing.assert_close(result[what], single[what])
    torch.testing.assert_close(result["losses"], single["losses"][dp_rank::2])
    return {
        "state": state,
        "gradients": result["gradients"],
        "parameters": result["parameters"],
        "rank": {
            "inputs": inputs,
            "losses": result["losses"],
            "local_gradients": by_name(model, lambda parameter: plain(parameter.grad.to_local())),
            "local_parameters": by_name(model, lambda parameter: plain(parameter.to_local())),
        },
    }


def run_cases():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [
        unless_refused(str(case), lambda: run_case(case, number, mesh))  # noqa: B023  called at once
        for number, case in enumerate(all_cases())
    ]


def merged(by_rank):
    cases = []
    for case, parts in zip(all_cases(), zip(*by_rank)):
        if any(part is None for part in parts):
            continue
        alike = {key: value for key, value in parts[0].items() if key != "rank"}
        cases.append({"options": case, **alike, "ranks": [part["rank"] for part in parts]})
    return cases


if __name__ == "__main__":
    torch.save(merged(run_on_ranks(run_cases)), sys.argv[1])
