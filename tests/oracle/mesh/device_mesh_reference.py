"""Prints what PyTorch's DeviceMesh says about every rank of several meshes, one line per mesh and rank.

No rank runs: the fake backend pretends the world. The lines are compared with those of the C++ test beside this file.
"""

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD_SIZE = 8
NAMES = ["a", "b", "c"]
SHAPES = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (8, 1), (2, 1, 4), (3, 2), (1, 1)]


def joined(items):
    return ",".join(str(item) for item in items)


def describe(label, rank, mesh):
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return f"{label} rank {rank}: {mesh} outside"
    groups = ";".join(joined(dist.get_process_group_ranks(group)) for group in mesh.get_all_groups())
    return f"{label} rank {rank}: {mesh} at {joined(coordinate)} ranks {joined(mesh.mesh.flatten().tolist())} groups {groups}"


def describe_all(rank):
    for shape in SHAPES:
        names = NAMES[: len(shape)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))
        label = joined(shape)
        yield describe(label, rank, mesh)
        # PyTorch refuses slices on ranks outside the mesh; ours do not, so they are not compared.
        if mesh.get_coordinate() is None:
            continue
        for name in names:
            yield describe(f"{label} slice {name}", rank, mesh[name])
        if len(shape) == 3:
            for pair in (("a", "b"), ("b", "c"), ("a", "c")):
                part = mesh[pair]
                yield describe(f"{label} slice {joined(pair)}", rank, part)
                yield describe(f"{label} flatten {joined(pair)}", rank, part._flatten())
            both = DeviceMesh._concatenate([mesh["c"], mesh["a"]])
            yield describe(f"{label} concatenate c,a", rank, both)
    yield describe("array", rank, DeviceMesh("cpu", [[1, 3, 5], [2, 4, 6]], mesh_dim_names=("a", "b")))
    yield describe("unnamed", rank, init_device_mesh("cpu", (2, 4)))
    yield describe("unnamed flat", rank, init_device_mesh("cpu", (8,)))


def main():
    warnings.simplefilter("ignore")
    for rank in range(WORLD_SIZE):
        dist.init_process_group("fake", rank=rank, world_size=WORLD_SIZE, store=FakeStore())
        for line in describe_all(rank):
            print(line)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
