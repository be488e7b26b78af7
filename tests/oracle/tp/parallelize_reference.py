"""Saves what parallelize_module gives, over models, plans, layouts and seeds: outputs, gradients and numbers of
collectives.

Usage: parallelize_reference.py RESULT. The file holds plain dicts, lists and tensors, for torch::pickle_load: a list of
cases. Each has "name", "model" and its "arguments", "world_size", "plan" with the records of `colwise` and the others
below, whole "state", and whole "gradients" by name; by rank "ranks" with "inputs", "output", the "weights" whose product
with the output is summed up as the loss (none if the output is the loss) and the "input_gradient"; and counts of
collectives, "forward" and "backward", and "late", of what brings gradients to their parameters' placements. Layouts are [kind, dim] with the kinds replicate and shard. Cases of two ranks run
on both pairs, of which the first counts.
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  what is imported when it is first used
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

sys.path.append(str(Path(__file__).parents[1] / "dtensor"))
from ranks import Collectives, plain, run_on_ranks, unless_refused  # noqa: E402
from tp_models import BATCH, LENGTH, MODELS, WIDTH  # noqa: E402

R = [0, 0]
S0, S1, S2 = [1, 0], [1, 1], [1, 2]
LAST = [1, -1]
SEEDS = (1, 2)


def colwise(input=R, output=LAST, is_local=True):
    return {"style": "colwise", "input": input, "output": output, "is_local": is_local}


def rowwise(input=LAST, output=R, is_local=True):
    return {"style": "rowwise", "input": input, "output": output, "is_local": is_local}


def sequence(dim=1, is_local=False):
    return {"style": "sequence", "dim": dim, "is_local": is_local}


def prepare(input, desired=R, is_local=False):
    return {"style": "prepare_input", "input": input, "desired": desired, "is_local": is_local}


class Case:
    """`input` and `output` are the layouts of what goes in and comes out; the loss comes out whole."""

    def __init__(self, model, plan, input=R, output=R, arguments=None, has_loss_parallel=False):
        self.model = model
        self.plan = plan
        self.input = input
        self.output = output
        self.arguments = arguments or {}
        self.has_loss_parallel = has_loss_parallel

    def name(self):
        return " ".join(str(part) for part in (self.model, self.arguments or "", self.plan) if part)


def linear_cases():
    for input in (R, S0, S1, S2):
        for output in (LAST, R, S0, S1):
            yield Case("linear", {"": colwise(input, output)}, input, S2 if output == LAST else output)
            # Without what rank 0 has to add once.
            has_bias = output != S1
            yield Case("linear", {"": rowwise(input, output)}, input, S2 if output == LAST else output, {"bias": has_bias})
    for output in (LAST, R):
        # Kept as a DTensor: ranks have parts of different sizes, or none.
        yield Case("linear", {"": colwise(R, output, False)}, R, S2 if output == LAST else output, {"features": 5})


def embedding_cases():
    for rows in (12, 10):
        for output in (R, S0, S1, S2):
            yield Case("embedding", {"": colwise(R, output)}, R, output, {"rows": rows})
            yield Case("embedding", {"": rowwise(R, output)}, R, output, {"rows": rows})


def attention_plan(layer_plan, outside, kept=False):
    plan = {layer: colwise(is_local=not kept) for layer in layer_plan}
    return {**plan, "out": rowwise(output=outside)}


def under(path, plan):
    return {f"{path}.{name}" if name else path: record for name, record in plan.items()}


def block_plan(outside):
    plan = {
        "attention": prepare(outside),
        "mlp": prepare(outside),
        **under("attention", attention_plan(("q", "k", "v"), outside)),
        **under("mlp", {"up": colwise(), "down": rowwise(output=outside)}),
    }
    if outside == S1:
        plan.update({"attention_norm": sequence(), "mlp_norm": sequence()})
    return plan


def transformer_plan():
    plan = {"tokens": rowwise(R, S1), "norm": sequence(), "head": colwise(S1, LAST, False)}
    for index in range(2):
        plan.update(under(f"blocks.{index}", block_plan(S1)))
    return plan


def all_cases():
    yield from linear_cases()
    yield from embedding_cases()
    for model in ("layer_norm", "rms_norm"):
        yield Case(model, {"": sequence()}, S1, S1)
        yield Case(model, {"": sequence(0, True)}, S0, S0)
    yield Case("mlp", {"up": colwise(), "down": rowwise()})
    yield Case("mlp", {"up": colwise(S1), "down": rowwise(output=S1)}, S1, S1)
    yield Case("mlp", {"": prepare(S1), "up": colwise(), "down": rowwise(output=S1)}, S1, S1)
    kept = {"up": colwise(is_local=False), "down": rowwise(is_local=False)}
    yield Case("mlp", kept)
    yield Case("mlp", kept, arguments={"hidden": 10})
    for model, layers in (("attention", ("q", "k", "v")), ("fused_attention", ("qkv",))):
        # The input's gradient is reduced once for each layer, and then once for all of them.
        yield Case(model, attention_plan(layers, R))
        yield Case(model, {"": prepare(R), **attention_plan(layers, R)})
        yield Case(model, {"": prepare(S1), **attention_plan(layers, S1)}, S1, S1)
    yield Case("attention", {"": prepare(R), **attention_plan(("q", "k", "v"), R, True)}, arguments={"is_manual": True})
    yield Case("block", block_plan(R))
    yield Case("block", block_plan(S1), S1, S1)
    head = {"head": colwise(is_local=False)}
    for arguments in (
        {"classes": 12},
        {"classes": 10},
        {"classes": 12, "reduction": "sum"},
        {"classes": 10, "reduction": "none"},
        {"classes": 12, "ignore_index": 3},
        {"classes": 12, "is_weighted": True},
    ):
        yield Case("classifier", head, arguments=arguments, has_loss_parallel=True)
    yield Case("classifier", {"head": colwise(output=R)}, arguments={"classes": 12})
    yield Case("transformer", transformer_plan(), arguments={"vocabulary": 12}, has_loss_parallel=True)


def layout(written):
    return Shard(written[1]) if written[0] == 1 else Replicate()


def style_of(record):
    is_local = record["is_local"]
    if record["style"] == "sequence":
        return SequenceParallel(sequence_dim=record["dim"], use_local_output=is_local)
    if record["style"] == "prepare_input":
        return PrepareModuleInput(
            input_layouts=layout(record["input"]),
            desired_input_layouts=layout(record["desired"]),
            use_local_output=is_local,
        )
    made = ColwiseParallel if record["style"] == "colwise" else RowwiseParallel
    return made(
        input_layouts=layout(record["input"]), output_layouts=layout(record["output"]), use_local_output=is_local
    )


def cut(tensor, mesh, written):
    if written[0] == 0:
        return tensor.clone()
    parts = Shard(written[1])._split_tensor(tensor, mesh.size(), with_padding=False, contiguous=True)[0]
    return parts[mesh.get_local_rank()].clone()


def whole(tensor):
    return plain(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def whole_inputs(case, generator):
    """Tokens or activations, and the targets where there is a loss."""
    if case.model in ("embedding", "transformer"):
        count = case.arguments.get("rows") or case.arguments["vocabulary"]
        inputs = [torch.randint(count, (BATCH, LENGTH), generator=generator)]
    else:
        inputs = [torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)]
    if case.model in ("classifier", "transformer"):
        count = case.arguments.get("classes") or case.arguments["vocabulary"]
        inputs.append(torch.randint(count, (BATCH, LENGTH), generator=generator))
    return inputs


def on_one_device(model, inputs, generator):
    """Loss weights (none if the output is the loss), gradients by name, and the first input's if it has one."""
    first = inputs[0].clone().requires_grad_(inputs[0].is_floating_point())
    output = model(first, *inputs[1:])
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64) if output.dim() else None
    (output if weights is None else (output * weights).sum()).backward()
    gradients = {name: plain(parameter.grad) for name, parameter in model.named_parameters()}
    model.zero_grad()
    return weights, gradients, first.grad


def run_case(case, mesh, seed):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = MODELS[case.model](**case.arguments).double()
    for parameter in model.parameters():
        # What begins with zeros or ones would hide mistakes.
        nn.init.normal_(parameter, std=0.5)
    state = {name: plain(tensor) for name, tensor in model.state_dict().items()}
    inputs = whole_inputs(case, generator)
    weights, right, right_input_gradient = on_one_device(model, inputs, generator)

    parallelize_module(model, mesh, {path: style_of(record) for path, record in case.plan.items()})
    inputs[0] = cut(inputs[0], mesh, case.input)
    rank = {"inputs": [tensor.clone() for tensor in inputs]}
    inputs[0].requires_grad_(inputs[0].is_floating_point())
    with loss_parallel() if case.has_loss_parallel else contextlib.nullcontext():
        with Collectives() as forward:
            output = model(*inputs)
        local = output.to_local() if isinstance(output, DTensor) else output
        rank["output"] = plain(local)
        if weights is not None:
            rank["weights"] = cut(weights, mesh, case.output)
        with Collectives() as backward:
            (output if weights is None else (local * rank["weights"]).sum()).backward()
    with Collectives() as late:
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                parameter.grad.redistribute(placements=parameter.placements)
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients, right)
    if inputs[0].requires_grad:
        rank["input_gradient"] = plain(inputs[0].grad)
        torch.testing.assert_close(rank["input_gradient"], cut(right_input_gradient, mesh, case.input))
    return {
        "state": state,
        "gradients": gradients,
        "forward": forward.counts(),
        "backward": backward.counts(),
        "late": late.counts(),
        "rank": rank,
    }


def each_case():
    for ranks in (2, 4):
        for case in all_cases():
            for seed in SEEDS:
                yield ranks, case, seed


def run_cases():
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "tp"))
    meshes = {2: grid["tp"], 4: init_device_mesh("cpu", (4,))}
    results = []
    for ranks, case, seed in each_case():
        name = f"{case.name()} on {ranks} ranks"
        results.append(unless_refused(name, lambda: run_case(case, meshes[ranks], seed)))  # noqa: B023  called at once
    return results


def merged(by_rank):
    cases = []
    for (ranks, case, seed), parts in zip(each_case(), zip(*by_rank)):
        if any(part is None for part in parts):
            continue
        first = parts[0]
        cases.append(
            {
                "name": f"{case.name()} on {ranks} ranks, seed {seed}",
                "model": case.model,
                "arguments": case.arguments,
                "world_size": ranks,
                "plan": case.plan,
                "has_loss_parallel": case.has_loss_parallel,
                **{key: value for key, value in first.items() if key != "rank"},
                "ranks": [part["rank"] for part in parts[:ranks]],
            }
        )
    return cases


if __name__ == "__main__":
    torch.save(merged(run_on_ranks(run_cases)), sys.argv[1])
