"""Stage state: a stage as a worker runs it, and the graph that is retained for its backward.

Inputs become leaves of the stage's own graph. The contents of an output are not retained for the backward, only its
edge in the graph. An input that the stage writes to is copied first, since others may read the same memory; the first
forward shows which inputs those are.
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
from gemini.runtime.worker.side_effect_check import BufferWrites, Refusal, WorkerReads

if TYPE_CHECKING:
    from gemini.codegen.stage_interface import Interface


_TAKES_EDGES = "GradientEdge" in str(inspect.signature(torch.autograd.backward))


def graph_edge(tensor: torch.Tensor) -> Any:
    """Return where a backward can start: without the contents, if this version of torch supports that."""
    return edge_of(tensor) if _TAKES_EDGES else tensor


@dataclass
class MicrobatchGraph:
    """What the backward of a stage on one micro-batch needs."""

    leaves: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # by port and reader
    edges: dict[str, Any] = field(default_factory=dict)  # graph edges of outputs
    root: Any = None  # graph edge of the loss, if it follows this stage
    root_like: torch.Tensor | None = None
    given: list[Any] | None = None  # inputs, to run the forward again


class LiveStage:
    """One stage."""

    def __init__(self, number: int, module: nn.Module, interface: Interface) -> None:
        self.number, self.module, self.interface = number, module, interface
        self.modules, self.parameters = list(module.modules()), list(module.parameters())
        self.trained = [parameter.requires_grad for parameter in self.parameters]
        self.buffers = BufferWrites(module)
        self.written: set[str] | None = None  # inputs that it writes; None: not known yet
        self.snapshot, self.reads = ModuleState(module), WorkerReads(module)

    def apply_state(self, training: Iterable[bool], trained: Iterable[bool]) -> None:
        """Apply training flags and frozen parameters."""
        self.buffers.written = self.written = None  # in another mode it may write others
        for module, flag in zip(self.modules, training, strict=True):
            module.training = flag
        self.trained = list(trained)

    def freeze(self) -> None:
        """Freeze the parameters as last set, before a step."""
        for parameter, flag in zip(self.parameters, self.trained, strict=True):
            parameter.requires_grad_(flag)

    def set_shares(self, shares: list[Any]) -> None:
        """Set the factors of reductions over samples, for one micro-batch."""
        shares_list = getattr(self.module, "shares", None)
        if isinstance(shares_list, list):
            shares_list[:] = shares

    # ── forward ────────────────────────────────────────────────────────────────────────────────────────────────
    def forward(self, given: list[Any], graph: MicrobatchGraph) -> dict[str, Any]:
        """Run it on values of its input ports, in order; return its outputs by port, with their edges in `graph`."""
        entered = [
            self._enter(port.name, value, graph) for port, value in zip(self.interface.inputs, given, strict=True)
        ]
        versions = [_version(value) for value in entered]
        made = dict(name_outputs(self.interface, self.module(*entered)))
        if self.written is None or any(
            _version(value) != version for value, version in zip(entered, versions, strict=True)
        ):
            self._note_written(entered, versions)
        # Without gradients there is no graph, but a view of a parameter still has requires_grad.
        for name, value in made.items() if torch.is_grad_enabled() else ():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                graph.edges[name] = graph_edge(value)
        return made

    def _enter(self, name: str, value: Any, graph: MicrobatchGraph) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fresh = value.detach()
        if fresh.is_inference() or self.written is None or name in self.written:
            # An ordinary copy in inference mode, too: inference tensors have no version counter.
            with torch.inference_mode(False):
                fresh = fresh.clone()
        if not value.requires_grad or not torch.is_grad_enabled():
            return fresh
        leaf = graph.leaves[name, self.number] = fresh.requires_grad_()
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

    # ── side effects ──────────────────────────────────────────────────────────────────────────────────────────────
    def check(self, saved: list[tuple[int, torch.Tensor]]) -> None:
        """Learn which buffers a step writes; raise Refusal if it has changed anything else."""
        if self.buffers.written is None:
            self.buffers.written = {at for at, _ in self.buffers.find_written(saved)}
        self.set_shares([1.0] * len(getattr(self.module, "shares", ())))  # as installed
        changed = self.snapshot.find_change() or self.reads.find_change()
        if changed:
            self.snapshot.take()
            raise Refusal(f"in stage {self.number} {changed}")


@contextmanager
def save_nothing() -> Iterator[None]:
    """Run a forward whose graph retains no tensors: it will be recomputed."""

    def lost(_: Any) -> Any:
        raise RuntimeError("this forward must be recomputed before its backward")

    with saved_tensors_hooks(lambda _: None, lost):
        yield


def _version(value: Any) -> int:
    """Return the version counter of a tensor; 0 in inference mode, which does not count."""
    return 0 if not isinstance(value, torch.Tensor) or value.is_inference() else int(value._version)
