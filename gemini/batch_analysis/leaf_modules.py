"""Leaf modules: modules that a graph runs as one node. Common layers of torch.nn have rules; any other is traced.

Its Python is executed in every run, so branches on contents or on the number of samples invalidate a proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.analysis_steps import AnalysisStep
from gemini.batch_analysis.batch_kinds import Kind, Opaque, Replicate, Shard, SortedRows, WeightedPartial
from gemini.batch_analysis.batchnorm import can_use_micro_batch_statistics
from gemini.batch_analysis.expert_loops import analyze_expert_loops
from gemini.batch_analysis.leaf_trace import model_objects, trace_inside
from gemini.batch_analysis.microbatch_weights import TargetWeight
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, SampleCount, TensorValue, UnknownNumber, leaves
from gemini.batch_analysis.propagate import KindInterpreter
from gemini.batch_analysis.rules.expert_rows import as_rows, from_row_kind, row_result, row_value
from gemini.batch_analysis.rules.registry import find_rule
from gemini.capture.trace_state import BRANCHES_ON_RESULTS, TraceRefused
from gemini.ir.graph import Graph
from gemini.ir.hook_tables import has_hooks
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
SAME_LEAF = "leaf"  # keys of a memo: (this, node), with the kinds of the arguments and of the results


def keep_equal_leaves(first: dict[Any, Any], second: dict[Any, Any]) -> dict[Any, Any]:
    """Return the leaves with equal kinds in two proofs, which differ in sizes: they need no analysis at further sizes.

    Kinds that depend on sizes in other ways than equal numbers are in neither.
    """
    return {
        key: found
        for key, found in first.items()
        if key[0] == SAME_LEAF and not isinstance(found[1], _Refusal) and second.get(key) == found
    }


def analyze_leaf(
    graph: Graph, node: Node, interpreter: KindInterpreter, statement: AnalysisStep, memo: dict[Any, Any]
) -> Any:
    """Return the kinds of the results of a leaf."""
    args, kwargs = interpreter.arguments(statement)
    given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, TensorValue)]
    module = graph.bound_model().get_submodule(node.target)
    varying = [value for value in given if not value.is_constant]
    if not varying and not _counts((args, kwargs)) and not node.changes:
        return Replicate()
    for value in varying:
        if isinstance(value.kind, Opaque):
            raise _inherit_refusal(value.kind.reason)
    if has_hooks(module) and (module._forward_hooks or module._forward_pre_hooks):
        raise AnalysisRefused("its hooks are not traced")
    if any(isinstance(value.kind, SortedRows) for value in varying):
        return _analyze_rows(graph, node, interpreter, statement, memo)
    if interpreter.micro_batch_statistics and can_use_micro_batch_statistics(module):
        return _batch_norm_kind(args, kwargs)
    found = None if node.changes else _apply_known_rule(module, args, kwargs, statement)
    if found is not None:
        return found
    kinds = tuple(value.kind for value in given)
    at_other_sizes = memo.get((SAME_LEAF, node.id))
    if at_other_sizes is not None and at_other_sizes[0] == kinds:
        return _map_to_graph(at_other_sizes[1], given)
    numbers = tuple(
        (type(leaf), leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, (int, float, UnknownNumber))
    )
    seen = tuple((v.kind, v.shape, v.dtype, v.known) for v in given)
    key = (node_signature(graph, node, costs=False), seen, numbers, tuple(model_objects(node)))
    if key not in memo:
        memo[key] = _analyze_inside(node, module, interpreter, graph.bound_model())
    if type(module).__module__.startswith("torch.nn."):  # other code may branch on sizes
        memo[SAME_LEAF, node.id] = kinds, memo[key]
    return _map_to_graph(memo[key], given)


def _analyze_rows(
    graph: Graph, node: Node, interpreter: KindInterpreter, statement: AnalysisStep, memo: dict[Any, Any]
) -> list[Kind]:
    """Analyse a leaf on sorted rows, each treated as a sample."""
    keys = {ref for form in (node.args, node.kwargs) for ref in refs(form)}
    before = {key: interpreter.values[key] for key in keys}
    varying = [value for value in before.values() if not value.is_constant]
    rows = as_rows(varying)
    if statement.random and not rows.entries:
        raise AnalysisRefused("random numbers for an unknown number of rows")
    results = [(key, row_result(result, rows, varying[0].shape[0])) for key, result in statement.results]
    try:
        for key, value in before.items():
            interpreter.values[key] = row_value(value)
        found = analyze_leaf(graph, node, interpreter, replace(statement, results=results), memo)
    finally:
        for key, value in before.items():
            interpreter.values[key] = value
    kinds = found if isinstance(found, list) else [found] * len(results)
    return [from_row_kind(kind, rows) for kind in kinds]


def _inherit_refusal(reason: str) -> Exception:
    from gemini.batch_analysis.analysis_steps import InheritedRefusal

    return InheritedRefusal(reason)


def _counts(arguments: Any) -> bool:
    return any(isinstance(leaf, (SampleCount, UnknownNumber)) for leaf in leaves(arguments))


def _apply_known_rule(module: nn.Module, args: Any, kwargs: Any, statement: AnalysisStep) -> Any:
    """Apply the rule of the function that a layer of torch.nn calls; None if there is none."""
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
    call = OpCall(name, (value,), extra, statement.samples, [result for _, result in statement.results], True)
    rule = find_rule(name)
    assert rule is not None
    return rule(call)


def _batch_norm_kind(args: Any, kwargs: Any) -> Kind:
    """Return the kind after batch normalization by the statistics of each micro-batch."""
    value: TensorValue = args[0] if args else kwargs["input"]
    if not isinstance(value.kind, Shard) or value.kind.dim != 0 or value.kind.outer != 1:
        raise AnalysisRefused("batch normalization whose first dimension is not the samples")
    return value.kind


def _constant(tensor: torch.Tensor) -> TensorValue:
    return TensorValue("parameter", Replicate(), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class _Refusal:
    """A leaf that could not be analysed, as stored in the memo."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _map_to_graph(found: Any, given: list[TensorValue]) -> list[Kind]:
    """Return the kinds of a leaf with weights that refer to values of the graph."""
    if isinstance(found, _Refusal):
        raise AnalysisRefused(found.reason)
    kinds: list[Kind] = []
    for kind in found:
        if isinstance(kind, WeightedPartial) and isinstance(kind.share, TargetWeight):
            share = kind.share
            places = [None if key is None else given[int(str(key))].key for key in (share.target, share.weight)]
            kind = WeightedPartial(replace(share, target=places[0], weight=places[1]))
        kinds.append(kind)
    return kinds


def _analyze_inside(node: Node, module: nn.Module, interpreter: KindInterpreter, model: nn.Module) -> Any:
    found = _try_analysis(trace_inside, node, module, interpreter, model)
    if not isinstance(found, _Refusal):
        return found
    looped = _try_analysis(analyze_expert_loops, node, module, interpreter, model)
    return looped if not isinstance(looped, _Refusal) or found.reason.endswith(BRANCHES_ON_RESULTS) else found


def _try_analysis(follow: Callable[..., Any], node: Node, *given: Any) -> Any:
    try:
        return follow(node, *given)
    except AnalysisRefused as refused:
        return _Refusal(str(refused))
    except TraceRefused as coarse:
        return _Refusal(f"its Python is not traced: {coarse.reason}")
    except Exception as error:
        return _Refusal(f"tracing it raised {type(error).__name__}: {error!s:.80}")
