"""Who presses Ctrl-C while a solver runs interrupts the program, not the solver alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gemini.partition.exact import solver


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background ignores it
    yield
    signal.signal(signal.SIGINT, before)


def _interrupted(model: Any) -> None:
    solver.solve(model, 1.0)
    signal.sigpending()  # handlers run between instructions


@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(not solver.has_solver(), reason="OR-tools is not installed")
def test_an_interrupt_is_the_programs() -> None:
    model = solver.cp_model().CpModel()
    pigeons, holes = 14, 13  # more than holes: hard to prove
    sits = [[model.new_bool_var("") for _ in range(holes)] for _ in range(pigeons)]
    for row in sits:
        model.add(sum(one * (at + 2) for at, one in enumerate(row)) >= 2)
        model.add(sum(row) == 1)
    for first in range(pigeons):
        for second in range(first):
            for hole in range(holes):
                model.add_bool_or(sits[first][hole].negated(), sits[second][hole].negated())
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _interrupted(model)
    finally:
        timer.join()
