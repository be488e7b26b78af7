"""Saves learning rates of torch.optim.lr_scheduler, by schedule and step. Usage: schedules_reference.py RESULT."""

import sys
import warnings

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

STEPS = 25


def rates(make):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.3, 0.007)]
    optimizer = torch.optim.SGD(groups)
    schedule = make(optimizer)
    seen = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return torch.tensor(seen, dtype=torch.float64)


def main():
    warnings.simplefilter("ignore")  # SequentialLR's own call of step(0)
    saved = {
        "linear": rates(lambda o: LinearLR(o)),
        "linear down": rates(lambda o: LinearLR(o, start_factor=1.0, end_factor=0.2, total_iters=7)),
        "cosine": rates(lambda o: CosineAnnealingLR(o, T_max=10, eta_min=0.001)),
        "sequence": rates(lambda o: SequentialLR(o, [LinearLR(o, start_factor=0.01, total_iters=6), CosineAnnealingLR(o, T_max=15)], milestones=[6])),
        "three": rates(lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=3), CosineAnnealingLR(o, 5, 0.01), LinearLR(o, 1.0, 0.5, 4)], milestones=[4, 11])),
    }
    torch.save(saved, sys.argv[1])


main()
