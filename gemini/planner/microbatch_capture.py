"""Micro-batch capture: the graph of one micro-batch, with the proof that micro-batches reproduce the batch.

Micro-batches may have one sample each. A model whose Python treats one sample specially (`if len(x) == 1`,
`squeeze()`) is captured on several; the plan then has fewer micro-batches, of two samples or more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import Opaque
from gemini.batch_analysis.batchnorm import uses_batch_statistics
from gemini.batch_analysis.precompute import random_guards
from gemini.batch_analysis.rules.reshape import SQUEEZED
from gemini.cache_files import cache_folder
from gemini.capture.attribute_writes import return_attribute_writes
from gemini.capture.batch_dim import BatchLayout
from gemini.capture.options import CaptureOptions
from gemini.errors import GeminiError
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.encode import follow
from gemini.ir.graph import Graph
from gemini.planner.buffer_writes import check_outputs_joinable
from gemini.planner.microbatch_split import find_part_like_batch, micro_batch_sizes, slice_call
from gemini.planner.preconditions import check_reassigned
from gemini.planner.step_plan import CoupledSamplesError, UnplannableError
from gemini.planner.tail_plan import exclude_tail

if TYPE_CHECKING:
    from gemini.batch_analysis.graph_analysis import GraphKinds
    from gemini.planner.plan_request import PlanRequest

_MAX_CAPTURES = 5  # of a model with branches on random numbers, until two runs take the same branch
_SEVERAL = 2  # samples of the smallest micro-batch, where one sample is not enough


@dataclass(frozen=True)
class MicroBatch:
    """A captured micro-batch, its proof, and how it divides the batch."""

    graph: Graph
    forms: GraphKinds
    call: tuple[tuple[Any, ...], dict[str, Any]]
    sizes: list[int]  # of all micro-batches of the batch
    parts: float  # captured calls that make up the batch


def prove_micro_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: BatchLayout, request: PlanRequest
) -> MicroBatch:
    """Capture and prove the smallest micro-batch of the request; raises UnplannableError."""
    call = args, kwargs
    first: MicroBatch | _CaptureFailure
    try:
        first = _capture_and_prove(model, call, batch, request, _find_least_samples(batch, request))
        reason = _find_one_sample_obstacle(first, batch.size)
    except _CaptureFailure as failed:
        first, reason = failed, "it fails on few samples"
    if reason and batch.size >= 2 * _SEVERAL and request.micro_batches > 1 and not request.current_branch:
        try:
            second = _capture_and_prove(model, call, batch, request, _SEVERAL)
            if not _find_obstacle(second, batch.size):
                return _check_micro_batch(second, batch, request)
        except UnplannableError:
            pass  # the first attempt has the better reason
    times = _equal_parts(batch.size, request.micro_batches)
    if times > 1 and not request.current_branch and _may_loop(first, batch.size):
        try:
            looped = _prove_sample_loop(model, call, batch, request, times)
            if looped is not None:
                return _check_micro_batch(looped, batch, request)
        except UnplannableError:
            pass
    if isinstance(first, _CaptureFailure):
        raise first
    return _check_micro_batch(first, batch, request)


def _find_least_samples(batch: BatchLayout, request: PlanRequest) -> int:
    """Return the fewest samples of a micro-batch: several where a plan for another length has needed them."""
    needed = any(plan.forms.least == _SEVERAL for plan in request.earlier_plans)
    return _SEVERAL if needed and batch.size >= 2 * _SEVERAL and request.micro_batches > 1 else 1


def _prove_sample_loop(
    model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], batch: BatchLayout, request: PlanRequest, times: int
) -> MicroBatch | None:
    """Prove a model that loops over samples; modules without children are opened if one is the obstacle."""
    for opens_leaves in (False, True):
        found = _capture_and_prove(model, call, batch, request, batch.size // times, times, opens_leaves=opens_leaves)
        if random_guards(found.graph):  # random branches inside loops are not supported
            return None
        reason = _find_obstacle(found, batch.size)
        if not reason:
            return found
        if not _concerns_leaf(found, reason):
            break
    return None


def _concerns_leaf(micro_batch: MicroBatch, reason: str) -> bool:
    """Return whether a reason concerns a module without children that is not one of torch.nn."""
    leaves = [node for node in micro_batch.graph.nodes if node.kind == "module"]
    own = [node for node in leaves if not _class_of(micro_batch.graph, node.target).__module__.startswith("torch.nn.")]
    return any(reason.startswith(f"{node.name} (") for node in own)


def _class_of(graph: Graph, name: str) -> type:
    return type(graph.bound_model().get_submodule(name))


def _equal_parts(samples: int, most: int) -> int:
    """Return the largest number of micro-batches of equal size."""
    return next((count for count in range(min(samples, most), 1, -1) if samples % count == 0), 1)


def _may_loop(micro_batch: MicroBatch | _CaptureFailure, samples: int) -> bool:
    """Return whether a loop over samples, or a branch on their contents, may be the obstacle."""
    if isinstance(micro_batch, _CaptureFailure):
        return False
    found, graph = _find_obstacle(micro_batch, samples), micro_batch.graph
    reasons = [graph.checked.get("half batch", ""), *graph.blocks.values(), *graph.calls.values()]
    counts = graph.batch_size is None or any("batch size" in reason or "from data" in reason for reason in reasons)
    return bool(found) and (counts or "a branch depends" in found or _concerns_leaf(micro_batch, found))


class _CaptureFailure(UnplannableError):
    """The model fails on few samples."""


def _capture_and_prove(  # noqa: PLR0917
    model: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    batch: BatchLayout,
    request: PlanRequest,
    least: int,
    times: int = 0,
    *,
    opens_leaves: bool = False,
) -> MicroBatch:
    """Capture and prove a micro-batch of `least` samples or more.

    With `times`: of exactly `least` samples, as one of `times` equal parts of the batch.
    """
    from gemini.batch_analysis.graph_analysis import prove_graph

    sizes = micro_batch_sizes(batch.size, min(request.micro_batches, batch.size // least))
    few = (
        batch.size
        if request.current_branch
        else max(sizes[0], _samples_to_capture(model, batch, sizes, least, request))
    )
    few = least if times else few
    micro_batch = slice_call(*call, batch, 0, few)
    earlier = [plan.graph for plan in request.earlier_plans if plan.graph.batch_size is not None and not times]
    micro_batch = (earlier and find_part_like_batch(earlier[0], model, call, batch, few)) or micro_batch
    try:
        options = CaptureOptions(batch, times, opens_leaves or request.divides)
        graph = _capture_repeatable(model, *micro_batch, request, options)
        other = None if times else find_part_like_batch(graph, model, call, batch, few)
        if other is not None:
            micro_batch, graph = other, _capture_repeatable(model, *other, request, options)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # raised by the model: it needs more samples
        raise _CaptureFailure(f"on {few} samples it raises {type(error).__name__}: {error!s:.150}") from error
    # The proof runs layers.
    with torch.random.fork_rng(devices=[]):
        forms = prove_graph(graph, *micro_batch, least=least, micro_batch_statistics=request.micro_batch_statistics)
    return MicroBatch(graph, forms, micro_batch, sizes, 1.0 if request.current_branch else len(sizes) * sizes[0] / few)


def _check_micro_batch(micro_batch: MicroBatch, batch: BatchLayout, request: PlanRequest) -> MicroBatch:
    if micro_batch.forms.reason:
        if not request.gather_reason:
            raise (CoupledSamplesError if micro_batch.forms.interpreter.blockers else UnplannableError)(
                micro_batch.forms.reason
            )
        micro_batch = replace(micro_batch, forms=exclude_tail(micro_batch.forms))
    check_batch_dims(micro_batch.graph, micro_batch.call, batch)
    check_outputs_joinable(micro_batch.forms)
    return micro_batch


def _find_obstacle(micro_batch: MicroBatch, samples: int) -> str:
    """Return why the model cannot be split for this batch size; '' if it can."""
    from gemini.batch_analysis.graph_analysis import find_size_branch

    forms = micro_batch.forms
    kinds = [forms.kind(ref) for ref in micro_batch.graph.outputs()]
    opaque = next((kind.reason for kind in kinds if isinstance(kind, Opaque)), "")
    return forms.reason or find_size_branch(forms.interpreter, micro_batch.graph, samples) or opaque


def _find_one_sample_obstacle(micro_batch: MicroBatch, samples: int) -> str:
    """Return an obstacle that may disappear with several samples per micro-batch; '' if there is none."""
    from gemini.batch_analysis.graph_analysis import find_size_branch

    found, graph = _find_obstacle(micro_batch, samples), micro_batch.graph
    if not found or micro_batch.forms.least > 1:
        return ""
    reasons = [graph.checked.get("half batch", ""), *graph.blocks.values(), *graph.calls.values()]
    if graph.batch_size is None or any("batch size" in reason for reason in reasons):
        return found
    if SQUEEZED in found or (
        not micro_batch.forms.reason and find_size_branch(micro_batch.forms.interpreter, graph, samples)
    ):
        return found
    return ""


def _samples_to_capture(
    model: nn.Module, batch: BatchLayout, sizes: list[int], least: int, request: PlanRequest
) -> int:
    """Return the samples that a capture needs; it also runs on half of them, and statistics need two or more."""
    if not any(uses_batch_statistics(module) for module in model.modules()):
        return 1 if least == 1 else 2 * least
    if min(sizes) < 2 and not request.gather_reason:
        raise UnplannableError("batch normalization in training, and micro-batches of one sample, without statistics")
    return min(batch.size, 4)


def check_batch_dims(graph: Graph, call: tuple[tuple[Any, ...], dict[str, Any]], batch: BatchLayout) -> None:
    """Raise UnplannableError where the graph has found other sample dimensions than those of `batch`."""
    bound = bind(graph.bound_model(), *call)
    seen = {id(follow(bound, path)): graph.nodes[node] for node, path in graph.inputs.items()}
    for tensor, (dim, factor) in zip(ModelCall(*call).tensors, batch.sample_dims(), strict=True):
        node = seen.get(id(tensor))
        if node is None:
            continue
        meta = next(iter(node.outputs.values()))
        if (found := meta.batch_dim) != dim:
            raise UnplannableError(
                f"it is ambiguous whether dimension {dim} or {found} of {node.target} counts samples"
            )
        if dim is not None and meta.batch_factor != factor:
            raise UnplannableError(
                f"it is ambiguous whether {node.target} has {factor} or {meta.batch_factor} rows per sample"
            )


def _capture_repeatable(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest, options: CaptureOptions
) -> Graph:
    """Capture a graph that is valid for two batch sizes; of random branches, those that several seeds take."""
    graph = capture_graph(model, args, kwargs, request, options)
    for seed in range(0 if request.current_branch else _MAX_CAPTURES):
        if graph.batch_size is not None or not random_guards(graph):
            break
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            graph = capture_graph(model, args, kwargs, request, options)
    return graph


def capture_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest, options: CaptureOptions
) -> Graph:
    """Return the graph of a call, from the cache if possible; raises UnplannableError."""
    from gemini.cache.graphs import load_or_capture

    settings: dict[str, Any] = {"depth": None, "basic_blocks": ()}
    try:
        graph, _ = load_or_capture(model, args, kwargs, settings, cache_folder("graphs", request.cache), options)
    except GeminiError as error:
        raise UnplannableError(f"it cannot be captured: {str(error).splitlines()[0]}") from error
    check_reassigned(graph.reassigned)
    if graph.is_whole:
        raise UnplannableError(f"it had to be captured whole: {graph.blocks['']}")
    for ref in graph.outputs():
        if (ref.source, ref.path) not in graph.nodes[ref.node].outputs:  # a NumPy array: it cannot be deferred
            raise UnplannableError(f"{graph.nodes[ref.node].name} is returned, and is no tensor")
    return return_attribute_writes(graph)
