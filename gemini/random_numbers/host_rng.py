"""Foreign draws: functions of a model that draw from Python's or NumPy's generator, as masks of SpecAugment do.

They are run when the call is made, for the whole batch and in their order, as one device would run them: from then on
these generators are where they would be after the call, whatever the program does with them next. What the functions
gave is kept with the call. Workers get the part of their samples, and never draw themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import SplittingError
from gemini.batch_analysis.loss_tape import Tape
from gemini.batch_analysis.precompute import Foreseen, is_foreign
from gemini.ir.graph import Graph

States = tuple[Any, Any]


class ForeignDraws:
    """What the functions of a model that draw so gave one call. Made when the call is made."""

    def __init__(self, graph: Graph, model: nn.Module, bound: dict[str, Any]) -> None:
        self.results: dict[int, Any] = {}
        self._before = states()
        own = torch.get_rng_state()
        try:
            for node in graph.nodes:
                if is_foreign(graph, node):
                    known = Foreseen(graph, bound, Tape(0, []), model, self.results)
                    self.results[node.id] = known.run(node.id)
            if not torch.equal(own, torch.get_rng_state()):
                raise SplittingError("a function of the model draws from two generators")
        except BaseException:
            set_states(self._before)
            torch.set_rng_state(own)
            raise

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """With the generators as they were before the call; afterwards, as they are now."""
        now = states()
        set_states(self._before)
        try:
            yield
        finally:
            set_states(now)


def states() -> States:
    """Those of Python's and NumPy's generators."""
    return random.getstate(), np.random.get_state()


def set_states(found: States) -> None:
    """Put them back."""
    random.setstate(found[0])
    np.random.set_state(found[1])


def still(function: Any) -> Any:
    """A function that leaves these generators as it finds them: what it returns here, nobody uses."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = states()
        try:
            return function(*args, **kwargs)
        finally:
            set_states(before)

    return run


def draws_foreign(graph: Graph) -> bool:
    """Whether any function of a model draws so."""
    return any(is_foreign(graph, node) for node in graph.nodes)
