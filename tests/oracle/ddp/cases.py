"""What the DDP oracle trains: models, options and the steps of every case. Families are the tests of training_test.cpp.

A step is a dict. kind: "train" (reduced, then the optimizer steps), "local" (under no_sync) or "evaluate" (no_grad).
zero: what happens to gradients before it: "none" (dropped), "zeros" or "keep". forwards: how many forwards the loss
sums up. uses: for every rank the branches it takes.
"""

import dataclasses
import random

import models

SEEDS = (1, 2)
MORE_SEEDS = (1, 2, 3, 4)  # of the plainest case of a family
TINY_CAP_MB = 100 / 2**20  # 100 bytes: a bucket or two per layer
# Dtypes of parameters, reduction and buffers.
LOW_PRECISION = {
    "bfloat16": ["bfloat16", "bfloat16", ""],
    "bfloat16 summed in float": ["bfloat16", "float32", ""],
    "half": ["float16", "float16", ""],
    "bfloat16 with buffers": ["bfloat16", "", "bfloat16"],
}


@dataclasses.dataclass
class Case:
    family: str
    name: str
    model: type
    options: dict
    steps: callable  # of world size and a random generator
    momentum: float = 0.9
    learning_rate: float = 0.05
    channels_last: bool = False
    frozen: tuple = ()  # names of parameters without gradients
    ignored: tuple = ()  # names of parameters and buffers to leave alone
    environment: dict = dataclasses.field(default_factory=dict)
    has_one_model: bool = True  # the same on all ranks, so that one process may have it too
    records_tensors: bool = True  # large models would make a large file
    seeds: tuple = SEEDS
    # In a Join scope: how many of the steps a rank has, and what gradients are divided by.
    inputs: callable = None  # of the rank
    divides_by_all: bool = True


def step(kind="train", zero="none", forwards=1, uses=()):
    return {"kind": kind, "zero": zero, "forwards": forwards, "uses": uses}


def plain(count=5, **fields):
    return lambda world, rng: [step(**fields) for _ in range(count)]


def accumulating(world, rng):
    """Micro-steps; gradients are dropped after each reduced one, and those of a reduced step may be added to."""
    kinds = ["local", "train", "local", "local", "train", "train", "train"]
    zeros = ["none", "keep", "none", "keep", "keep", "none", "keep"]
    return [step(kind, zero) for kind, zero in zip(kinds, zeros)]


def evaluating(world, rng):
    """Forwards without gradients between steps, and local ones: the next forward then syncs no buffers."""
    kinds = ["train", "evaluate", "train", "train", "local", "train", "evaluate", "evaluate", "train"]
    return [step(kind) for kind in kinds]


def accumulating_late(world, rng):
    """Micro-steps, but not at once: PyTorch's static graphs must begin with a reduced step."""
    kinds = ["train", "local", "train", "local", "local", "train", "train"]
    zeros = ["none", "none", "keep", "none", "keep", "keep", "none"]
    return [step(kind, zero) for kind, zero in zip(kinds, zeros)]


def few_and_many(rank):
    """Of rank 0 none at all."""
    return (0, 9, 4)[rank]


def accumulating_in_turn(world, rng):
    """Every second step is reduced, from the first on."""
    return [step("local" if i % 2 else "train", "none" if i % 2 else "keep") for i in range(9)]


def whole_accumulations(inputs):
    """Ranks end with a reduced step: what they have added up before PyTorch drops, and Lockstep gives to the others."""
    return lambda rank: inputs(rank) and inputs(rank) | 1


def branching_never(world, rng):
    """One branch is never used. PyTorch's ranks without inputs repeat the marks of their last step, ours have none."""
    return [step(uses=[[0, 2]] * world) for _ in range(9)]


def branching_alike(world, rng):
    """The same branches on all ranks."""
    return [step(uses=[rng.sample(range(3), rng.randrange(4))] * world) for _ in range(6)]


def random_uses(world, rng):
    return [rng.sample(range(3), rng.randrange(4)) for _ in range(world)]


def branching(zero="none"):
    """Branches by step and rank: all, none anywhere, one rank alone, then at random."""

    def steps(world, rng):
        fixed = [[[0, 1, 2]] * world, [[]] * world, [[1]] + [[]] * (world - 1), [[0]] * world]
        drawn = [random_uses(world, rng) for _ in range(5)]
        return [step(zero=zero, uses=uses) for uses in fixed + drawn]

    return steps


def branching_locally(world, rng):
    """A branch that only a local step used counts as used in the next reduced one."""
    kinds = ["local", "train", "local", "local", "train", "local", "train"]
    zeros = ["none", "keep", "none", "keep", "keep", "none", "keep"]
    return [step(kind, zero, uses=random_uses(world, rng)) for kind, zero in zip(kinds, zeros)]


def cases():
    tiny = {"bucket_cap_mb": TINY_CAP_MB}
    tiny_first = {"bucket_cap_mb_list": [50 / 2**20, 200 / 2**20]}
    skip = {"skip_all_reduce_unused_params": True}
    view = {"gradient_as_bucket_view": True}
    search = {"find_unused_parameters": True}
    static = {"static_graph": True}
    yield Case("mlp", "one bucket", models.Mlp, {}, plain())
    yield Case("mlp", "small buckets", models.Mlp, tiny, plain(), seeds=MORE_SEEDS)
    yield Case("mlp", "one tensor per bucket", models.Mlp, {"bucket_cap_mb": 0}, plain(3))
    yield Case("mlp", "list of caps", models.Mlp, {"bucket_cap_mb_list": [50 / 2**20, 300 / 2**20]}, plain())
    yield Case("mlp", "batched copies", models.Mlp, {"batched_grad_copy": True, **tiny}, plain())
    yield Case("mlp", "gradients add up", models.Mlp, tiny, plain(zero="keep"))
    yield Case("mlp", "two forwards", models.Mlp, tiny, plain(forwards=2))
    yield Case("mlp", "needless search", models.Mlp, {**search, **tiny}, plain())
    small_last = {"DDP_SET_LAST_BUCKET_CAP": "1"}
    yield Case("mlp", "small bucket last", models.Mlp, tiny_first, plain(), environment=small_last)
    yield Case("mlp", "a frozen layer", models.Mlp, tiny, plain(), frozen=("layer1.weight", "layer1.bias"))
    yield Case("mlp", "an ignored layer", models.Mlp, tiny, plain(), ignored=("layer1.weight",), has_one_model=False)
    yield Case("mlp", "no first sync", models.Mlp, {"init_sync": False}, plain(), has_one_model=False)
    yield Case("mlp", "two dtypes", models.TwoDtypes, {}, plain())
    yield Case("mlp", "two dtypes, small buckets", models.TwoDtypes, {**search, **tiny}, plain())
    yield Case("mlp", "complex parameters", models.Phases, {}, plain())
    yield Case("conv", "buffers of rank 0", models.ConvNet, {}, plain(), seeds=MORE_SEEDS)
    yield Case("conv", "small buckets", models.ConvNet, tiny, plain())
    yield Case("conv", "own buffers", models.ConvNet, {"broadcast_buffers": False}, plain())
    yield Case("conv", "buffers at first only", models.ConvNet, {"forward_sync_buffers": False}, plain())
    left_alone = {"ignored": ("norm0.running_mean", "norm1.bias"), "has_one_model": False}
    yield Case("conv", "ignored buffers", models.ConvNet, {}, plain(), **left_alone)
    yield Case("conv", "evaluation between steps", models.ConvNet, {}, evaluating)
    yield Case("conv", "channels last", models.ConvNet, tiny, plain(), channels_last=True)
    yield Case("conv", "channels last, views", models.ConvNet, {**tiny, **view}, plain(), channels_last=True)
    yield Case("transformer", "one bucket", models.Transformer, {}, plain(), learning_rate=0.002)
    yield Case("transformer", "small buckets", models.Transformer, tiny, plain(), learning_rate=0.002, seeds=MORE_SEEDS)
    yield Case("transformer", "static graph", models.Transformer, {**static, **tiny}, plain(), learning_rate=0.002)
    yield Case("transformer", "views", models.Transformer, {**view, **tiny}, plain(zero="zeros"), learning_rate=0.002)
    yield Case("sparse", "plain", models.Bags, {}, plain(), momentum=0, seeds=MORE_SEEDS)
    yield Case("sparse", "search", models.Bags, search, plain(), momentum=0)
    yield Case("sparse", "views", models.Bags, view, plain(), momentum=0)
    yield Case("sparse", "accumulation", models.Bags, {}, accumulating, momentum=0)
    yield Case("unused", "one bucket", models.Branchy, search, branching())
    yield Case("unused", "small buckets", models.Branchy, {**search, **tiny}, branching(), seeds=MORE_SEEDS)
    yield Case("unused", "zeroed gradients", models.Branchy, {**search, **tiny}, branching("zeros"))
    yield Case("unused", "kept gradients", models.Branchy, {**search, **tiny}, branching("keep"))
    yield Case("unused", "views", models.Branchy, {**search, **tiny, **view}, branching())
    yield Case("unused", "views, zeroed", models.Branchy, {**search, **tiny, **view}, branching("zeros"))
    yield Case("unused", "accumulation", models.Branchy, {**search, **tiny}, branching_locally)
    yield Case("unused", "accumulation in views", models.Branchy, {**search, **tiny, **view}, branching_locally)
    yield Case("unused", "skipped buckets", models.Branchy, {**search, **tiny, **skip}, branching_alike)
    yield Case("static", "a layer twice", models.Reused, static, plain(), seeds=MORE_SEEDS)
    yield Case("static", "small buckets", models.Reused, {**static, **tiny}, plain())
    yield Case("static", "views", models.Reused, {**static, **tiny, **view}, plain(zero="zeros"))
    yield Case("static", "search too", models.Reused, {**static, **search, **tiny}, plain())
    yield Case("static", "accumulation", models.Reused, {**static, **tiny}, accumulating_late)
    yield Case("view", "dropped gradients", models.Mlp, {**view, **tiny}, plain(), seeds=MORE_SEEDS)
    yield Case("view", "zeroed gradients", models.Mlp, {**view, **tiny}, plain(zero="zeros"))
    yield Case("view", "kept gradients", models.Mlp, {**view, **tiny}, plain(zero="keep"))
    yield Case("no_sync", "mlp", models.Mlp, tiny, accumulating, seeds=MORE_SEEDS)
    yield Case("no_sync", "views", models.Mlp, {**tiny, **view}, accumulating)
    yield Case("no_sync", "conv", models.ConvNet, {}, accumulating)
    yield Case("no_sync", "transformer", models.Transformer, tiny, accumulating, learning_rate=0.002)
    for name, dtypes in LOW_PRECISION.items():
        options = {"mixed_precision": dtypes}
        yield Case("precision", f"mlp, {name}", models.Mlp, options, plain(), has_one_model=False, seeds=MORE_SEEDS)
        if dtypes[2]:  # BatchNorm on a CPU wants buffers in its weights' dtype
            yield Case("precision", f"conv, {name}", models.ConvNet, options, plain(), has_one_model=False)
        shared = {"learning_rate": 0.002, "has_one_model": False}
        yield Case("precision", f"transformer, {name}", models.Transformer, options, plain(), **shared)
    joining = {"has_one_model": False, "steps": plain(9)}
    for name, inputs in {"as many": lambda rank: 3, "one more": lambda rank: 3 + rank, "many more": few_and_many}.items():
        for by_all in (True, False):
            options = {**joining, "inputs": inputs, "divides_by_all": by_all}
            yield Case("join", f"mlp, {name}, {by_all}", models.Mlp, tiny, **options)
        options = {**joining, "inputs": inputs}
        yield Case("join", f"conv, {name}", models.ConvNet, {}, **options)
        yield Case("join", f"views, {name}", models.Mlp, {**tiny, **view}, **options)
        if inputs(0) > 0:  # without a step PyTorch's marks are not even set
            yield Case("join", f"search, {name}", models.Branchy, {**search, **tiny}, **{**options, "steps": branching_never})
        accumulation = {**options, "inputs": whole_accumulations(inputs), "steps": accumulating_in_turn}
        yield Case("join", f"accumulation, {name}", models.Mlp, tiny, **accumulation)
    large = {"model": models.FourLinears, "steps": plain(3), "records_tensors": False, "seeds": (1,)}
    yield Case("large", "one bucket first", options={}, **large)
    yield Case("large", "small bucket first", options=search, **large)
    yield Case("large", "static graph", options=static, **large)
    yield Case("large", "1 MiB", options={"bucket_cap_mb": 1}, **large)


def steps_of(case, world, seed):
    return case.steps(world, random.Random(seed))
