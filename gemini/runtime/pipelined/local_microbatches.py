"""Local micro-batches: a call by micro-batches, one after the other, in the controller.

Where micro-batches have their own statistics (batch normalization by opt-in), the result of a call depends on them on
every path: this is the path for calls that cannot run by the plan, and for reruns. It uses the plan's random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import Kind, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.loss_tape import Tape
from gemini.batch_analysis.microbatch_weights import weigh
from gemini.batch_analysis.precompute import Precomputed
from gemini.capture.module_hooks import without_hooks
from gemini.errors import GeminiError
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.encode import decode
from gemini.planner.microbatch_split import micro_batch_sizes
from gemini.planner.step_plan import StepPlan
from gemini.random_numbers.sliced_rng import SlicedRandomOps
from gemini.runtime.deferred.contract import flatten_output
from gemini.runtime.local_mode import run_locally
from gemini.runtime.pipelined.returned_attributes import passthrough_tensors


def run_microbatches(plan: StepPlan, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the output of a call, assembled from those of its micro-batches, with autograd."""
    call = ModelCall(args, kwargs)
    samples = plan.batch.count_samples(call.tensors)
    assert samples is not None  # the call is of the planned kind
    sizes = micro_batch_sizes(samples, plan.micro_batches)
    draws = SlicedRandomOps([pattern for stage in plan.rng_patterns for pattern in stage], samples)
    found, start = [], 0
    with run_locally(), without_hooks(model):
        for length in sizes:
            given, named = call.arguments(plan.batch.narrow(call.tensors, start, length))
            with draws.micro_batch(start, length):
                found.append(flatten_output(model(*given, **named)))
            start += length
    form, (first, *_) = found[0][0], [tensors for _, tensors in found]
    known = Precomputed(plan.graph, bind(model, args, kwargs), Tape(0, []))
    kinds = [plan.forms.kind(ref) for ref in plan.graph.outputs()]
    if any(len(tensors) != len(kinds) for _, tensors in found):
        raise GeminiError(
            f"{type(model).__name__} returns {len(first)} tensors for a micro-batch, {len(kinds)} were expected\n"
            "    → batch_norm='batch'"
        )
    given_back = passthrough_tensors(plan, model, args, kwargs)
    joined = [
        given_back[at] if at in given_back else _join(kind, [one[1][at] for one in found], known, sizes)
        for at, kind in enumerate(kinds)
    ]
    return decode(form, lambda ref: joined[ref.node])


def _join(kind: Kind, parts: list[torch.Tensor], known: Precomputed, sizes: list[int]) -> torch.Tensor:
    if isinstance(kind, Shard):
        return kind.join(parts)
    if isinstance(kind, Replicate):
        return parts[0]
    shares = kind.share.weights(known, sizes) if isinstance(kind, WeightedPartial) else [1.0] * len(parts)
    return torch.stack([weigh(part, share) for part, share in zip(parts, shares, strict=True)]).sum(0)
