"""The deferred step: a call of a model waits until its loss and backward are known, and runs together with them.

    output = defer(runner, call)           the output of the call, with deferred tensors
    loss = criterion(output, y)            recorded on a tape
    loss.backward()                        runner.run_pipelined(pending, tape, root), once; gradients arrive as usual
    flush(model)                           runs the waiting calls of a model, or of all models

`CallRunner` runs the call and knows the structure of its output (`OutputSpec.of` an observed output). `PendingCall` is
the call, with copies of its inputs (`inputs`, `region`, `context`), the values that are still reachable (`alive()`),
and `tape`, the ops that the script has applied to the outputs. `StepResult` is the result of a pipelined run.

Invariant: whenever the script reads a tensor, it sees the value of a run in one process. Where a step cannot run
pipelined, or more than the gradients of one loss is requested, the call runs eagerly from the copies of its inputs, and
the recorded ops are replayed on its outputs.

| file              | contents                                                        |
|-------------------|-----------------------------------------------------------------|
| contract          | runner, output spec and result of a deferred call               |
| deferred_tensor   | the deferred tensor                                             |
| tape_recorder     | ops on deferred tensors become ops of the tape                  |
| op_metadata       | shapes and dtypes of an op's results, without running it        |
| input_copies      | copies of inputs and operands                                   |
| tape_aliases      | which values share memory                                       |
| call_values       | numbers of values, and the deferred tensors that stand for them |
| pending_call      | the call: waiting, run pipelined, or run eagerly                |
| repeatable_call   | re-execution of the call, and gradients from it                 |
| call_context      | modes, buffers and generators at the time of the call           |
| step_autograd     | the step as a node of the script's autograd graph               |
| grad_assignment   | gradients assigned without autograd where that is unobservable  |
| deferred_backward | `backward()` and `torch.autograd.grad` of deferred tensors      |
| pending_queue     | waiting calls, and the order in which they must run             |
| hazard_mode       | ops of the script that must run after waiting calls             |
| recorded_warnings | warnings of recorded ops                                        |
| torch_patches     | custom functions, compiled functions, seeds, optimizers         |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gemini.ir.call_binding import ModelCall
from gemini.runtime.deferred import pending_queue
from gemini.runtime.deferred.contract import CallRunner, OutputSpec, StepResult
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
    runner: CallRunner, call: ModelCall, passed: Mapping[int, torch.Tensor] | None = None, model_state: Any = None
) -> Any:
    """Defer a call with real arguments (`materialize_arguments`) and return its output with deferred tensors.

    `passed`: tensors of the output that the caller already has, by place; those of `runner.passed`. `model_state` is
    the state that the model is in.
    """
    install_patches()
    pending = PendingCall(runner, call, model_state)
    pending_queue.add(pending)
    return pending.outputs(passed or {})


def materialize_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with real tensors in place of deferred ones."""
    deferred = [*find_deferred((args, kwargs))]
    if not deferred:
        return args, kwargs
    for one in deferred:
        if one.requires_grad:  # what has no gradient is in no graph: its contents will do
            graph_tensor(one)
    found: tuple[Any, Any] = replace_deferred((args, kwargs), materialize)
    return found


def flush(model: nn.Module | None = None) -> None:
    """Run the waiting calls of a model, or all; its buffers and the generator are then as without deferral."""
    for one in pending_queue.waiting_calls():
        if model is None or one.runner.model is model:
            one.complete()


__all__ = [
    "AppliedFunction",
    "CallRunner",
    "DeferredTensor",
    "OutputSpec",
    "PendingCall",
    "StepResult",
    "defer",
    "flush",
    "materialize_arguments",
]
