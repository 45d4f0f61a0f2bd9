"""Training scripts produce under `gemini_python` what they produce under `python`."""

from __future__ import annotations

import re

import pytest

from conformance.scripts.registry import FOLDER, PROGRAMS, Program
from conformance.scripts.verdict import judge


def _parameter(program: Program) -> object:
    marks = [] if program.sampled else [pytest.mark.slow]
    if program.missing:
        marks.append(pytest.mark.skip(reason=f"{', '.join(program.missing)} is not installed"))
    return pytest.param(program, id=program.name, marks=marks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [_parameter(program) for program in PROGRAMS])
def test_same_as_under_python(program: Program) -> None:
    verdict = judge(program)
    assert not verdict.faults, "\n".join([*verdict.faults, verdict.said])


def test_programs_are_ordinary_scripts() -> None:
    for path in FOLDER.rglob("*.py"):
        assert "gemini" not in path.read_text(encoding="utf-8").lower(), path


def test_every_program_is_registered() -> None:
    entries = {program.path for program in PROGRAMS}
    scripts = set(FOLDER.glob("*.py")) | {
        FOLDER / "several_files/train.py",
        FOLDER / "from_config/main.py",
    }
    assert entries == scripts
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    assert all(re.fullmatch(r"[a-z0-9_-]+", program.name) for program in PROGRAMS)
