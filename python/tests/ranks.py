"""Runs a function on several ranks, each a process of its own, and fails the test with what the ranks say.

Ranks are forked, so bodies may be local functions and nothing is imported again. That is allowed because the process that
runs pytest never computes with torch, hence has none of its threads.
"""

import datetime
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist

import lockstep_torch  # noqa: F401

TIMEOUT_S = 60  # of one run; its ranks show their stacks a little earlier
FORK = multiprocessing.get_context("fork")


def _rank_main(body, rank, world, backend, folder):
    log = open(folder / f"log{rank}", "w", buffering=1)
    sys.stdout = sys.stderr = log  # not what pytest put there
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(TIMEOUT_S - 10, file=log)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=TIMEOUT_S - 20)
        )
        torch.save(body(rank), folder / f"result{rank}")
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def run_ranks(body, world, folder, *, backend="shm", killed=()):
    """Calls body(rank) on `world` ranks within a process group; returns what each returned, None for a rank in `killed`.

    Those must be ended by SIGKILL, all others must end with exit code 0, and all within TIMEOUT_S.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        FORK.Process(target=_rank_main, args=(body, rank, world, backend, folder), name=f"rank {rank}")
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT_S
    hung = []
    for rank, process in enumerate(processes):
        process.join(max(0, deadline - time.monotonic()))
        if process.is_alive():
            hung.append(rank)
            process.kill()
            process.join()
    expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(world)]
    if hung or [process.exitcode for process in processes] != expected:
        logs = "".join(f"--- rank {rank}:\n{(folder / f'log{rank}').read_text()}" for rank in range(world))
        raise AssertionError(
            f"exit codes {[process.exitcode for process in processes]}, expected {expected}; "
            f"hung after {TIMEOUT_S} s: {hung or 'none'}\n{logs}"
        )
    return [None if rank in killed else torch.load(folder / f"result{rank}") for rank in range(world)]
