"""Call guard: check that the stages are valid for a call; otherwise it falls back to the original model.

Stages are valid for one signature, one gradient mode, one Python state of the model and one outcome of every branch.
Fallbacks are counted, and each kind of reason is shown once.
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
from gemini.pipe.model_guards import GradientGuard, PythonStateGuard

_MAX_SIGNATURES = 64  # verified signatures that are remembered
_CHANGED = "the model was changed"
_HIDDEN = "hooks, a forward, a module or a function of it were replaced"  # compared by identity: there is no text


@dataclass(frozen=True)
class Mismatch:
    """Why a call does not match the stages: a kind, shown once, and the text for this call."""

    kind: str
    text: str


class CallGuard:
    """Decides before a call whether it matches the stages."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._python_state: PythonStateGuard | None = None
        self._state: object = None
        self._verified: set[Hashable] = set()
        self._gradients = GradientGuard(graph)
        self._attributes = [node for node in graph.nodes if node.kind in ("attribute", "buffer")]

    def with_graph(self, graph: Graph) -> CallGuard:
        """Return the guard of a graph that differs from this one in sizes alone; the model is not inspected again."""
        other = CallGuard(graph)
        other._python_state, other._state = self._python_state, self._state
        return other

    def find_mismatch(self, bound: dict[str, Any], state: object = None, like: Hashable = None) -> Mismatch | None:
        """Return why the stages cannot run a call, bound by name; None if no reason is visible before the run.

        `state`, unless None, is a token that changes with any object of a module of the model. `like`, unless None,
        is a key of everything in the call except the contents of its tensors.
        """
        model, validity = self.graph.bound_model(), self.graph.validity
        if validity is not None:
            if Region.current() != validity.region or not self._matches_signature(validity, bound, like):
                return _explain_mismatch(validity, bound)
            if not self._is_unchanged(state):
                if resized := self._find_resized_tensor():
                    return Mismatch("held", resized)
                if not self._has_captured_state(validity):
                    return Mismatch("model", f"{_CHANGED}: {self._describe_change(validity):.300}")
        if name := self._gradients.find_new_gradient(self._python_state, state):
            return Mismatch("model", f"{_CHANGED}: {name.lstrip('.')} requires a gradient and is no parameter")
        early = early_guards(self.graph)
        broken = early.find_broken(model, bound) if early.guards else None
        if broken is not None:
            return Mismatch(f"guard {broken.line} {broken.expr}", f"the model takes another branch: no longer {broken}")
        return None

    def _matches_signature(self, validity: Validity, bound: dict[str, Any], like: Hashable) -> bool:
        """Return whether the arguments have the signature of the stages."""
        if like is not None and like in self._verified:
            return True
        fits = validity.fits(signature_of(bound))
        if fits and like is not None:
            if len(self._verified) >= _MAX_SIGNATURES:
                self._verified.clear()
            self._verified.add(like)
        return fits

    def _is_unchanged(self, state: object) -> bool:
        """Return whether no object has changed since the state of the model was last verified."""
        if self._python_state is None:
            return False
        is_same = state is not None and state is self._state
        found = self._python_state.is_unchanged(is_same)
        self._state = state if found else None
        return found

    def _has_captured_state(self, validity: Validity) -> bool:
        """Return whether the model is in the captured state; if so, later calls compare object identities only."""
        graph, model = self.graph, self.graph.bound_model()
        now = fingerprint(model, validity.glue)
        if graph.awaited_state is not None and describe_state(now) == graph.awaited_state:
            validity.fingerprint, graph.awaited_state = now, None
        if now != validity.fingerprint:
            return False
        self._python_state = PythonStateGuard(model, validity.glue)
        return True

    def _find_resized_tensor(self) -> str:
        """Return which tensor in an attribute has another size or dtype (a mask per length); '' if none."""
        for node in self._attributes:
            try:
                found = find_model_tensor(self.graph.bound_model(), node.target)
            except (AttributeError, LookupError, TypeError):
                continue  # the attribute is missing: the model was changed
            if not isinstance(found, torch.Tensor):
                continue
            now, meta = (tuple(found.shape), str(found.dtype).removeprefix("torch.")), next(iter(node.outputs.values()))
            if meta.batch_dim is None and now != (meta.shape, meta.dtype):
                return (
                    f"{node.target} is {now[1]}{[*now[0]]}; the stages were generated for {meta.dtype}{[*meta.shape]}"
                )
        return ""

    def _describe_change(self, validity: Validity) -> str:
        """Return the first difference from the captured state."""
        before, now = validity.fingerprint, fingerprint(self.graph.bound_model(), validity.glue)
        return next(describe_differences(describe_state(before), describe_state(now)), _HIDDEN)


def mismatch_of_error(error: Exception) -> Mismatch:
    """Return why a run of the stages stopped."""
    if isinstance(error, GuardBroken):
        line = error.guard.line if error.guard is not None else str(error).partition(",")[0]
        return Mismatch(f"guard {line}", f"the model takes another branch: {error}")
    return Mismatch(f"error {type(error).__name__}", f"a stage raised {type(error).__name__}: {error}")


def _explain_mismatch(validity: Validity, bound: dict[str, Any]) -> Mismatch:
    now = Region.current()
    if now != validity.region:
        return Mismatch(
            "mode", f"{_describe_mode(now)}; the stages were generated with {_describe_mode(validity.region)}"
        )
    found = {fact[0]: fact[1:] for fact in signature_of(bound)}
    wanted = {fact[0]: fact[1:] for fact in validity.signature}
    for name in dict.fromkeys((*wanted, *found)):
        one, other = wanted.get(name), found.get(name)
        if one != other and not (
            name in validity.batch and one and other and _differs_in_batch_only(one, other, validity.batch[name])
        ):
            actual, expected = _describe_argument(other), _describe_argument(one)
            return Mismatch(
                f"argument {name}", f"argument {name} is {actual}; the stages were generated for {expected}"
            )
    return Mismatch("batch", "the batch sizes of the arguments differ from each other, or are 0")


def _differs_in_batch_only(one: tuple[Any, ...], other: tuple[Any, ...], batch: tuple[int, int]) -> bool:
    """Return whether two tensors differ in the batch size only."""
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
    """The calls that fell back to the original model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reasons: Counter[str] = Counter()
        self._shown: set[str] = set()

    def count(self, mismatch: Mismatch) -> None:
        """Count a fallback, and warn if its kind is new."""
        self.reasons[mismatch.text] += 1
        if mismatch.kind not in self._shown:
            self._shown.add(mismatch.kind)
            warnings.warn(
                f"gemini: a call of {self.name} runs the original model instead of its stages: {mismatch.text}",
                UserWarning,
                stacklevel=2,
            )
