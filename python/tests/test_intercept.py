"""The fallback that Lockstep owns in the dispatcher, in a process where Python's torch has its own: neither minds the other."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep_torch import _lockstep_torch
from ranks import FORK, run_ranks
from test_training import Mlp, adam, train


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A subclass that answers for itself, as DTensor does."""

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)

    def __init__(self, value):
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [arg.value if isinstance(arg, cls) else arg for arg in args]
        return func(*args, **(kwargs or {}))


def in_process_of_its_own(body):
    """Runs it in a child: the fallback stays registered for the rest of a process."""

    def guarded(queue):
        try:
            body()
            queue.put(None)
        except BaseException as error:
            queue.put(repr(error))

    queue = FORK.Queue()
    process = FORK.Process(target=guarded, args=(queue,))
    process.start()
    failure = queue.get(timeout=60)
    process.join(60)
    assert failure is None, failure


def check_python_works():
    a = torch.arange(12.0).reshape(3, 4).requires_grad_()
    (a @ a.T).sum().backward()
    assert a.grad is not None
    with Names() as mode:
        (a * 2).sum()
    assert mode.names == ["aten::mul.Tensor", "aten::sum"]
    assert torch.equal(Wrapped(torch.ones(3)) + 1, torch.full((3,), 2.0))
    assert torch.func.vmap(lambda x: x.sum())(torch.ones(2, 3)).tolist() == [3, 3]
    assert torch.func.grad(lambda x: (x**2).sum())(torch.ones(2)).tolist() == [2, 2]
    with torch.device("meta"):
        assert nn.Linear(3, 2).weight.is_meta
    with torch._subclasses.FakeTensorMode():
        assert nn.Linear(3, 2)(torch.ones(1, 3)).shape == (1, 2)
    with torch.inference_mode():
        assert torch.ones(2).add(1).sum().item() == 4


def test_python_operators_work_beside_the_fallback():
    def body():
        torch.set_num_threads(1)
        check_python_works()
        _lockstep_torch.install_interceptor()
        _lockstep_torch.install_interceptor()  # once is enough
        check_python_works()

    in_process_of_its_own(body)


def test_operators_of_python_are_counted():
    def body():
        torch.set_num_threads(1)
        a = torch.ones(4, 4, requires_grad=True)

        def work():
            with Names() as mode:
                (a @ a).sum().backward()
            assert "aten::mm" in mode.names

        table = _lockstep_torch.count_operators(work)
        assert "aten::mm" in table and "384" in table, table
        with pytest.raises(ZeroDivisionError):
            _lockstep_torch.count_operators(lambda: 1 / 0)
        check_python_works()

    in_process_of_its_own(body)


def test_ddp_trains_the_same_beside_the_fallback(tmp_path):
    def body(rank):
        return train(rank, DistributedDataParallel(Mlp()), adam)

    def body_beside(rank):
        _lockstep_torch.install_interceptor()
        return body(rank)

    expected = run_ranks(body, 2, tmp_path / "plain", backend="gloo")
    assert run_ranks(body_beside, 2, tmp_path / "beside", backend="gloo") == expected
    assert run_ranks(body_beside, 2, tmp_path / "shm", backend="shm") == expected


def test_a_second_owner_of_the_key_is_named():
    def body():
        library = torch.library.Library("_", "IMPL", "DeferredInit")
        library.fallback(torch.library.fallthrough_kernel)
        with pytest.raises(RuntimeError, match="only one"):
            _lockstep_torch.install_interceptor()

    in_process_of_its_own(body)
