"""Checks: graph and model side by side on one batch, from the same state and the same random numbers.

    first     outputs, written tensors and inputs by element; gradients by digest, or, for a large model on all but
              one batch, by the way back through torch's own graph
    closer    where that shows a difference: gradients by element, one set held; and if the difference remains,
              the noise of the model itself, run again and again, is what may remain

A real difference is never accepted: noise counts as far as the model shows it in the same tensor, up to a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gemini.capture.binding import Call, bind
from gemini.capture.executor import Execution
from gemini.capture.gradients import Sink, digest, kept
from gemini.capture.graph import Graph
from gemini.capture.hooks import with_hooks
from gemini.capture.observation import (
    Differences,
    Observation,
    compare,
    contents,
    dense,
    distance,
    look,
    observe,
    scale_of,
    tensor_difference,
    tolerance,
)
from gemini.capture.state import Saved, seed_all
from gemini.capture.traces import Trace

_RERUNS = 3  # of the model, to see its noise; of the graph, to stay within it
_LOUDEST, _LOUDEST_SHARE = 1000, 0.05  # noise above so many times the tolerance, or this share, proves nothing


class Rejected(Exception):
    """The model itself rejects a batch that was made from the captured one."""


class BackwardFailed(Exception):
    """The backward of a graph fails where that of the model did not."""


class Checks:
    """Compares graphs with one model; what the model showed is remembered for the next graph."""

    def __init__(self, model: nn.Module, call: Call, saved: Saved) -> None:
        self.model, self.call, self.saved = model, call, saved
        self.seeds: dict[str, int | None] = {}  # per batch; None: the generators as they are
        self.expected: dict[str, Observation | None] = {}

    def begin(self, what: str) -> None:
        """The state before a run; a second batch also gets other random numbers, so that baked-in ones show."""
        self.saved.restore()
        seed = self.seeds.get(what)
        if seed is not None:
            seed_all(seed)

    def adopt(self, what: str, traced: Trace, gradients: bool) -> None:
        """Take a traced run for the run of the model that graphs are compared with."""
        if what not in self.expected:
            given = self.model, traced.output, traced.arguments
            self.expected[what] = look(*given, gradients=gradients, keep=digest, saved=self.saved)

    def forget(self, what: str) -> None:
        """Run the model again for this batch."""
        self.expected.pop(what, None)

    def differences(self, what: str, graph: Graph, given: Sequence[torch.Tensor], gradients: bool) -> Differences:
        """Where graph and model differ on a batch. What the graph's run raises passes through."""
        expected = self._expected(what, given, gradients)
        try:
            found = self._observe(what, self._graph(graph), given, gradients, digest)
        except RuntimeError as error:
            raise BackwardFailed(str(error)) from error
        differences = compare(self._completed(expected), self._completed(found))
        if not differences and not gradients and expected.way_back != found.way_back:
            self.forget(what)
            return self.differences(what, graph, given, gradients=True)
        if differences or not _equal_digests(expected, found):
            return self._closer(what, graph, given, gradients)
        return differences

    def finite(self, what: str) -> bool:
        """Whether the outputs of the model on a batch were."""
        seen = self.expected.get(what)
        return seen is None or seen.finite

    # ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _observe(
        self,
        what: str,
        run: Callable[[Any, Any], Any],
        given: Sequence[torch.Tensor],
        gradients: bool,
        keep: Sink,
    ) -> Observation:
        self.begin(what)
        try:
            return observe(run, self.model, self.call, given, gradients=gradients, keep=keep, saved=self.saved)
        finally:
            self.saved.restore()

    def _graph(self, graph: Graph) -> Callable[[Any, Any], Any]:
        return lambda args, kwargs: with_hooks(
            self.model, args, kwargs, lambda _, a, k: Execution(graph, self.model, bind(self.model, a, k)).run()
        )

    def _model(self, args: Any, kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def _expected(self, what: str, given: Sequence[torch.Tensor], gradients: bool) -> Observation:
        if what not in self.expected:
            try:
                self.expected[what] = self._observe(what, self._model, given, gradients, digest)
            except Exception:
                if what == "batch":
                    raise
                self.expected[what] = None
        seen = self.expected[what]
        if seen is None:
            raise Rejected
        return seen

    def _completed(self, seen: Observation) -> Observation:
        """With all tensors that any run has written: one that this run did not write is as before."""
        return replace(seen, buffers={copy.name: contents(copy.before) for copy in self.saved.written()} | seen.buffers)

    # ── a closer look ──────────────────────────────────────────────────────────────────────────────────────────
    def _closer(self, what: str, graph: Graph, given: Sequence[torch.Tensor], gradients: bool) -> Differences:
        """The differences by element that the noise of the model does not explain."""
        reference = self._observe(what, self._model, given, gradients, kept)
        found = self._against(reference, what, self._graph(graph), given, gradients)
        if not found.differences:
            return found.differences
        reruns = [self._against(reference, what, self._model, given, gradients) for _ in range(_RERUNS)]
        noise = {name: max(run.off.get(name, 0.0) for run in reruns) for name in found.off}
        for _ in range(_RERUNS):
            if all(found.off[name] <= 2 * noise[name] <= found.most[name] for name in found.off) and found.only_off:
                return Differences()
            if not any(noise.values()):
                break
            found = self._against(reference, what, self._graph(graph), given, gradients)
        return found.differences

    def _against(
        self,
        reference: Observation,
        what: str,
        run: Callable[[Any, Any], Any],
        given: Sequence[torch.Tensor],
        gradients: bool,
    ) -> _Close:
        close = _Close(reference)
        seen = self._observe(what, run, given, gradients, close.gradient)
        close.rest(self._completed(reference), self._completed(seen))
        return close


class _Close:
    """A run compared with a reference, element by element: how far each tensor is off, and how far it may be."""

    def __init__(self, reference: Observation) -> None:
        self.grads = reference.grads or {}
        self.off: dict[str, float] = {}
        self.most: dict[str, float] = {}
        self.lines: dict[str, str] = {}
        self.differences = Differences()
        self.only_off = True  # values only: not a missing tensor, nor another size

    def gradient(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Compare a gradient as it comes, and let go of it."""
        line = self._note(f"gradient of {name}", self.grads.get(name), grad.detach())
        if line:
            self.lines[name] = line
        return grad.new_zeros(()) if grad.layout == torch.strided else torch.zeros(())

    def rest(self, reference: Observation, seen: Observation) -> None:
        """Compare everything else."""
        self.differences = compare(replace(reference, grads=None), replace(seen, grads=None))
        for name in reference.buffers:
            self._note(f"buffer {name}", reference.buffers[name], seen.buffers.get(name))
        for what, one, two in (
            ("output", reference.outputs, seen.outputs),
            ("input", reference.inputs, seen.inputs),
        ):
            self.only_off &= len(one) == len(two)
            for index, (expected, found) in enumerate(zip(one, two, strict=False)):
                self._note(f"{what} {index}", expected, found)
        self.only_off &= reference.structure == seen.structure
        for name, grad in self.grads.items():
            other = (seen.grads or {}).get(name)
            if (grad is None) != (other is None):
                self.lines[name] = f"gradient of {name}: {'missing' if other is None else 'unexpected'}"
                self.only_off = False
        self.differences.lines += self.lines.values()
        self.differences.parameters += self.lines

    def _note(self, name: str, expected: torch.Tensor | None, found: torch.Tensor | None) -> str:
        line = tensor_difference(expected, found)
        if not line:
            return ""
        if expected is None or found is None or not line.startswith("off"):
            self.only_off = False
        else:
            expected, found = dense(expected), dense(found)
            self.off[name] = distance(expected, found)
            self.most[name] = min(_LOUDEST * tolerance(expected), _LOUDEST_SHARE) * scale_of(expected)
        return f"{name}: {line}"


def _equal_digests(expected: Observation, found: Observation) -> bool:
    """Whether all gradients are equal to the bit, as far as digests can tell: one that is not finite tells nothing."""
    one, two = expected.grads or {}, found.grads or {}
    return one.keys() == two.keys() and all(
        (a is b is None) or (a is not None and b is not None and torch.equal(a, b) and bool(torch.isfinite(a).all()))
        for a, b in zip(one.values(), two.values(), strict=True)
    )
