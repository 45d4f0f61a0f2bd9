"""Evaluation step: a call without gradients, by micro-batches through the workers, run at once.

Outputs with a batch dimension are concatenated, constants taken from the first micro-batch, and a loss that the model
computes over its batch is summed by weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gemini.batch_analysis.batch_kinds import WeightedPartial
from gemini.batch_analysis.loss_tape import Meta, Tape
from gemini.batch_analysis.precompute import Precomputed
from gemini.ir.autograd_modes import Region
from gemini.planner.step_plan import StepPlan
from gemini.runtime.local_mode import run_locally
from gemini.runtime.pipelined.call_signature import CallKind
from gemini.runtime.pipelined.loss_request import PreparedLoss, fetch_value, is_fetchable, port_names, trivial_split
from gemini.runtime.pipelined.step_request import StepRequest, bind_inputs


def prepare_outputs(plan: StepPlan, metas: Sequence[Meta], sizes: Sequence[int]) -> PreparedLoss:
    """Determine how outputs are assembled from micro-batches; `reason` says why they cannot be."""
    from gemini.batch_analysis.loss_analysis import prove
    from gemini.batch_analysis.whole_batch_tail import prove_tail

    tape = Tape(len(metas), list(metas))
    if plan.single_micro_batch_reason:
        return PreparedLoss("", trivial_split(tape), None, tuple(port_names(plan)))
    if plan.tail is not None:
        found = prove_tail(plan.forms, plan.tail.nodes, tape, None, sum(sizes))
        return PreparedLoss(found.reason, found, None, () if found.reason else tuple(port_names(plan)))
    kinds = [plan.forms.kind(ref) for ref in plan.graph.outputs()]
    means = [at for at, kind in enumerate(kinds) if isinstance(kind, WeightedPartial)]
    root = means[0] if means else next((at for at, meta in enumerate(metas) if meta.is_scalar()), 0)
    splitting = prove(plan.forms, tape, root, sum(sizes))
    if means and splitting.reason:
        return PreparedLoss(splitting.reason)
    names = port_names(plan)
    wrong = [at for at, name in enumerate(names) if name and not is_fetchable(splitting, at)]
    if wrong or len(splitting.outputs) < len(metas):
        return PreparedLoss(splitting.reason or f"output {wrong[0]} does not come from micro-batches")
    return PreparedLoss("", splitting, None, tuple(names))


def request_outputs(  # noqa: PLR0917
    kind: CallKind,
    prepared: PreparedLoss,
    tensors: Sequence[torch.Tensor],
    bound: dict[str, Any],
    sizes: Sequence[int],
    given: Mapping[int, Any] | None = None,
) -> StepRequest:
    """Build the forward-only request; `given`: results of draws from other generators than torch's."""

    plan = kind.plan
    assert plan is not None
    piped = plan.build(kind.shares)
    dims = {id(tensor): dim for tensor, dim in zip(tensors, plan.batch.dims, strict=True)}
    with run_locally():
        nodes, _ = prepared.splitting.weights(Precomputed(plan.graph, bound, Tape(0, []), host_results=given), sizes)
    shares = [[nodes[node][mid] if node in nodes else 1.0 for node in kind.shares] for mid in range(len(sizes))]
    return StepRequest(
        bind_inputs(piped.routes, piped.model, bound, dims, sizes, and_all=plan.tail is not None),
        tuple(sizes),
        Region.current(),
        shares=shares if kind.shares else (),
        keep=tuple(name for name in dict.fromkeys(prepared.keep) if name),
        rng_patterns=plan.rng_patterns,
    )


def collect_outputs(
    prepared: PreparedLoss, outputs: dict[str, Any], passed: Mapping[int, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors of the model's output; `passed` are those that the caller already has."""
    return [
        passed[at] if at in passed else fetch_value(prepared.splitting, at, outputs[name])
        for at, name in enumerate(prepared.keep)
    ]
