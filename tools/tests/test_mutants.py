#!/usr/bin/env python3
"""Tests of what mutants.py makes of a line; see test_checkers.py.

Run with `python3 -m unittest discover -s tools/tests`.
"""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mutants  # noqa: E402


class FaultsTest(unittest.TestCase):
    def assert_faults(self, line, *faults):
        self.assertEqual(list(mutants.faults_of_line(line)), list(faults))

    def test_a_check_is_left_out(self):
        self.assert_faults(
            '  TORCH_CHECK(size(a, b) > 0, "a, b: ", a);',
            ("check left out", '  TORCH_CHECK(LOCKSTEP_MUTANT({id}) || (size(a, b) > 0), "a, b: ", a);'),
        )
        self.assert_faults(
            "  TORCH_CHECK_VALUE(is_open,",
            ("check left out", "  TORCH_CHECK_VALUE(LOCKSTEP_MUTANT({id}) || (is_open),"),
        )

    def test_a_check_that_never_holds_or_has_no_end_here_stays(self):
        self.assert_faults('  TORCH_CHECK(false, "it cannot be");')
        self.assert_faults("  TORCH_CHECK(one(a,")
        self.assert_faults('  TORCH_CHECK(text == "a, b")')

    def test_a_condition_is_negated_and_changed(self):
        self.assert_faults(
            "  if (a < b || c) return;",
            ("condition negated", "  if (LOCKSTEP_MUTANT({id}) != static_cast<bool>(a < b || c)) return;"),
            ("< -> <=", "  if (LOCKSTEP_MUTANT({id}) ? (a <= b || c) : (a < b || c)) return;"),
            ("|| -> &&", "  if (LOCKSTEP_MUTANT({id}) ? (a < b && c) : (a < b || c)) return;"),
        )
        self.assert_faults(
            "  } else if (is_done) {",
            ("condition negated", "  } else if (LOCKSTEP_MUTANT({id}) != static_cast<bool>(is_done)) {"),
        )

    def test_a_condition_that_declares_stays(self):
        self.assert_faults("  if (const auto found = find(a); found) return;")
        self.assert_faults("  while (auto* next = pop()) {")

    def test_a_loop_leaves_out_the_last_one(self):
        self.assert_faults(
            "  for (int i = 0; i < count; ++i) {",
            ("last one left out", "  for (int i = 0; LOCKSTEP_MUTANT({id}) ? (i + 1 < count) : (i < count); ++i) {"),
        )
        self.assert_faults("  for (const auto& each : all) {")

    def test_a_value_is_changed(self):
        self.assert_faults(
            "  return a + 1;",
            ("+ -> -", "  return LOCKSTEP_MUTANT({id}) ? (a - 1) : (a + 1);"),
            ("1 -> 2", "  return LOCKSTEP_MUTANT({id}) ? (a + 2) : (a + 1);"),
        )
        self.assert_faults("  is_open_ = true;", ("true -> false", "  is_open_ = LOCKSTEP_MUTANT({id}) ? (false) : (true);"))

    def test_a_call_is_left_out(self):
        self.assert_faults(
            "  reducer_->buckets().add(a, b);",
            ("call left out", "  if (!LOCKSTEP_MUTANT({id})) { reducer_->buckets().add(a, b); }"),
        )

    def test_what_is_no_call_of_its_own_or_costs_time_only_stays(self):
        for line in ("  return run(a);", "  throw Error(a);", "  add(a, [&] {", "  all.reserve(count);", "  // stop();", "add(a);"):
            self.assert_faults(line)


class SwapsTest(unittest.TestCase):
    def test_operators_and_constants_change_one_at_a_time(self):
        self.assertEqual(
            list(mutants.swaps("a == 0 && b == false")),
            [
                ("== -> !=", "a != 0 && b == false"),
                ("== -> !=", "a == 0 && b != false"),
                ("&& -> ||", "a == 0 || b == false"),
                ("false -> true", "a == 0 && b == true"),
                ("0 -> 1", "a == 1 && b == false"),
            ],
        )

    def test_literals_names_and_other_numbers_stay(self):
        self.assertEqual(list(mutants.swaps(r'f("a < b, \" true 1") < 10')), [("< -> <=", r'f("a < b, \" true 1") <= 10')])
        for text in ("is_true", "a1", "1.5", "x.0", "std::vector<int>(a)", '"1"'):
            self.assertEqual(list(mutants.swaps(text)), [], text)


class BalancedTest(unittest.TestCase):
    def test_brackets_in_literals_do_not_count(self):
        for text in ("f(a, {b[1]})", '")"', r'f("\")")', ""):
            self.assertTrue(mutants.balanced(text), text)
        for text in ("f(a", "a) (", "f(])["):
            self.assertFalse(mutants.balanced(text), text)


if __name__ == "__main__":
    unittest.main()
