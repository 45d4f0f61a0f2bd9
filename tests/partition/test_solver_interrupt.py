"""Ctrl-C during a solver run interrupts the program, not only the solver."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gemini.cpsat_library import has_cpsat, import_cpsat
from gemini.partition.exact import cpsat


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background ignores it
    yield
    signal.signal(signal.SIGINT, before)


def _interrupted(model: Any) -> None:
    cpsat.solve(model, 2.0)
    signal.sigpending()  # handlers run between instructions


@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(not has_cpsat(), reason="OR-tools is not installed")
def test_an_interrupt_is_the_programs() -> None:
    model = import_cpsat().CpModel()
    numbers = random.Random(0)
    facts = [model.new_bool_var("") for _ in range(400)]
    for _ in range(1700):  # as hard as clauses of three get
        model.add_bool_or([numbers.choice((one, one.negated())) for one in numbers.sample(facts, 3)])
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _interrupted(model)
    finally:
        timer.join()
