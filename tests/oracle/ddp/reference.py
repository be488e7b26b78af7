"""Trains the cases of cases.py with Python's DistributedDataParallel over gloo and writes down everything there is to
compare: inputs, initial values, and losses, gradients, parameters, buffers and logging data after each step.

Usage: reference.py WORLD_SIZE FILE. The file holds plain dicts, lists and tensors, for torch::pickle_load.
"""

import contextlib
import copy
import datetime
import inspect
import os
import sys
import tempfile
import traceback
import warnings
from unittest import mock

import torch
import torch._dynamo  # noqa: F401  what DistributedDataParallel imports when it is first used
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import buckets
import cases
import low_precision
import packing

ROWS = 3  # of a rank's batch


def batch_of(model, generator):
    """Input and target."""
    sizes = (ROWS, *model.INPUT)
    if hasattr(model, "WORDS"):
        input = torch.randint(model.WORDS, sizes, generator=generator)
    else:
        input = torch.randn(sizes, generator=generator)
    return [input, torch.randn(ROWS, *model.OUTPUT, generator=generator)]


def new_model(case, seed):
    torch.manual_seed(seed)
    model = case.model()
    with torch.no_grad():
        # Anything but the zeros and ones that buffers begin with, for the first sync to show.
        for buffer in model.buffers():
            buffer.copy_(torch.rand(buffer.shape) * 8)
    for name in case.frozen:
        model.get_parameter(name).requires_grad_(False)
    if case.ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, case.ignored)
    return model.to(memory_format=torch.channels_last) if case.channels_last else model


def plain_gradient(grad):
    """As plain tensors: those of a sparse one are its coalesced indices and values."""
    if grad is None or not grad.is_sparse:
        return None if grad is None else grad.clone()
    merged = grad.clone().coalesce()
    return {"indices": merged.indices(), "values": merged.values()}


def gradients_of(model):
    return {name: plain_gradient(parameter.grad) for name, parameter in model.named_parameters()}


def copies(named):
    return {name: tensor.detach().clone() for name, tensor in named}


def state_of(model):
    return {"parameters": copies(model.named_parameters()), "buffers": copies(model.named_buffers())}


def flat_state_of(model):
    """All values of parameters and buffers, exactly, in one tensor."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    return torch.cat([_as_real(tensor).double().flatten() for tensor in tensors])


def _as_real(tensor):
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def log_of(ddp):
    """Without times."""
    return {key: value for key, value in ddp._get_ddp_logging_data().items() if "time" not in key}


def loss_of(model, batches, uses):
    """`batches` are pairs of input and target, one per forward."""
    return sum((model(input, uses) - target).pow(2).mean() for input, target in batches)


def run_step(ddp, step, batches, uses):
    if step["zero"] != "keep":
        ddp.zero_grad(set_to_none=step["zero"] == "none")
    scopes = {"train": contextlib.nullcontext, "local": lambda: ddp.no_sync(), "evaluate": torch.no_grad}
    with scopes[step["kind"]]():
        loss = loss_of(ddp, batches, uses)
        if step["kind"] != "evaluate":
            loss.backward()
            if isinstance(ddp, low_precision.LowPrecision):
                ddp.reduce()
    return loss.detach()


def wrapped(model, options):
    if "mixed_precision" in options:
        return low_precision.LowPrecision(model, options["mixed_precision"])
    return DistributedDataParallel(model, **options)


def local_gradients(model, batches, uses):
    """Of one backward on this rank alone."""
    alone = copy.deepcopy(model)
    loss_of(alone, batches, uses).backward()
    return gradients_of(alone)


def given_to(model, case, seed, rank, world):
    """Everything a rank begins with: its own weights, though rank 0's will rule, and the batches of each step."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    steps = []
    for step in cases.steps_of(case, world, seed):
        batches = [batch_of(model, generator) for _ in range(step["forwards"])]
        steps.append({"batches": batches, "uses": step["uses"][rank] if step["uses"] else []})
    return {"initial": state_of(model) if case.records_tensors else {}, "steps": steps}


def run_case(case, seed, rank, world):
    with mock.patch.dict(os.environ, case.environment):
        return train(case, seed, rank, world)


def train(case, seed, rank, world):
    """What this rank was given, and what came out of it."""
    model = new_model(case, 100 * seed + rank)
    given = given_to(model, case, seed, rank, world)
    results = {"steps": []}
    if case.records_tensors:
        results["local_gradients"] = local_gradients(model, given["steps"][0]["batches"], given["steps"][0]["uses"])
    ddp = wrapped(model, case.options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=case.learning_rate, momentum=case.momentum)
    results["log"] = log_of(ddp)
    if case.records_tensors:
        results["state"] = flat_state_of(model)
    scope = contextlib.nullcontext()
    if case.inputs:
        scope = ddp.join(divide_by_initial_world_size=case.divides_by_all)
    with scope:
        train_steps(case, ddp, optimizer, given["steps"], results, seed, rank, world)
    if case.inputs:
        results["final"] = flat_state_of(model)
    return {"given": given, "results": results}


def train_steps(case, ddp, optimizer, given, results, seed, rank, world):
    model = ddp.model if isinstance(ddp, low_precision.LowPrecision) else ddp.module
    count = case.inputs(rank) if case.inputs else None
    for step, mine in zip(cases.steps_of(case, world, seed)[:count], given):
        result = {"loss": run_step(ddp, step, mine["batches"], mine["uses"])}
        if case.records_tensors:
            result["gradients"] = gradients_of(model)
        if step["kind"] == "train":
            optimizer.step()
        if case.records_tensors:
            result["state"] = flat_state_of(model)
        result["log"] = {key: value for key, value in log_of(ddp).items() if results["log"].get(key) != value}
        results["steps"].append(result)


def is_supported(case):
    """Older releases lack some options, and refuse a cap of 0."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    is_old = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)
    return all(option in known for option in case.options) and not (is_old and case.options.get("bucket_cap_mb") == 0)


def supported_cases():
    """Each with a seed."""
    for case in filter(is_supported, cases.cases()):
        for seed in case.seeds:
            yield case, seed


def run_rank(rank, world, directory):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(os.path.join(directory, "store"), world)
    # Long enough for a busy machine; the others shall not wait half an hour for a rank that failed.
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=limit)
    results = [run_case(case, seed, rank, world) for case, seed in supported_cases()]
    torch.save(packing.packed(results), os.path.join(directory, f"rank{rank}"))
    dist.barrier()
    dist.destroy_process_group()


def facts_of(case, seed, world):
    """What holds for all ranks."""
    return {
        "family": case.family,
        "name": f"{case.name}, seed {seed}",
        "model": case.model.__name__,
        "options": case.options,
        "frozen": list(case.frozen),
        "ignored": list(case.ignored),
        "environment": case.environment,
        "has_one_model": case.has_one_model,
        "is_joined": case.inputs is not None,
        "divides_by_all": case.divides_by_all,
        "momentum": case.momentum,
        "learning_rate": case.learning_rate,
        "steps": [{key: step[key] for key in ("kind", "zero")} for step in cases.steps_of(case, world, seed)],
    }


def merged(world, directory):
    return {
        "cases": [facts_of(case, seed, world) for case, seed in supported_cases()],
        "ranks": [torch.load(os.path.join(directory, f"rank{rank}")) for rank in range(world)],
        "bucket_tables": packing.packed(buckets.tables()),
    }


def run_child(*arguments):
    """Ends the process, whatever happens: what follows in main() is the parent's."""
    try:
        run_rank(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main():
    world, result_path = int(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as directory:
        # Forked before anything has threads: modules are imported once.
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                run_child(rank, world, directory)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
        torch.save(merged(world, directory), result_path)


if __name__ == "__main__":
    main()
