#!/usr/bin/env python3
"""Breaks the library on purpose, one small fault at a time, and tells which faults no test notices.

All faults (mutants) are compiled into one build, and LOCKSTEP_MUTANT chooses one at run time, so nothing is rebuilt between them. A fault is
a changed operator, condition, constant or flag, a check that always holds, or a call left out. A first run without faults notes which test
reaches which of them; each is then tried with those tests only, and with the quickest programs first.

    tools/mutants.py prepare --layers ddp=60,join=20,zero=45,optim=20 --seed 1
    tools/mutants.py build
    tools/mutants.py reach
    tools/mutants.py run
    tools/mutants.py table

Everything lies in build-mutants/. `prepare` again after an edit keeps what it drew before, as long as the line is still there.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build-mutants"
SOURCES = BUILD / "sources"
DRAWN = BUILD / "mutants.json"
REACHED = BUILD / "reached.txt"
RESULTS = BUILD / "results.json"
KINDS = ("unit", "threads", "oracle", "multiprocess")

SWAPS = {
    " == ": " != ", " != ": " == ", " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ",
    " && ": " || ", " || ": " && ", " + ": " - ", " - ": " + ", " * ": " + ", "true": "false", "false": "true",
}  # fmt: skip
CONDITION = re.compile(r"^(\s*(?:\} else )?(?:if|while) \()(.*)(\) (?:\{|[^{]*;))$")
LOOP = re.compile(r"^(\s*for \([^;()]*; )([^;]*)(; .*)$")
VALUE = re.compile(r"^(\s*(?:return |(?:const )?(?:auto|bool|int|int64_t|size_t|double) \w+ = |[\w.\->]+ = ))([^{}\[\]]*)(;)$")
CALL = re.compile(r"^(\s+)((?:[A-Za-z_][\w:]*(?:->|\.))*[A-Za-z_][\w:]*\(.*\));$")
CHECK = re.compile(r"^(\s*TORCH_CHECK\w*\()(.*)$")
# What costs time only, what no test can see, and what is no statement of its own.
DULL = re.compile(r"reserve\(|shrink_to_fit|RECORD_FUNCTION|TORCH_INTERNAL|static_assert|constexpr|assert\(|^\s*//|\bLOG\(|std::move\(\w+\);$|operator")


def balanced(text):
    depth = 0
    for char in re.sub(r'"(?:\\.|[^"\\])*"', '""', text):
        depth += char in "([{"
        depth -= char in ")]}"
        if depth < 0:
            return False
    return depth == 0


def swaps(text):
    """All texts that differ from this one by one operator or constant outside of literals."""
    holes = [match.span() for match in re.finditer(r'"(?:\\.|[^"\\])*"', text)]
    for old, new in SWAPS.items():
        pattern = rf"\b{old}\b" if old.isalpha() else re.escape(old)
        for match in re.finditer(pattern, text):
            if not any(begin <= match.start() < end for begin, end in holes):
                yield f"{old.strip()} -> {new.strip()}", text[: match.start()] + new + text[match.end() :]
    for match in re.finditer(r"(?<![\w.\"])([012])(?![\w.\"])", text):
        if not any(begin <= match.start() < end for begin, end in holes):
            other = str(int(match.group(1)) + 1)
            yield f"{match.group(1)} -> {other}", text[: match.start()] + other + text[match.end() :]


def faults_of_line(line):
    """(what is changed, the line with both forms) for every fault that this line can have; {id} stands for the mutant's number."""
    if DULL.search(line):
        return
    match = CHECK.match(line)
    if match:
        rest = re.sub(r'"(?:\\.|[^"\\])*"', lambda literal: "_" * len(literal.group()), match.group(2))
        depth = 0
        for at, char in enumerate(rest):
            depth += char in "([{"
            depth -= char in ")]}"
            if depth < 0:
                return
            if char == "," and depth == 0:
                condition = match.group(2)[:at]
                if condition == "false":
                    return
                yield "check left out", f"{match.group(1)}LOCKSTEP_MUTANT({{id}}) || ({condition}){match.group(2)[at:]}"
                return
        return
    for pattern, negates in ((CONDITION, True), (LOOP, False), (VALUE, False)):
        match = pattern.match(line)
        if not match:
            continue
        before, text, after = match.groups()
        if not balanced(text) or ";" in text or (pattern is CONDITION and re.search(r"[^=!<>]=[^=]", text)):
            return
        if negates:
            yield "condition negated", f"{before}LOCKSTEP_MUTANT({{id}}) != static_cast<bool>({text}){after}"
        for what, changed in [("last one left out", text.replace(" < ", " + 1 < "))] if pattern is LOOP and " < " in text else swaps(text):
            yield what, f"{before}LOCKSTEP_MUTANT({{id}}) ? ({changed}) : ({text}){after}"
        return
    match = CALL.match(line)
    if match and balanced(match.group(2)) and not match.group(2).startswith(("return", "if", "for", "while", "throw", "sizeof")):
        yield "call left out", f"{match.group(1)}if (!LOCKSTEP_MUTANT({{id}})) {{ {match.group(2)}; }}"


def candidates(layers):
    for layer in layers:
        for path in sorted((ROOT / "lockstep" / layer).rglob("*.cpp")):
            lines = path.read_text(encoding="utf-8").splitlines()
            inside = False
            for number, line in enumerate(lines):
                # Members of initialiser lists and declarations stand at the margin; statements do not.
                inside = inside or line.endswith("{")
                # A statement that begins on the line before is not a statement of its own.
                fresh = number == 0 or re.search(r"([;{}:]|^|^\s*//.*)$", lines[number - 1])
                if inside and fresh and line.startswith("  "):
                    for what, changed in faults_of_line(line):
                        yield {"file": str(path.relative_to(ROOT)), "line": number + 1, "text": line, "what": what, "changed": changed}


def draw(counts, seed):
    """As many faults of each layer as `counts` says, at most one for a line."""
    every = {}
    for fault in candidates(counts):
        every.setdefault((fault["file"], fault["line"]), []).append(fault)
    generator = random.Random(seed)
    places = sorted(every)
    generator.shuffle(places)
    drawn = []
    for layer, count in counts.items():
        drawn += [generator.choice(every[place]) for place in [place for place in places if place[0].split("/")[1] == layer][:count]]
    return drawn


def write_sources(mutants):
    files = {}
    for mutant in mutants:
        files.setdefault(mutant["file"], []).append(mutant)
    wanted = set()
    for file, faults in files.items():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        for mutant in faults:
            lines[mutant["line"] - 1] = mutant["changed"].replace("{id}", str(mutant["id"]))
        text = '#include "lockstep_mutant.h"\n#line 1\n' + "\n".join(lines) + "\n"
        target = SOURCES / file
        wanted.add(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
    for old in SOURCES.rglob("*.cpp"):
        if old not in wanted and old.name != "lockstep_mutant.cpp":
            old.unlink()


HEADER = """#pragma once
extern const int lockstep_mutant_chosen;
extern bool lockstep_mutant_reached(int id);
#define LOCKSTEP_MUTANT(id) (lockstep_mutant_chosen == (id) || (lockstep_mutant_chosen < 0 && lockstep_mutant_reached(id)))
"""

RUNTIME = r"""#include "lockstep_mutant.h"
#include <gtest/gtest.h>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#pragma weak _ZN7testing8UnitTest11GetInstanceEv
#pragma weak _ZNK7testing8UnitTest17current_test_infoEv
const int lockstep_mutant_chosen = [] {
  const char* text = std::getenv("LOCKSTEP_MUTANT");
  return text == nullptr ? 0 : std::string(text) == "reach" ? -1 : std::atoi(text);
}();
// Notes in the file named by LOCKSTEP_MUTANT_FILE that the test which runs now comes by this place.
bool lockstep_mutant_reached(int id) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> seen;
  if (&testing::UnitTest::GetInstance == nullptr) return false;
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  const std::lock_guard lock(mutex);
  if (test == nullptr || !seen.emplace(test, id).second) return false;
  if (std::FILE* file = std::fopen(std::getenv("LOCKSTEP_MUTANT_FILE"), "a")) {
    std::fprintf(file, "%s.%s %d\n", test->test_suite_name(), test->name(), id);
    std::fclose(file);
  }
  return false;
}
"""


def prepare(arguments):
    counts = {layer: int(count) for layer, count in (entry.split("=") for entry in arguments.layers.split(","))}
    old = json.loads(DRAWN.read_text()) if DRAWN.exists() and not arguments.fresh else []
    kept = []
    for mutant in old:
        lines = (ROOT / mutant["file"]).read_text(encoding="utf-8").splitlines() if (ROOT / mutant["file"]).exists() else []
        places = [number for number, line in enumerate(lines, 1) if line == mutant["text"]]
        if places:
            mutant["line"] = min(places, key=lambda place: abs(place - mutant["line"]))
            kept.append(mutant)
    if not old:
        kept = draw(counts, arguments.seed)
        kept.sort(key=lambda mutant: (mutant["file"], mutant["line"]))
        for number, mutant in enumerate(kept, 1):
            mutant["id"] = number
    BUILD.mkdir(exist_ok=True)
    SOURCES.mkdir(exist_ok=True)
    for name, text in (("lockstep_mutant.h", HEADER), ("lockstep_mutant.cpp", RUNTIME)):
        if not (SOURCES / name).exists():
            (SOURCES / name).write_text(text)
    write_sources(kept)
    DRAWN.write_text(json.dumps(kept, indent=1))
    print(f"{len(kept)} mutants of {', '.join(sorted({mutant['file'].split('/')[1] for mutant in kept}))}")


def programs_of(mutants):
    layers = {mutant["file"].split("/")[1] for mutant in mutants}
    return [f"{kind}_{layer}" for kind in KINDS for layer in sorted(layers) if list((ROOT / "tests" / kind / layer).glob("*.cpp"))]


def python():
    """The one that has torch: what `make setup` found, or the first there is."""
    found = ROOT / "build" / "torch_python"
    return found.read_text().strip() if found.exists() else "python3"


def build(arguments):
    subprocess.run(["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DLOCKSTEP_WERROR=OFF",
                    f"-DLOCKSTEP_PYTHON={python()}", f"-DLOCKSTEP_MUTANTS={SOURCES}",
                    *arguments.cmake], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    while True:
        mutants = json.loads(DRAWN.read_text())
        command = ["cmake", "--build", BUILD, "-j", str(arguments.jobs), "--target", *programs_of(mutants), "--", "-k", "0"]
        output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if output.returncode == 0:
            return
        wrong = {(file, int(line)) for file, line in re.findall(r"sources/(lockstep/\S+?\.cpp):(\d+):\d+: error", output.stdout)}
        left = [mutant for mutant in mutants if (mutant["file"], mutant["line"]) not in wrong]
        if len(left) == len(mutants):
            sys.exit("\n".join(line for line in output.stdout.splitlines() if "error" in line)[:6000])
        print(f"{len(mutants) - len(left)} mutants do not compile and are left out")
        DRAWN.write_text(json.dumps(left, indent=1))
        write_sources(left)


def environment():
    tests = json.loads(subprocess.run(["ctest", "--test-dir", BUILD, "--show-only=json-v1"], check=True, capture_output=True, text=True).stdout)
    found = {}
    for test in tests["tests"]:
        variables = next((p["value"] for p in test.get("properties", []) if p["name"] == "ENVIRONMENT"), [])
        found[test["name"]] = dict(variable.split("=", 1) for variable in variables)
    return found


def start(program, variables, arguments, limit):
    """Exit status (or "hang") and what was printed; everything the program started ends with it."""
    process = subprocess.Popen([BUILD / "tests" / program, "--gtest_brief=1", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, errors="replace", env={**os.environ, **variables}, start_new_session=True)  # fmt: skip
    try:
        text = process.communicate(timeout=limit)[0]
        return process.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return "hang", process.communicate()[0]


def reach(arguments):
    variables = environment()
    programs = programs_of(json.loads(DRAWN.read_text()))

    def look(program):
        note = BUILD / f"reached_{program}.txt"
        note.unlink(missing_ok=True)
        begin = time.monotonic()
        settings = {**variables[program], "LOCKSTEP_MUTANT": "reach", "LOCKSTEP_MUTANT_FILE": str(note)}
        status, text = start(program, settings, [], 580)
        seconds = time.monotonic() - begin
        pairs = sorted(set(note.read_text().split("\n")) - {""}) if note.exists() else []
        # Who fails without any fault notices nothing.
        failed = set(re.findall(r"\[  FAILED  \] (\S+?)[ ,(]", text))
        if status not in (0, 1) or (status == 1 and not failed):
            failed = {pair.split()[0] for pair in pairs}
        if failed:
            print(f"{program} ends with {status}; left out: {', '.join(sorted(failed))}", flush=True)
        pairs = [pair for pair in pairs if pair.split()[0] not in failed]
        print(f"{program}: {seconds:.0f} s, {len(pairs)} pairs of test and mutant", flush=True)
        return [f"{program} {seconds:.1f} {pair}" for pair in pairs]

    with ThreadPoolExecutor(arguments.jobs) as pool:
        REACHED.write_text("\n".join(line for lines in pool.map(look, programs) for line in lines) + "\n")


def run(arguments):
    mutants = json.loads(DRAWN.read_text())
    variables = environment()
    reached, seconds = {}, {}
    for line in REACHED.read_text().splitlines():
        program, took, test, number = line.split()
        seconds[program] = float(took)
        reached.setdefault(int(number), {}).setdefault(program, []).append(test)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    chosen = {int(number) for number in arguments.only.split(",")} if arguments.only else None

    def attempt(mutant):
        number = mutant["id"]
        tests_of = reached.get(number, {})
        if not tests_of:
            return "not reached", ""
        for program in sorted(tests_of, key=lambda name: (KINDS.index(name.split("_")[0]), len(tests_of[name]))):
            names = ":".join(sorted(set(tests_of[program])))
            status, text = start(program, {**variables[program], "LOCKSTEP_MUTANT": str(number), "LOCKSTEP_TEST_TIMEOUT": "40"},
                                 [f"--gtest_filter={names}", "--gtest_fail_fast"], 60 + 3 * seconds[program])  # fmt: skip
            if status != 0:
                failed = re.findall(r"\[  FAILED  \] (\S+?)[ ,(]", text)
                return "noticed", f"{program} {failed[0].rstrip(',') if failed else status}"
        return "survived", ", ".join(f"{program}: {len(tests)} tests" for program, tests in tests_of.items())

    todo = [m for m in mutants if (m["id"] in chosen if chosen else str(m["id"]) not in results)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        tried = {pool.submit(attempt, mutant): mutant for mutant in todo}
        for future in as_completed(tried):
            mutant, (verdict, by) = tried[future], future.result()
            results[str(mutant["id"])] = {"verdict": verdict, "by": by}
            RESULTS.write_text(json.dumps(results, indent=1))
            print(f"{mutant['id']:4} {verdict:12} {mutant['file']}:{mutant['line']} {mutant['what']}: {mutant['text'].strip()[:90]} | {by}", flush=True)
    table(arguments)


def table(_):
    mutants = json.loads(DRAWN.read_text())
    results = json.loads(RESULTS.read_text())
    rows = {}
    for mutant in mutants:
        verdict = results.get(str(mutant["id"]), {}).get("verdict", "not run")
        row = rows.setdefault(mutant["file"].split("/")[1], {})
        row[verdict] = row.get(verdict, 0) + 1
    print("| layer | mutants | noticed | survived | reached by no test |\n| --- | --- | --- | --- | --- |")
    for layer, row in sorted(rows.items()):
        print(f"| {layer} | {sum(row.values())} | {row.get('noticed', 0)} | {row.get('survived', 0)} | {row.get('not reached', 0)} |")
    for mutant in mutants:
        if results.get(str(mutant["id"]), {}).get("verdict") in ("survived", "not reached"):
            print(f"{mutant['id']:4} {results[str(mutant['id'])]['verdict']:12} {mutant['file']}:{mutant['line']} {mutant['what']}: {mutant['text'].strip()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (prepare, build, reach, run, table):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("--jobs", type=int, default=os.cpu_count())
        if function is prepare:
            command.add_argument("--layers", default="ddp=60,join=20,zero=45,optim=20,graph=50", help="how many mutants of which layer")
            command.add_argument("--seed", type=int, default=1)
            command.add_argument("--fresh", action="store_true", help="draw anew")
        if function is build:
            command.add_argument("--cmake", action="append", default=[], help="a further argument for cmake")
        if function is run:
            command.add_argument("--only", help="numbers of mutants to try again, with commas between them")
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
