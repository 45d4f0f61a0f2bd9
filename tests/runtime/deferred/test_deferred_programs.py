"""Programs observe the same values with deferred calls as with plain torch, in every execution mode."""

from __future__ import annotations

import pytest

from tests import models
from tests.programs.deferred_values import PROGRAMS, REORDERED
from tests.runtime.deferred.rig import MODES, compare


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
