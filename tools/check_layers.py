#!/usr/bin/env python3
"""Checks the #include lines of lockstep/ and of the programs against tools/layers.json.

Prints `file:line: offence (rule)` for each offence and exits 1 if there is any. Standard library only.
Also checked: every folder is in the table, headers open with `#pragma once`, and includes of the
library are written from the repository root.
"""

import argparse
import json
import posixpath
import re
import sys
from pathlib import Path

HEADERS = {".h", ".hpp", ".cuh"}
SOURCES = HEADERS | {".cpp", ".cc", ".cu", ".inc", ".inl"}
UMBRELLA = "the umbrella header"

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)
COMMENT_OR_LITERAL = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"', re.DOTALL
)


# What CMake leaves out of the install tree: see lockstep_public_headers() in cmake/LockstepBuild.cmake.
INTERNAL = re.compile(r"^// (.*\b)?Internal\b", re.MULTILINE)


class TableError(Exception):
    """layers.json contradicts itself."""


class Table:
    """The layer table: which folder may include which, closed over the listed ones."""

    def __init__(self, path):
        raw = json.loads(path.read_text(encoding="utf-8"))
        self.umbrella = raw["umbrella"]
        self.libtorch_prefixes = tuple(raw["libtorch_prefixes"])
        self.layers = [row["folder"] for row in raw["layers"]]
        self.outside = [row["folder"] for row in raw["outside"]]
        self.listed = {}
        self.allowed = {}
        self.libtorch = {}
        for row in raw["layers"]:
            self._add(row, lower=list(self.allowed))
        for row in raw["outside"]:
            self._add(row, lower=self.layers)

    def _add(self, row, lower):
        folder, listed = row["folder"], row["may_include"]
        if folder in self.allowed:
            raise TableError(f"folder '{folder}' is in the table twice")
        self.listed[folder] = listed
        self.allowed[folder] = {folder}
        if listed == "all":
            self.allowed[folder].update(self.layers, [UMBRELLA])
        else:
            for name in listed:
                if name not in lower:
                    raise TableError(f"folder '{folder}' lists '{name}', which is not a layer below it")
                self.allowed[folder] |= self.allowed[name]
        if "libtorch" in row:
            self.libtorch[folder] = tuple(row["libtorch"])

    def rule_for(self, folder):
        listed = self.listed[folder]
        if listed == "all":
            return f"'{folder}' may include every layer"
        names = ", ".join(listed) if listed else "nothing of the library"
        return f"'{folder}' may include {names}" + (" and what those may include" if listed else "")


def without_comments(text):
    """Blanks comments and raw strings, keeping every line where it was."""

    def blank(match):
        token = match.group(0)
        return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)

    return COMMENT_OR_LITERAL.sub(blank, text)


def check_include(table, root, file, folder, quote, target):
    """Returns the offence and its rule, or None. `folder` is None for the umbrella header."""
    from_root = target.startswith("lockstep/") or target.split("/")[0] in table.outside
    if quote == '"' and not from_root:
        resolved = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        if resolved.startswith("lockstep/") and ("../" in target or (root / resolved).is_file()):
            return f'"{target}" is a relative include', f'write "{resolved}"'
        return check_libtorch(table, folder, target)
    if not from_root:
        return check_libtorch(table, folder, target)

    parts = target.split("/")
    if parts[0] != "lockstep":
        if folder == parts[0]:
            return None
        return f"includes {target}", f"no layer may include {parts[0]}/"
    if target == table.umbrella:
        if folder is None or UMBRELLA in table.allowed[folder]:
            return None
        return f"'{folder}' includes {UMBRELLA} {target}", table.rule_for(folder)
    if len(parts) < 3 or parts[1] not in table.layers:
        return f"includes {target}", "its folder is not in tools/layers.json"
    if folder is not None and parts[1] not in table.allowed[folder]:
        return f"'{folder}' includes '{parts[1]}' ({target})", table.rule_for(folder)
    return None


def check_libtorch(table, folder, target):
    if target == "filesystem" and folder not in table.outside:
        return "includes <filesystem>", "libtorch exports another compiler's copy of it, and mixing the two crashes"
    if folder not in table.libtorch or not target.startswith(table.libtorch_prefixes):
        return None
    exceptions = table.libtorch[folder]
    if exceptions and target.startswith(exceptions):
        return None
    rule = f"only {', '.join(exceptions)}" if exceptions else "no libtorch header at all"
    return f"'{folder}' includes libtorch ({target})", f"'{folder}' may include {rule}"


def is_internal(path):
    """Whether the comment a header opens with says so."""
    opening = path.read_text(encoding="utf-8").split("#pragma once")[0]
    return INTERNAL.search(opening) is not None


def check_file(table, root, file, folder):
    path = root / file
    text = without_comments(path.read_text(encoding="utf-8"))
    offences = []
    is_public = path.suffix in HEADERS and folder in table.layers and not is_internal(path)
    if path.suffix in HEADERS:
        first = re.search(r"\S[^\n]*", text)
        if not first or not re.fullmatch(r"#[ \t]*pragma[ \t]+once", first.group(0).strip()):
            line = text.count("\n", 0, first.start()) + 1 if first else 1
            offences.append((file, line, "no #pragma once", "a header's first line of code is #pragma once"))
    for match in INCLUDE.finditer(text):
        target = match.group(2).strip()
        offence = check_include(table, root, file, folder, match.group(1), target)
        if not offence and is_public and target.startswith("lockstep/") and (root / target).is_file():
            if is_internal(root / target):
                offence = f"a public header includes {target}", "an internal header is not installed"
        if offence:
            offences.append((file, text.count("\n", 0, match.start(1)) + 1, *offence))
    return offences


def check_tree(root, table):
    """Returns the offences and the number of files read."""
    offences, files = [], 0
    for top in ["lockstep", *table.outside]:
        for path in sorted((root / top).rglob("*")):
            file = path.relative_to(root).as_posix()
            parts = file.split("/")
            if path.is_dir():
                if top == "lockstep" and len(parts) == 2 and parts[1] not in table.layers:
                    offences.append((file, 1, f"folder '{parts[1]}' is no layer", "add it to tools/layers.json"))
                continue
            if path.suffix not in SOURCES:
                continue
            files += 1
            if top != "lockstep":
                folder = top
            elif file == table.umbrella:
                folder = None
            elif len(parts) == 2:
                offences.append((file, 1, "file in no layer", f"only {table.umbrella} stands outside the folders"))
                continue
            elif parts[1] in table.layers:
                folder = parts[1]
            else:
                continue
            offences += check_file(table, root, file, folder)
    return offences, files


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="repository root")
    root = parser.parse_args(arguments).root.resolve()
    try:
        table = Table(root / "tools" / "layers.json")
    except TableError as error:
        print(f"tools/layers.json:1: {error}")
        return 1
    offences, files = check_tree(root, table)
    for file, line, offence, rule in offences:
        print(f"{file}:{line}: {offence} (rule: {rule})")
    print(f"layers: {files} files, {len(offences)} offences")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
