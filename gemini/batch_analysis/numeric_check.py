"""Numeric check of a proof: it may overrule a proof, never replace one.

Two comparisons of the whole batch with its micro-batches: the loss and its gradients by the model's outputs, in double
precision with made-up outputs; and the model's outputs, with the random numbers of the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from gemini.batch_analysis.batch_kinds import Kind, Opaque, Partial, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.graph_analysis import GraphKinds
from gemini.batch_analysis.loss_tape import Meta, Tape
from gemini.batch_analysis.microbatch_weights import PrecomputedValues
from gemini.batch_analysis.precompute import Precomputed
from gemini.batch_analysis.reference_run import micro_batch_ranges, run_graph, run_tape, split_operands
from gemini.batch_analysis.split_result import Splitting
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.encode import tensors
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution, GuardBroken, NodeFailed
from gemini.ir.pytree import Ref, leaves
from gemini.snapshot.model_state import ModelSnapshot
from gemini.snapshot.rng_snapshot import preserve_rng_state

_EXACT = 1e-7  # in double precision
_CLOSE = 2e-3  # in the model's precision


def check_splitting(  # noqa: PLR0917
    forms: GraphKinds,
    tape: Tape,
    root: int,
    splitting: Splitting,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Mapping[int, Any] | None = None,
    but: Collection[int] = (),
) -> str:
    """Return why a splitting must be refused after all; '' if no comparison fails.

    `given`: results of nodes that use Python's or NumPy's generator; micro-batches run all nodes `but` these.
    """
    call = ModelCall(args, kwargs)
    sizes = _sizes(call, forms)
    if splitting.reason or len(sizes) < 2:
        return splitting.reason
    graph, bound = forms.graph, bind(forms.graph.bound_model(), args, kwargs)
    known = Precomputed(graph, bound, tape, host_results=given)
    nodes, ops = splitting.weights(known, sizes)
    try:
        found = _check_tape(tape, root, splitting, sizes, ops, known)
        if found or forms.own_statistics:  # they differ between micro-batches
            return found
        with preserve_rng_state():
            return _check_graph(forms, splitting, call, sizes, (nodes, given or {}, but))
    except (GuardBroken, NodeFailed, RuntimeError, ValueError, IndexError, TypeError) as error:
        return f"a micro-batch fails: {type(error).__name__}: {error!s:.120}"


def _sizes(call: ModelCall, forms: GraphKinds) -> list[int]:
    """Return the sizes of two micro-batches, uneven where both get enough samples."""
    for tensor, place in zip(call.tensors, forms.places(), strict=False):
        if place is not None:
            samples = tensor.shape[place.dim] // place.entries
            if times := forms.graph.rolled:
                return [samples // times] * times
            small = max(samples // 3, forms.least)
            return [samples - small, small] if samples > 2 else [1] * samples
    return []


# ── the tape ───────────────────────────────────────────────────────────────────────────────────────────────────
def _check_tape(  # noqa: PLR0917
    tape: Tape, root: int, splitting: Splitting, sizes: Sequence[int], weights: Any, known: PrecomputedValues
) -> str:
    if root < tape.outputs:
        return ""
    total = sum(sizes)
    generator = torch.Generator().manual_seed(0)
    parts = [
        [_make_output(tape.metas[at], splitting.outputs[at], size, total, generator) for at in range(tape.outputs)]
        for size in sizes
    ]
    for one in parts[1:]:  # replicated values
        for at in range(tape.outputs):
            one[at] = parts[0][at] if isinstance(splitting.outputs[at], (Replicate, Opaque)) else one[at]
    whole = [
        _join_outputs([one[at] for one in parts], splitting.outputs[at], sizes, known) for at in range(tape.outputs)
    ]
    operands = {number: _double(tensor) for number, tensor in tape.operands.items()}
    needed = tape.ops_needed_for(root)  # other ops may need the whole batch
    loss = run_tape(tape, [one.clone() for one in whole], operands, needed=needed, double=True)[root]
    gathered = torch.zeros_like(loss)
    doubled = Tape(tape.outputs, tape.metas, operands, tape.ops)
    for index, (start, length) in enumerate(micro_batch_ranges(sizes)):
        given = split_operands(doubled, splitting, start, length, total)
        ops = {at: weight[index] for at, weight in weights.items()}
        outputs = [one.clone() for one in parts[index]]  # not leaves: the tape may write them
        gathered = gathered + run_tape(tape, outputs, given, splitting, length, ops, needed, double=True)[root]
    if not is_close(loss, gathered, _EXACT):
        return f"the loss of the whole batch is {float(loss):.9g}, that of its micro-batches {float(gathered):.9g}"
    leaves = [tensor for one in parts for tensor in one if tensor.requires_grad]
    if not leaves or not loss.requires_grad:
        return ""
    ways = [torch.autograd.grad(value, leaves, allow_unused=True) for value in (loss, gathered)]
    same = all(
        (a is None and b is None) or is_close(_or_zero(a, b), _or_zero(b, a), _EXACT)
        for a, b in zip(*ways, strict=True)
    )
    return "" if same else "the derivatives of the loss by the outputs differ between whole batch and micro-batches"


def _make_output(meta: Meta, kind: Kind, size: int, total: int, generator: torch.Generator) -> torch.Tensor:
    """An output of a micro-batch: numbers between 0 and 1, which every loss accepts."""
    shape = list(meta.shape)
    if isinstance(kind, Shard):
        shape[kind.dim] = shape[kind.dim] // total * size
    if not meta.dtype.is_floating_point:
        return torch.zeros(shape, dtype=meta.dtype, device=meta.device)
    made = torch.rand(shape, dtype=torch.float64, generator=generator) * 0.9 + 0.05
    return made.to(meta.device).requires_grad_(meta.requires_grad)


def _join_outputs(
    parts: list[torch.Tensor], kind: Kind, sizes: Sequence[int], known: PrecomputedValues | None = None
) -> torch.Tensor:
    if isinstance(kind, Shard):
        return kind.join(parts)
    if isinstance(kind, Partial):
        return torch.stack(parts).sum(0)
    if isinstance(kind, WeightedPartial) and known is not None:
        weights = kind.share.weights(known, sizes)
        return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
    return parts[0]


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach()


def _or_zero(one: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor:
    return one if one is not None else torch.zeros_like(like)


def is_close(one: torch.Tensor, two: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors agree, measured by the largest entry of the first."""
    if one.shape != two.shape:
        return False
    if one.is_complex() and two.is_complex():
        one, two = (torch.view_as_real(part.resolve_conj()) for part in (one, two))
    if not one.is_floating_point():
        return bool(torch.equal(one, two))
    finite = one.nan_to_num(0.0, 0.0, 0.0).abs()
    scale = float(finite.detach().max()) if one.numel() else 0.0
    return bool(torch.allclose(one, two, rtol=tolerance, atol=tolerance * max(scale, 1e-6), equal_nan=True))


# ── the graph ──────────────────────────────────────────────────────────────────────────────────────────────────
def _check_graph(forms: GraphKinds, splitting: Splitting, call: ModelCall, sizes: Sequence[int], known: Any) -> str:
    saved = ModelSnapshot(forms.graph.bound_model())
    try:
        with torch.no_grad():
            return _compare_graph(forms, splitting, call, sizes, known, saved)
    finally:
        saved.restore()


def _compare_graph(  # noqa: PLR0917
    forms: GraphKinds, splitting: Splitting, call: ModelCall, sizes: Sequence[int], known: Any, saved: ModelSnapshot
) -> str:
    graph, model, (weights, foreign, but) = forms.graph, forms.graph.bound_model(), known
    args, kwargs = call.arguments()
    drawn: dict[int, Any] = {}
    if not graph.rolled:
        whole, drawn = _whole_run(graph, bind(model, args, kwargs), foreign)
    elif any(node.random for node in graph.nodes):
        return ""
    else:
        whole = _whole_by_model(graph, args, kwargs)
    found = []
    for index, (start, length) in enumerate(micro_batch_ranges(sizes)):
        given = [
            tensor if place is None else place.take(tensor, start, length, sum(sizes))
            for tensor, place in zip(call.tensors, forms.places(), strict=True)
        ]
        args, kwargs = call.arguments(given)
        noise = {}
        for node, made in drawn.items():
            noise[node] = _part(forms, Ref(node), made, (start, length, sum(sizes)))
        factors = {node: weight[index] for node, weight in weights.items()}
        saved.restore()  # every micro-batch starts from the same buffers
        found.append(run_graph(graph, bind(model, args, kwargs), factors, noise, but))
    return _differ(graph, splitting, whole, found)


def _differ(
    graph: Graph, splitting: Splitting, whole: dict[Ref, torch.Tensor], found: list[dict[Ref, torch.Tensor]]
) -> str:
    for at, ref in enumerate(graph.outputs()):
        kind = splitting.outputs[at] if at < len(splitting.outputs) else Opaque("")
        if isinstance(kind, (Opaque, WeightedPartial)) or ref not in whole:
            continue
        parts = [one[ref] for one in found]
        joined = _join_outputs(parts, kind, [1] * len(parts))
        if not is_close(whole[ref], joined, _CLOSE):
            return f"the output {graph.nodes[ref.node].name} differs between whole batch and micro-batches"
    return ""


def _part(forms: GraphKinds, ref: Ref, made: Any, where: tuple[int, int, int]) -> Any:
    """Return the part of some samples of the result of a random node."""
    if isinstance(made, torch.Tensor):
        kind = forms.kind(ref)
        return kind.take(made, *where).clone() if isinstance(kind, Shard) else made.clone()
    if type(made) in (tuple, list):
        parts = [_part(forms, Ref(ref.node, "ret", (*ref.path, ("i", at))), one, where) for at, one in enumerate(made)]
        return type(made)(parts)
    return made


def _copy(made: Any) -> Any:
    if isinstance(made, torch.Tensor):
        return made.clone()
    return type(made)(_copy(one) for one in made) if type(made) in (tuple, list) else made


def _whole_by_model(graph: Graph, args: Any, kwargs: Any) -> dict[Ref, torch.Tensor]:
    """Return the model's outputs on the whole batch: a rolled graph covers one micro-batch only."""
    made = [tensor for _, tensor in tensors(graph.bound_model()(*args, **kwargs))]
    every = [leaf for leaf in leaves(graph.result) if isinstance(leaf, Ref)]
    return dict(zip(every, made, strict=True)) if len(every) == len(made) else {}


def _whole_run(
    graph: Graph, bound: dict[str, Any], given: Mapping[int, Any]
) -> tuple[dict[Ref, torch.Tensor], dict[int, Any]]:
    """Return the outputs on the whole batch, and the results of random nodes."""
    execution = Execution(graph, graph.bound_model(), bound)
    drawn: dict[int, Any] = {}
    with RegionSwitch() as regions:
        for node in graph.nodes:
            if not node.is_source and node.region is not None:
                regions.to(node.region)
            if node.id in given:
                execution.results[node.id] = given[node.id]
                continue
            execution.step(node)
            result = execution.results[node.id]
            if node.random:
                drawn[node.id] = _copy(result)  # later nodes may write it
    return {ref: execution.read(ref) for ref in graph.outputs()}, drawn
