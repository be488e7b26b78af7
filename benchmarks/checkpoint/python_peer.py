"""Checkpoints by Python's torch.distributed.checkpoint: the peer of checkpoint.cpp, which starts it once per rank.

Prints "<what> <number>" lines on rank 0: milliseconds from the moment all ranks begin until all have ended, or MB.
"""

import argparse
import os
import shutil
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def made(layers, width, mesh):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def say(what, value):
    if dist.get_rank() == 0:
        print(what, value, flush=True)


def timed(what, action):
    dist.barrier()
    start = time.perf_counter()
    result = action()
    dist.barrier()
    say(what, 1e3 * (time.perf_counter() - start))
    return result


def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1e3 for line in status if line.startswith(field + ":"))


def extra_memory(what, action):
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = resident("VmRSS")
    action()
    say(what, resident("VmHWM") - before)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--path")
    parser.add_argument("--what")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    state = made(options.layers, options.width, init_device_mesh("cpu", (dist.get_world_size(),)))
    path = options.path
    if options.what == "prepare":
        dcp.save(state, checkpoint_id=path)
    elif options.what == "reshard":
        for _ in range(options.samples):
            timed("reshard", lambda: dcp.load(state, checkpoint_id=path))
    else:
        for sample in range(options.samples):
            target = f"{path}-{sample}"
            timed("save", lambda: dcp.save(state, checkpoint_id=target))
            timed("load", lambda: dcp.load(state, checkpoint_id=target))
            future = timed("stall", lambda: dcp.async_save(state, checkpoint_id=target + "-async"))
            future.result()
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(target)
                shutil.rmtree(target + "-async")
            dist.barrier()
        extra_memory("memory", lambda: dcp.save(state, checkpoint_id=path))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
            whole = {name: torch.zeros(options.width, options.width) for name in range(3 * options.layers)}
            start = time.perf_counter()
            torch.save(whole, path + ".pt")
            say("torch.save", 1e3 * (time.perf_counter() - start))
            os.unlink(path + ".pt")
        dist.barrier()
    if dist.get_rank() == 0:
        print("delivered", flush=True)
    dist.destroy_process_group()


main()
