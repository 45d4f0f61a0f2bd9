"""Node ports: the tensors that a node reads and makes, and the op calls that ask rules about them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import Replicate
from gemini.batch_analysis.op_call import AnalysisRefused, ResultMeta, TensorValue, UnknownNumber
from gemini.batch_analysis.rules.registry import short_name
from gemini.ir.encode import decode
from gemini.ir.graph import Graph
from gemini.ir.hook_tables import has_hooks
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import ModelObject, Number, Path, Ref, SequenceForm, leaves
from gemini.ir.symint import Expr, evaluate
from gemini.tensor_parallel.layer_calls import layer_call, positional_arguments
from gemini.tensor_parallel.layouts import Layout
from gemini.tensor_parallel.shard_query import ShardQuery


@dataclass(frozen=True)
class TensorPort:
    """Shape and type of a tensor, whether it has a gradient, and the dimensions of which the size is not fixed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    batch_dim: int | None
    dynamic_dims: tuple[int, ...] = ()
    whole_dims: frozenset[int] = frozenset()

    def is_divisible(self, dim: int) -> bool:
        """Whether shards may divide a dimension: it counts no samples, and its size is that of all calls."""
        return dim != self.batch_dim and dim not in self.dynamic_dims and dim not in self.whole_dims

    @property
    def fixed_shape(self) -> tuple[int, ...]:
        """The shape, with -1 for sizes that contents decide."""
        return tuple(-1 if dim in self.dynamic_dims else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True)
class Port(TensorPort):
    """A tensor that a node reads: a value, or a parameter or buffer of its module by name in the model."""

    key: Ref | str = ""


@dataclass(frozen=True)
class ResultPort(TensorPort):
    """A tensor that a node makes."""

    ref: Ref = Ref(-1)


@dataclass
class NodeCall:
    """A node as an op on its ports; `refusal` says why no rule can be asked."""

    node: Node
    inputs: tuple[Port, ...]
    results: tuple[ResultPort, ...]
    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    places: tuple[tuple[Path, Path], ...] | None = None  # of a layer: its numbers are attributes
    refusal: str = ""
    passes_partial: bool = True  # its backward is linear: of partial gradients it makes partial ones

    def query(self, layouts: tuple[Layout, ...], units: int) -> ShardQuery:
        """Return the op with layouts of `units` units."""
        values = {at: TensorValue(at, layout, port.shape, port.dtype, port.grad)  # type: ignore[arg-type]
                  for at, (port, layout) in enumerate(zip(self.inputs, layouts, strict=True))}  # fmt: skip
        results = [ResultMeta(port.shape, port.dtype, port.grad) for port in self.results]
        args, kwargs = _fill(self.args, values), _fill(self.kwargs, values)
        return ShardQuery(self.name, args, kwargs, units, results, False, random=self.node.random)

    def signature(self) -> object:
        """Return a key that is equal for nodes with equal strategies."""
        ports = tuple((port.fixed_shape, port.dtype, port.grad, port.batch_dim, port.whole_dims)
                      for port in (*self.inputs, *self.results))  # fmt: skip
        args, node = self.args, self.node
        if self.name == "getitem" and type(args[1]) is int:
            args = (args[0], 0)  # layouts do not depend on which entry it is
        return (self.name, self.refusal, repr(args), repr(self.kwargs), self.places, ports, node.random, node.kind)


@dataclass(frozen=True)
class _Slot:
    at: int


def _fill(template: Any, values: dict[int, TensorValue]) -> Any:
    """Return arguments with a value in every slot."""
    if isinstance(template, _Slot):
        return values[template.at]
    if isinstance(template, (tuple, list)):
        return type(template)(_fill(part, values) for part in template)
    if isinstance(template, dict):
        return {key: _fill(part, values) for key, part in template.items()}
    if isinstance(template, slice):
        return slice(*(_fill(part, values) for part in (template.start, template.stop, template.step)))
    return template


def node_call(
    graph: Graph, node: Node, grads: Collection[Ref], whole: Mapping[Ref, frozenset[int]] | None = None
) -> NodeCall:
    """Return a node as an op on its ports; `grads` are the values with gradients, `whole` dimensions to leave whole."""

    def facts(ref: Ref) -> tuple[tuple[int, ...], torch.dtype, bool, int | None, tuple[int, ...], frozenset[int]]:
        meta = graph.meta(ref)
        varying = (whole or {}).get(ref, frozenset())
        return meta.shape, getattr(torch, meta.dtype), ref in grads, meta.batch_dim, meta.dynamic_dims, varying

    made_refs = [Ref(node.id, source, path) for source, path in node.outputs]
    results = tuple(ResultPort(*facts(ref), ref=ref) for ref in made_refs)
    if node.is_source:
        return NodeCall(node, (), results)
    forms = [leaf for form in (node.args, node.kwargs) for leaf in leaves(form)]
    read = list(dict.fromkeys(leaf for leaf in forms if isinstance(leaf, Ref)))
    typed = _read_for_type(node, read)
    objects = {ref for ref in read if (ref.source, ref.path) not in graph.nodes[ref.node].outputs}
    read = [ref for ref in read if ref not in typed and ref not in objects]
    ports = [Port(*facts(ref), key=ref) for ref in read]
    made = NodeCall(node, tuple(ports), results)
    slots: dict[Ref, Any] = {ref: _Slot(at) for at, ref in enumerate(read)}
    slots |= {ref: TensorValue(str(ref), Replicate(), *facts(ref)[:2]) for ref in typed}
    slots |= dict.fromkeys(objects)

    def argument(form: Any) -> Any:
        return slots[form] if isinstance(form, Ref) else _number(graph, form)

    if node.kind in MODULES:
        _open_module(graph, made, argument)
    elif node.kind in ("op", "function"):
        made.name = short_name(node.target) if node.kind == "op" else node.target
        made.args, made.kwargs = _decoded(made, argument)
    else:
        made.refusal = "its Python is not traced"
    made.refusal = "it reads an object that is no tensor" if objects else made.refusal or _obstacle(node, made)
    made.passes_partial = not objects and node.kind not in ("call", "function") and not _has_backward_hooks(graph, node)
    return made


def _has_backward_hooks(graph: Graph, node: Node) -> bool:
    """Whether a module node has hooks that see gradients: they must be whole."""
    if node.kind not in MODULES:
        return False
    modules = graph.bound_model().get_submodule(node.target).modules()
    return any(one._backward_hooks or one._backward_pre_hooks for one in modules)


def _read_for_type(node: Node, read: list[Ref]) -> set[Ref]:
    """Return the values of which a node reads only type and device, in whatever layout they are."""
    name = short_name(node.target) if node.kind == "op" else ""
    at = {"type_as": 1, "to": 1}.get(name, 0 if name.startswith("new_") else None)
    if at is None or not isinstance(node.args, SequenceForm) or len(node.args.items) <= at:
        return set()
    one = node.args.items[at]
    others = [*node.args.items[:at], *node.args.items[at + 1 :], node.kwargs]
    elsewhere = {leaf for form in others for leaf in leaves(form) if isinstance(leaf, Ref)}
    return {one} if one in read and one not in elsewhere else set()


def _writers(graph: Graph) -> tuple[dict[int, set[int]], dict[int, list[int]]]:
    """Return the memory that each node's results are in, by the node that made it, and the nodes that write to each."""
    roots = {node.id: set(node.shares) or {node.id} for node in graph.nodes}
    writers: dict[int, list[int]] = defaultdict(list)
    for node in graph.nodes:
        for root in {root for ref in node.mutates for root in roots[ref.node]}:
            writers[root].append(node.id)
    return roots, writers


def written_values(graph: Graph) -> set[Ref]:
    """Return the values in memory to which an op writes after they are made."""
    roots, writers = _writers(graph)
    return {
        Ref(node.id, source, path)
        for node in graph.nodes
        if any(root in writers and node.id < writers[root][-1] for root in roots[node.id])
        for source, path in node.outputs
    }


def overwritten_values(graph: Graph) -> set[Ref]:
    """Return new values without gradients that nothing reads but the op that writes to them."""
    _, writers = _writers(graph)
    readers: dict[int, int] = {}
    for node in graph.nodes:
        readers.update(dict.fromkeys((ref.node for ref in node.inputs()), node.id))  # the last one
    results = {ref.node for ref in graph.outputs()}
    return {
        Ref(node.id, source, path)
        for node in graph.nodes
        if node.id in writers and not node.shares and node.id not in results and not node.is_source
        and readers[node.id] == writers[node.id][0]
        for (source, path), meta in node.outputs.items()
        if not meta.requires_grad
    }  # fmt: skip


_SETTERS = ("torch.Tensor.requires_grad.__set__", "torch.Tensor.requires_grad_")  # of values that require a gradient


def values_with_gradients(graph: Graph) -> frozenset[Ref]:
    """Return the values that have a gradient, those included that receive one when an op writes to them."""
    found = {Ref(node.id, source, path) for node in graph.nodes for (source, path), meta in node.outputs.items()
             if meta.requires_grad}  # fmt: skip
    found |= {ref for node in graph.nodes if node.target in _SETTERS for ref in [*node.inputs()][:1]}
    roots, _ = _writers(graph)
    overwritten = overwritten_values(graph)
    gained: set[int] = set()
    for node in graph.nodes:
        if node.mutates and any(ref in found for ref in (*node.inputs(), Ref(node.id))):
            gained.update(root for ref in node.mutates for root in roots[ref.node])
    for node in graph.nodes:
        if roots[node.id] & gained:
            refs = {Ref(node.id, source, path) for source, path in node.outputs} - overwritten
            found.update(ref for ref in refs if getattr(torch, graph.meta(ref).dtype).is_floating_point)
    return frozenset(found)


def _obstacle(node: Node, made: NodeCall) -> str:
    if any(port.ref.source != "ret" for port in made.results):
        return "it changes its arguments or stores tensors"
    if node.changes:
        return "its run changes the state of the model"
    if node.checkpoint:
        return "it is recomputed as a whole"
    return "" if made.results else "it changes its arguments"


def _decoded(made: NodeCall, argument: Any) -> tuple[Any, dict[str, Any]]:
    try:
        return decode(made.node.args, argument), decode(made.node.kwargs, argument)
    except (TypeError, ValueError, AnalysisRefused):
        made.refusal = "its arguments are not supported"
        return (), {}


def _open_module(graph: Graph, made: NodeCall, argument: Any) -> None:
    """Write a layer of torch.nn as the function that it calls."""
    node = made.node
    module = graph.bound_model().get_submodule(node.target)
    ports = list(made.inputs)
    slots: dict[str, _Slot] = {}
    names = [(f"{node.target}.{name}" if node.target else name, one) for name, one in module.named_parameters()]
    names += [(name, graph.bound_model().get_parameter(name)) for name in node.uses]
    for name, tensor in dict(names).items():
        slots[name] = _Slot(len(ports))
        ports.append(Port(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, None, key=name))
    made.inputs = tuple(ports)
    call = None
    if node.kind == "module" and not any(True for _ in module.buffers()) and not _has_hooks(module):
        given = positional_arguments(module, *_decoded(made, argument))
        if given is not None and not made.refusal:
            try:
                call = layer_call(
                    module, given, lambda name: slots.get(f"{node.target}.{name}" if node.target else name)
                )
            except AnalysisRefused as refused:
                made.refusal = str(refused)
                return
    if call is None:
        made.refusal = "it is a basic block" if node.kind == "block" else f"no rule for {node.cls or 'this module'}"
        return
    made.name, made.args, made.kwargs, made.places = call.name, call.args, {}, call.places


def _has_hooks(module: nn.Module) -> bool:
    return has_hooks(module) and bool(module._forward_hooks or module._forward_pre_hooks)


def _number(graph: Graph, form: Any) -> Any:
    """Return a traced number of the captured batch; `UnknownNumber` for one that is read from contents."""
    if not isinstance(form, Number):
        if isinstance(form, ModelObject):
            raise AnalysisRefused("an object of the model among its arguments")
        return None

    def read(expr: Expr) -> Any:
        source, *rest = expr.operands
        if expr.op != "size" or not isinstance(source, Ref):
            raise LookupError(expr.op)
        shape = graph.meta(source).shape
        return shape[rest[0]] if rest else shape

    try:
        return evaluate(form.expr, read)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return UnknownNumber()


def value_bytes(graph: Graph, ref: Ref) -> int:
    """Return the bytes of a value, as captured."""
    meta = graph.meta(ref)
    return meta.numel * int(getattr(torch, meta.dtype).itemsize)
