"""Python's own data parallelism over shm gives the losses it gives over gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks

STEPS = 20


class Mlp(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), norm(32), nn.Linear(32, 17), nn.Tanh())
        self.head = nn.Linear(17, 5)

    def forward(self, batch):
        return self.head(self.layers(batch))


class TwoHeads(Mlp):
    """Uses one head or the other, so that half of the steps leave a gradient out."""

    def __init__(self):
        super().__init__()
        self.other_head = nn.Linear(17, 5)

    def forward(self, batch, use_other):
        hidden = self.layers(batch)
        return self.other_head(hidden) if use_other else self.head(hidden)


def train(rank, model, make_optimizer, *, arguments=lambda step: ()):
    """The losses of STEPS steps on batches that differ by rank."""
    optimizer = make_optimizer(model)
    random = torch.Generator().manual_seed(100 + rank)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(8, 13, generator=random)
        loss = nn.functional.mse_loss(model(batch, *arguments(step)), batch[:, :5])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def check_same_losses(body, world, folder):
    """Of two ranks, sums have one order only, so all bits are equal; of more, the order is the backend's own."""
    shm = run_ranks(body, world, folder / "shm", backend="shm")
    gloo = run_ranks(body, world, folder / "gloo", backend="gloo")
    tolerance = dict(rtol=0, atol=0) if world == 2 else dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(shm), torch.tensor(gloo), **tolerance)
    assert all(losses[-1] < losses[0] for losses in shm)


def test_ddp(world, tmp_path):
    def body(rank):
        return train(rank, DistributedDataParallel(Mlp()), adam)

    check_same_losses(body, world, tmp_path)


def test_ddp_with_a_device_qualified_backend(tmp_path):
    def body(rank):
        return train(rank, DistributedDataParallel(Mlp()), adam)

    assert run_ranks(body, 2, tmp_path / "device", backend="cpu:shm") == run_ranks(body, 2, tmp_path / "plain")


def test_ddp_with_many_buckets_that_are_views(world, tmp_path):
    def body(rank):
        model = DistributedDataParallel(Mlp(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        return train(rank, model, adam)

    check_same_losses(body, world, tmp_path)


def test_ddp_with_unused_parameters(world, tmp_path):
    def body(rank):
        model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
        return train(rank, model, adam, arguments=lambda step: ((step + rank) % 2 == 0,))

    check_same_losses(body, world, tmp_path)


def test_ddp_with_a_python_hook(world, tmp_path):
    def average(group, bucket):
        group = group or dist.group.WORLD
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size(group)), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def body(rank):
        model = DistributedDataParallel(Mlp(), bucket_cap_mb=0.001)
        model.register_comm_hook(None, average)
        return train(rank, model, adam)

    check_same_losses(body, world, tmp_path)


def test_ddp_join_with_uneven_inputs(world, tmp_path):
    def body(rank):
        model = DistributedDataParallel(nn.Linear(3, 2))
        with model.join():
            for _ in range(3 + rank):
                model(torch.ones(4, 3)).sum().backward()
        return [parameter.grad.sum().item() for parameter in model.parameters()]

    shm = run_ranks(body, world, tmp_path / "shm", backend="shm")
    assert shm == run_ranks(body, world, tmp_path / "gloo", backend="gloo")


def test_zero_redundancy_optimizer(world, tmp_path):
    def body(rank):
        model = DistributedDataParallel(Mlp())
        return train(rank, model, lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))

    check_same_losses(body, world, tmp_path)


def test_zero_redundancy_optimizer_state_goes_to_one_rank(world, tmp_path):
    def body(rank):
        model = DistributedDataParallel(Mlp())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        train(rank, model, lambda model: optimizer)
        optimizer.consolidate_state_dict(to=1)
        return len(optimizer.state_dict()["state"]) if rank == 1 else 0

    assert run_ranks(body, world, tmp_path)[1] == len(list(Mlp().parameters()))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_fsdp2(world, reshard_after_forward, tmp_path):
    def body(rank):
        model = Mlp()
        mesh = init_device_mesh("cpu", (world,))
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return train(rank, model, adam)

    check_same_losses(body, world, tmp_path)


def test_fsdp2_in_bfloat16(world, tmp_path):
    def body(rank):
        model = Mlp(norm=nn.LayerNorm)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
        return train(rank, model, adam)

    shm = run_ranks(body, world, tmp_path / "shm", backend="shm")
    gloo = run_ranks(body, world, tmp_path / "gloo", backend="gloo")
    torch.testing.assert_close(torch.tensor(shm), torch.tensor(gloo), rtol=0.05, atol=0.05)


def test_fsdp2_hybrid(tmp_path):
    def body(rank):
        model = Mlp()
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        return train(rank, model, adam)

    check_same_losses(body, 4, tmp_path)


@pytest.mark.real_shm
def test_fsdp2_in_memory_of_the_group(world, tmp_path):
    def body(rank):
        model = Mlp()
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        if dist.get_backend() == "shm":
            model.set_allocate_memory_from_process_group_for_comm(True)
        return train(rank, model, adam)

    check_same_losses(body, world, tmp_path)


def test_fsdp1(world, tmp_path):
    def body(rank):
        return train(rank, FullyShardedDataParallel(Mlp(), device_id=torch.device("cpu")), adam)

    check_same_losses(body, world, tmp_path)


def test_dtensors(world, tmp_path):
    def body(rank):
        mesh = init_device_mesh("cpu", (world,))
        whole = torch.arange(world * 6.0).reshape(world * 2, 3)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(sharded.full_tensor(), whole)
        assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local(), whole)

    run_ranks(body, world, tmp_path)
