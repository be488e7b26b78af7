"""Saves the indices of torch.utils.data.DistributedSampler. Usage: distributed_sampler_reference.py RESULT."""

import itertools
import sys

import torch
from torch.utils.data import DistributedSampler


def main():
    cases = []
    for size, ranks, shuffle, drop_last, seed, epoch in itertools.product([1, 5, 12, 101], [1, 2, 3, 7], [False, True], [False, True], [0, 12345], [0, 4]):
        for rank in range(ranks):
            sampler = DistributedSampler(range(size), ranks, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
            sampler.set_epoch(epoch)
            cases.append({
                "size": size, "ranks": ranks, "rank": rank, "shuffle": shuffle, "drop_last": drop_last, "seed": seed, "epoch": epoch,
                "indices": torch.tensor(list(sampler), dtype=torch.long),
            })
    torch.save(cases, sys.argv[1])


main()
