"""Micro-batches of eager dispatch: a call of the model in pieces, one thread each, so that workers overlap.

    thread 0    module a ─── module b ─── module c
    thread 1         module a ─── module b ─── module c          a and c on worker 0, b on worker 1

To the script's autograd all of it is one function of inputs and parameters. Inside, each micro-batch has its own graph,
and backward runs them concurrently as well; gradients of parameters are summed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.autograd_engine import differentiate
from gemini.capture.module_hooks import without_tensor_hooks
from gemini.capture.patches import ORIGINAL_CALL
from gemini.ir.autograd_modes import Region, RegionSwitch
from gemini.ir.call_binding import ModelCall
from gemini.malloc import trim_if_large
from gemini.runtime.eager.split_proof import SplitProof
from gemini.runtime.graph_token import make_token
from gemini.runtime.pool.fault_policy import thread_context
from gemini.runtime.pool.signals import DeferredSignals
from gemini.runtime.pool.worker_handle import InternalFault
from gemini.runtime.rerun import GradientRequest, compute_gradients, unfrozen
from gemini.runtime.transport.serialization import ClassTable, pack, unpack

_threads = ThreadPoolExecutor(64, thread_name_prefix="gemini-micro-batch")


def run_forward(model: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    """Run a call of a model by eager dispatch, the batch as one; `forward`: its forward where its hooks already run."""
    trim_if_large()
    return ORIGINAL_CALL(model, *args, **kwargs) if forward is model else forward(*args, **kwargs)


class SplitCall:
    """One call of a model in micro-batches."""

    def __init__(self, model: nn.Module, args: Any, kwargs: Any, proof: SplitProof, degree: int) -> None:
        self.model, self.proof = model, proof
        self.call = ModelCall(args, kwargs)
        self.region = Region.current()
        self.inputs = self.call.tensors
        size = self.inputs[0].shape[proof.inputs[0]]
        self.count = min(degree, size)
        self.pieces = [t.tensor_split(self.count, dim) for t, dim in zip(self.inputs, proof.inputs, strict=True)]
        self.given: list[list[torch.Tensor]] = []  # inputs of each micro-batch
        self.made: list[list[torch.Tensor]] = []  # tensors of its result
        self.body = b""

    def run(self) -> Any:
        """Return the result for the whole batch."""
        unfrozen = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        found = SplitCallFunction.apply(self, len(self.inputs), *self.inputs, *unfrozen)
        return unpack(self.body, found, _CLASSES)

    def forward(self) -> list[torch.Tensor]:
        """Run all micro-batches; return the tensors of the whole result."""
        self.given = [
            [
                piece[at].detach().requires_grad_(tensor.requires_grad)
                for tensor, piece in zip(self.inputs, self.pieces, strict=True)
            ]
            for at in range(self.count)
        ]
        packed = _run_all(self._forward_one, self.given)
        self.body, self.made = packed[0][0], [tensors for _, tensors in packed]
        try:
            return [torch.cat([one[at].detach() for one in self.made], d) for at, d in enumerate(self.proof.outputs)]
        except (RuntimeError, IndexError) as error:
            raise InternalFault(f"the results of the micro-batches cannot be joined: {error}") from error

    def _forward_one(self, given: list[torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
        args, kwargs = self.call.with_tensors(given)
        with RegionSwitch() as regions:
            regions.to(self.region)
            body, found = pack(ORIGINAL_CALL(self.model, *args, **kwargs), _CLASSES)
        if len(found) != len(self.proof.outputs):
            raise InternalFault(f"a micro-batch returned {len(found)} tensors, {len(self.proof.outputs)} were expected")
        return body, found

    def run_whole(self, inputs: list[torch.Tensor], _: bool) -> list[torch.Tensor]:
        """Return the tensors of the result, from the whole batch."""
        return self._forward_one(inputs)[1]

    def backward(self, gradients: Sequence[Any], inputs: list[int], parameters: list[torch.Tensor]) -> list[Any]:
        """Return the gradients of inputs and parameters."""
        dims = self.proof.outputs
        sizes = [[one[at].shape[dim] for one in self.made] for at, dim in enumerate(dims)]
        cut = [
            [None] * self.count if g is None else g.split(size, dim)
            for g, size, dim in zip(gradients, sizes, dims, strict=True)
        ]
        sums = MicrobatchGradientSums(len(parameters))

        def one(at: int) -> list[Any]:
            pairs = [
                (t, g[at]) for t, g in zip(self.made[at], cut, strict=True) if g[at] is not None and t.requires_grad
            ]
            wanted = [self.given[at][index] for index in inputs] + parameters
            if not pairs or not wanted:
                return [None] * len(inputs)
            outputs, given = zip(*pairs, strict=True)
            found = differentiate(outputs, given, wanted, retain_graph=True)
            sums.add(found[len(inputs) :])
            return list(found[: len(inputs)])

        with unfrozen(parameters), without_tensor_hooks(parameters):
            found = _run_all(one, range(self.count))
        whole = [self._whole([row[at] for row in found], index) for at, index in enumerate(inputs)]
        return [*whole, *sums.total]

    def _whole(self, parts: list[Any], index: int) -> Any:
        """Return the gradient of an input from those of its pieces."""
        if all(part is None for part in parts):
            return None
        filled = [torch.zeros_like(self.given[at][index]) if p is None else p for at, p in enumerate(parts)]
        return torch.cat(filled, self.proof.inputs[index])

    def release_actions(self) -> Callable[[], Any]:
        """Return the action for when the graph is freed: release the graphs of the micro-batches."""
        return partial(vars(self).update, {"given": [], "made": []})


class MicrobatchGradientSums:
    """Gradients of parameters, summed as they arrive."""

    def __init__(self, count: int) -> None:
        self.total: list[Any] = [None] * count
        self._own = [False] * count
        self._lock = threading.Lock()

    def add(self, gradients: Sequence[Any]) -> None:
        """Add those of a micro-batch."""
        with self._lock:
            for at, gradient in enumerate(gradients):
                if gradient is None:
                    continue
                if self.total[at] is None:
                    self.total[at] = gradient
                elif self._own[at]:
                    self.total[at].add_(gradient)
                else:  # a gradient from autograd may be shared: the first sum is a new tensor
                    self.total[at], self._own[at] = self.total[at] + gradient, True


class SplitCallFunction(torch.autograd.Function):  # type: ignore[misc]
    """The node of a split call in the script's autograd graph."""

    @staticmethod
    def forward(ctx: Any, split: SplitCall, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the call."""
        found = split.forward()
        flags = [any(one[at].requires_grad for one in split.made) for at in range(len(found))]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, flag in zip(found, flags, strict=True) if not flag))
        ctx.split, ctx.count, ctx.parameters = split, count, tensors[count:]
        if any(flags):
            ctx.save_for_backward(make_token(0, split.release_actions()))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of inputs and parameters."""
        _ = ctx.saved_tensors  # raises where the graph has been freed
        split: SplitCall = ctx.split
        needed = ctx.needs_input_grad[2:]
        inputs = [at for at in range(ctx.count) if needed[at]]
        wanted = [at for at in range(ctx.count, len(needed)) if needed[at]]
        parameters = [ctx.parameters[at - ctx.count] for at in wanted]
        if torch.is_grad_enabled():
            found = _differentiable_gradients(split, gradients, inputs, parameters)
        else:
            found = split.backward(gradients, inputs, parameters)
        result: list[Any] = [None] * len(needed)
        for at, gradient in zip([*inputs, *wanted], found, strict=True):
            result[at] = gradient
        return (None, None, *result)


def _differentiable_gradients(
    split: SplitCall, gradients: Sequence[Any], inputs: list[int], parameters: list[Any]
) -> list[Any]:
    """Return gradients that can be differentiated again, from a run of the whole batch."""
    given = [at for at, gradient in enumerate(gradients) if gradient is not None]
    wanted = GradientRequest(inputs, parameters, given)
    return compute_gradients(split.run_whole, split.inputs, wanted, [gradients[at] for at in given], create_graph=True)


def _run_all(work: Callable[[Any], Any], items: Any) -> list[Any]:
    """Run on all items concurrently; raise the first error when all have ended."""
    count = len(items)

    def named(at: int, item: Any) -> Any:
        thread_context.micro_batch = f"micro-batch {at} of {count}"
        return work(item)

    with DeferredSignals():
        futures = [_threads.submit(copy_context().run, named, at, item) for at, item in enumerate(items)]
        wait(futures)
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


_CLASSES = ClassTable(stays=True)
