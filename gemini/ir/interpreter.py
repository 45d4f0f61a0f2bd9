"""Interpreter: runs a graph node by node, in the order of capture.

It is the reference for everything built on a graph: the stages of a partitioned model must compute the same. Guards
are checked where the model's Python would branch; a broken guard stops the run before the next node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import nn

from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.encode import decode, follow
from gemini.ir.import_paths import Symbol
from gemini.ir.node import Guard, Node
from gemini.ir.op_targets import find_call, find_op
from gemini.ir.out_spec import structure_of
from gemini.ir.pytree import ModelObject, Number, Ref, expr_refs, refs
from gemini.ir.symint import Expr, evaluate

if TYPE_CHECKING:
    from gemini.ir.graph import Graph


class GuardBroken(Exception):
    """A call takes another branch of the model's Python than the captured one."""

    def __init__(self, text: str, guard: Guard | None = None) -> None:
        super().__init__(text)
        self.guard = guard


class NodeFailed(Exception):
    """A node raised; holds the node and its exception."""

    def __init__(self, node: Node, cause: Exception) -> None:
        super().__init__(f"{node.kind} {node.name}: {type(cause).__name__}: {cause}")
        self.node, self.cause = node, cause


class Execution:
    """One run of a graph on the arguments of one call."""

    def __init__(self, graph: Graph, model: nn.Module, bound: dict[str, Any]) -> None:
        self.graph, self.model, self.bound = graph, model, bound
        self.results: dict[int, Any] = {}
        self.arguments: dict[int, Any] = {}
        self.inner: dict[int, dict[str, list[Any]]] = {}

    def run(self, observe: Callable[[Node, Any], None] | None = None) -> Any:
        """Run all nodes and return the model's output; `observe` is called with every node and its result."""
        last_use, guards = self.graph.liveness(), self.graph.guards_at()
        with RegionSwitch() as regions:
            for node in self.graph.nodes:
                self.check(guards.get(node.id, ()))
                if not node.is_source and node.region is not None:
                    regions.to(node.region)
                self.step(node)
                if observe is not None:
                    observe(node, self.results[node.id])
                for dead in last_use.get(node.id, ()):
                    self.results.pop(dead, None)
                    self.arguments.pop(dead, None)
                    self.inner.pop(dead, None)
            self.check(guards.get(len(self.graph.nodes), ()))
        return decode(self.graph.result, self.read)

    def check(self, guards: tuple[Guard, ...] | list[Guard]) -> None:
        """Raise GuardBroken for the first guard that does not hold."""
        for guard in guards:
            try:
                value = evaluate(guard.expr, self.read_number)
            except (RuntimeError, IndexError, ZeroDivisionError, ValueError, TypeError) as error:
                raise GuardBroken(f"{guard}: {error}", guard) from error
            if value != guard.expected:
                raise GuardBroken(f"{guard}, now {value!r}", guard)

    def step(self, node: Node) -> None:
        """Run one node."""
        if node.is_source:
            self.results[node.id] = self._source(node)
            return
        try:
            args, kwargs = decode(node.args, self.read), decode(node.kwargs, self.read)
            before = structure_of((args, kwargs)) if node.kind != "op" else ""
            result = self._call(node, args, kwargs)
        except (GuardBroken, NodeFailed):
            raise
        except Exception as error:
            raise NodeFailed(node, error) from error
        found = structure_of(result)
        if node.kind != "op" and (after := structure_of((args, kwargs))) != before:
            found += f" | {after}"
        if found != node.out_spec and node.target:  # a model that is one block may return any structure
            raise GuardBroken(f"{node.name} returned {found}, not {node.out_spec} as when it was captured")
        self.results[node.id] = result
        if any(source == "arg" for source, _ in node.outputs):
            self.arguments[node.id] = (args, kwargs)

    def _source(self, node: Node) -> torch.Tensor:
        if node.kind == "input":
            return follow(self.bound, self.graph.inputs[node.id])
        return find_model_tensor(self.model, node.target)

    def _call(self, node: Node, args: Any, kwargs: Any) -> Any:
        if node.kind == "op":
            return find_op(node.target)(*args, **kwargs)
        if node.kind == "function":
            module, _, qualname = node.target.partition(":")
            return Symbol(module, qualname).resolve().apply(*args, **kwargs)
        if node.kind == "call":
            owner, name = find_call(node.target)
            return getattr(owner, name)(*args, **kwargs)
        target = self.model.get_submodule(node.target) if node.target else self.model
        if any(source == "inner" for source, _ in node.outputs):
            with self._collect_inner(node):
                return self._call_module(node, target, args, kwargs)
        return self._call_module(node, target, args, kwargs)

    @staticmethod
    def _call_module(node: Node, target: nn.Module, args: Any, kwargs: Any) -> Any:
        if node.wrapped:
            return torch.utils.checkpoint.checkpoint(
                lambda *inputs: target(*inputs, **kwargs), *args, use_reentrant=node.wrapped == "reentrant"
            )
        return target(*args, **kwargs)

    @contextmanager
    def _collect_inner(self, node: Node) -> Iterator[None]:
        """Collect the results of inner modules while a block runs, as hooks of the model did during capture."""
        collected: dict[str, list[Any]] = {}
        self.inner[node.id] = collected
        names = {path[0][1] for source, path in node.outputs if source == "inner"}
        handles = [
            self.model.get_submodule(name).register_forward_hook(
                lambda _, __, output, name=name: collected.setdefault(name, []).append(output)
            )
            for name in names
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def read(self, form: Any) -> Any:
        """Return the value of a reference, a number or an object of the model."""
        if isinstance(form, Ref):
            return self._value(form)
        if isinstance(form, Number):
            return evaluate(form.expr, self.read_number)
        owned: ModelObject = form
        module = self.model.get_submodule(owned.module) if owned.module else self.model
        return getattr(module, owned.attribute) if owned.attribute else module

    def _value(self, ref: Ref) -> Any:
        if ref.source == "ret":
            return follow(self.results[ref.node], ref.path)
        if ref.source == "arg":
            return follow(self.arguments[ref.node], ref.path)
        if ref.source == "inner":
            (_, name), (_, call), *rest = ref.path
            return follow(self.inner[ref.node][name][call], tuple(rest))
        target = self.graph.nodes[ref.node].target
        return follow(self.model.get_submodule(target) if target else self.model, ref.path)

    def read_number(self, expr: Expr) -> Any:
        """Return the number that an expression reads from a tensor."""
        if expr.op == "call":
            name, args, kwargs = expr.operands
            return find_op(name)(*decode(args, self.read), **decode(kwargs, self.read))
        value = self._value(expr.operands[0])
        if expr.op == "size":
            return value.shape[expr.operands[1]]
        if expr.op == "stride":
            return value.stride(expr.operands[1])
        return {"numel": torch.Tensor.numel, "item": torch.Tensor.item, "storage_offset": torch.Tensor.storage_offset}[
            expr.op
        ](value)


def last_uses(graph: Graph) -> dict[int, list[int]]:
    """Return, for every node, the nodes whose results are not needed after it."""
    last: dict[int, int] = {}
    for node in graph.nodes:
        for ref in node.inputs():
            last[ref.node] = node.id
    for guard in graph.guards:
        for ref in expr_refs(guard.expr):
            last[ref.node] = max(last.get(ref.node, 0), guard.position)
    returned = {ref.node for ref in refs(graph.result)}
    dead: dict[int, list[int]] = {}
    for node in graph.nodes:
        if node.id not in returned:
            dead.setdefault(last.get(node.id, node.id), []).append(node.id)
    return dead


def find_model_tensor(model: nn.Module, name: str) -> torch.Tensor:
    """Return the tensor of a parameter, buffer or attribute node by its target name."""
    head, bracket, rest = name.partition("[")
    module_name, _, attribute = head.rpartition(".")
    found: Any = getattr(model.get_submodule(module_name) if module_name else model, attribute)
    for part in (bracket + rest).replace("]", "").split("[")[1:]:
        found = found[int(part) if part.lstrip("-").isdigit() else part.strip("'\"")]
    return found
