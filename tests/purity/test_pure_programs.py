"""Generated pure programs are proven pure, train as under `python`, and overlap."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from gemini.purity.proof import prove_purity
from tests.programs.impure.compose import Program
from tests.programs.impure.pure_pieces import generate_pure
from tests.programs.program_runner import describe_difference, run_both, run_program

PROGRAMS = {program.title.partition(" | ")[0]: program for program in generate_pure()}
# Pure, but not proven: what their code names may have effects.
NOT_PROVEN = {
    "print never reached": "uses print",
    "warning never given": "uses warnings.warn",
    "log never written": "uses log",
    "single dispatch": "uses dispatch_cache",
    "weak reference": "uses holder",
}


class _Proven(BaseException):
    """Ends a program when its model is built."""


def _prove(program: Program, folder: Path) -> str:
    reasons = []

    def prove(model: nn.Module) -> None:
        reasons.append(prove_purity(model).reason)
        raise _Proven

    with pytest.raises(_Proven):
        run_program(program, folder, prove)
    for name in (program.name, f"{program.name}_helper"):
        sys.modules.pop(name, None)
    return reasons[0]


def test_pure_programs_are_proven(tmp_path: Path) -> None:
    reasons = {name: _prove(program, tmp_path / program.name) for name, program in PROGRAMS.items()}
    refused = {name: reason for name, reason in reasons.items() if reason}
    assert refused.keys() == NOT_PROVEN.keys(), refused
    assert all(part in refused[name] for name, part in NOT_PROVEN.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pure_programs_train_as_under_python_and_overlap(tmp_path: Path) -> None:
    programs = [*PROGRAMS.values()]
    plain, managed = run_both(programs, tmp_path)
    found = [describe_difference(one, plain[one.name], managed[one.name]) for one in programs]
    assert not any(found), "\n\n".join(filter(None, found))
    assert sum("overlapped" in managed[one.name].steps for one in programs) >= 70
