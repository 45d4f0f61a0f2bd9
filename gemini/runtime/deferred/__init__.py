"""The deferred step: a model's call is put off until its loss and backward are known, to be run together with them.

    output = defer(work, call)             the output of the call, with deferred tensors
    loss = criterion(output, y)            recorded
    loss.backward()                        work.overlapped(pending, tape, root), once; gradients arrive as always
    flush(model)                           calls of a model, or of all, are made now

`StepRunner` says how the call can be run and what its output will look like (`OutputSpec.of` an output that was seen).
`PendingCall` is the call, with copies of what it was given (`inputs`, `region`, `context`), the values that are
still wanted (`alive()`), and `tape`, what the program has done with the outputs. `StepResult` is what an overlapped run
gives back.

Whatever the program does, the tensors it holds are, when it looks, what they would have been: where a step cannot be
run overlapped, or more is asked of it than gradients of one loss, the call is made eagerly, from copies of its inputs,
and the recorded ops are done with its outputs.

| file         | what                                                            |
|--------------|-----------------------------------------------------------------|
| work         | what must be known of a call; what a run gives back             |
| tensor       | the deferred tensor                                             |
| recording    | ops on deferred tensors become ops of the tape                  |
| facts        | what the results of an op look like, without running it         |
| memory       | copies of inputs and operands                                   |
| sharing      | which values share memory                                       |
| values       | numbers of values, and the deferred tensors that stand for them  |
| pending      | the call: waiting, run overlapped, or made eagerly              |
| repeatable   | the call made again, and gradients from that                    |
| replay       | the tape on real tensors                                        |
| rerun        | the step again, in a graph of its own                           |
| context | modes, buffers and generators of the time of the call           |
| node         | the step in the program's graph                                 |
| backward     | `backward()` and `torch.autograd.grad` from deferred tensors    |
| queue        | calls that wait, and which must come first                      |
| watching     | what the program does meanwhile                                 |
| doors        | custom functions, compiled functions, seeds, optimizers         |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gemini.ir.call_binding import ModelCall
from gemini.runtime.deferred import pending_queue
from gemini.runtime.deferred.contract import OutputSpec, StepResult, StepRunner
from gemini.runtime.deferred.deferred_tensor import (
    DeferredTensor,
    find_deferred,
    graph_tensor,
    materialize,
    replace_deferred,
)
from gemini.runtime.deferred.pending_call import PendingCall
from gemini.runtime.deferred.torch_patches import AppliedFunction, install_patches


def defer(
    runner: StepRunner, call: ModelCall, passed: Mapping[int, torch.Tensor] | None = None, model_state: Any = None
) -> Any:
    """Put a call off, whose arguments are real (`materialize_arguments`); its output, with deferred tensors.

    `passed`: what the output holds of arguments, or of the model, as it is, by place; those of `work.passed`.
    `model_state` is the state that the model is in.
    """
    install_patches()
    pending = PendingCall(runner, call, model_state)
    pending_queue.add(pending)
    return pending.outputs(passed or {})


def materialize_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments with real tensors in the place of deferred ones."""
    deferred = [*find_deferred((args, kwargs))]
    if not deferred:
        return args, kwargs
    for one in deferred:
        if one.requires_grad:  # what has no gradient is in no graph: its contents will do
            graph_tensor(one)
    found: tuple[Any, Any] = replace_deferred((args, kwargs), materialize)
    return found


def flush(model: nn.Module | None = None) -> None:
    """Have the calls of a model made, or all: its buffers, and the generator, are as if it had never been put off."""
    for one in pending_queue.waiting_calls():
        if model is None or one.runner.model is model:
            one.complete()


__all__ = [
    "AppliedFunction",
    "DeferredTensor",
    "OutputSpec",
    "PendingCall",
    "StepResult",
    "StepRunner",
    "defer",
    "flush",
    "materialize_arguments",
]
