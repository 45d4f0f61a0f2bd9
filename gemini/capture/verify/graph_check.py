"""Graph check: graph and model compared on one batch, from the same state and the same random numbers.

    first     outputs, written tensors and inputs by element; gradients by digest, or, for a large model on all but
              one batch, by the autograd graph
    closer    on a difference: gradients by element, one set retained; a remaining difference must be within the noise
              of the model itself over several runs

A real difference is never accepted: noise counts only as far as the model shows it in the same tensor, up to a bound.
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

_RERUNS = 3  # of the model, to measure its noise; of the graph, to stay within it
_MAX_RERUNS, _FAR = 12, 10  # of the model, where the graph is off by at most this multiple of the noise so far
_MAX_NOISE, _MAX_NOISE_SHARE = (
    1000,
    0.05,
)  # noise above this multiple of the tolerance, or this share of the scale, is refused


class BatchRejected(Exception):
    """The model itself rejects a batch derived from the captured one."""


class BackwardFailed(Exception):
    """The backward of a graph fails where that of the model did not."""


class GraphChecker:
    """Compares graphs with one model; observations of the model are cached for the next graph."""

    def __init__(self, model: nn.Module, call: ModelCall, saved: ModelSnapshot) -> None:
        self.model, self.call, self.saved = model, call, saved
        self.seeds: dict[str, int | None] = {}  # per batch; None: the generators as they are
        self.expected: dict[str, StepObservation | None] = {}
        self.noisy: dict[str, int] = {}  # per batch, the number of tensors that differ by noise of the model

    def begin(self, what: str) -> None:
        """Restore the state before a run; a second batch also gets other random numbers, so that constants differ."""
        self.saved.restore()
        seed = self.seeds.get(what)
        if seed is not None:
            seed_all(seed)

    def adopt(self, what: str, traced: Trace, gradients: bool) -> None:
        """Use a traced run as the run of the model that graphs are compared with."""
        if what not in self.expected:
            inputs = self.model, traced.output, traced.arguments
            self.expected[what] = observe_finished(*inputs, gradients=gradients, keep=digest, saved=self.saved)

    def forget(self, what: str) -> None:
        """Run the model again for this batch."""
        self.expected.pop(what, None)

    def differences(self, what: str, graph: Graph, inputs: Sequence[torch.Tensor], gradients: bool) -> Differences:
        """Return where graph and model differ on a batch. Exceptions of the graph's run propagate."""
        expected = self._observe_model(what, inputs, gradients)
        self.noisy.pop(what, None)
        try:
            found = self._observe(what, self._graph(graph), inputs, gradients, digest)
        except RuntimeError as error:
            raise BackwardFailed(str(error)) from error
        differences = compare(self._with_all_writes(expected), self._with_all_writes(found))
        if not gradients and expected.autograd_text != found.autograd_text:
            self.forget(what)
            return self.differences(what, graph, inputs, gradients=True)
        if differences or not _equal_digests(expected, found):
            return self._compare_closely(what, graph, inputs, gradients)
        return differences

    def finite(self, what: str) -> bool:
        """Return whether the outputs of the model on a batch are finite."""
        seen = self.expected.get(what)
        return seen is None or seen.finite

    # ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _observe(
        self,
        what: str,
        run: Callable[[Any, Any], Any],
        inputs: Sequence[torch.Tensor],
        gradients: bool,
        keep: Sink,
    ) -> StepObservation:
        self.begin(what)
        try:
            return observe(run, self.model, self.call, inputs, gradients=gradients, keep=keep, saved=self.saved)
        finally:
            self.saved.restore()

    def _graph(self, graph: Graph) -> Callable[[Any, Any], Any]:
        return lambda args, kwargs: run_with_hooks(
            self.model, args, kwargs, lambda _, a, k: Execution(graph, self.model, bind(self.model, a, k)).run()
        )

    def _model(self, args: Any, kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def _observe_model(self, what: str, inputs: Sequence[torch.Tensor], gradients: bool) -> StepObservation:
        known = self.expected.get(what)
        if what not in self.expected or (known is not None and (known.grads is not None) != gradients):
            try:
                self.expected[what] = self._observe(what, self._model, inputs, gradients, digest)
            except Exception:
                if what == "batch":
                    raise
                self.expected[what] = None
        seen = self.expected[what]
        if seen is None:
            raise BatchRejected
        return seen

    def _with_all_writes(self, seen: StepObservation) -> StepObservation:
        """Return an observation with all tensors that any run has written; those not written by this run as before."""
        before = {copy.name: contents(copy.before) for copy in self.saved.written_tensors()}
        return replace(seen, buffers=before | seen.buffers)

    # ── by element ─────────────────────────────────────────────────────────────────────────────────────────────
    def _compare_closely(self, what: str, graph: Graph, inputs: Sequence[torch.Tensor], gradients: bool) -> Differences:
        """Return the differences by element that the noise of the model does not explain, in several runs."""
        reference = self._observe(what, self._model, inputs, gradients, keep_gradient)
        close = self._compare_elements(reference, what, self._graph(graph), inputs, gradients)
        if not close.lines:
            return Differences()
        noise: dict[str, float] = {}
        left = dict(close.lines)
        for count in range(_MAX_RERUNS):
            if not left or (count >= _RERUNS and not close.may_be_noise(left, noise)):
                break
            for name, off in self._compare_elements(reference, what, self._model, inputs, gradients).off.items():
                noise[name] = max(off, noise.get(name, 0.0))
            left = close.beyond(noise)
        seen = set(close.lines)
        for _ in range(_RERUNS - 1):
            if not left or not any(noise.values()):  # without noise, the model repeats itself and so does the graph
                break
            close = self._compare_elements(reference, what, self._graph(graph), inputs, gradients)
            again = close.beyond(noise)
            left = {name: line for name, line in left.items() if name in again}
            seen |= set(close.lines)
        self.noisy[what] = len(seen - set(left))
        parameters = [name.removeprefix(_GRADIENT) for name in left if name.startswith(_GRADIENT)]
        return Differences(list(left.values()), len(parameters) < len(left), parameters)

    def _compare_elements(
        self,
        reference: StepObservation,
        what: str,
        run: Callable[[Any, Any], Any],
        inputs: Sequence[torch.Tensor],
        gradients: bool,
    ) -> _ElementComparison:
        close = _ElementComparison(reference)
        seen = self._observe(what, run, inputs, gradients, close.gradient)
        close.compare_rest(self._with_all_writes(reference), self._with_all_writes(seen))
        return close


class _ElementComparison:
    """A run compared with a reference by element: the deviation of each tensor, and the accepted one."""

    def __init__(self, reference: StepObservation) -> None:
        self.reference = reference
        self.off: dict[str, float] = {}
        self.most: dict[str, float] = {}
        self.rounding: dict[str, float] = {}  # the tolerance of the dtype
        self.lines: dict[str, str] = {}

    def gradient(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Compare a gradient and release it."""
        self._compare(f"{_GRADIENT}{name}", (self.reference.grads or {}).get(name), grad.detach())
        return torch.zeros(())

    def compare_rest(self, reference: StepObservation, seen: StepObservation) -> None:
        """Compare all tensors but gradients."""
        if reference.structure != seen.structure:
            self.lines["structure"] = f"the output is {seen.structure:.200}, not {reference.structure:.200}"
        if line := argument_difference(reference, seen):
            self.lines["given"] = line
        one, two = _forward_tensors(reference), _forward_tensors(seen)
        for name in {**one, **two}:
            self._compare(name, one.get(name), two.get(name))
        for name, grad in (reference.grads or {}).items():
            if grad is not None and (seen.grads or {}).get(name) is None:
                self.lines[f"{_GRADIENT}{name}"] = f"{_GRADIENT}{name}: missing"

    def beyond(self, noise: dict[str, float]) -> dict[str, str]:
        """Return the differences, by name, that noise does not explain."""
        return {
            name: line
            for name, line in self.lines.items()
            if name not in self.most or not self.off[name] <= 2 * noise.get(name, 0.0) <= self._max_noise(name)
        }

    def may_be_noise(self, names: Iterable[str], noise: dict[str, float]) -> bool:
        """Return whether all these tensors are noisy and not far beyond: a few runs underestimate the noise."""
        return all(0 < self.off.get(name, math.inf) <= _FAR * noise.get(name, 0.0) for name in names)

    def _max_noise(self, name: str) -> float:
        """Return the largest noise that is accepted for a tensor.

        A gradient whose terms cancel (of a bias before a softmax or a norm) is pure rounding and differs in every run.
        Its terms have the scale of other gradients, and so has its rounding.
        """
        if not name.startswith(_GRADIENT):
            return self.most[name]
        return max(self.most[name], self.rounding[name] * self._largest)

    @cached_property
    def _largest(self) -> float:
        """Largest element of all gradients."""
        return max(
            (scale_of(dense(grad)) for grad in (self.reference.grads or {}).values() if grad is not None), default=0
        )

    def _compare(self, name: str, expected: torch.Tensor | None, found: torch.Tensor | None) -> None:
        line = tensor_difference(expected, found)
        if line:
            self.lines[name] = f"{name}: {line}"
        if expected is None or found is None or (line and not line.startswith("off")):
            return
        expected, found = dense(expected), dense(found)
        if not (expected.is_floating_point() or expected.is_complex()) or expected.is_meta:
            return
        self.off[name] = distance(expected, found)  # also within rounding: another run may exceed it
        if line:
            self.rounding[name] = tolerance(expected)
            self.most[name] = min(_MAX_NOISE * tolerance(expected), _MAX_NOISE_SHARE) * scale_of(expected)


def _forward_tensors(seen: StepObservation) -> dict[str, torch.Tensor]:
    return {
        **{f"output {index}": tensor for index, tensor in enumerate(seen.outputs)},
        **{f"buffer {name}": tensor for name, tensor in seen.buffers.items()},
        **{f"input {index}": tensor for index, tensor in enumerate(seen.inputs)},
    }


_GRADIENT = "gradient of "


def _equal_digests(expected: StepObservation, found: StepObservation) -> bool:
    """Return whether all digests are equal and finite, so that all gradients are equal to the bit."""
    one, two = expected.grads or {}, found.grads or {}
    return one.keys() == two.keys() and all(
        (a is b is None) or (a is not None and b is not None and torch.equal(a, b) and bool(torch.isfinite(a).all()))
        for a, b in zip(one.values(), two.values(), strict=True)
    )
