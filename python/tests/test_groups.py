"""Starting and ending: backend strings, the import itself, errors, and what is left when a group is gone."""

import datetime
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep_torch
from ranks import run_ranks


def run_python(program, **environment):
    """A Python of its own, as a user would start it."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).parent,  # not a folder with the package, which would go before PYTHONPATH
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("backend", ["shm", "SHM", "cpu:shm", "cpu:shm,cuda:gloo"])
def test_backend_strings(backend, tmp_path):
    def body(rank):
        assert "cpu:shm" in str(dist.get_backend_config())
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert (tensor == 2).all()

        inherited = dist.new_group([0, 1])
        dist.all_reduce(tensor, group=inherited)
        assert (tensor == 4).all()

    run_ranks(body, 2, tmp_path, backend=backend)


def test_subgroup_over_shm_in_a_world_over_gloo(tmp_path):
    def body(rank):
        group = dist.new_group([0, 1], backend="shm")
        assert dist.get_backend(group) == "shm"
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        assert (tensor == 2).all()

    run_ranks(body, 2, tmp_path, backend="gloo")


def test_a_world_of_one(tmp_path):
    def body(rank):
        tensor = torch.arange(3.0)
        dist.all_reduce(tensor)
        dist.barrier()
        gathered = [None]
        dist.all_gather_object(gathered, "alone")
        assert gathered == ["alone"]
        return tensor.tolist()

    assert run_ranks(body, 1, tmp_path) == [[0, 1, 2]]


def test_groups_one_after_the_other(tmp_path):
    def body(rank):
        for turn in range(5):
            group = dist.new_group([0, 1])
            tensor = torch.ones(1000)
            dist.all_reduce(tensor, group=group)
            assert (tensor == 2).all()
            dist.destroy_process_group(group)

    run_ranks(body, 2, tmp_path)


def test_every_rank_exits_with_0_and_leaves_nothing(tmp_path):
    program = """
        import os, threading, torch, torch.distributed as dist, lockstep_torch
        dist.init_process_group("shm")                     # from the environment, as under torchrun
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, async_op=True).wait()
        assert (tensor == 2).all()
        del backend
        if os.environ["DESTROY"] == "yes":
            dist.destroy_process_group()
            assert threading.active_count() == 1
    """
    before = set(Path("/dev/shm").iterdir())
    for destroy in ("yes", "no"):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "DESTROY": destroy,
        }
        ranks = [
            subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], env={**environment, "RANK": str(rank)})
            for rank in range(2)
        ]
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "lockstep" in path.name]


def test_import_twice_registers_once():
    done = run_python("""
        import importlib, torch.distributed as dist, lockstep_torch
        importlib.reload(lockstep_torch)
        assert dist.Backend.backend_list.count("shm") == 1
        assert dist.is_backend_available("shm")
        assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    """)
    assert done.returncode == 0, done.stderr


def test_refuses_another_torch(tmp_path):
    shutil.copytree(Path(lockstep_torch.__file__).parent, tmp_path / "lockstep_torch")
    (tmp_path / "lockstep_torch" / "_build.py").write_text('torch_version = "1.2.3+other"\n')
    done = run_python("import lockstep_torch", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "ImportError: lockstep_torch was built for torch 1.2.3+other, this is torch " in done.stderr
    assert "make python" in done.stderr


def test_a_rank_that_never_comes_is_an_error(tmp_path):
    done = run_python(f"""
        import datetime, torch.distributed as dist, lockstep_torch
        store = dist.FileStore({str(tmp_path / "store")!r}, 2)
        try:
            dist.init_process_group("shm", store=store, rank=0, world_size=2, timeout=datetime.timedelta(seconds=2))
        except RuntimeError as error:
            print("refused:", error)
    """)
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout


@pytest.mark.real_shm
def test_a_killed_rank_is_named(world, tmp_path):
    victim = world - 1

    def body(rank):
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=f"rank {victim}"):
            for _ in range(1000):
                dist.all_reduce(tensor)
        assert time.monotonic() - started < 10

    run_ranks(body, world, tmp_path, killed=[victim])


@pytest.mark.real_shm
def test_a_late_rank_is_named(tmp_path):
    def body(rank):
        for wait in (lambda group: dist.all_reduce(torch.ones(3), group=group), dist.barrier):
            group = dist.new_group(timeout=datetime.timedelta(seconds=2))
            if rank == 0:
                with pytest.raises(dist.DistBackendError, match="rank 1"):
                    wait(group)
            else:
                time.sleep(4)

    run_ranks(body, 2, tmp_path)


@pytest.mark.real_shm
def test_ranks_that_disagree_are_refused(tmp_path):
    def body(rank):
        sizes, kinds = dist.new_group(), dist.new_group()
        with pytest.raises(RuntimeError, match="rank"):
            dist.all_reduce(torch.ones(3 + rank), group=sizes)
        with pytest.raises(RuntimeError, match="rank"):
            if rank == 0:
                dist.all_reduce(torch.ones(3), group=kinds)
            else:
                dist.broadcast(torch.ones(3), 0, group=kinds)

    run_ranks(body, 2, tmp_path)


def test_debug_mode_of_torch(tmp_path):
    def body(rank):
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        group = dist.new_group()
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert (tensor == 2).all()
        with pytest.raises(RuntimeError, match="Detected mismatch"):
            dist.all_reduce(torch.ones(3 + rank), group=group)

    run_ranks(body, 2, tmp_path)


@pytest.mark.real_shm
def test_communication_memory_from_python(tmp_path):
    def body(rank):
        device = torch.device("cpu")
        backend = dist.group.WORLD._get_backend(device)
        assert backend.supports_tensor_alloc(device)
        tensor = backend.allocate_tensor(1000, dtype=torch.float32, device=device)
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        assert (tensor == 3).all()

    run_ranks(body, 2, tmp_path)
