"""A stage as a worker runs it: forward on what arrived, and the graph that is kept for its backward.

What arrives becomes leaves of the stage's own graph. The contents of an output are not kept for the backward, only its
place in the graph. An input that the stage writes to is copied first, since others may read the same memory; which
inputs those are shows in the first forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gemini.autograd_engine import edge_of
from gemini.guards.module_state import ModuleState
from gemini.pipe.value_routes import name_outputs
from gemini.runtime.worker.module_server import InputBoundary
from gemini.runtime.worker.side_effect_check import BufferWrites, Refusal

if TYPE_CHECKING:
    from gemini.codegen.stage_interface import Interface


_TAKES_EDGES = "GradientEdge" in str(inspect.signature(torch.autograd.backward))


def graph_edge(tensor: torch.Tensor) -> Any:
    """Where a backward can begin: without the contents, where this version of torch can."""
    return edge_of(tensor) if _TAKES_EDGES else tensor


@dataclass
class MicrobatchGraph:
    """What the backward of a stage on one micro-batch needs."""

    leaves: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # by port and reader
    edges: dict[str, Any] = field(default_factory=dict)  # places of outputs in the graph
    root: Any = None  # place of the loss, where it follows this stage
    root_like: torch.Tensor | None = None
    given: list[Any] | None = None  # to run the forward again


class LiveStage:
    """One stage."""

    def __init__(self, number: int, module: nn.Module, interface: Interface) -> None:
        self.number, self.module, self.interface = number, module, interface
        self.modules, self.parameters = list(module.modules()), list(module.parameters())
        self.trained = [parameter.requires_grad for parameter in self.parameters]
        self.buffers = BufferWrites(module)
        self.written: set[str] | None = None  # inputs that it writes; None: not known yet
        self.snapshot = ModuleState(module)

    def follow(self, training: Iterable[bool], trained: Iterable[bool]) -> None:
        """Take over training flags and frozen parameters."""
        self.buffers.written = self.written = None  # in another mode it may write to others
        for module, flag in zip(self.modules, training, strict=True):
            module.training = flag
        self.trained = list(trained)

    def freeze(self) -> None:
        """Before a step: parameters are trained or frozen as was said last."""
        for parameter, flag in zip(self.parameters, self.trained, strict=True):
            parameter.requires_grad_(flag)

    def set_shares(self, shares: list[Any]) -> None:
        """The factors of reductions over samples, for one micro-batch."""
        held = getattr(self.module, "shares", None)
        if isinstance(held, list):
            held[:] = shares

    # ── forward ────────────────────────────────────────────────────────────────────────────────────────────────
    def forward(self, given: list[Any], kept: MicrobatchGraph) -> dict[str, Any]:
        """Run it on values of its input ports, in order; its outputs by port, with their place in `kept`."""
        entered = [
            self._enter(port.name, value, kept) for port, value in zip(self.interface.inputs, given, strict=True)
        ]
        versions = [_version(value) for value in entered]
        made = dict(name_outputs(self.interface, self.module(*entered)))
        if self.written is None or any(
            _version(value) != version for value, version in zip(entered, versions, strict=True)
        ):
            self._note_written(entered, versions)
        # Without gradients there is no graph, but a view of a parameter still says that it wants one.
        for name, value in made.items() if torch.is_grad_enabled() else ():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                kept.edges[name] = graph_edge(value)
        return made

    def _enter(self, name: str, value: Any, kept: MicrobatchGraph) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fresh = value.detach()
        if fresh.is_inference() or self.written is None or name in self.written:
            # In inference mode, too, an ordinary copy: nobody counts what is written to another one.
            with torch.inference_mode(False):
                fresh = fresh.clone()
        if not value.requires_grad or not torch.is_grad_enabled():
            return fresh
        leaf = kept.leaves[name, self.number] = fresh.requires_grad_()
        return InputBoundary.apply(leaf)

    def _note_written(self, entered: list[Any], versions: list[int]) -> None:
        ports = self.interface.inputs
        found = {
            port.name
            for port, value, version in zip(ports, entered, versions, strict=True)
            if _version(value) != version
        }
        given = [port.name for port in ports if port.name in found and port.source is None]
        if given:
            raise Refusal(f"stage {self.number} writes to {', '.join(given)}, an argument of the call")
        if self.written is not None and found - self.written:
            raise Refusal(f"stage {self.number} writes to {', '.join(found)} in some calls only")
        self.written = found

    # ── what it must not change, and what must be put back ─────────────────────────────────────────────────────
    def check(self, saved: list[tuple[int, torch.Tensor]]) -> None:
        """After a step: learn which buffers it writes; raises Refusal where it has changed anything else."""
        if self.buffers.written is None:
            self.buffers.written = {at for at, _ in self.buffers.find_written(saved)}
        self.set_shares([1.0] * len(getattr(self.module, "shares", ())))  # as it came
        changed = self.snapshot.find_change()
        if changed:
            self.snapshot.take()
            raise Refusal(f"in stage {self.number} {changed}")


@contextmanager
def save_nothing() -> Iterator[None]:
    """A forward whose graph says what depends on what, and keeps no tensors: it will be run again."""

    def lost(_: Any) -> Any:
        raise RuntimeError("this forward was to be run again before its backward")

    with saved_tensors_hooks(lambda _: None, lost):
        yield


def _version(value: Any) -> int:
    """How often a tensor was written to; in inference mode nobody counts."""
    return 0 if not isinstance(value, torch.Tensor) or value.is_inference() else int(value._version)
