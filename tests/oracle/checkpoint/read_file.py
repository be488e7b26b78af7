"""Saves what Python's safetensors finds in a file, and the file's metadata.

Usage: read_file.py RESULT FILE.
"""

import sys

import torch
from safetensors import safe_open
from tensors import described


def main():
    with safe_open(sys.argv[2], framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = dict(file.metadata() or {})
    torch.save({"tensors": described(tensors), "metadata": metadata}, sys.argv[1])


if __name__ == "__main__":
    main()
