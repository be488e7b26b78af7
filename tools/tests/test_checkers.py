#!/usr/bin/env python3
"""Tests of check_layers.py and check_behaviour.py on small temporary trees.

Run with `python3 -m unittest discover -s tools/tests`.
"""

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOOLS))

import check_behaviour  # noqa: E402
import check_layers  # noqa: E402


class TreeTest(unittest.TestCase):
    """A temporary repository and one checker to run on it."""

    checker = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def write(self, file, text):
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def read(self, file):
        return (self.root / file).read_text(encoding="utf-8")

    def run_checker(self, *options):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = self.checker.main(["--root", str(self.root), *options])
        return code, output.getvalue()

    def assert_passes(self, *options):
        code, output = self.run_checker(*options)
        self.assertEqual(code, 0, output)
        return output

    def assert_fails(self, *words, options=()):
        code, output = self.run_checker(*options)
        self.assertEqual(code, 1, output)
        for word in words:
            self.assertIn(word, output)
        return output


class LayersTest(TreeTest):
    checker = check_layers

    def setUp(self):
        super().setUp()
        self.write("tools/layers.json", (TOOLS / "layers.json").read_text(encoding="utf-8"))
        self.write("lockstep/base/env.h", "// What it is for.\n#pragma once\n#include <string>\n")

    def change_table(self, change):
        table = json.loads(self.read("tools/layers.json"))
        change(table)
        self.write("tools/layers.json", json.dumps(table))

    def test_good_tree_passes(self):
        ring = '#pragma once\n#include "lockstep/base/env.h"\n#include <torch/headeronly/x.h>\n'
        self.write("lockstep/shm/ring.h", ring)
        self.write("lockstep/comm/group.cpp", '#include <torch/csrc/x.h>\n#include <lockstep/shm/ring.h>\n')
        self.write("lockstep/testing/ranks.cpp", '#include "lockstep/fsdp/unit.h"\n#include "lockstep/lockstep.h"\n')
        self.write("lockstep/lockstep.h", '#pragma once\n#include "lockstep/testing/ranks.h"\n')
        self.write("cli/main.cpp", '#include <CLI/CLI.hpp>\n#include "options.h"\n#include "lockstep/launch/job.h"\n')
        self.write("cli/options.h", '#pragma once\n#include "lockstep/base/env.h"\n')
        self.assertIn("layers: 7 files, 0 offences", self.assert_passes())

    def test_reachable_folder_is_allowed(self):
        self.write("lockstep/zero/step.cpp", '#include "lockstep/mesh/mesh.h"\n#include "lockstep/base/env.h"\n')
        self.assert_passes()

    def test_upward_include_fails_with_place_and_rule(self):
        self.write("lockstep/comm/group.cpp", '#include <vector>\n#include "lockstep/ddp/reducer.h"\n')
        self.assert_fails("lockstep/comm/group.cpp:2:", "'comm' includes 'ddp'", "'comm' may include base, shm")

    def test_sideways_include_fails(self):
        self.write("lockstep/launch/job.cpp", "#include <lockstep/shm/ring.h>\n")
        self.assert_fails("lockstep/launch/job.cpp:1:", "'launch' includes 'shm'")

    def test_folder_inside_a_layer_follows_its_rule(self):
        self.write("lockstep/mesh/detail/x.cpp", '#include "lockstep/dtensor/x.h"\n')
        self.assert_fails("'mesh' includes 'dtensor'")

    def test_libtorch_is_refused_below_comm(self):
        self.write("lockstep/base/a.cpp", "#include <torch/headeronly/x.h>\n")
        self.write("lockstep/shm/b.cpp", "#include <c10/util/x.h>\n")
        self.write("lockstep/launch/c.cpp", "\n#  include <ATen/Tensor.h>\n")
        self.write("cli/d.cpp", "#include <torch/torch.h>\n")
        self.assert_fails("base/a.cpp:1:", "shm/b.cpp:1:", "launch/c.cpp:2:", "cli/d.cpp:1:", "only torch/headeronly/")

    def test_filesystem_is_refused(self):
        self.write("lockstep/base/bad.cpp", "#include <filesystem>\n")
        self.assert_fails("lockstep/base/bad.cpp:1", "<filesystem>", "crashes")

    def test_cli_includes_only_launch_and_base(self):
        self.write("cli/main.cpp", '#include "lockstep/comm/group.h"\n#include "lockstep/lockstep.h"\n')
        self.assert_fails("cli/main.cpp:1:", "cli/main.cpp:2:", "'cli' may include launch, base")

    def test_layer_may_not_include_cli(self):
        self.write("lockstep/testing/x.cpp", '#include "cli/options.h"\n')
        self.assert_fails("no layer may include cli/")

    def test_layer_may_not_include_the_umbrella(self):
        self.write("lockstep/ddp/x.cpp", "#include <lockstep/lockstep.h>\n")
        self.assert_fails("'ddp' includes the umbrella header")

    def test_relative_include_fails(self):
        self.write("lockstep/base/env.cpp", '#include "env.h"\n')
        self.write("lockstep/shm/x.cpp", '#include "../comm/group.h"\n')
        self.write("cli/main.cpp", '#include "../lockstep/comm/group.h"\n')
        self.assert_fails('write "lockstep/base/env.h"', "lockstep/shm/x.cpp:1:", "cli/main.cpp:1:")

    def test_public_header_may_not_include_an_internal_one(self):
        self.write("lockstep/comm/state.h", "// What a group keeps. Internal to comm.\n#pragma once\n")
        self.write("lockstep/comm/failure.h", '// Internal to comm.\n#pragma once\n#include "lockstep/comm/state.h"\n')
        self.write("lockstep/comm/group.cpp", '#include "lockstep/comm/state.h"\n')
        self.assert_passes()
        self.write("lockstep/comm/group.h", '// Groups.\n#pragma once\n#include "lockstep/comm/state.h"\n')
        self.assert_fails("lockstep/comm/group.h:3:", "a public header includes lockstep/comm/state.h", "not installed")

    def test_commented_include_is_no_include(self):
        self.write("lockstep/base/x.cpp", '// #include <torch/torch.h>\n/*\n#include "lockstep/ddp/x.h"\n*/\n')
        self.assert_passes()

    def test_missing_pragma_once_fails(self):
        self.write("lockstep/base/a.h", "#include <string>\n#pragma once\n")
        self.write("lockstep/base/b.h", "// only a comment: #pragma once\n")
        self.write("cli/c.h", "// c\n#ifndef C_H\n#define C_H\n#endif\n")
        self.assert_fails("base/a.h:1: no #pragma once", "base/b.h:1:", "cli/c.h:2:")

    def test_unknown_folder_fails(self):
        self.write("lockstep/extra/x.cpp", "")
        self.assert_fails("folder 'extra' is no layer")

    def test_include_of_unknown_folder_fails(self):
        self.write("lockstep/testing/x.cpp", '#include "lockstep/extra/x.h"\n#include "lockstep/loose.h"\n')
        self.assert_fails("x.cpp:1: includes lockstep/extra/x.h", "x.cpp:2: includes lockstep/loose.h")

    def test_loose_file_fails(self):
        self.write("lockstep/loose.h", "#pragma once\n")
        self.assert_fails("lockstep/loose.h:1: file in no layer")

    def test_table_listing_a_higher_layer_fails(self):
        self.change_table(lambda table: table["layers"][0]["may_include"].append("ddp"))
        self.assert_fails("folder 'base' lists 'ddp'")

    def test_table_with_a_folder_twice_fails(self):
        self.change_table(lambda table: table["layers"].append(table["layers"][0]))
        self.assert_fails("folder 'base' is in the table twice")


class BehaviourTest(TreeTest):
    checker = check_behaviour

    def table(self, *rows, file="docs/behaviour/ddp.md"):
        lines = [f"| {row} |" for row in ("row | behaviour | state | proof", "--- | --- | --- | ---", *rows)]
        self.write(file, "# Area\n\nIntro.\n\n" + "\n".join(lines) + "\n")

    def cpp(self, text):
        self.write("tests/unit/ddp/plan_test.cpp", text)

    def test_good_tree_passes_with_a_summary(self):
        self.table("DDP-1 | a | done | Plan.Works", "DDP-2 | b | partly | Plan.Works", "DDP-3 | c | open | ")
        self.cpp("// DDP-1, DDP-2\nTEST(Plan, Works) {\n  EXPECT_TRUE(true);\n}\n")
        self.assertEqual(self.assert_passes(), "behaviour: 3 rows, 1 done, 1 partly, 1 open\n")

    def test_rows_are_found_above_and_inside_tests_of_every_macro(self):
        self.table(*[f"DDP-{n} | x | done | " for n in range(1, 10)])
        self.cpp(
            "namespace {\n\n"
            "// DDP-1: reason\n// goes on\nTEST(A, Above) { f('{', \"}\", 1'000); }  // DDP-2\n\n"
            "TEST_F(B, Inside) {\n  if (x) {\n    g();  // DDP-3\n  }\n  /* DDP-4 */\n}\n\n"
            "// DDP-5 to DDP-7\nLOCKSTEP_RANK_TEST(C, Ranks, 4) {\n}\n\n"
            'TEST_P(D, Param) {\n  auto text = R"(} // DDP-3)";\n  // DDP-8 and DDP-9.\n}\n}  // namespace\n'
        )
        self.assert_passes("--write-proofs")
        text = self.read("docs/behaviour/ddp.md")
        for row, proof in [(1, "A.Above"), (2, "A.Above"), (3, "B.Inside"), (4, "B.Inside"), (5, "C.Ranks"),
                           (6, "C.Ranks"), (7, "C.Ranks"), (8, "D.Param"), (9, "D.Param")]:  # fmt: skip
            self.assertIn(f"| DDP-{row} | x | done | {proof} |\n", text)
        self.assert_passes()

    def test_python_tests_count(self):
        self.table("DDP-1 | a | done | Suite.test_one", "DDP-2 | b | done | oracle_test.test_two")
        self.write(
            "tests/oracle/oracle_test.py",
            "class Suite:\n    def test_one(self):\n        # DDP-1\n        pass\n\n\n"
            "# DDP-2\n@slow\ndef test_two():\n    pass\n",
        )
        self.assert_passes()

    def test_done_row_without_a_test_fails(self):
        self.table("DDP-1 | a | done | ")
        self.assert_fails("docs/behaviour/ddp.md:7: DDP-1 is done, but no test names it")

    def test_comment_apart_from_the_test_does_not_count(self):
        self.table("DDP-1 | a | done | ")
        self.cpp("// DDP-1\n\nTEST(Plan, Works) {\n}\n")
        self.assert_fails("no test names it")

    def test_reference_in_a_sentence_does_not_count(self):
        self.table("DDP-1 | a | done | ")
        self.cpp("// Not about DDP-1.\nTEST(Plan, Works) {\n}\n")
        self.assert_fails("no test names it")

    def test_disabled_test_does_not_count(self):
        self.table("DDP-1 | a | done | ")
        self.cpp("// DDP-1\nTEST(Plan, DISABLED_Works) {\n}\n")
        self.assert_fails("no test names it")

    def test_macro_definition_is_no_test(self):
        self.table("DDP-1 | a | done | ")
        self.cpp("// DDP-1\n#define RANK_TEST(Suite, Name) \\\n  TEST(Suite, Name) { run(); }\n")
        self.assert_fails("no test names it")

    def test_proof_that_does_not_exist_fails(self):
        self.table("DDP-1 | a | partly | Plan.Gone")
        self.assert_fails("DDP-1 is proved by Plan.Gone, which does not exist")

    def test_proof_that_does_not_name_the_row_fails(self):
        self.table("DDP-1 | a | done | Plan.Works, Plan.Other")
        self.cpp("// DDP-1\nTEST(Plan, Works) {\n}\nTEST(Plan, Other) {\n}\n")
        self.assert_fails("DDP-1 is proved by Plan.Other, which does not name it")

    def test_unknown_row_in_a_test_fails(self):
        self.table("DDP-1 | a | open | ")
        self.cpp("// DDP-9, DPP-1\nTEST(Plan, Works) {\n  // as UTF-8, unlike DDP-8\n}\n")
        output = self.assert_fails("plan_test.cpp:1: Plan.Works names DDP-9", "names DPP-1", "names DDP-8")
        self.assertNotIn("UTF-8", output)

    def test_duplicate_row_fails(self):
        self.table("DDP-1 | a | open | ")
        self.table("DDP-1 | a | open | ", file="docs/behaviour/zero.md")
        self.assert_fails("docs/behaviour/zero.md:7: DDP-1 is already at docs/behaviour/ddp.md:7")

    def test_unknown_state_fails(self):
        self.table("DDP-1 | a | finished | ")
        self.assert_fails("DDP-1 state 'finished' is not one of done, partly, open")

    def test_malformed_row_fails(self):
        self.table("DDP-1 | a | open", "DDP 2 | a | open | ")
        self.assert_fails("ddp.md:7: not of the form", "ddp.md:8: not of the form")

    def test_backward_range_fails(self):
        self.table("DDP-1 | a | open | ", "DDP-2 | a | open | ")
        self.cpp("// DDP-2 to DDP-1\nTEST(Plan, Works) {\n}\n")
        self.assert_fails("plan_test.cpp:1: range DDP-2 to DDP-1")

    def test_unreadable_python_fails(self):
        self.table("DDP-1 | a | open | ")
        self.write("tests/oracle/x_test.py", "def test_(:\n")
        self.assert_fails("tests/oracle/x_test.py:1: cannot be read")

    def test_stale_proof_fails_until_written(self):
        self.table("DDP-1 | a | done | Plan.A", "DDP-2 | b | partly | ", "DDP-3 | c | open | ")
        names = ["C", "A", "E", "B", "D"]
        self.cpp("".join(f"// DDP-1\nTEST(Plan, {name}) {{\n  // DDP-3\n}}\n" for name in names))
        self.assert_fails("DDP-1 has an out-of-date proof column", "--write-proofs")
        before = self.read("docs/behaviour/ddp.md")
        output = self.assert_passes("--write-proofs")
        self.assertIn("open, but named by tests: DDP-3", output)
        self.assertEqual(
            self.read("docs/behaviour/ddp.md"), before.replace("Plan.A", "Plan.A, Plan.B, Plan.C +2")
        )
        self.assertEqual(self.assert_passes(), "behaviour: 3 rows, 1 done, 1 partly, 1 open\n")

    def test_written_proofs_drop_what_is_gone(self):
        self.table("DDP-1 | a | partly | Plan.Gone", "DDP-2 | a | done | Plan.Gone")
        self.cpp("TEST(Plan, Works) {\n  // DDP-1\n}\n")
        self.assert_fails("DDP-2 is done, but no test names it", options=["--write-proofs"])
        self.assertIn("| DDP-1 | a | partly | Plan.Works |", self.read("docs/behaviour/ddp.md"))
        self.assertIn("| DDP-2 | a | done |  |", self.read("docs/behaviour/ddp.md"))


if __name__ == "__main__":
    unittest.main()
