"""Leaf traces: the Python of a leaf, traced at two batch sizes on made-up contents, and analysed.

Sizes are traced as in a capture, and both batch sizes must have the same nodes. The Python of the leaf is executed
in every run, so branches on contents or on the number of samples invalidate a proof.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import Kind, Opaque, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.microbatch_weights import TargetWeight
from gemini.batch_analysis.op_call import SAMPLES, AnalysisRefused, SampleCount, TensorValue, UnknownNumber, leaves
from gemini.batch_analysis.propagate import KindInterpreter
from gemini.batch_analysis.side_effects import find_obstacle
from gemini.capture.leaf_policy import make_leaf_policy
from gemini.capture.memoized import find_caches
from gemini.capture.trace_diff import CaptureSubject, Trace, first_mismatch, mark_batch_dims, trace
from gemini.capture.tracer import Tracer
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.encode import decode, follow
from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.ir.pytree import ModelObject, Number, Ref, expr_refs, refs
from gemini.ir.pytree import leaves as form_leaves
from gemini.snapshot.model_state import ModelSnapshot

_SIZES = (2, 3)


def model_objects(node: Node) -> list[ModelObject]:
    """Return the objects of the model among the arguments of a leaf: another module, a configuration."""
    return [leaf for form in (node.args, node.kwargs) for leaf in form_leaves(form) if isinstance(leaf, ModelObject)]


class LeafTrace:
    """A leaf with made-up arguments for two numbers of samples; `model` owns the objects among them."""

    def __init__(
        self, node: Node, module: nn.Module, interpreter: KindInterpreter, model: nn.Module | None = None
    ) -> None:
        self.order: list[TensorValue] = []  # its tensor arguments
        self.region, self.micro_batch_statistics = node.region, interpreter.micro_batch_statistics
        where = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        given = _arguments
        objects = {one: _find_model_object(model, one) for one in model_objects(node)}
        forms = (node.args, node.kwargs)
        if objects or any(
            isinstance(leaf, SampleCount) for form in forms for leaf in leaves(decode(form, interpreter.read))
        ):
            module, given = (
                _LeafWithNumbers(module, node, partial(_number, interpreter), objects),
                _arguments_with_numbers,
            )
        self.module = module
        self.calls = [ModelCall(*given(node, interpreter, size, self.order, where)) for size in _SIZES]

    def traces(self, make: Callable[..., Tracer] = Tracer, count: int = 2) -> list[Trace]:
        """Return its traces with two samples, and with three."""
        saved = ModelSnapshot(self.module)
        found = []
        try:
            for call in self.calls[:count]:
                subject = CaptureSubject(self.module, call, saved, find_caches(self.module))
                with _enter_region(self.region), saved.watch_writes():
                    found.append(trace(subject, call.tensors, make_leaf_policy(self.module, None, ()), make=make))
        finally:
            saved.restore()
        return found

    def graph(self, traces: list[Trace]) -> Graph:
        """Return the graph of two traces, which must be equal."""
        mismatch = first_mismatch(*traces)
        if mismatch is not None:
            raise AnalysisRefused(f"inside {mismatch[0].name}: {mismatch[1]}")
        tracer = traces[0].tracer
        assert tracer.result is not None
        guards = list(tracer.guards.values())
        name = type(self.module).__name__
        inner = Graph(name, tracer.nodes, guards, tracer.inputs, tracer.result, model=self.module)
        mark_batch_dims(tracer.nodes, traces[1].nodes, *_SIZES)
        return inner

    def interpret(self, inner: Graph, same: frozenset[int] = frozenset()) -> KindInterpreter:
        """Return the kinds of all values; the nodes in `same` are replicated."""
        from gemini.batch_analysis.graph_analysis import statement_of

        inside = KindInterpreter(frozen=True, micro_batch_statistics=self.micro_batch_statistics)
        places = _places(self.module, self.calls[0], inner.inputs)
        for one in inner.nodes:
            made = statement_of(inner, one, {})
            if one.kind == "input":
                outer = self.order[places[one.id]]
                made.run = lambda *_, outer=outer: outer.kind
                made.known = outer.known
                inside.alias[Ref(one.id)] = str(places[one.id])
            elif one.id in same:
                made.run = lambda *_: Replicate()
            inside.extend([made])
        return inside


def trace_inside(node: Node, module: nn.Module, interpreter: KindInterpreter, model: nn.Module | None = None) -> Any:
    """Return the kinds of the results of a leaf."""
    leaf = LeafTrace(node, module, interpreter, model)
    inner = leaf.graph(leaf.traces())
    return checked_results(inner, leaf.interpret(inner))


def checked_results(inner: Graph, inside: KindInterpreter) -> list[Kind]:
    """Return the kinds of the results of a leaf, if nothing contradicts them."""
    found = _results(inner, inside)
    _guards(inner, inside)
    if effect := find_obstacle(inner):
        raise AnalysisRefused(f"inside it, {effect}")
    if inside.blocked:
        raise AnalysisRefused(f"inside it, {inside.blocked}")
    return found


def _enter_region(region: Any) -> Any:
    from contextlib import ExitStack

    from gemini.ir.autograd_modes import Region

    stack = ExitStack()
    if region is not None:
        region.enter(stack, Region.current())
    return stack


def _find_model_object(model: nn.Module | None, form: ModelObject) -> Any:
    if model is None:
        raise AnalysisRefused("an object of the model among its arguments")
    module = model.get_submodule(form.module)
    return getattr(module, form.attribute) if form.attribute else module


class _LeafWithNumbers(nn.Module):  # type: ignore[misc]
    """A leaf with numbers of samples, or objects of the model, among its arguments.

    The numbers are sizes of one more tensor, the last; the modules are submodules of this one, with their weights.
    """

    def __init__(
        self, module: nn.Module, node: Node, number: Callable[[Number, int], Any], objects: dict[ModelObject, Any]
    ) -> None:
        super().__init__()
        self.inner = module
        self.others = nn.ModuleList(one for one in objects.values() if isinstance(one, nn.Module))
        self.__dict__.update(forms=(node.args, node.kwargs), number=number, objects=objects)

    def forward(self, *tensors: Any) -> Any:
        """Return the result of the leaf."""
        given, samples = iter(tensors), tensors[-1].shape[0]

        def read(form: Any) -> Any:
            if isinstance(form, ModelObject) and form in self.objects:
                return self.objects[form]
            return next(given) if isinstance(form, Ref) else self.number(form, samples)

        args, kwargs = (decode(form, read) for form in self.forms)
        return self.inner.forward(*args, **kwargs)


def _number(interpreter: KindInterpreter, form: Any, samples: int) -> Any:
    """Return a number among the arguments of a leaf, for a number of samples."""
    from gemini.batch_analysis.batch_counts import number_kind

    found = number_kind(form.expr, interpreter.values) if isinstance(form, Number) else None
    if isinstance(found, SampleCount):
        return samples * (found // SAMPLES)
    if isinstance(found, (int, float)):
        return found
    raise AnalysisRefused("a number or an object among its arguments that depends on the batch")


def _arguments(
    node: Node, interpreter: KindInterpreter, size: int, order: list[TensorValue], where: torch.device
) -> tuple[Any, Any]:
    """Return arguments like those of the node, for a number of samples, on a device."""
    order.clear()

    def read(form: Any) -> Any:
        if isinstance(form, Ref):
            order.append(interpreter.values[form])
            return _make_tensor(order[-1], size, where)
        return None if isinstance(form, ModelObject) else _number(interpreter, form, size)

    return decode(node.args, read), decode(node.kwargs, read)


def _arguments_with_numbers(
    node: Node, interpreter: KindInterpreter, size: int, order: list[TensorValue], where: torch.device
) -> tuple[Any, Any]:
    """Return the arguments of `_LeafWithNumbers`: the tensors, and one that counts samples."""
    _arguments(node, interpreter, size, order, where)
    order.append(TensorValue("samples", Shard(0), (SAMPLES,), torch.float32, known=True, sized=0))
    return tuple(_make_tensor(value, size, where) for value in order), {}


def _make_tensor(value: TensorValue, size: int, where: torch.device) -> torch.Tensor:
    shape = list(value.shape)
    dim = getattr(value.kind, "dim", None)
    if dim is not None:
        shape[dim] = shape[dim] // SAMPLES * size
    if value.dtype.is_floating_point:
        noise = torch.rand(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
        return noise.to(where, value.dtype).requires_grad_(value.grad)
    return torch.full(shape, value.dtype == torch.bool, dtype=value.dtype, device=where)


def _places(module: nn.Module, call: ModelCall, inputs: dict[int, Any]) -> dict[int, int]:
    """Return the number of the argument that each input of the trace is."""
    args, kwargs = call.with_tensors(call.tensors)
    bound = bind(module, args, kwargs)
    numbers = {id(tensor): at for at, tensor in enumerate(call.tensors)}
    return {node: numbers[id(follow(bound, path))] for node, path in inputs.items()}


def _guards(inner: Graph, inside: KindInterpreter) -> None:
    for guard in inner.guards:
        held = all(inner.nodes[ref.node].kind in ("parameter", "buffer") for ref in expr_refs(guard.expr))
        if guard.data and not held:  # real contents may take the other branch
            raise AnalysisRefused(f"inside it, a branch depends on the contents of the batch ({guard.line})")
        if not guard.data and isinstance(_size_comparison(guard.expr, inside), UnknownNumber):
            raise AnalysisRefused(f"inside it, a branch depends on the number of samples ({guard.line})")


def _size_comparison(expr: Any, inside: KindInterpreter) -> Any:
    """Return a comparison of sizes; `UnknownNumber` for one of the number of samples."""
    from gemini.batch_analysis.batch_counts import number_kind

    found = number_kind(expr, inside.values)
    return UnknownNumber() if isinstance(found, SampleCount) else found


def _results(inner: Graph, inside: KindInterpreter) -> list[Kind]:
    kinds = [inside.values[ref].kind for ref in refs(inner.result)]
    for kind in kinds:
        if isinstance(kind, Opaque):
            raise AnalysisRefused(f"inside it, {kind.reason}")
        if isinstance(kind, WeightedPartial) and isinstance(kind.share, TargetWeight):
            known = (kind.share.target, kind.share.weight)
            if any(key is not None and not str(key).isdigit() for key in known):
                raise AnalysisRefused("inside it, a mean over targets made there")
    return kinds
