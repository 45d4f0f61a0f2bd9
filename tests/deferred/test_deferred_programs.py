"""Programs see the same with calls that are put off as with plain torch, whichever way the step is run."""

from __future__ import annotations

import pytest

from tests.deferred import models
from tests.deferred.programs import PROGRAMS, REORDERED
from tests.deferred.rig import MODES, compare


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sees_the_same(name: str, mode: str) -> None:
    program, make = PROGRAMS[name]
    compare(program, make, mode, exact=name not in REORDERED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, (_, make) in PROGRAMS.items() if make is models.plain])
def test_sees_the_same_with_dropout(name: str) -> None:
    program, _ = PROGRAMS[name]
    compare(program, models.dropout, "eager", exact=name not in REORDERED, draws=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, (_, make) in PROGRAMS.items() if make is models.plain])
def test_sees_the_same_with_running_averages(name: str) -> None:
    program, _ = PROGRAMS[name]
    compare(program, models.norm, "eager", exact=name not in REORDERED, writes=True)
