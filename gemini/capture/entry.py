"""Entry points of capture: `capture(model, args, kwargs)` and `attach_model(graph, model)`."""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.capture.driver import CaptureDriver
from gemini.capture.leaf_policy import LeafPolicy, make_leaf_policy
from gemini.capture.options import DEFAULT_OPTIONS, CaptureOptions
from gemini.capture.python_state import fingerprint
from gemini.capture.specialize import GraphVariants
from gemini.errors import CaptureError
from gemini.ir.call_binding import ModelCall
from gemini.ir.graph import Graph
from gemini.ir.validity import describe_differences, describe_state
from gemini.purity.proof import find_impure_argument, prove_purity


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    depth: int | None = None,
    basic_blocks: tuple[type | str, ...] = (),
    options: CaptureOptions = DEFAULT_OPTIONS,
) -> Graph:
    """Capture a model as a graph, on one batch.

    `depth` and `basic_blocks` make modules opaque: from a nesting depth on, by class or by name.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"capture needs an nn.Module, got {type(model).__name__}")
    names = [block if isinstance(block, str) else block.__name__ for block in _as_tuple(basic_blocks)]
    graph = _capture_once(model, args, kwargs or {}, make_leaf_policy(model, depth, basic_blocks), options)
    graph.settings = {"depth": depth, "basic_blocks": names, "opens_leaves": options.opens_leaves}
    return add_variants(graph, model)


def add_variants(graph: Graph, model: nn.Module) -> Graph:
    """Enable a graph to capture further variants of its model with the same settings."""
    depth, blocks = graph.settings["depth"], tuple(graph.settings["basic_blocks"])
    options = CaptureOptions(opens_leaves=graph.settings.get("opens_leaves", False))

    def recapture(args: Any, kwargs: Any) -> Graph:
        return _capture_once(model, args, kwargs, make_leaf_policy(model, depth, blocks), options)

    graph.variants = GraphVariants(model, recapture)
    graph.variants.graphs.append(graph)
    return graph


def _capture_once(model: nn.Module, args: Any, kwargs: Any, leaf_policy: LeafPolicy, options: CaptureOptions) -> Graph:
    if reason := prove_purity(model).reason or find_impure_argument((args, kwargs), model):
        raise CaptureError(
            f"capture runs a model several times, and this one is no function of its tensors: {reason}\n"
            "    → move that out of forward, or pass its result as an argument"
        )
    leaf_policy.opens_leaves = options.opens_leaves
    return CaptureDriver(model, ModelCall(tuple(args), dict(kwargs)), leaf_policy, options).capture()


def _as_tuple(blocks: Any) -> tuple[Any, ...]:
    return (blocks,) if isinstance(blocks, (str, type)) else tuple(blocks)


def attach_model(graph: Graph, model: nn.Module, *, any_state: bool = False) -> Graph:
    """Attach a loaded graph to the model it was captured from, so that it can run; raises CaptureError.

    A model in another state (a mode, an attribute, a configuration) is refused; or, with `any_state`, accepted: the
    graph then holds as soon as the model is in the captured state.
    """
    faults = _missing_parts(graph, model)
    if not faults and graph.validity is not None and graph.awaited_state is not None:
        now = fingerprint(model, graph.validity.glue)
        differences = list(describe_differences(graph.awaited_state, describe_state(now)))
        if not (differences and any_state):
            graph.validity.fingerprint, graph.awaited_state = now, None
            faults += differences
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults[:8])
        raise CaptureError(f"this graph does not fit the model:\n{listed}\n    → capture the model as it is now")
    graph.model = model
    return add_variants(graph, model)


def _missing_parts(graph: Graph, model: nn.Module) -> list[str]:
    faults = []
    if type(model).__name__ != graph.model_name:
        faults.append(f"it was captured from a {graph.model_name}, this is a {type(model).__name__}")
    modules = {name for name, _ in model.named_modules()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = parameters | {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for node in graph.nodes:
        if node.kind in ("module", "block") and node.target not in modules:
            faults.append(f"module {node.target!r} is missing")
        if node.kind in ("parameter", "buffer") and node.target not in tensors:
            faults.append(f"{node.kind} {node.target!r} is missing")
    return faults
