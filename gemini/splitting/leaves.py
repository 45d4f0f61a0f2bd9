"""Leaves: modules that a graph runs as one node. The common layers of torch.nn are known; any other is traced inside.

The trace is made as in a capture: with traced sizes, at two batch sizes which must give the same nodes. Its Python runs
anew in every run, so branches on contents or on the number of samples are no proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.capture.binding import Call as ModelCall
from gemini.capture.binding import bind
from gemini.capture.caches import find_caches
from gemini.capture.forms import Number, Owned, Ref, expr_refs, refs
from gemini.capture.forms import leaves as form_leaves
from gemini.capture.granularity import make_granularity
from gemini.capture.graph import Graph
from gemini.capture.node import Node
from gemini.capture.recording import Coarsen
from gemini.capture.signatures import node_signature
from gemini.capture.state import Saved
from gemini.capture.traces import Subject, first_mismatch, mark_batch, trace
from gemini.capture.values import decode, follow
from gemini.splitting.calls import SAMPLES, Call, Count, Odd, Refused, Value, leaves
from gemini.splitting.effects import obstacle
from gemini.splitting.interpreter import Interpreter, Statement
from gemini.splitting.rules.experts import as_rows, back, row_result, row_value
from gemini.splitting.rules.registry import find_rule
from gemini.splitting.statistics import may_be_own
from gemini.step.splitting import Arranged, Constant, Counted, Kind, Mean, Opaque, Sample

_POINTWISE = (
    nn.Dropout, nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU,
    nn.LeakyReLU, nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid,
    nn.AlphaDropout, nn.Threshold,
)  # fmt: skip
_KNOWN: dict[type, str] = {
    nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d", nn.LayerNorm: "layer_norm",
    nn.Embedding: "embedding", **dict.fromkeys(_POINTWISE, "relu"),
}  # fmt: skip
_SIZES = (2, 3)


def open_leaf(graph: Graph, node: Node, interpreter: Interpreter, statement: Statement, memo: dict[Any, Any]) -> Any:
    """The kinds of what a leaf returns."""
    args, kwargs = interpreter.arguments(statement)
    given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Value)]
    module = graph.bound_model().get_submodule(node.target)
    varying = [value for value in given if not value.is_constant]
    if not varying and not _counts((args, kwargs)) and not node.changes:
        return Constant()
    for value in varying:
        if isinstance(value.kind, Opaque):
            raise _inherited(value.kind.reason)
    if module._forward_hooks or module._forward_pre_hooks:
        raise Refused("its hooks are not followed")
    if any(isinstance(value.kind, Arranged) for value in varying):
        return _row_by_row(graph, node, interpreter, statement, memo)
    if may_be_own(module):
        return _normalized(args, kwargs)
    found = None if node.changes else _known(module, args, kwargs, statement)
    if found is not None:
        return found
    numbers = tuple((type(leaf), leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, (int, float, Odd)))
    seen = tuple((v.kind, v.shape, v.dtype, v.known) for v in given)
    key = (node_signature(graph, node, costs=False), seen, numbers, tuple(_lent(node)))
    if key not in memo:
        memo[key] = _attempt(node, module, interpreter, graph.bound_model())
    return _outer(memo[key], given)


def _row_by_row(
    graph: Graph, node: Node, interpreter: Interpreter, statement: Statement, memo: dict[Any, Any]
) -> list[Kind]:
    """Rows of a sort, each seen as a sample of its own."""
    keys = {ref for form in (node.args, node.kwargs) for ref in refs(form)}
    before = {key: interpreter.values[key] for key in keys}
    rows = as_rows([value for value in before.values() if not value.is_constant])
    results = [(key, row_result(result, rows.entries)) for key, result in statement.results]
    try:
        for key, value in before.items():
            interpreter.values[key] = row_value(value)
        found = open_leaf(graph, node, interpreter, replace(statement, results=results), memo)
    finally:
        for key, value in before.items():
            interpreter.values[key] = value
    kinds = found if isinstance(found, list) else [found] * len(results)
    return [back(kind, rows) for kind in kinds]


def _inherited(reason: str) -> Exception:
    from gemini.splitting.interpreter import Inherited

    return Inherited(reason)


def _counts(arguments: Any) -> bool:
    return any(isinstance(leaf, (Count, Odd)) for leaf in leaves(arguments))


def _known(module: nn.Module, args: Any, kwargs: Any, statement: Statement) -> Any:
    """By the rule of the function that a layer of torch.nn is."""
    name = _KNOWN.get(type(module))
    if name is None or kwargs or len(args) != 1 or "forward" in vars(module):
        return None
    value: Any = args[0]
    extra: dict[str, Any] = {}
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq:
            return None
        extra["weight"] = _constant(module.weight)
    elif isinstance(module, nn.LayerNorm):
        extra["normalized_shape"] = module.normalized_shape
    elif name.startswith(("conv", "linear")):
        extra["weight"] = _constant(module.weight)
        extra["bias"] = None if module.bias is None else _constant(module.bias)
    call = Call(name, (value,), extra, statement.samples, [result for _, result in statement.results], True)
    rule = find_rule(name)
    assert rule is not None
    return rule(call)


def _normalized(args: Any, kwargs: Any) -> Kind:
    """Batch normalization by statistics of each micro-batch."""
    value: Value = args[0] if args else kwargs["input"]
    if not isinstance(value.kind, Sample) or value.kind.dim != 0 or value.kind.outer != 1:
        raise Refused("batch normalization whose first dimension is not the samples")
    return value.kind


def _constant(tensor: torch.Tensor) -> Value:
    return Value("parameter", Constant(), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class _Refusal:
    """A leaf that could not be followed, remembered."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _outer(found: Any, given: list[Value]) -> list[Kind]:
    """What was found of a leaf, with shares by the values of the graph."""
    if isinstance(found, _Refusal):
        raise Refused(found.reason)
    kinds: list[Kind] = []
    for kind in found:
        if isinstance(kind, Mean) and isinstance(kind.share, Counted):
            share = kind.share
            places = [None if key is None else given[int(str(key))].key for key in (share.target, share.weight)]
            kind = Mean(replace(share, target=places[0], weight=places[1]))
        kinds.append(kind)
    return kinds


def _lent(node: Node) -> list[Owned]:
    """Objects of the model that a leaf is given: another's embedding, a configuration."""
    return [leaf for form in (node.args, node.kwargs) for leaf in form_leaves(form) if isinstance(leaf, Owned)]


def _attempt(node: Node, module: nn.Module, interpreter: Interpreter, model: nn.Module) -> Any:
    try:
        return trace_inside(node, module, interpreter, model)
    except Refused as refused:
        return _Refusal(str(refused))
    except Coarsen as coarse:
        return _Refusal(f"its Python is not followed: {coarse.reason}")
    except Exception as error:
        return _Refusal(f"tracing it raised {type(error).__name__}: {error!s:.80}")


def trace_inside(node: Node, module: nn.Module, interpreter: Interpreter, model: nn.Module | None = None) -> Any:
    """Trace the leaf at two batch sizes and interpret the trace. `model` holds the objects that it is given."""
    from gemini.splitting.graphs import statement_of

    order: list[Value] = []
    where = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    given = _arguments
    lent = {one: _owned(model, one) for one in _lent(node)}
    if lent or any(
        isinstance(leaf, Count) for form in (node.args, node.kwargs) for leaf in leaves(decode(form, interpreter.read))
    ):
        module, given = _Numbered(module, node, partial(_number, interpreter), lent), _numbered
    calls = [ModelCall(*given(node, interpreter, size, order, where)) for size in _SIZES]
    saved = Saved(module)
    region = node.region
    traces = []
    try:
        for call in calls:
            subject = Subject(module, call, saved, find_caches(module))
            with _entered(region), saved.watching():
                traces.append(trace(subject, call.tensors, make_granularity(module, None, ())))
    finally:
        saved.restore()
    mismatch = first_mismatch(traces[0], traces[1])
    if mismatch is not None:
        raise Refused(f"inside {mismatch[0].name}: {mismatch[1]}")
    tracer = traces[0].tracer
    assert tracer.result is not None
    inner = Graph(
        type(module).__name__, tracer.nodes, list(tracer.guards.values()), tracer.inputs, tracer.result, model=module
    )
    mark_batch(tracer.nodes, traces[1].nodes, *_SIZES)
    inside = Interpreter(frozen=True)
    places = _places(module, calls[0], tracer.inputs)
    for one in tracer.nodes:
        made = statement_of(inner, one, {})
        if one.kind == "input":
            outer = order[places[one.id]]
            made.run = lambda *_, outer=outer: outer.kind
            made.known = outer.known
            inside.alias[Ref(one.id)] = str(places[one.id])
        inside.extend([made])
    found = _results(inner, inside)
    _guards(inner, inside)
    if effect := obstacle(inner):
        raise Refused(f"inside it, {effect}")
    if inside.blocked:
        raise Refused(f"inside it, {inside.blocked}")
    return found


def _entered(region: Any) -> Any:
    from contextlib import ExitStack

    from gemini.capture.regions import Region

    stack = ExitStack()
    if region is not None:
        region.enter(stack, Region.current())
    return stack


def _owned(model: nn.Module | None, form: Owned) -> Any:
    if model is None:
        raise Refused("it is given an object of the model")
    module = model.get_submodule(form.module)
    return getattr(module, form.attribute) if form.attribute else module


class _Numbered(nn.Module):  # type: ignore[misc]
    """A leaf that is given numbers of samples, or objects of the model.

    Numbers are sizes of one more tensor here, the last; modules are held by this one, with their weights.
    """

    def __init__(
        self, module: nn.Module, node: Node, number: Callable[[Number, int], Any], lent: dict[Owned, Any]
    ) -> None:
        super().__init__()
        self.inner = module
        self.others = nn.ModuleList(one for one in lent.values() if isinstance(one, nn.Module))
        self.__dict__.update(forms=(node.args, node.kwargs), number=number, lent=lent)

    def forward(self, *tensors: Any) -> Any:
        """What the leaf returns."""
        given, samples = iter(tensors), tensors[-1].shape[0]

        def read(form: Any) -> Any:
            if isinstance(form, Owned) and form in self.lent:
                return self.lent[form]
            return next(given) if isinstance(form, Ref) else self.number(form, samples)

        args, kwargs = (decode(form, read) for form in self.forms)
        return self.inner.forward(*args, **kwargs)


def _number(interpreter: Interpreter, form: Any, samples: int) -> Any:
    """A number that a leaf is given, for a number of samples."""
    from gemini.splitting.numbers import number_kind

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
        return None if isinstance(form, Owned) else _number(interpreter, form, size)

    return decode(node.args, read), decode(node.kwargs, read)


def _numbered(
    node: Node, interpreter: Interpreter, size: int, order: list[Value], where: torch.device
) -> tuple[Any, Any]:
    """Arguments of `_Numbered`: the tensors, and one that counts samples."""
    _arguments(node, interpreter, size, order, where)
    order.append(Value("samples", Sample(0), (SAMPLES,), torch.float32, known=True, sized=0))
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
    args, kwargs = decode(call.form, lambda ref: call.tensors[ref.node])
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
    from gemini.splitting.numbers import number_kind

    found = number_kind(expr, inside.values)
    return Odd() if isinstance(found, Count) else found


def _results(inner: Graph, inside: Interpreter) -> list[Kind]:
    kinds = [inside.values[ref].kind for ref in refs(inner.result)]
    for kind in kinds:
        if isinstance(kind, Opaque):
            raise Refused(f"inside it, {kind.reason}")
        if isinstance(kind, Mean) and isinstance(kind.share, Counted):
            known = (kind.share.target, kind.share.weight)
            if any(key is not None and not str(key).isdigit() for key in known):
                raise Refused("inside it, a mean over targets made there")
    return kinds
