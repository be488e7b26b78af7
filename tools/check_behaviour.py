#!/usr/bin/env python3
"""Checks the tables in docs/behaviour/ against the tests that name their rows.

A test names a row by a comment line that begins with it, inside the test or directly above it:
`// DDP-17`, `// DDP-17, DDP-18: why`, `// DDP-1 to DDP-3`, and the same after `#` in Python.
A row mentioned in the middle of a sentence is a reference, no proof. Disabled tests prove nothing.
Standard library only.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from pathlib import Path

STATES = ("done", "partly", "open")
SHOWN_PROOFS = 3

ROW = r"[A-Z]+-\d+"
RANGE = rf"{ROW}(?:\s*(?:to|\.\.)\s*{ROW})?"
LEADING_ROWS = re.compile(rf"{RANGE}(?:\s*(?:,|;|&|and)\s*{RANGE})*(?![\w-])")
ONE_RANGE = re.compile(rf"(?<![\w-])({ROW})(?:\s*(?:to|\.\.)\s*({ROW}))?(?![\w-])")

CPP_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)"
    r'|R"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])*'",
    re.DOTALL,
)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
CPP_TEST = re.compile(r"\b(?:[A-Z0-9]+_)*TEST(?:_[A-Z0-9]+)*\s*\(\s*(\w+)\s*,\s*(\w+)\s*(?=[,)])")


class Row:
    """One line of a table."""

    def __init__(self, file, line, cells):
        self.file = file
        self.line = line
        self.id, self.behaviour, self.state, self.proof = cells

    def text(self):
        return f"| {self.id} | {self.behaviour} | {self.state} | {self.proof} |"


class Mention:
    """A row named in a test file; `test` is None outside any test, or when it is only a reference."""

    def __init__(self, file, line, row, test):
        self.file = file
        self.line = line
        self.row = row
        self.test = test


class Test:
    """A test and the lines it covers, the comment lines directly above it included."""

    def __init__(self, name, first, last):
        self.name = name
        self.first = first
        self.last = last

    def is_disabled(self):
        return any(part.startswith("DISABLED_") for part in self.name.split("."))


def expand(text, problems, where):
    """Lists the rows of `DDP-1, DDP-3 to DDP-5`."""
    rows = []
    for first, last in ONE_RANGE.findall(text):
        if not last:
            rows.append(first)
            continue
        (area, start), (last_area, end) = first.split("-"), last.split("-")
        if area != last_area or int(start) >= int(end):
            problems.append(f"{where}: range {first} to {last} does not count upwards within one area")
            continue
        rows += [f"{area}-{number}" for number in range(int(start), int(end) + 1)]
    return rows


def read_cpp(text):
    """Returns the tests and the comment lines as {line: text}; lines count from 1."""
    comments, pieces, end = {}, [], 0
    for match in CPP_TOKEN.finditer(text):
        token = match.group(0)
        pieces += [text[end : match.start()], re.sub(r"[^\n]", " ", token)]
        end = match.end()
        if match.group("comment"):
            first = text.count("\n", 0, match.start()) + 1
            for offset, line in enumerate(token.split("\n")):
                comments[first + offset] = line.strip().removesuffix("*/").lstrip("/*!< \t")
    code = "".join(pieces) + text[end:]
    code_lines = code.split("\n")
    code = DIRECTIVE.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), code)

    tests, position = [], 0
    while match := CPP_TEST.search(code, position):
        position = match.end()
        first = code.count("\n", 0, match.start()) + 1
        body = matching(code, code.index("(", match.start()), "()")
        opening = re.compile(r"\s*\{").match(code, body) if body else None
        if not opening:
            continue
        position = matching(code, opening.end() - 1, "{}") or len(code)
        last = code.count("\n", 0, position) + 1
        while first > 1 and first - 1 in comments and not code_lines[first - 2].strip():
            first -= 1
        tests.append(Test(f"{match.group(1)}.{match.group(2)}", first, last))
    return tests, comments


def matching(code, position, pair):
    """Position just after the bracket that closes the one at `position`, or None."""
    depth = 0
    for match in re.compile(f"[{re.escape(pair)}]").finditer(code, position):
        depth += 1 if match.group(0) == pair[0] else -1
        if depth == 0:
            return match.end()
    return None


def read_python(text, stem):
    """As read_cpp(); a test outside a class takes the file's name as its suite."""
    lines = text.split("\n")
    comments = {
        token.start[0]: token.string.lstrip("#!: \t")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    tests = []

    def visit(node, suite):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, child.name)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and child.name.startswith("test_"):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                while first > 1 and lines[first - 2].lstrip().startswith("#"):
                    first -= 1
                tests.append(Test(f"{suite}.{child.name}", first, child.end_lineno))

    visit(ast.parse(text), stem)
    return tests, comments


def read_tests(root, areas, problems):
    """Returns every mention of a row, and the names of all tests that run."""
    mentions, names = [], set()
    paths = [path for path in (root / "tests").rglob("*") if path.suffix in (".cpp", ".py") and path.is_file()]
    for path in sorted(paths):
        file = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        try:
            tests, comments = read_cpp(text) if path.suffix == ".cpp" else read_python(text, path.stem)
        except (SyntaxError, tokenize.TokenError) as error:
            problems.append(f"{file}:1: cannot be read: {error}")
            continue
        tests = [test for test in tests if not test.is_disabled()]
        names.update(test.name for test in tests)
        for line, comment in sorted(comments.items()):
            where = f"{file}:{line}"
            leading = LEADING_ROWS.match(comment)
            head = leading.group(0) if leading else ""
            tail = comment[len(head) :]
            test = next((test.name for test in tests if test.first <= line <= test.last), None)
            # A line of nothing but rows is meant as such, so there a mistyped area is a mistake too.
            only_rows = not tail.strip(" .,;:")
            for row in expand(head, problems, where):
                if row.split("-")[0] in areas or (only_rows and test):
                    mentions.append(Mention(file, line, row, test))
            for match in ONE_RANGE.finditer(tail):
                for row in filter(None, match.groups()):
                    if row.split("-")[0] in areas:
                        mentions.append(Mention(file, line, row, None))
    return mentions, names


def read_tables(root, problems):
    """Returns the rows of docs/behaviour/*.md in order."""
    rows = []
    for path in sorted((root / "docs" / "behaviour").glob("*.md")):
        file = path.relative_to(root).as_posix()
        for line, text in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            if not text.startswith("|"):
                continue
            cells = [cell.strip() for cell in text.strip()[1:].removesuffix("|").split("|")]
            if cells[0] == "row" or set(text) <= set("|-: "):
                continue
            if len(cells) != 4 or not re.fullmatch(ROW, cells[0]):
                problems.append(f"{file}:{line}: not of the form | ROW-1 | behaviour | state | proof |")
                continue
            rows.append(Row(file, line, cells))
    return rows


def proof_text(tests):
    shown = ", ".join(sorted(tests)[:SHOWN_PROOFS])
    hidden = len(tests) - SHOWN_PROOFS
    return f"{shown} +{hidden}" if hidden > 0 else shown


def wanted_proof(row, tests_of):
    return "" if row.state == "open" else proof_text(tests_of.get(row.id, ()))


def check_row(row, tests_of, names):
    """Lists what is wrong with one row."""
    if row.state not in STATES:
        return [f"state '{row.state}' is not one of {', '.join(STATES)}"]
    if row.state == "open":
        return []
    problems = []
    tests = tests_of.get(row.id, set())
    if row.state == "done" and not tests:
        problems.append("is done, but no test names it")
    for proof in re.findall(r"[^\s,`+]+\.[^\s,`+]+", row.proof):
        if proof not in names:
            problems.append(f"is proved by {proof}, which does not exist")
        elif proof not in tests:
            problems.append(f"is proved by {proof}, which does not name it")
    if not problems and row.proof.replace("`", "") != proof_text(tests):
        problems.append("has an out-of-date proof column: run tools/check_behaviour.py --write-proofs")
    return problems


def write_proofs(root, rows, tests_of):
    """Rewrites the proof column; open rows have none, rows of an unknown state are left alone."""
    changed = {}
    for row in rows:
        wanted = wanted_proof(row, tests_of)
        if row.state in STATES and row.proof != wanted:
            row.proof = wanted
            changed.setdefault(row.file, []).append(row)
    for file, changed_rows in changed.items():
        lines = (root / file).read_text(encoding="utf-8").split("\n")
        for row in changed_rows:
            lines[row.line - 1] = row.text()
        (root / file).write_text("\n".join(lines), encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="repository root")
    parser.add_argument("--write-proofs", action="store_true", help="fill the proof columns from the tests found")
    options = parser.parse_args(arguments)
    root = options.root.resolve()

    problems = []
    rows = read_tables(root, problems)
    areas = {row.id.split("-")[0] for row in rows}
    mentions, names = read_tests(root, areas, problems)

    tests_of = {}
    for mention in mentions:
        if mention.test:
            tests_of.setdefault(mention.row, set()).add(mention.test)
    if options.write_proofs:
        write_proofs(root, rows, tests_of)

    first_seen = {}
    for row in rows:
        where = f"{row.file}:{row.line}"
        if row.id in first_seen:
            problems.append(f"{where}: {row.id} is already at {first_seen[row.id]}")
        first_seen.setdefault(row.id, where)
        problems += [f"{where}: {row.id} {problem}" for problem in check_row(row, tests_of, names)]
    for mention in mentions:
        if mention.row not in first_seen:
            by = f"{mention.test} names" if mention.test else "a comment names"
            problems.append(f"{mention.file}:{mention.line}: {by} {mention.row}, which no table has")

    for problem in problems:
        print(problem)
    if options.write_proofs:
        tested = [row.id for row in rows if row.state == "open" and row.id in tests_of]
        if tested:
            print(f"open, but named by tests: {', '.join(tested)}")
    counts = ", ".join(f"{sum(row.state == state for row in rows)} {state}" for state in STATES)
    print(f"behaviour: {len(rows)} rows, {counts}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
