"""Inside a leaf: its Python is traced at two batch sizes, on made-up contents, and the trace is interpreted.

The trace is made as in a capture: with traced sizes; two batch sizes must give the same nodes. The leaf's Python runs
anew in every run, so branches on contents or on the number of samples are no proof.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import Kind, Opaque, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.microbatch_weights import Counted
from gemini.batch_analysis.op_call import SAMPLES, Count, Odd, Refused, Value, leaves
from gemini.batch_analysis.propagate import Interpreter
from gemini.batch_analysis.side_effects import obstacle
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


def lent(node: Node) -> list[ModelObject]:
    """Objects of the model that a leaf is given: another's embedding, a configuration."""
    return [leaf for form in (node.args, node.kwargs) for leaf in form_leaves(form) if isinstance(leaf, ModelObject)]


class Inside:
    """A leaf with made-up arguments for two numbers of samples. `model` holds the objects that it is given."""

    def __init__(self, node: Node, module: nn.Module, interpreter: Interpreter, model: nn.Module | None = None) -> None:
        self.order: list[Value] = []  # the tensors that it is given
        self.region, self.micro_batch_statistics = node.region, interpreter.micro_batch_statistics
        where = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        given = _arguments
        objects = {one: _owned(model, one) for one in lent(node)}
        forms = (node.args, node.kwargs)
        if objects or any(isinstance(leaf, Count) for form in forms for leaf in leaves(decode(form, interpreter.read))):
            module, given = _Numbered(module, node, partial(_number, interpreter), objects), _numbered
        self.module = module
        self.calls = [ModelCall(*given(node, interpreter, size, self.order, where)) for size in _SIZES]

    def traces(self, make: Callable[..., Tracer] = Tracer, count: int = 2) -> list[Trace]:
        """What it does with two samples, and with three."""
        saved = ModelSnapshot(self.module)
        found = []
        try:
            for call in self.calls[:count]:
                subject = CaptureSubject(self.module, call, saved, find_caches(self.module))
                with _entered(self.region), saved.watching():
                    found.append(trace(subject, call.tensors, make_leaf_policy(self.module, None, ()), make=make))
        finally:
            saved.restore()
        return found

    def graph(self, traces: list[Trace]) -> Graph:
        """The graph of two traces, which must be the same."""
        mismatch = first_mismatch(*traces)
        if mismatch is not None:
            raise Refused(f"inside {mismatch[0].name}: {mismatch[1]}")
        tracer = traces[0].tracer
        assert tracer.result is not None
        guards = list(tracer.guards.values())
        name = type(self.module).__name__
        inner = Graph(name, tracer.nodes, guards, tracer.inputs, tracer.result, model=self.module)
        mark_batch_dims(tracer.nodes, traces[1].nodes, *_SIZES)
        return inner

    def interpreted(self, inner: Graph, same: frozenset[int] = frozenset()) -> Interpreter:
        """The kinds of all values; those of some nodes are the same in every micro-batch."""
        from gemini.batch_analysis.graph_analysis import statement_of

        inside = Interpreter(frozen=True, micro_batch_statistics=self.micro_batch_statistics)
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


def trace_inside(node: Node, module: nn.Module, interpreter: Interpreter, model: nn.Module | None = None) -> Any:
    """The kinds of what a leaf returns."""
    leaf = Inside(node, module, interpreter, model)
    inner = leaf.graph(leaf.traces())
    return settled(inner, leaf.interpreted(inner))


def settled(inner: Graph, inside: Interpreter) -> list[Kind]:
    """The kinds of what a leaf returns, if nothing stands against them."""
    found = _results(inner, inside)
    _guards(inner, inside)
    if effect := obstacle(inner):
        raise Refused(f"inside it, {effect}")
    if inside.blocked:
        raise Refused(f"inside it, {inside.blocked}")
    return found


def _entered(region: Any) -> Any:
    from contextlib import ExitStack

    from gemini.ir.autograd_modes import Region

    stack = ExitStack()
    if region is not None:
        region.enter(stack, Region.current())
    return stack


def _owned(model: nn.Module | None, form: ModelObject) -> Any:
    if model is None:
        raise Refused("it is given an object of the model")
    module = model.get_submodule(form.module)
    return getattr(module, form.attribute) if form.attribute else module


class _Numbered(nn.Module):  # type: ignore[misc]
    """A leaf that is given numbers of samples, or objects of the model.

    Numbers are sizes of one more tensor here, the last; modules are held by this one, with their weights.
    """

    def __init__(
        self, module: nn.Module, node: Node, number: Callable[[Number, int], Any], lent: dict[ModelObject, Any]
    ) -> None:
        super().__init__()
        self.inner = module
        self.others = nn.ModuleList(one for one in lent.values() if isinstance(one, nn.Module))
        self.__dict__.update(forms=(node.args, node.kwargs), number=number, lent=lent)

    def forward(self, *tensors: Any) -> Any:
        """What the leaf returns."""
        given, samples = iter(tensors), tensors[-1].shape[0]

        def read(form: Any) -> Any:
            if isinstance(form, ModelObject) and form in self.lent:
                return self.lent[form]
            return next(given) if isinstance(form, Ref) else self.number(form, samples)

        args, kwargs = (decode(form, read) for form in self.forms)
        return self.inner.forward(*args, **kwargs)


def _number(interpreter: Interpreter, form: Any, samples: int) -> Any:
    """A number that a leaf is given, for a number of samples."""
    from gemini.batch_analysis.batch_counts import number_kind

    found = number_kind(form.expr, interpreter.values) if isinstance(form, Number) else None
    if isinstance(found, Count):
        return samples * (found // SAMPLES)
    if isinstance(found, (int, float)):
        return found
    raise Refused("it is given a number, or an object of the model, that depends on the batch")


def _arguments(
    node: Node, interpreter: Interpreter, size: int, order: list[Value], where: torch.device
) -> tuple[Any, Any]:
    """Arguments like those of the node, for a number of samples, on a device."""
    order.clear()

    def read(form: Any) -> Any:
        if isinstance(form, Ref):
            order.append(interpreter.values[form])
            return _made(order[-1], size, where)
        return None if isinstance(form, ModelObject) else _number(interpreter, form, size)

    return decode(node.args, read), decode(node.kwargs, read)


def _numbered(
    node: Node, interpreter: Interpreter, size: int, order: list[Value], where: torch.device
) -> tuple[Any, Any]:
    """Arguments of `_Numbered`: the tensors, and one that counts samples."""
    _arguments(node, interpreter, size, order, where)
    order.append(Value("samples", Shard(0), (SAMPLES,), torch.float32, known=True, sized=0))
    return tuple(_made(value, size, where) for value in order), {}


def _made(value: Value, size: int, where: torch.device) -> torch.Tensor:
    shape = list(value.shape)
    dim = getattr(value.kind, "dim", None)
    if dim is not None:
        shape[dim] = shape[dim] // SAMPLES * size
    if value.dtype.is_floating_point:
        noise = torch.rand(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
        return noise.to(where, value.dtype).requires_grad_(value.grad)
    return torch.full(shape, value.dtype == torch.bool, dtype=value.dtype, device=where)


def _places(module: nn.Module, call: ModelCall, inputs: dict[int, Any]) -> dict[int, int]:
    """For every input of the trace, the number of the argument it is."""
    args, kwargs = call.with_tensors(call.tensors)
    bound = bind(module, args, kwargs)
    numbers = {id(tensor): at for at, tensor in enumerate(call.tensors)}
    return {node: numbers[id(follow(bound, path))] for node, path in inputs.items()}


def _guards(inner: Graph, inside: Interpreter) -> None:
    for guard in inner.guards:
        held = all(inner.nodes[ref.node].kind in ("parameter", "buffer") for ref in expr_refs(guard.expr))
        if guard.data and not held:  # made-up contents went this way, real ones may go another
            raise Refused(f"inside it, a branch depends on the contents of the batch ({guard.line})")
        if not guard.data and isinstance(_compared(guard.expr, inside), Odd):
            raise Refused(f"inside it, a branch depends on the number of samples ({guard.line})")


def _compared(expr: Any, inside: Interpreter) -> Any:
    """A comparison of sizes; one of the number of samples is odd."""
    from gemini.batch_analysis.batch_counts import number_kind

    found = number_kind(expr, inside.values)
    return Odd() if isinstance(found, Count) else found


def _results(inner: Graph, inside: Interpreter) -> list[Kind]:
    kinds = [inside.values[ref].kind for ref in refs(inner.result)]
    for kind in kinds:
        if isinstance(kind, Opaque):
            raise Refused(f"inside it, {kind.reason}")
        if isinstance(kind, WeightedPartial) and isinstance(kind.share, Counted):
            known = (kind.share.target, kind.share.weight)
            if any(key is not None and not str(key).isdigit() for key in known):
                raise Refused("inside it, a mean over targets made there")
    return kinds
