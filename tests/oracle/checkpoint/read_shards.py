"""Saves what torch.distributed.checkpoint reads from every folder of shards in FOLDER, tensor by tensor.

Usage: read_shards.py RESULT FOLDER.
"""

import os
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader


def read(folder):
    about = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    # Values that nobody has, so that one that is not read is noticed.
    state = {name: torch.full(each.size, 77, dtype=each.properties.dtype) for name, each in about.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    return state


def main():
    warnings.simplefilter("ignore")
    result, above = sys.argv[1:]
    torch.save({name: read(f"{above}/{name}") for name in sorted(os.listdir(above))}, result)


if __name__ == "__main__":
    main()
