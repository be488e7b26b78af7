#!/usr/bin/env python3
"""Writes a compile database clang-tidy can use: without precompiled headers and without flags only GCC knows.

usage: lint_commands.py compile_commands.json OUTPUT_DIR
"""

import json
import pathlib
import re
import sys


def main() -> None:
    source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    entries = json.loads(source.read_text())
    for entry in entries:
        command = re.sub(r"^.*?ccache ", "", entry["command"])
        command = re.sub(r"-include \S*cmake_pch\.hxx", "", command)
        entry["command"] = re.sub(r" (-fpch-preprocess|-Winvalid-pch|-Wno-restrict|-Werror)\b", "", command)
    target.mkdir(parents=True, exist_ok=True)
    (target / "compile_commands.json").write_text(json.dumps(entries))


if __name__ == "__main__":
    main()
