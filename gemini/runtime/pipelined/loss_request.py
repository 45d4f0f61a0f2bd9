"""Loss request: from the recorded tape of a loss to the request that workers receive.

A tape is analysed once: whether its root is a sum over micro-batches, which ops it needs, which operands are sliced.
Tapes that differ in contents only share the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from gemini.batch_analysis.batch_kinds import Partial, Replicate, SampleIndices, Shard, SplittingError, WeightedPartial
from gemini.batch_analysis.loss_tape import Tape
from gemini.batch_analysis.microbatch_weights import PrecomputedValues
from gemini.batch_analysis.precompute import Precomputed
from gemini.batch_analysis.split_result import Splitting
from gemini.capture.module_hooks import without_hooks
from gemini.ir.call_binding import ModelCall
from gemini.planner.step_plan import StepPlan
from gemini.quiet_warnings import mute_warnings
from gemini.runtime.deferred.pending_call import PendingCall
from gemini.runtime.local_mode import run_locally
from gemini.runtime.pipelined.call_signature import CallKind
from gemini.runtime.pipelined.step_request import RemoteOutput, StepRequest, WholeTensor, bind_inputs
from gemini.snapshot.rng_snapshot import preserve_rng_state
from gemini.step.worker_program import Loss


@dataclass(frozen=True)
class PreparedLoss:
    """How steps with one tape run; `reason` says why they cannot."""

    reason: str = ""
    splitting: Splitting = Splitting()
    loss: Loss | None = None
    keep: tuple[str, ...] = ()  # outputs of the model that stay in the workers
    ops: tuple[int, ...] = ()  # positions of the loss's ops on the tape


def prepare(plan: StepPlan, tape: Tape, root: int, alive: Sequence[int], sizes: Sequence[int]) -> PreparedLoss:
    """Analyse a tape."""
    from gemini.batch_analysis.loss_analysis import prove
    from gemini.batch_analysis.whole_batch_tail import prove_tail

    if plan.single_micro_batch_reason:
        return _prepare_loss(plan, tape, root, alive, trivial_split(tape))
    with torch.random.fork_rng(devices=[]):
        if plan.tail is None:
            splitting = prove(plan.forms, tape, root, sum(sizes))
        else:
            splitting = prove_tail(plan.forms, plan.tail.nodes, tape, root, sum(sizes))
    if splitting.reason:
        return PreparedLoss(splitting.reason)
    return _prepare_loss(plan, tape, root, alive, splitting)


def check_numerically(
    plan: StepPlan, prepared: PreparedLoss, pending: PendingCall, tape: Tape, root: int
) -> PreparedLoss:
    """Compare the proof that a step splits with a numeric run, before the first step that relies on it.

    Returns `prepared`, or why it cannot be used; leaves model and generators unchanged. Raises SplittingError where
    this batch violates an assumption of the proof.
    """
    from gemini.batch_analysis.numeric_check import check_splitting
    from gemini.batch_analysis.whole_batch_tail import check_tail

    args, kwargs = pending.call.with_tensors([one.detach() for one in pending.inputs])
    given = None if pending.runner.host_draws is None else pending.runner.host_draws.results
    with run_locally(), without_hooks(pending.runner.model), preserve_rng_state(), mute_warnings():
        if plan.tail is not None:
            reason = check_tail(plan.forms, plan.tail.nodes, prepared.splitting, ModelCall(args, kwargs), given)
        else:
            reason = check_splitting(plan.forms, tape, root, prepared.splitting, args, kwargs, given)
    return PreparedLoss(f"the numeric check contradicts the proof: {reason}") if reason else prepared


def trivial_split(tape: Tape) -> Splitting:
    """Return the split for one micro-batch: every value is that of the batch."""
    return Splitting(operands=dict.fromkeys(tape.operands), outputs=(Replicate(),) * len(tape.metas))


def _prepare_loss(plan: StepPlan, tape: Tape, root: int, alive: Sequence[int], splitting: Splitting) -> PreparedLoss:
    needed = tape.ops_needed_for(root)
    names = port_names(plan)
    read = {root, *(number for at in needed for number in tape.ops[at].reads())}
    made = {number for at in needed for number in tape.ops[at].results}
    wanted = _values_to_retain(tape, {*range(tape.outputs), *made}, alive, splitting)
    loss = Loss(
        tuple(tape.ops[at] for at in needed),
        {number: names[number] for number in range(tape.outputs) if names[number]},
        tuple(number for number in tape.operands if number in read),
        root,
        tuple(number for number in wanted if number in made and number != root),
        {place: splitting.sizes[at] for place, at in enumerate(needed) if at in splitting.sizes},
    )
    kept = tuple(names[number] for number in wanted if number < tape.outputs)
    return PreparedLoss("", splitting, loss, kept, tuple(needed))


def _values_to_retain(tape: Tape, there: set[int], alive: Sequence[int], splitting: Splitting) -> list[int]:
    """Return the values that workers must retain so that all reachable ones can be computed.

    `there`: the values that workers compute.
    """
    found, makers, waiting = {}, tape.makers(), [*alive]
    while waiting:
        number = waiting.pop()
        if number in found:
            continue
        found[number] = number in there and is_weighable(splitting, number)
        if not found[number] and number in makers:  # its operands suffice
            waiting += tape.ops[makers[number]].reads()
    return sorted(number for number, stays in found.items() if stays)


def is_fetchable(splitting: Splitting, number: int) -> bool:
    """Whether a value can be assembled from those of the micro-batches."""
    return isinstance(splitting.outputs[number], (Partial, Replicate, Shard))


def is_weighable(splitting: Splitting, number: int) -> bool:
    """Whether a value of a step can be assembled; includes means, which are combined by weights."""
    return is_fetchable(splitting, number) or isinstance(splitting.outputs[number], WeightedPartial)


def port_names(plan: StepPlan) -> list[str]:
    """Return the ports of the model's outputs, in the order of the tape; '' where the caller already has the tensor."""
    return ["" if port is None else port.name for port in plan.output_ports(plan.build())]


def fetch_value(splitting: Splitting, number: int, output: RemoteOutput, weights: Sequence[float] | None = None) -> Any:
    """Fetch a value of the tape from its worker; `weights` are those of a mean."""
    return output.join(splitting.outputs[number], weights)


def build_request(
    kind: CallKind, prepared: PreparedLoss, pending: PendingCall, bound: dict[str, Any], sizes: Sequence[int]
) -> tuple[StepRequest, dict[int, list[float]]]:
    """Build the step request, and the weights of means among the values that workers retain."""

    plan, splitting = kind.plan, prepared.splitting
    assert plan is not None
    assert prepared.loss is not None
    piped = plan.build(kind.shares)
    dims = {id(tensor): dim for tensor, dim in zip(pending.inputs, plan.batch.dims, strict=True)}
    foreign = pending.runner.host_draws
    known = Precomputed(plan.graph, bound, pending.tape, host_results=None if foreign is None else foreign.results)
    with run_locally():  # layers without weights may be precomputed
        nodes, ops = splitting.weights(known, sizes)
        means = _means(prepared, known, sizes)
    operands = {
        number: WholeTensor(pending.tape.operands[number], _batch_layout(splitting.outputs[number]))
        for number in prepared.loss.operands
    }
    shares = [[nodes[node][mid] if node in nodes else 1.0 for node in kind.shares] for mid in range(len(sizes))]
    request = StepRequest(
        bind_inputs(piped.routes, piped.model, bound, dims, sizes, and_all=plan.tail is not None),
        tuple(sizes),
        pending.region,
        prepared.loss,
        operands,
        shares if kind.shares else (),
        {at: ops[place] for at, place in enumerate(prepared.ops) if place in ops},
        prepared.keep,
        plan.rng_patterns,
    )
    return request, means


def _means(prepared: PreparedLoss, known: PrecomputedValues, sizes: Sequence[int]) -> dict[int, list[float]]:
    """Return the weights of micro-batch means, such as the loss before it is divided or scaled."""
    assert prepared.loss is not None
    ports = (number for number, name in prepared.loss.ports.items() if name in prepared.keep)
    found = {}
    for number in (*prepared.loss.keep, *ports):
        value = prepared.splitting.outputs[number]
        if isinstance(value, WeightedPartial):
            with suppress(SplittingError):  # no part of the loss: it is recomputed where it is read
                found[number] = value.share.weights(known, sizes)
    return found


def _batch_layout(kind: Any) -> Shard | SampleIndices | None:
    return kind if isinstance(kind, (Shard, SampleIndices)) else None
