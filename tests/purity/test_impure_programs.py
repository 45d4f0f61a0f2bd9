"""Generated training programs whose models reach files, generators, iterators and state train as under `python`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.impure.compose import Program, generate
from tests.programs.impure.effects import FAMILIES
from tests.programs.program_runner import describe_difference, has_failed, run_both

SEED, PER_FAMILY = 3, 24
IMPURE = [family for family in FAMILIES if family]


def check_equal(programs: list[Program], folder: Path) -> int:
    """Compare programs under `python` and over two workers; return how many do not raise."""
    plain, managed = run_both(programs, folder)
    found = [describe_difference(one, plain[one.name], managed[one.name]) for one in programs]
    assert not any(found), "\n\n".join(filter(None, found))
    return sum(not has_failed(plain[one.name]) for one in programs)


def test_two_programs_of_each_family_train_as_under_python(tmp_path: Path) -> None:
    programs = [program for family in IMPURE for program in generate(1, family, 2)]
    assert check_equal(programs, tmp_path) >= len(programs) - 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", IMPURE, ids=[FAMILIES[one] for one in IMPURE])
def test_impure_programs_train_as_under_python(family: int, tmp_path: Path) -> None:
    assert check_equal([*generate(SEED, family, PER_FAMILY)], tmp_path) >= 20
