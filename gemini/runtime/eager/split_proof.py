"""The proof that a call may be split into micro-batches.

A call is split only where the rules of `gemini.batch_analysis` show that samples are independent: every input and
output has a known batch dimension, nothing is random, no branch depends on contents, no buffer is written, and there
are no batch statistics. All other calls run as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import Opaque, Shard
from gemini.errors import GeminiError
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.encode import follow
from gemini.ir.graph import Graph


@dataclass(frozen=True)
class SplitProof:
    """The proof that calls of one signature may be split, or why not."""

    reason: str = ""
    inputs: tuple[int, ...] = ()  # batch dimension of each input tensor, in the order of the call
    outputs: tuple[int, ...] = ()  # of each tensor of the result


def prove_split(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitProof:
    """Prove that calls like this one may be split."""
    from gemini.batch_analysis.graph_analysis import prove_graph
    from gemini.capture import capture

    coupled = [type(m).__name__ for m in model.modules() if _couples_samples(m)]
    if coupled:
        return SplitProof(f"{coupled[0]} takes statistics over the batch")
    try:
        graph = capture(model, args, kwargs)
    except GeminiError as error:
        return SplitProof(f"it cannot be captured: {error!s:.100}")
    with torch.random.fork_rng(devices=[]):  # layers are inspected by running them
        forms = prove_graph(graph, args, kwargs)
    reason = _find_obstacle(graph) or forms.reason
    kinds = [forms.kind(ref) for ref in graph.outputs()]
    reason = reason or next((kind.reason for kind in kinds if isinstance(kind, Opaque)), "")
    if reason:
        return SplitProof(reason)
    bound = bind(model, args, kwargs)
    dims: dict[int, int] = {}
    for node, path in graph.inputs.items():
        (meta,) = graph.nodes[node].outputs.values()
        if meta.batch_dim is None or meta.batch_factor != 1:
            return SplitProof(f"the input {graph.nodes[node].target} does not count samples")
        dims[id(follow(bound, path))] = meta.batch_dim
    outputs = [graph.meta(ref) for ref in graph.outputs()]
    if any(meta.batch_dim is None or meta.batch_factor != 1 for meta in outputs) or not all(
        isinstance(kind, Shard) for kind in kinds
    ):
        return SplitProof("an output does not count samples")
    given = ModelCall(args, kwargs).tensors
    if any(id(tensor) not in dims for tensor in given):
        return SplitProof("an input is not used")
    return SplitProof("", tuple(dims[id(tensor)] for tensor in given), tuple(meta.batch_dim or 0 for meta in outputs))


def _couples_samples(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats)


def _find_obstacle(graph: Graph) -> str:
    if graph.is_whole:
        return f"it had to be captured whole: {graph.blocks['']}"
    if graph.batch_size is None:
        return "its Python code depends on the number of samples"
    if any(node.random for node in graph.nodes):
        return "it draws random numbers"
    if any(guard.data for guard in graph.guards):
        return "a branch depends on contents"
    if any(node.mutates for node in graph.nodes):
        return "it writes in place"
    if any(node.kind in ("block", "call") for node in graph.nodes):
        return "parts of it run Python that was not followed"
    return ""
