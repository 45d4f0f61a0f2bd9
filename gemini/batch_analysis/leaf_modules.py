"""Leaves: modules that a graph runs as one node. The common layers of torch.nn are known; any other is traced inside.

The trace is made as in a capture: with traced sizes, at two batch sizes which must give the same nodes. Its Python runs
anew in every run, so branches on contents or on the number of samples are no proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.analysis_steps import Statement
from gemini.batch_analysis.batch_kinds import Arranged, Kind, Opaque, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.batchnorm import may_be_own
from gemini.batch_analysis.expert_loops import follow_loops
from gemini.batch_analysis.leaf_trace import lent, trace_inside
from gemini.batch_analysis.microbatch_weights import Counted
from gemini.batch_analysis.op_call import Call, Count, Odd, Refused, Value, leaves
from gemini.batch_analysis.propagate import Interpreter
from gemini.batch_analysis.rules.expert_rows import as_rows, back, row_result, row_value
from gemini.batch_analysis.rules.registry import find_rule
from gemini.capture.trace_state import BRANCHES_ON_RESULTS, TraceRefused
from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.ir.node_signature import node_signature
from gemini.ir.pytree import refs

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
        return Replicate()
    for value in varying:
        if isinstance(value.kind, Opaque):
            raise _inherited(value.kind.reason)
    if module._forward_hooks or module._forward_pre_hooks:
        raise Refused("its hooks are not followed")
    if any(isinstance(value.kind, Arranged) for value in varying):
        return _row_by_row(graph, node, interpreter, statement, memo)
    if interpreter.micro_batch_statistics and may_be_own(module):
        return _normalized(args, kwargs)
    found = None if node.changes else _known(module, args, kwargs, statement)
    if found is not None:
        return found
    numbers = tuple((type(leaf), leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, (int, float, Odd)))
    seen = tuple((v.kind, v.shape, v.dtype, v.known) for v in given)
    key = (node_signature(graph, node, costs=False), seen, numbers, tuple(lent(node)))
    if key not in memo:
        memo[key] = _attempt(node, module, interpreter, graph.bound_model())
    return _outer(memo[key], given)


def _row_by_row(
    graph: Graph, node: Node, interpreter: Interpreter, statement: Statement, memo: dict[Any, Any]
) -> list[Kind]:
    """Rows of a sort, each seen as a sample of its own."""
    keys = {ref for form in (node.args, node.kwargs) for ref in refs(form)}
    before = {key: interpreter.values[key] for key in keys}
    varying = [value for value in before.values() if not value.is_constant]
    rows = as_rows(varying)
    if statement.random and not rows.entries:
        raise Refused("random numbers for rows of which nobody knows how many there are")
    results = [(key, row_result(result, rows, varying[0].shape[0])) for key, result in statement.results]
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
    from gemini.batch_analysis.analysis_steps import Inherited

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
    if not isinstance(value.kind, Shard) or value.kind.dim != 0 or value.kind.outer != 1:
        raise Refused("batch normalization whose first dimension is not the samples")
    return value.kind


def _constant(tensor: torch.Tensor) -> Value:
    return Value("parameter", Replicate(), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


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
        if isinstance(kind, WeightedPartial) and isinstance(kind.share, Counted):
            share = kind.share
            places = [None if key is None else given[int(str(key))].key for key in (share.target, share.weight)]
            kind = WeightedPartial(replace(share, target=places[0], weight=places[1]))
        kinds.append(kind)
    return kinds


def _attempt(node: Node, module: nn.Module, interpreter: Interpreter, model: nn.Module) -> Any:
    found = _followed(trace_inside, node, module, interpreter, model)
    if not isinstance(found, _Refusal):
        return found
    looped = _followed(follow_loops, node, module, interpreter, model)
    return looped if not isinstance(looped, _Refusal) or found.reason.endswith(BRANCHES_ON_RESULTS) else found


def _followed(follow: Callable[..., Any], node: Node, *given: Any) -> Any:
    try:
        return follow(node, *given)
    except Refused as refused:
        return _Refusal(str(refused))
    except TraceRefused as coarse:
        return _Refusal(f"its Python is not followed: {coarse.reason}")
    except Exception as error:
        return _Refusal(f"tracing it raised {type(error).__name__}: {error!s:.80}")
