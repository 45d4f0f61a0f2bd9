"""Graph walk: interpret a graph and stop at every node, so that it can be measured on its real inputs.

Values carry no autograd history: no node is linked to its predecessors, and a value is dropped after its last reader.
When profiling on another device than the model's, parameters move to that device one node at a time.

    values ──► node: the visitor measures it in isolation, on detached inputs that require gradients;
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
from gemini.ir.pytree import Literal, MappingForm, Ref, SequenceForm
from gemini.profiling.measured_device import is_on_other_device, is_out_of_memory
from gemini.profiling.node_tensors import model_tensors

Visitor = Callable[["GraphWalk", Node], None]


class GraphWalk(Execution):
    """One run of a graph; `missing` lists the nodes whose values could not be computed, with the reason."""

    def __init__(self, graph: Graph, inputs: dict[int, torch.Tensor], device: torch.device) -> None:
        super().__init__(graph, graph.bound_model(), {})
        self.inputs, self.device = inputs, device
        self.is_relocated = any(is_on_other_device(tensor, device) for tensor in self.model.parameters())
        self.substitutes: dict[Ref, torch.Tensor] = {}
        self.missing: dict[int, str] = {}

    def visit(self, visitor: Visitor) -> None:
        """Run all nodes; `visitor` is called before each."""
        for node in self.graph.nodes:
            if node.is_source:
                self.results[node.id] = self._source(node)
            else:
                visitor(self, node)
                self._advance(node)
            self._drop(node)

    def _drop(self, node: Node) -> None:
        """Drop the values whose last reader is this node."""
        for dead in self.graph.liveness().get(node.id, ()):
            for values in (self.results, self.arguments, self.inner):
                values.pop(dead, None)
            if self.substitutes:
                self.substitutes = {ref: value for ref, value in self.substitutes.items() if ref.node != dead}

    def _source(self, node: Node) -> torch.Tensor:
        if node.kind == "input":
            return self.inputs[node.id].detach().to(self.device, copy=True)  # the model may write to it
        return super()._source(node)

    # ── one node ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _advance(self, node: Node) -> None:
        """Compute the values of a node; where that fails, its readers get zero tensors of the captured sizes."""
        if self.lacks_input(node):
            self._substitute_outputs(node, "an input could not be computed")
            return
        try:
            with self.node_context(node):
                args, kwargs = self.decode_arguments(node, self.read)
                self.results[node.id] = self._without_history(node, args, kwargs)
            if any(source == "arg" for source, _ in node.outputs):
                self.arguments[node.id] = (args, kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise ProfileError(
                    f"{node.kind} {node.name} ({node.line}) fails: {type(error).__name__}: {error}\n"
                    "    → pass a batch that the model accepts: profile(graph, args, kwargs)"
                ) from error
            self._substitute_outputs(node, "out of memory")

    def _without_history(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Run a node without gradients, or with gradients where it requires them (for example to register a hook)."""
        try:
            with torch.no_grad():
                return self._call(node, args, kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error) or not torch.is_grad_enabled() or self.device.type == "meta":
                raise
        return self._call(node, args, kwargs)

    def _substitute_outputs(self, node: Node, reason: str) -> None:
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
            self.substitutes[Ref(node.id, source, path)] = made

    def lacks_input(self, node: Node) -> bool:
        """Return whether an input of a node has no values."""
        if self.device.type == "meta":
            return False
        return any(self.substitutes[ref].is_meta for ref in node.inputs() if ref in self.substitutes)

    def _value(self, ref: Ref) -> Any:
        if ref in self.substitutes:
            return self.substitutes[ref]
        return super()._value(ref)

    def make_call(self, node: Node, args: Any, kwargs: Any) -> Callable[[], Any]:
        """Return a call of a node on these arguments, with all lookups done in advance."""
        if node.kind == "op":
            op = find_op(node.target)
            return lambda: op(*args, **kwargs)
        inner = any(source == "inner" for source, _ in node.outputs)
        if node.kind in MODULES and not node.wrapped and not inner:
            module = self.model.get_submodule(node.target) if node.target else self.model
            return lambda: module(*args, **kwargs)
        return lambda: self._call(node, args, kwargs)

    def decode_arguments(self, node: Node, read: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the arguments of a node, references resolved by `read`."""
        if not self.is_relocated:
            return decode(node.args, read), decode(node.kwargs, read)
        return decode(_replace_devices(node.args, self.device), read), decode(
            _replace_devices(node.kwargs, self.device), read
        )

    @contextmanager
    def node_context(self, node: Node) -> Iterator[None]:
        """Enter the autograd modes of a node, with its parameters on the device."""
        with ExitStack() as stack:
            if self.is_relocated:
                stack.enter_context(moved_to(self.tensors_of_node(node), self.device))
                stack.enter_context(torch.device(self.device))
            if node.region is not None:
                stack.enter_context(RegionSwitch()).to(node.region)
            yield

    def substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that replaces a model tensor in this walk."""
        return tensor

    def tensors_of_node(self, node: Node) -> list[torch.Tensor]:
        """Return the model tensors that a node uses."""
        return model_tensors(self.graph, self.model, node)


@contextmanager
def moved_to(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Move the data of tensors to another device inside the context; the tensor objects stay the same."""
    moved = [(tensor, tensor.data) for tensor in tensors if is_on_other_device(tensor, device)]
    try:
        for tensor, data in moved:
            tensor.data = data.to(device, copy=True)
        yield
    finally:
        for tensor, data in moved:
            tensor.data = data


def _replace_devices(form: Any, device: torch.device) -> Any:
    """Return a form with its literal devices replaced."""
    if isinstance(form, Literal) and isinstance(form.value, torch.device):
        return Literal(device)
    if isinstance(form, SequenceForm):
        return replace(form, items=tuple(_replace_devices(part, device) for part in form.items))
    if isinstance(form, MappingForm):
        return replace(form, items=tuple((key, _replace_devices(part, device)) for key, part in form.items))
    return form
