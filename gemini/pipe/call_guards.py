"""Fitting: whether a call may run by the stages, and what happens if it may not.

Stages are made for one way through the model: one signature, one gradient mode, one state of the model's Python, one
outcome of every branch. A call that goes another way runs the model itself: always right, never cut. The user is told
once a reason, and every such call is counted.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from gemini.capture.graph_guards import early_guards
from gemini.capture.python_state import fingerprint
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import signature_of
from gemini.ir.graph import Graph
from gemini.ir.interpreter import GuardBroken, find_model_tensor
from gemini.ir.validity import Validity, describe_differences, describe_state
from gemini.pipe.gradient_guard import GradientGuard
from gemini.pipe.python_guard import PythonStateGuard

_MOST = 64  # kinds of arguments that are remembered
_CHANGED = "the model was changed"
_HIDDEN = "hooks, a forward, a module or a function of it are others"  # by identity: there is no text to show


@dataclass(frozen=True)
class Mismatch:
    """Why a call does not fit: a kind, told once, and the words for this call."""

    kind: str
    text: str


class CallGuard:
    """Decides, before it runs, whether a call fits."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._watch: PythonStateGuard | None = None
        self._state: object = None
        self._fitted: set[Hashable] = set()
        self._learning = GradientGuard(graph)
        self._held = [node for node in graph.nodes if node.kind in ("attribute", "buffer")]

    def find_mismatch(self, bound: dict[str, Any], state: object = None, like: Hashable = None) -> Mismatch | None:
        """Why a call, bound by name, cannot run by the stages; None if it can, as far as is known before it runs.

        `state`, if given, is another object where anything of a module of the model is another object than before.
        `like`, if given, tells all of a call but what its tensors hold.
        """
        model, validity = self.graph.bound_model(), self.graph.validity
        if validity is not None:
            if Region.current() != validity.region or not self._fits(validity, bound, like):
                return _explain_mismatch(validity, bound)
            if not self._is_as_before(state):
                if other := self._other_size():
                    return Mismatch("held", other)
                if not self._is_in_state(validity):
                    return Mismatch("model", f"{_CHANGED}: {self._change(validity):.300}")
        if learner := self._learning.begun(self._watch, state):
            return Mismatch("model", f"{_CHANGED}: {learner.lstrip('.')} requires a gradient and is no parameter")
        early = early_guards(self.graph)
        broken = early.find_broken(model, bound) if early.guards else None
        if broken is not None:
            return Mismatch(
                f"guard {broken.line} {broken.expr}", f"the model takes another way here: no longer {broken}"
            )
        return None

    def _fits(self, validity: Validity, bound: dict[str, Any], like: Hashable) -> bool:
        """Whether the arguments are such as the stages were made for."""
        if like is not None and like in self._fitted:
            return True
        fits = validity.fits(signature_of(bound))
        if fits and like is not None:
            if len(self._fitted) >= _MOST:
                self._fitted.clear()
            self._fitted.add(like)
        return fits

    def _is_as_before(self, state: object) -> bool:
        """Whether nothing at all has changed since the model was found to be in the state that is wanted."""
        if self._watch is None:
            return False
        is_same = state is not None and state is self._state
        found = self._watch.is_unchanged(is_same)
        self._state = state if found else None
        return found

    def _is_in_state(self, validity: Validity) -> bool:
        """Whether the model is in the state the graph was captured in; if so, from now on it is watched."""
        graph, model = self.graph, self.graph.bound_model()
        now = fingerprint(model, validity.glue)
        if graph.awaited_state is not None and describe_state(now) == graph.awaited_state:
            validity.fingerprint, graph.awaited_state = now, None
        if now != validity.fingerprint:
            return False
        self._watch = PythonStateGuard(model, validity.glue)
        return True

    def _other_size(self) -> str:
        """Which tensor that is no parameter has another size or type now: a mask that is made for each length."""
        for node in self._held:
            try:
                found = find_model_tensor(self.graph.bound_model(), node.target)
            except (AttributeError, LookupError, TypeError):
                continue  # it is gone: the model was changed
            if not isinstance(found, torch.Tensor):
                continue
            now, meta = (tuple(found.shape), str(found.dtype).removeprefix("torch.")), next(iter(node.outputs.values()))
            if meta.batch_dim is None and now != (meta.shape, meta.dtype):
                return f"{node.target} is {now[1]}{[*now[0]]}; the stages were made for {meta.dtype}{[*meta.shape]}"
        return ""

    def _change(self, validity: Validity) -> str:
        """What is other than when the graph was captured: the first of it."""
        before, now = validity.fingerprint, fingerprint(self.graph.bound_model(), validity.glue)
        return next(describe_differences(describe_state(before), describe_state(now)), _HIDDEN)


def mismatch_of_error(error: Exception) -> Mismatch:
    """Why a run stopped."""
    if isinstance(error, GuardBroken):
        line = error.guard.line if error.guard is not None else str(error).partition(",")[0]
        return Mismatch(f"guard {line}", f"the model takes another way here: {error}")
    return Mismatch(f"error {type(error).__name__}", f"a stage raised {type(error).__name__}: {error}")


def _explain_mismatch(validity: Validity, bound: dict[str, Any]) -> Mismatch:
    now = Region.current()
    if now != validity.region:
        return Mismatch("mode", f"{_describe_mode(now)}; the stages were made with {_describe_mode(validity.region)}")
    found = {fact[0]: fact[1:] for fact in signature_of(bound)}
    wanted = {fact[0]: fact[1:] for fact in validity.signature}
    for name in dict.fromkeys((*wanted, *found)):
        one, other = wanted.get(name), found.get(name)
        if one != other and not (
            name in validity.batch and one and other and _differs_in_batch_only(one, other, validity.batch[name])
        ):
            return Mismatch(
                f"argument {name}",
                f"argument {name} is {_describe_argument(other)}; the stages were made for {_describe_argument(one)}",
            )
    return Mismatch("batch", "the batch sizes of the arguments differ from each other, or are 0")


def _differs_in_batch_only(one: tuple[Any, ...], other: tuple[Any, ...], batch: tuple[int, int]) -> bool:
    """Whether two tensors differ in the size of the batch only."""
    if one[:-1] != other[:-1] or len(one[-1]) != len(other[-1]):
        return False
    return all(a == b or at == batch[0] for at, (a, b) in enumerate(zip(one[-1], other[-1], strict=True)))


def _describe_argument(fact: tuple[Any, ...] | None) -> str:
    if fact is None:
        return "absent"
    if len(fact) == 2:
        return f"{fact[1]:.60}"
    dtype, device, requires_grad, shape = fact
    return f"{shape} {dtype.removeprefix('torch.')} on {device}{' with gradient' if requires_grad else ''}"


def _describe_mode(region: Region) -> str:
    parts = ["inference mode" if region.inference else f"gradients {'on' if region.grad else 'off'}"]
    parts += [f"autocast to {dtype} on {kind}" for kind, _, dtype in region.autocast]
    return " and ".join(parts)


class Fallbacks:
    """The calls that ran the model itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reasons: Counter[str] = Counter()
        self._told: set[str] = set()

    def count(self, misfit: Mismatch) -> None:
        """Count one, and tell its kind if that is new."""
        self.reasons[misfit.text] += 1
        if misfit.kind not in self._told:
            self._told.add(misfit.kind)
            warnings.warn(f"gemini: a call of {self.name} runs uncut: {misfit.text}", UserWarning, stacklevel=2)
