"""Tables of bucket assignments as PyTorch makes them, for buckets_test.cpp."""

import random

import torch
import torch.distributed as dist

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64]


def random_table(rng):
    """One call's arguments and result. Sizes are numels: shapes do not matter."""
    count = rng.randrange(1, 20)
    dtypes = rng.sample(DTYPES, rng.randrange(1, 4))
    tensors = [torch.empty(rng.choice([0, 1, 2, 7, 16, 50, 100]), dtype=rng.choice(dtypes)) for _ in range(count)]
    caps = [rng.choice([0, 1, 40, 100, 400, 1000, 2**30]) for _ in range(rng.randrange(1, 4))]
    sparse = [rng.random() < 0.15 for _ in range(count)] if rng.random() < 0.5 else []
    order = rng.sample(range(count), count) if rng.random() < 0.5 else []
    buckets, limits = dist._compute_bucket_assignment_by_size(tensors, caps, sparse, order)
    return {"tensors": tensors, "caps": caps, "sparse": sparse, "order": order, "buckets": buckets, "limits": limits}


def tables(count=400, seed=5):
    rng = random.Random(seed)
    return [random_table(rng) for _ in range(count)]
