"""The walk: one run of a graph that stops at every node, so that it can be measured on its real inputs.

Values are plain numbers without history: nothing links a node to the ones before it, and a value is dropped after
its last reader. When profiling on another device than the model's, parameters visit that device a node at a time.

    values ──► node: the visitor measures it alone, on copies of its inputs that can take gradients
                     then it runs once more, without gradients, for the values of its readers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from gemini.errors import ProfileError
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.encode import decode
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution
from gemini.ir.node import MODULES, Node
from gemini.ir.op_targets import find_op
from gemini.ir.pytree import Literal, Mapping, Ref, Sequence
from gemini.profiling.measured_device import is_elsewhere, is_out_of_memory
from gemini.profiling.node_tensors import held_tensors

Visitor = Callable[["Walk", Node], None]


class Walk(Execution):
    """One run of a graph; `missing` has the nodes whose values could not be computed, with the reason."""

    def __init__(self, graph: Graph, inputs: dict[int, torch.Tensor], device: torch.device) -> None:
        super().__init__(graph, graph.bound_model(), {})
        self.given, self.device = inputs, device
        self.away = any(is_elsewhere(tensor, device) for tensor in self.model.parameters())
        self.stand_ins: dict[Ref, torch.Tensor] = {}
        self.missing: dict[int, str] = {}

    def visit(self, visitor: Visitor) -> None:
        """Run all nodes; `visitor` comes to each before it runs."""
        for node in self.graph.nodes:
            if node.is_source:
                self.results[node.id] = self._source(node)
            else:
                visitor(self, node)
                self._advance(node)
            self._drop(node)

    def _drop(self, node: Node) -> None:
        """Drop the values that nothing after a node reads."""
        for dead in self.graph.liveness().get(node.id, ()):
            for held in (self.results, self.arguments, self.inner):
                held.pop(dead, None)
            if self.stand_ins:
                self.stand_ins = {ref: value for ref, value in self.stand_ins.items() if ref.node != dead}

    def _source(self, node: Node) -> torch.Tensor:
        if node.kind == "input":
            return self.given[node.id].detach().to(self.device, copy=True)  # the model may write to it
        return super()._source(node)

    # ── one node ───────────────────────────────────────────────────────────────────────────────────────────────
    def _advance(self, node: Node) -> None:
        """Compute the values of a node; where that is impossible its readers get empty tensors of the right size."""
        if self.lacks_input(node):
            self._stand_in(node, "an input of it could not be computed")
            return
        try:
            with self.place(node):
                args, kwargs = self.decoded(node, self.read)
                self.results[node.id] = self._without_history(node, args, kwargs)
            if any(source == "arg" for source, _ in node.outputs):
                self.arguments[node.id] = (args, kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise ProfileError(
                    f"{node.kind} {node.name} ({node.line}) fails: {type(error).__name__}: {error}\n"
                    "    → give a batch that the model accepts, as profile(graph, args, kwargs)"
                ) from error
            self._stand_in(node, "out of memory")

    def _without_history(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Run a node without gradients, or with them where it insists (it registers a hook, say)."""
        try:
            with torch.no_grad():
                return self._call(node, args, kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error) or not torch.is_grad_enabled() or self.device.type == "meta":
                raise
        return self._call(node, args, kwargs)

    def _stand_in(self, node: Node, reason: str) -> None:
        self.missing[node.id] = reason
        self.results[node.id] = None
        for (source, path), meta in node.outputs.items():
            dtype = getattr(torch, meta.dtype)
            try:
                made = torch.zeros(meta.shape, dtype=dtype, device=self.device)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                made = torch.empty(meta.shape, dtype=dtype, device="meta")
            self.stand_ins[Ref(node.id, source, path)] = made

    def lacks_input(self, node: Node) -> bool:
        """Whether a value it needs has no contents."""
        if self.device.type == "meta":
            return False
        return any(self.stand_ins[ref].is_meta for ref in node.inputs() if ref in self.stand_ins)

    def _value(self, ref: Ref) -> Any:
        if ref in self.stand_ins:
            return self.stand_ins[ref]
        return super()._value(ref)

    def call_of(self, node: Node, args: Any, kwargs: Any) -> Callable[[], Any]:
        """A call of a node on these arguments, with nothing left to look up."""
        if node.kind == "op":
            op = find_op(node.target)
            return lambda: op(*args, **kwargs)
        inner = any(source == "inner" for source, _ in node.outputs)
        if node.kind in MODULES and not node.checkpoint and not inner:
            module = self.model.get_submodule(node.target) if node.target else self.model
            return lambda: module(*args, **kwargs)
        return lambda: self._call(node, args, kwargs)

    def decoded(self, node: Node, read: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The arguments of a node, references answered by `read`."""
        if not self.away:
            return decode(node.args, read), decode(node.kwargs, read)
        return decode(_redirect(node.args, self.device), read), decode(_redirect(node.kwargs, self.device), read)

    @contextmanager
    def place(self, node: Node) -> Iterator[None]:
        """The modes a node runs in, and its parameters on the device."""
        with ExitStack() as stack:
            if self.away:
                stack.enter_context(resident(self.held_by(node), self.device))
                stack.enter_context(torch.device(self.device))
            if node.region is not None:
                stack.enter_context(RegionSwitch()).to(node.region)
            yield

    def stand_in_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """What takes the place of a tensor of the model in this walk."""
        return tensor

    def held_by(self, node: Node) -> list[torch.Tensor]:
        """The tensors of the model that a node uses."""
        return held_tensors(self.graph, self.model, node)


@contextmanager
def resident(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[None]:
    """The contents of tensors on another device for a while; the tensors stay the same objects."""
    moved = [(tensor, tensor.data) for tensor in tensors if is_elsewhere(tensor, device)]
    try:
        for tensor, data in moved:
            tensor.data = data.to(device, copy=True)
        yield
    finally:
        for tensor, data in moved:
            tensor.data = data


def _redirect(form: Any, device: torch.device) -> Any:
    """A form whose literal devices are another one."""
    if isinstance(form, Literal) and isinstance(form.value, torch.device):
        return Literal(device)
    if isinstance(form, Sequence):
        return replace(form, items=tuple(_redirect(part, device) for part in form.items))
    if isinstance(form, Mapping):
        return replace(form, items=tuple((key, _redirect(part, device)) for key, part in form.items))
    return form
