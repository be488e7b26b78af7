"""Every collective that torch.distributed offers on the CPU gives what gloo gives, in the same processes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ranks import run_ranks

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]


def values(rank, count, dtype=torch.float32):
    """Small whole numbers, other ones on each rank: sums of them are exact in every dtype and order."""
    return ((torch.arange(count) * (rank + 3)) % 7 + 1).to(dtype)


def copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


class Both:
    """Does the same over shm and over gloo, and compares."""

    def __init__(self, ranks=None):
        self.shm = dist.new_group(ranks)
        self.gloo = dist.new_group(ranks, backend="gloo")

    def check(self, operation, *arguments, **options):
        """operation(group, …) changes or returns tensors; it is given its own copies."""
        results = []
        for group in (self.shm, self.gloo):
            copies = [
                [copied(one) for one in argument] if isinstance(argument, list) else copied(argument)
                for argument in arguments
            ]
            returned = operation(*copies, group=group, **options)
            assert returned is None, "a collective that blocks returns nothing"
            results.append([argument for argument in copies if isinstance(argument, (torch.Tensor, list))])
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_all_reduce_with_every_op_and_dtype(world, tmp_path):
    def body(rank):
        both = Both()
        for dtype in FLOATS + INTEGERS:
            ops = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
            ops += [ReduceOp.AVG] if dtype.is_floating_point else [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
            for op in ops:
                for count in (0, 1, 7, 1000):
                    both.check(dist.all_reduce, values(rank, count, dtype), op=op)

    run_ranks(body, world, tmp_path)


def test_all_reduce_of_any_layout(world, tmp_path):
    def body(rank):
        both = Both()
        both.check(dist.all_reduce, torch.tensor(rank + 1.0))
        both.check(dist.all_reduce, values(rank, 300_000))
        both.check(dist.all_reduce, values(rank, 12).reshape(3, 4))
        both.check(dist.all_reduce, torch.complex(values(rank, 5), values(rank + 1, 5)))

    run_ranks(body, world, tmp_path)


def test_async_work_and_futures(world, tmp_path):
    def body(rank):
        total = sum(range(1, world + 1))
        works = []
        tensors = [torch.full((10,), rank + 1.0) for _ in range(8)]
        for tensor in tensors:
            works.append(dist.all_reduce(tensor, async_op=True))
        for work in reversed(works):
            assert work.wait()
            assert work.is_completed()
        assert all((tensor == total).all() for tensor in tensors)

        doubled = dist.all_reduce(torch.full((3,), rank + 1.0), async_op=True).get_future().then(
            lambda future: future.value()[0] * 2
        )
        assert (doubled.wait() == 2 * total).all()

    run_ranks(body, world, tmp_path)


def test_work_that_nobody_keeps(tmp_path):
    # The last reference to the first tensor is dropped by a thread of the backend, which takes the GIL for it.
    def body(rank):
        for _ in range(50):
            dist.all_reduce(torch.ones(10), async_op=True)
            work = dist.all_reduce(torch.ones(10), async_op=True)
            while not work.is_completed():
                pass

    run_ranks(body, 2, tmp_path)


def test_coalescing_manager(world, tmp_path):
    def body(rank):
        both = Both()

        def reduce_all(tensors, group):
            with dist._coalescing_manager(group):
                for tensor in tensors:
                    dist.all_reduce(tensor, group=group)

        def reduce_all_later(tensors, group):
            with dist._coalescing_manager(group, async_ops=True) as coalesced:
                for tensor in tensors:
                    dist.all_reduce(tensor, group=group)
            coalesced.wait()

        def reduce_scatter_all(outputs, inputs, group):
            with dist._coalescing_manager(group):
                for output, tensor in zip(outputs, inputs):
                    dist.reduce_scatter_tensor(output, tensor, group=group)

        def gather_all(outputs, inputs, group):
            with dist._coalescing_manager(group):
                for output, tensor in zip(outputs, inputs):
                    dist.all_gather_into_tensor(output, tensor, group=group)

        tensors = [values(rank, count) for count in (1, 5, 100)]
        both.check(reduce_all, tensors)
        both.check(reduce_all_later, tensors)
        both.check(gather_all, [torch.zeros(world * 5), torch.zeros(world)], [values(rank, 5), values(rank, 1)])
        both.check(reduce_scatter_all, [torch.zeros(5), torch.zeros(1)], [values(rank, world * 5), values(rank, world)])

    run_ranks(body, world, tmp_path)


def test_rooted_collectives_from_every_root(world, tmp_path):
    def body(rank):
        both = Both()

        def reduce(tensor, root, group):
            dist.reduce(tensor, root, group=group)
            if rank != root:
                tensor.zero_()  # what is left behind there means nothing

        for root in range(world):
            is_root = rank == root
            both.check(dist.broadcast, values(rank, 9), root)
            both.check(reduce, values(rank, 9), root)
            outputs = [torch.zeros(9) for _ in range(world)] if is_root else None
            both.check(dist.gather, values(rank, 9), outputs, root)
            inputs = [values(rank + other, 9) for other in range(world)] if is_root else None
            both.check(dist.scatter, torch.zeros(9), inputs, root)

    run_ranks(body, world, tmp_path)


def test_all_gather(world, tmp_path):
    def body(rank):
        both = Both()
        for dtype in FLOATS + INTEGERS + [torch.bool]:
            both.check(dist.all_gather, [torch.zeros(6, dtype=dtype) for _ in range(world)], values(rank, 6, dtype))
            both.check(dist.all_gather_into_tensor, torch.zeros(world * 6, dtype=dtype), values(rank, 6, dtype))
        both.check(dist.all_gather_into_tensor, torch.zeros(world * 2, 3), values(rank, 6).reshape(2, 3))

    run_ranks(body, world, tmp_path)


@pytest.mark.real_shm
def test_single_tensor_forms_also_stack(world, tmp_path):
    # Python documents both forms; gloo has the concatenated one only.
    def body(rank):
        stacked, concatenated = torch.zeros(world, 2, 3), torch.zeros(world * 2, 3)
        dist.all_gather_into_tensor(stacked, values(rank, 6).reshape(2, 3))
        dist.all_gather_into_tensor(concatenated, values(rank, 6).reshape(2, 3))
        assert torch.equal(stacked.reshape(-1, 3), concatenated)
        part = torch.zeros(2, 3)
        dist.reduce_scatter_tensor(part, stacked)
        assert torch.equal(part, values(rank, 6).reshape(2, 3) * world)

    run_ranks(body, world, tmp_path)


def test_reduce_scatter(world, tmp_path):
    def body(rank):
        both = Both()
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            both.check(dist.reduce_scatter_tensor, torch.zeros(5), values(rank, world * 5), op=op)
            both.check(dist.reduce_scatter, torch.zeros(5), [values(rank + other, 5) for other in range(world)], op=op)

    run_ranks(body, world, tmp_path)


def test_all_to_all(world, tmp_path):
    def body(rank):
        both = Both()
        both.check(dist.all_to_all_single, torch.zeros(world * 4), values(rank, world * 4))
        # Other numbers of rows for each pair; from rank 1 to rank 0 go none.
        sends = [to + rank + 1 if (to, rank) != (0, 1) else 0 for to in range(world)]
        receives = [source + rank + 1 if (rank, source) != (0, 1) else 0 for source in range(world)]
        rows = values(rank, sum(sends) * 3).reshape(-1, 3)
        both.check(dist.all_to_all_single, torch.zeros(sum(receives), 3), rows, receives, sends)

    run_ranks(body, world, tmp_path)


def test_all_to_all_of_lists(world, tmp_path):
    def body(rank):
        outputs, inputs = [torch.zeros(4) for _ in range(world)], [values(rank + to, 4) for to in range(world)]
        dist.all_to_all(outputs, inputs)
        # Not every release of gloo has it for lists.
        single = torch.zeros(4 * world)
        dist.all_to_all_single(single, torch.cat(inputs), group=dist.new_group(backend="gloo"))
        torch.testing.assert_close(torch.cat(outputs), single, rtol=0, atol=0)

    run_ranks(body, world, tmp_path)


@pytest.mark.real_shm
def test_all_to_all_of_lists_of_other_sizes(world, tmp_path):
    # gloo wants all of them to have one size.
    def body(rank):
        outputs = [torch.zeros(rank + source + 1) for source in range(world)]
        dist.all_to_all(outputs, [torch.full((rank + to + 1,), 10.0 * rank + to) for to in range(world)])
        for source, output in enumerate(outputs):
            assert (output == 10 * source + rank).all()

    run_ranks(body, world, tmp_path)


def test_send_and_receive(world, tmp_path):
    def body(rank):
        both = Both()
        right, left = (rank + 1) % world, (rank - 1) % world

        def blocking(tensor, group):
            if rank == 0:
                dist.send(tensor, 1, group=group)
            elif rank == 1:
                assert dist.recv(tensor, 0, group=group) == 0

        def around(sent, received, group):
            works = [dist.isend(sent, right, group=group, tag=4), dist.irecv(received, left, group=group, tag=4)]
            for work in works:
                work.wait()

        def tags_out_of_order(first, second, group):
            if rank == 0:
                works = [dist.isend(first, 1, group=group, tag=1), dist.isend(second, 1, group=group, tag=2)]
            elif rank == 1:
                works = [dist.irecv(second, 0, group=group, tag=2), dist.irecv(first, 0, group=group, tag=1)]
            else:
                works = []
            for work in works:
                work.wait()

        def batch(sent, received, group):
            operations = [dist.P2POp(dist.isend, sent, right, group), dist.P2POp(dist.irecv, received, left, group)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        both.check(blocking, values(rank, 5))
        both.check(around, values(rank, 5), torch.zeros(5))
        both.check(tags_out_of_order, values(rank, 5), values(rank + 1, 4))
        both.check(batch, values(rank, 300_000), torch.zeros(300_000))

    run_ranks(body, world, tmp_path)


def test_receive_from_any_rank(world, tmp_path):
    def body(rank):
        if rank != 0:
            dist.send(torch.full((3,), float(rank)), 0)
            return
        sources = set()
        for _ in range(1, world):
            tensor = torch.zeros(3)
            source = dist.recv(tensor)
            assert (tensor == source).all()
            sources.add(source)
        assert sources == set(range(1, world))

    run_ranks(body, world, tmp_path)


def test_barrier_waits_for_the_last(world, tmp_path):
    def body(rank):
        for late in range(world):
            marker = tmp_path / f"late{late}"
            if rank == late:
                marker.touch()
            dist.barrier()
            assert marker.exists()

    run_ranks(body, world, tmp_path)


def test_objects(world, tmp_path):
    def body(rank):
        mine = {"rank": rank, "text": "x" * (10 + 1000 * rank)}
        everyone = [{"rank": other, "text": "x" * (10 + 1000 * other)} for other in range(world)]

        gathered = [None] * world
        dist.all_gather_object(gathered, mine)
        assert gathered == everyone

        received = everyone if rank == 1 else [None] * world
        dist.broadcast_object_list(received, src=1)
        assert received == everyone

        at_root = [None] * world if rank == 0 else None
        dist.gather_object(mine, at_root, dst=0)
        assert rank != 0 or at_root == everyone

        part = [None]
        dist.scatter_object_list(part, everyone if rank == 0 else None, src=0)
        assert part == [mine]

    run_ranks(body, world, tmp_path)


def test_functional_collectives(world, tmp_path):
    import torch.distributed._functional_collectives as functional

    def body(rank):
        both = Both()
        results = []
        for group in (both.shm, both.gloo):
            tensor = values(rank, world * 4)
            results.append([
                functional.all_reduce(tensor, "sum", group) + 0,
                functional.all_gather_tensor(tensor, 0, group) + 0,
                functional.reduce_scatter_tensor(tensor, "sum", 0, group) + 0,
                functional.all_to_all_single(tensor, None, None, group) + 0,
                functional.broadcast(tensor, 1, group) + 0,
                *[one + 0 for one in functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group)],
                *[one + 0 for one in functional.all_gather_into_tensor_coalesced([tensor, tensor + 1], group)],
            ])
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)

    run_ranks(body, world, tmp_path)


def test_subgroups(tmp_path):
    def body(rank):
        pair = dist.new_group([0, 2])
        alone = dist.new_group([1])
        tensor = torch.tensor([rank + 1.0])
        if rank in (0, 2):
            dist.all_reduce(tensor, group=pair)
            dist.broadcast(tensor, src=2, group=pair)  # a rank of the world
        else:
            dist.all_reduce(tensor, group=alone)
            dist.barrier(group=alone)
        return tensor.item()

    assert run_ranks(body, 3, tmp_path) == [4, 2, 4]


def test_wrong_arguments_are_refused_here(tmp_path):
    def body(rank):
        for wrong in (
            lambda: dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2)),
            lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(3)),
            lambda: dist.all_gather([torch.zeros(2)], torch.zeros(2)),
            lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1], [2, 2]),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                wrong()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)  # the group is still good
        assert tensor == 2

    run_ranks(body, 2, tmp_path)
