"""Checks: graph and model side by side on one batch, from the same state and the same random numbers.

    first     outputs, written tensors and inputs by element; gradients by digest, or, for a large model on all but
              one batch, by the way back through torch's own graph
    closer    where that shows a difference: gradients by element, one set held; and if the difference remains,
              the noise of the model itself, run again and again, is what may remain

A real difference is never accepted: noise counts as far as the model shows it in the same tensor, up to a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from gemini.capture.module_hooks import run_with_hooks
from gemini.capture.trace_diff import Trace
from gemini.capture.verify.gradient_record import Sink, digest, keep_gradient
from gemini.capture.verify.step_observation import (
    Differences,
    StepObservation,
    argument_difference,
    compare,
    contents,
    dense,
    distance,
    observe,
    observe_finished,
    scale_of,
    tensor_difference,
    tolerance,
)
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution
from gemini.snapshot.model_state import ModelSnapshot
from gemini.snapshot.rng_snapshot import seed_all

_RERUNS = 3  # of the model, to see its noise; of the graph, to stay within it
_PATIENT_RERUNS, _FAR = 12, 10  # of the model, where the graph is no further off than so many times the noise so far
_LOUDEST, _LOUDEST_SHARE = 1000, 0.05  # noise above so many times the tolerance, or this share, proves nothing


class BatchRejected(Exception):
    """The model itself rejects a batch that was made from the captured one."""


class BackwardFailed(Exception):
    """The backward of a graph fails where that of the model did not."""


class GraphChecker:
    """Compares graphs with one model; what the model showed is remembered for the next graph."""

    def __init__(self, model: nn.Module, call: ModelCall, saved: ModelSnapshot) -> None:
        self.model, self.call, self.saved = model, call, saved
        self.seeds: dict[str, int | None] = {}  # per batch; None: the generators as they are
        self.expected: dict[str, StepObservation | None] = {}
        self.noisy: dict[str, int] = {}  # per batch, the tensors that the model's own noise makes differ

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
            self.expected[what] = observe_finished(*given, gradients=gradients, keep=digest, saved=self.saved)

    def forget(self, what: str) -> None:
        """Run the model again for this batch."""
        self.expected.pop(what, None)

    def differences(self, what: str, graph: Graph, given: Sequence[torch.Tensor], gradients: bool) -> Differences:
        """Where graph and model differ on a batch. What the graph's run raises passes through."""
        expected = self._expected(what, given, gradients)
        self.noisy.pop(what, None)
        try:
            found = self._observe(what, self._graph(graph), given, gradients, digest)
        except RuntimeError as error:
            raise BackwardFailed(str(error)) from error
        differences = compare(self._completed(expected), self._completed(found))
        if not gradients and expected.autograd_text != found.autograd_text:
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
    ) -> StepObservation:
        self.begin(what)
        try:
            return observe(run, self.model, self.call, given, gradients=gradients, keep=keep, saved=self.saved)
        finally:
            self.saved.restore()

    def _graph(self, graph: Graph) -> Callable[[Any, Any], Any]:
        return lambda args, kwargs: run_with_hooks(
            self.model, args, kwargs, lambda _, a, k: Execution(graph, self.model, bind(self.model, a, k)).run()
        )

    def _model(self, args: Any, kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def _expected(self, what: str, given: Sequence[torch.Tensor], gradients: bool) -> StepObservation:
        known = self.expected.get(what)
        if what not in self.expected or (known is not None and (known.grads is not None) != gradients):
            try:
                self.expected[what] = self._observe(what, self._model, given, gradients, digest)
            except Exception:
                if what == "batch":
                    raise
                self.expected[what] = None
        seen = self.expected[what]
        if seen is None:
            raise BatchRejected
        return seen

    def _completed(self, seen: StepObservation) -> StepObservation:
        """With all tensors that any run has written: one that this run did not write is as before."""
        return replace(seen, buffers={copy.name: contents(copy.before) for copy in self.saved.written()} | seen.buffers)

    # ── a closer look ──────────────────────────────────────────────────────────────────────────────────────────
    def _closer(self, what: str, graph: Graph, given: Sequence[torch.Tensor], gradients: bool) -> Differences:
        """The differences by element that the noise of the model does not explain, in several runs of the graph."""
        reference = self._observe(what, self._model, given, gradients, keep_gradient)
        close = self._against(reference, what, self._graph(graph), given, gradients)
        if not close.lines:
            return Differences()
        noise: dict[str, float] = {}
        left = dict(close.lines)
        for count in range(_PATIENT_RERUNS):
            if not left or (count >= _RERUNS and not close.may_be_noise(left, noise)):
                break
            for name, off in self._against(reference, what, self._model, given, gradients).off.items():
                noise[name] = max(off, noise.get(name, 0.0))
            left = close.beyond(noise)
        seen = set(close.lines)
        for _ in range(_RERUNS - 1):
            if not left or not any(noise.values()):  # without noise, the model repeats itself and so does the graph
                break
            close = self._against(reference, what, self._graph(graph), given, gradients)
            again = close.beyond(noise)
            left = {name: line for name, line in left.items() if name in again}
            seen |= set(close.lines)
        self.noisy[what] = len(seen - set(left))
        parameters = [name.removeprefix(_GRADIENT) for name in left if name.startswith(_GRADIENT)]
        return Differences(list(left.values()), len(parameters) < len(left), parameters)

    def _against(
        self,
        reference: StepObservation,
        what: str,
        run: Callable[[Any, Any], Any],
        given: Sequence[torch.Tensor],
        gradients: bool,
    ) -> _ElementComparison:
        close = _ElementComparison(reference)
        seen = self._observe(what, run, given, gradients, close.gradient)
        close.rest(self._completed(reference), self._completed(seen))
        return close


class _ElementComparison:
    """A run compared with a reference, element by element: how far each tensor is off, and how far it may be."""

    def __init__(self, reference: StepObservation) -> None:
        self.reference = reference
        self.off: dict[str, float] = {}
        self.most: dict[str, float] = {}
        self.rounding: dict[str, float] = {}  # of its dtype
        self.lines: dict[str, str] = {}

    def gradient(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Compare a gradient as it comes, and let go of it."""
        self._note(f"{_GRADIENT}{name}", (self.reference.grads or {}).get(name), grad.detach())
        return torch.zeros(())

    def rest(self, reference: StepObservation, seen: StepObservation) -> None:
        """Compare everything else."""
        if reference.structure != seen.structure:
            self.lines["structure"] = f"the output is {seen.structure:.200}, not {reference.structure:.200}"
        if line := argument_difference(reference, seen):
            self.lines["given"] = line
        one, two = _forward_tensors(reference), _forward_tensors(seen)
        for name in {**one, **two}:
            self._note(name, one.get(name), two.get(name))
        for name, grad in (reference.grads or {}).items():
            if grad is not None and (seen.grads or {}).get(name) is None:
                self.lines[f"{_GRADIENT}{name}"] = f"{_GRADIENT}{name}: missing"

    def beyond(self, noise: dict[str, float]) -> dict[str, str]:
        """What noise does not explain, by name."""
        return {
            name: line
            for name, line in self.lines.items()
            if name not in self.most or not self.off[name] <= 2 * noise.get(name, 0.0) <= self._loudest(name)
        }

    def may_be_noise(self, names: Iterable[str], noise: dict[str, float]) -> bool:
        """Whether all these tensors are noisy and not far beyond: a few runs show little of the noise of a number."""
        return all(0 < self.off.get(name, math.inf) <= _FAR * noise.get(name, 0.0) for name in names)

    def _loudest(self, name: str) -> float:
        """The noise up to which a tensor still proves something.

        A gradient whose terms cancel (of a bias before a softmax or a norm) is rounding and nothing else, and may be
        another one each time. What it is made of has the size of other gradients, so its rounding has theirs.
        """
        if not name.startswith(_GRADIENT):
            return self.most[name]
        return max(self.most[name], self.rounding[name] * self._largest)

    @cached_property
    def _largest(self) -> float:
        """The largest element of all gradients."""
        return max(
            (scale_of(dense(grad)) for grad in (self.reference.grads or {}).values() if grad is not None), default=0
        )

    def _note(self, name: str, expected: torch.Tensor | None, found: torch.Tensor | None) -> None:
        line = tensor_difference(expected, found)
        if line:
            self.lines[name] = f"{name}: {line}"
        if expected is None or found is None or (line and not line.startswith("off")):
            return
        expected, found = dense(expected), dense(found)
        if not (expected.is_floating_point() or expected.is_complex()) or expected.is_meta:
            return
        self.off[name] = distance(expected, found)  # within rounding too: another run may be beyond
        if line:
            self.rounding[name] = tolerance(expected)
            self.most[name] = min(_LOUDEST * tolerance(expected), _LOUDEST_SHARE) * scale_of(expected)


def _forward_tensors(seen: StepObservation) -> dict[str, torch.Tensor]:
    return {
        **{f"output {index}": tensor for index, tensor in enumerate(seen.outputs)},
        **{f"buffer {name}": tensor for name, tensor in seen.buffers.items()},
        **{f"input {index}": tensor for index, tensor in enumerate(seen.inputs)},
    }


_GRADIENT = "gradient of "


def _equal_digests(expected: StepObservation, found: StepObservation) -> bool:
    """Whether all gradients are equal to the bit, as far as digests can tell: one that is not finite tells nothing."""
    one, two = expected.grads or {}, found.grads or {}
    return one.keys() == two.keys() and all(
        (a is b is None) or (a is not None and b is not None and torch.equal(a, b) and bool(torch.isfinite(a).all()))
        for a, b in zip(one.values(), two.values(), strict=True)
    )
