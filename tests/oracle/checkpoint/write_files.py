"""Writes with Python's safetensors FOLDER/all.safetensors, with tensors of every dtype, and FOLDER/hf, the same as a Hugging Face
folder of two files. Saves what they hold.

Usage: write_files.py RESULT FOLDER.
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file
from tensors import described

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16,
    torch.uint8, torch.bool,
]  # fmt: skip


def main():
    result, folder = sys.argv[1:]
    torch.manual_seed(1)
    # Odd sizes, so that what follows is not aligned.
    tensors = {f"of.{dtype}": (torch.randn(3, 5) * 4).abs().to(dtype) for dtype in DTYPES}
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.empty(0, 3)
    tensors["flag"] = torch.tensor(True)
    tensors["ünïcode \"quoted\""] = torch.arange(7)
    os.makedirs(f"{folder}/hf")
    save_file(tensors, f"{folder}/all.safetensors", metadata={"format": "pt"})
    names = list(tensors)
    weight_map = {}
    for index in range(2):
        file = f"model-{index + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[index::2]}, f"{folder}/hf/{file}", metadata={"format": "pt"})
        weight_map |= {name: file for name in names[index::2]}
    with open(f"{folder}/hf/model.safetensors.index.json", "w") as file:
        json.dump({"metadata": {"total_size": 0}, "weight_map": weight_map}, file, indent=2)
    with open(f"{folder}/hf/config.json", "w") as file:
        json.dump({"model_type": "none"}, file)
    torch.save(described(tensors), result)


if __name__ == "__main__":
    main()
