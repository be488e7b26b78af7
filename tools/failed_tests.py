#!/usr/bin/env python3
"""Prints what tests that failed said, last of all: `ctest` has scrolled it away.

Reads the files that ctest leaves behind: failed_tests.py BUILD_FOLDER. Standard library only.
"""

import re
import sys
from pathlib import Path

NOISE = re.compile(r"^\[W\d|^-- |: Skipped$|^no GPU$")
TELLING = re.compile(r"Failure$|\[  FAILED  \]|error|Error|timed? ?out|exit code|terminate", re.IGNORECASE)
AROUND = 12  # lines behind a telling one
MOST = 150  # lines of one test


def sections(log):
    """The output of each test, by name."""
    found = {}
    for part in re.split(r"^\d+/\d+ Testing: ", log, flags=re.MULTILINE)[1:]:
        name, _, rest = part.partition("\n")
        found[name] = rest
    return found


def telling_lines(text):
    """Lines that say what failed, with those behind them; the last ones if there are none."""
    lines = [line for line in text.splitlines() if not NOISE.search(line)]
    wanted = set()
    for number, line in enumerate(lines):
        if TELLING.search(line):
            wanted.update(range(max(0, number - 1), number + AROUND))
    wanted.update(range(max(0, len(lines) - AROUND), len(lines)))
    return [lines[number] for number in sorted(wanted) if number < len(lines)][:MOST]


def main(build):
    folder = Path(build) / "Testing" / "Temporary"
    failed = (folder / "LastTestsFailed.log").read_text(encoding="utf-8").split()
    outputs = sections((folder / "LastTest.log").read_text(encoding="utf-8", errors="replace"))
    for name in (line.partition(":")[2] for line in failed):
        print(f"\n==== {name} failed:")
        print("\n".join(telling_lines(outputs.get(name, "(it left no output)"))))


if __name__ == "__main__":
    main(sys.argv[1])
