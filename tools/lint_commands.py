#!/usr/bin/env python3
"""Writes a compile database clang-tidy can use: without ccache, precompiled headers and flags only GCC knows.

usage: lint_commands.py compile_commands.json OUTPUT_DIR
"""

import json
import pathlib
import shlex
import sys

DROPPED = {"-fpch-preprocess", "-Winvalid-pch", "-Wno-restrict", "-Wno-subobject-linkage", "-Werror"}


def lintable(words: list[str]) -> list[str]:
    # A launcher is everything up to ccache itself, which may be preceded by `cmake -E env NAME=value ...`.
    for index, word in enumerate(words):
        if word in ("-c", "-o"):
            break
        if pathlib.PurePath(word).name == "ccache" and not word.startswith("-"):
            words = words[index + 1 :]
            break
    kept = []
    rest = iter(words)
    for word in rest:
        if word == "-include":
            included = next(rest)
            if not included.endswith("cmake_pch.hxx"):
                kept += [word, included]
        elif word not in DROPPED:
            kept.append(word)
    return kept


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    entries = json.loads(source.read_text())
    for entry in entries:
        entry["command"] = shlex.join(lintable(shlex.split(entry["command"])))
    target.mkdir(parents=True, exist_ok=True)
    (target / "compile_commands.json").write_text(json.dumps(entries))


if __name__ == "__main__":
    main()
