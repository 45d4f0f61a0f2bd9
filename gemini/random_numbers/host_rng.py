"""Host random numbers: functions of a model that use Python's or NumPy's generator, such as SpecAugment masks.

They run when the call is made, for the whole batch and in order, as on one device, so these generators have the right
state for the following code of the script. The call stores their results; workers receive the part of their samples,
and never use these generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import SplittingError
from gemini.batch_analysis.loss_tape import Tape
from gemini.batch_analysis.precompute import Precomputed, uses_host_rng
from gemini.ir.graph import Graph
from gemini.snapshot.rng_snapshot import HostGenerators


class HostRandomResults:
    """The results of a model's functions that use host generators, for one call; computed when the call is made."""

    def __init__(self, graph: Graph, model: nn.Module, bound: dict[str, Any]) -> None:
        self.results: dict[int, Any] = {}
        self._before = HostGenerators()
        own = torch.get_rng_state()
        try:
            for node in graph.nodes:
                if uses_host_rng(graph, node):
                    known = Precomputed(graph, bound, Tape(0, []), model, self.results)
                    self.results[node.id] = known.run(node.id)
            if not torch.equal(own, torch.get_rng_state()):
                raise SplittingError("a function of the model draws from torch's generator as well as a host generator")
        except BaseException:
            self._before.restore()
            torch.set_rng_state(own)
            raise

    @contextmanager
    def states_of_call(self) -> Iterator[None]:
        """Restore the generators to their states before the call, and afterwards to the current ones."""
        now = HostGenerators()
        self._before.restore()
        try:
            yield
        finally:
            now.restore()


def preserve_host_rng(function: Any) -> Any:
    """Wrap a function so that it leaves Python's and NumPy's generators unchanged; generated stages call it.

    The stage replaces the result of the wrapped function by that of the whole batch.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        before = HostGenerators()
        try:
            return function(*args, **kwargs)
        finally:
            before.restore()

    return run
