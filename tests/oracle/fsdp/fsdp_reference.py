"""Trains small models with Python's fully_shard and FullyShardedDataParallel over gloo and writes down what is to be
compared: inputs, initial state, losses, norms, gradients before the last step and parameters after it.

Usage: fsdp_reference.py FILE. The file holds plain dicts, lists and tensors, for torch::pickle_load: a list of cases,
each with what differs by rank in one entry per rank. Four ranks run them all; cases for two ranks run on both pairs, of
which the first counts.
"""

import contextlib
import os
import sys
import tempfile
import traceback
import warnings

import torch
import torch._dynamo  # noqa: F401  what fully_shard imports when it is first used
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_models import MODELS

WORLD = 4
STEPS = 3
LR = 0.05


class Case:
    def __init__(self, api, model, ranks, **options):
        self.api = api  # "fully_shard" or "fsdp1"
        self.model = model
        self.ranks = ranks
        # "reshard_after_forward": bool or number of ranks, "low_precision", "accumulates", "is_hybrid", "is_flat",
        # "is_replicated": bool, "clips": max norm
        self.options = options


def all_cases():
    cases = []
    for api in ("fully_shard", "fsdp1"):
        for ranks in (2, 4):
            for model in MODELS:
                cases.append(Case(api, model, ranks))
            cases.append(Case(api, "mlp_stack", ranks, low_precision=True))
            cases.append(Case(api, "transformer", ranks, accumulates=True))
            cases.append(Case(api, "mlp_stack", ranks, clips=0.01))
        cases.append(Case(api, "nested", 4, reshard_after_forward=True))
        cases.append(Case(api, "nested", 4, reshard_after_forward=False))
        # FullyShardedDataParallel clips no doubles.
        large = "transformer" if api == "fully_shard" else "nested"
        cases.append(Case(api, large, 4, reshard_after_forward=False, clips=0.5))
        cases.append(Case(api, "non_uniform", 4, clips=0.01))
        cases.append(Case(api, "nested", 4, low_precision=True, accumulates=True))
        cases.append(Case(api, "mlp_stack", 4, accumulates=True, reshard_after_forward=False))
        cases.append(Case(api, "nested", 4, is_hybrid=True))
        cases.append(Case(api, "mlp_stack", 4, is_hybrid=True, accumulates=True, clips=0.01))
    cases.append(Case("fully_shard", "nested", 4, reshard_after_forward=2))
    cases.append(Case("fully_shard", "transformer", 4, reshard_after_forward=2))
    for model in ("nested", "transformer", "mlp_stack", "double_linear"):
        cases.append(Case("fsdp1", model, 4, is_flat=True))
    cases.append(Case("fsdp1", "mlp_stack", 2, is_flat=True, accumulates=True, clips=0.01))
    cases.append(Case("fsdp1", "mlp_stack", 2, is_flat=True, low_precision=True))
    cases.append(Case("fsdp1", "nested", 4, is_replicated=True))
    return cases


def with_fully_shard(case, model, mesh):
    options = {"mesh": mesh if case.options.get("is_hybrid") else mesh["shard"]}
    if "reshard_after_forward" in case.options:
        options["reshard_after_forward"] = case.options["reshard_after_forward"]
    if case.options.get("low_precision"):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name in model.UNITS:
        fully_shard(model.get_submodule(name), **options)
    fully_shard(model, **options)
    return model


def with_fsdp1(case, model, mesh):
    frees = case.options.get("reshard_after_forward", True)
    options = {"device_mesh": mesh["shard"], "device_id": torch.device("cpu")}
    options["use_orig_params"] = not case.options.get("is_flat")
    strategy = ShardingStrategy.FULL_SHARD if frees else ShardingStrategy.SHARD_GRAD_OP
    if case.options.get("is_hybrid"):
        options["device_mesh"] = mesh
        strategy = ShardingStrategy.HYBRID_SHARD
    if case.options.get("is_replicated"):
        strategy = ShardingStrategy.NO_SHARD
    if case.options.get("low_precision"):
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units = {model.get_submodule(name) for name in model.UNITS}
    return FullyShardedDataParallel(
        model, auto_wrap_policy=CustomPolicy(lambda module: module in units), sharding_strategy=strategy, **options
    )


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "")


def whole(tensor):
    """Of one that fully_shard has cut."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()


def whole_gradients(case, model):
    """By name; none of frozen parameters, which FullyShardedDataParallel shows with zeros."""
    if case.api == "fully_shard":
        return {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        return {clean(name): each.grad.clone() for name, each in trained if each.grad is not None}


def whole_parameters(case, model):
    if case.api == "fully_shard":
        return {name: whole(each) for name, each in model.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(model):
        return {clean(name): each.detach().clone() for name, each in model.named_parameters()}


@contextlib.contextmanager
def without_sync(case, model):
    if case.api == "fsdp1":
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def clipped(case, model):
    if case.api == "fsdp1":
        return model.clip_grad_norm_(case.options["clips"])
    return whole(torch.nn.utils.clip_grad_norm_(model.parameters(), case.options["clips"]))


def run_case(case, number, line, grid):
    """On four ranks in a line, on a grid, or on both pairs of the grid."""
    mesh = grid if case.ranks == 2 or case.options.get("is_hybrid") else line
    rank = dist.get_rank() % case.ranks
    torch.manual_seed(number)
    plain = MODELS[case.model]()
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    model = (with_fully_shard if case.api == "fully_shard" else with_fsdp1)(case, plain, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    result = {"inputs": [], "losses": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = 2 if case.options.get("accumulates") else 1
        for batch in range(batches):
            generator = torch.Generator().manual_seed(1000 * number + 100 * step + 10 * batch + rank)
            inputs = plain.inputs(generator)
            skips = batch + 1 < batches
            with without_sync(case, model) if skips else contextlib.nullcontext():
                loss = plain.loss(inputs, model(*inputs))
                loss.backward()
            result["inputs"].append(inputs)
            result["losses"].append(loss.detach())
        if "clips" in case.options:
            result["norms"].append(clipped(case, model).detach())
        if step + 1 == STEPS and not case.options.get("is_flat"):
            result["gradients"] = whole_gradients(case, model)
            if case.api == "fully_shard":
                named = model.named_parameters()
                result["local_gradients"] = {name: local(each.grad) for name, each in named if each.grad is not None}
        optimizer.step()
    result["parameters"] = whole_parameters(case, model)
    result["state"] = state
    return result


def run_rank(rank, directory):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    line = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("shard",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = [run_case(case, number, line, grid) for number, case in enumerate(all_cases())]
    torch.save(results, f"{directory}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def run_child(*arguments):
    """Ends the process, whatever happens: what follows in main() is the parent's."""
    try:
        run_rank(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def merged(directory):
    ranks = [torch.load(f"{directory}/{rank}") for rank in range(WORLD)]
    alike = ["state", "gradients", "parameters"]
    cases = []
    for number, case in enumerate(all_cases()):
        first = ranks[0][number]
        name = " ".join([case.api, case.model, f"on {case.ranks} ranks", str(case.options) if case.options else ""])
        cases.append(
            {
                "name": name.strip(),
                "model": case.model,
                "world_size": case.ranks,
                "options": dict(case.options),
                **{key: first.get(key, {}) for key in alike},
                "ranks": [
                    {key: value for key, value in ranks[rank][number].items() if key not in alike}
                    for rank in range(case.ranks)
                ],
            }
        )
    return cases


def main():
    with tempfile.TemporaryDirectory() as directory:
        # Forked before anything has threads: modules are imported once.
        pids = []
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                run_child(rank, directory)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
        torch.save(merged(directory), sys.argv[1])


if __name__ == "__main__":
    main()
