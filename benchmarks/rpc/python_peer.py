"""The same work by torch.distributed.rpc over TensorPipe, for the benchmark `rpc`. Prints what worker.cpp prints.

One process per rank, with the launcher's variables set; one of them calls, the others serve.
"""

import argparse
import os
import signal
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.nn.parallel import DistributedDataParallel

IN_FLIGHT = 100
WIDTH = 64
PATIENCE = 300

stop_called = threading.Event()


def plus_one(x):
    return x + 1


def stop():
    stop_called.set()


def hang():
    time.sleep(PATIENCE)


lines = []


def measure(what, calls, run, samples):
    for sample in range(samples + 1):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        took = (time.perf_counter() - start) * 1000
        if sample > 0:
            lines.append(f"{what} {took / calls:.6f}")


def measure_round_trip(size, calls, tensor, samples):
    assert torch.equal(rpc.rpc_sync("worker1", plus_one, args=(tensor,)), tensor + 1)
    measure(f"round-trip-{size}", calls, lambda: rpc.rpc_sync("worker1", plus_one, args=(tensor,)), samples)


def call(samples):
    small = torch.ones(8, WIDTH)
    linear = RemoteModule("worker1/cpu", torch.nn.Linear, args=(WIDTH, WIDTH))
    leaf = torch.ones(8, WIDTH, requires_grad=True)

    def in_flight():
        torch.futures.wait_all([rpc.rpc_async("worker1", plus_one, args=(small,)) for _ in range(IN_FLIGHT)])

    def step():
        with dist_autograd.context() as context:
            loss = linear.forward(leaf).sum()
            dist_autograd.backward(context, [loss])
            return leaf in dist_autograd.get_gradients(context)

    measure_round_trip("8x64", 50, small, samples)
    measure("in-flight", 1, in_flight, samples)
    assert step()
    measure("forward-backward", 50, step, samples)
    measure_round_trip("1MiB", 5, torch.ones(1 << 18), samples)
    measure_round_trip("64MiB", 1, torch.ones(1 << 24), samples)


# The hybrid example: examples/hybrid/hybrid_model.h.
EMBEDDING_ROWS, SPARSE, DENSE, HIDDEN, OUTPUT, TRAINERS = 2, 3, 2, 3, 1, 4
MASTER = TRAINERS + 1


class FeatureSet(NamedTuple):
    dense_features: torch.Tensor
    sparse_features: torch.Tensor
    values: torch.Tensor


def make_linear(inputs, outputs):
    linear = torch.nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        linear.weight.fill_(1)
        linear.weight[0][0] = -1
    return linear


class RemoteEM(torch.nn.Module):
    def __init__(self, rows, size):
        super().__init__()
        self.em = torch.nn.EmbeddingBag(rows, size, _weight=torch.full((rows, size), 0.5))

    def forward(self, ids):
        return self.em(ids, torch.arange(ids.shape[0]))


class RemoteNet(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.fc = make_linear(inputs, outputs)

    def forward(self, value):
        return torch.relu(self.fc(value))


class HybridModel(torch.nn.Module):
    def __init__(self, embedding, net):
        super().__init__()
        self.embedding = embedding
        self.net = net
        self.fc1 = make_linear(DENSE, DENSE)
        self.fc2 = make_linear(HIDDEN, OUTPUT)

    def forward(self, batch):
        sparse = self.embedding.rpc_sync().forward(batch.sparse_features)
        x = torch.cat((self.fc1(batch.dense_features), sparse), 1)
        return self.fc2(self.net.rpc_sync().forward(x))


class Trainer:
    def __init__(self, embedding, net):
        model = HybridModel(embedding, net)
        self.parameters = [*model.fc1.parameters(), *model.fc2.parameters()]
        self.ddp = DistributedDataParallel(model, process_group=dist.new_group(list(range(TRAINERS))))

    def train_batch(self, batch):
        with dist_autograd.context() as context:
            loss = (self.ddp(batch) * batch.values).sum()
            dist_autograd.backward(context, [loss])
            gradients = dist_autograd.get_gradients(context)
            return tuple(gradients[parameter] for parameter in self.parameters)


def training_examples():
    rows = [
        (x, y, z, value)
        for value in (-1.0, 1.0)
        for x in (-value, value)
        for y in (value, -value)
        for z in (0, 1)
    ]
    dense = torch.tensor([(x, y) for x, y, _, _ in rows])
    sparse = torch.tensor([z for _, _, z, _ in rows])
    values = torch.tensor([value for _, _, _, value in rows])
    return [FeatureSet(*parts) for parts in zip(dense.split(4), sparse.split(4), values.split(4))]


def lead_hybrid(samples):
    server = f"worker{TRAINERS}"
    embedding = rpc.remote(server, RemoteEM, args=(EMBEDDING_ROWS, SPARSE))
    net = rpc.remote(server, RemoteNet, args=(DENSE + SPARSE, HIDDEN))
    trainers = [rpc.remote(f"worker{rank}", Trainer, args=(embedding, net)) for rank in range(TRAINERS)]
    dist.new_group(list(range(TRAINERS)))
    examples = training_examples()

    def step():
        return torch.futures.wait_all(
            [trainer.rpc_async().train_batch(examples[rank]) for rank, trainer in enumerate(trainers)]
        )

    assert all(each.count_nonzero() == 0 for gradients in step() for each in gradients)
    measure("hybrid", 2, step, samples)


def kill_callee():
    victim = rpc.rpc_sync("worker1", os.getpid)
    answer = rpc.rpc_async("worker1", hang)
    time.sleep(0.2)  # it is under way there
    start = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    try:
        answer.wait()
    except RuntimeError:
        lines.append(f"kill {(time.perf_counter() - start) * 1000:.6f}")


def deliver():
    # The benchmark has what it needs, even if this process aborts while it ends.
    print(*lines, "delivered", sep="\n", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--which", choices=["calls", "hybrid", "kill"], required=True)
    parser.add_argument("--samples", type=int, default=20)
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_hybrid = options.which == "hybrid"
    is_caller = rank == (MASTER if is_hybrid else 0)
    if is_hybrid:
        dist.init_process_group("gloo")
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=PATIENCE),
    )
    if options.which == "kill":
        if is_caller:
            kill_callee()
            deliver()
        else:
            stop_called.wait()
        rpc.shutdown(graceful=False)
        return
    if is_caller:
        lead_hybrid(options.samples) if is_hybrid else call(options.samples)
        deliver()
        for each in range(world_size):
            if each != rank:
                rpc.rpc_sync(f"worker{each}", stop)
    else:
        if is_hybrid and rank == TRAINERS:
            dist.new_group(list(range(TRAINERS)))
        stop_called.wait()
    rpc.shutdown()


if __name__ == "__main__":
    main()
