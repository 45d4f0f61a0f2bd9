"""A remote call: a module that runs in a worker, and is an ordinary function to the script's autograd.

The parameters of the module are inputs of the function beside its arguments, so that autograd treats them as usual:
accumulation, hooks, `torch.autograd.grad`, frozen parameters, weights shared by several modules.

    controller      x ──► RemoteCallFunction ──► y ─ … ─► loss.backward() ──► backward ──► dx, and p.grad
    parameters  p ──────►    │                                             │
    worker                 module(x), graph retained               autograd.grad over the retained graph

When the local graph is freed, the worker releases its own: a token among the saved tensors reports it
(`graph_token`). An activation checkpoint around the call drops the token and runs the call again in backward; the new
token names the new graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from gemini.autograd_engine import rename_grad_fn
from gemini.errors import WorkerError
from gemini.guards.active_modes import has_saved_tensor_hooks
from gemini.ir.autograd_modes import Region
from gemini.purity.proof import find_impure_argument
from gemini.random_numbers.rng_state import get_state, set_state
from gemini.runtime.argument_mutations import ArgumentObjects, apply_result, find_objects
from gemini.runtime.graph_token import make_token
from gemini.runtime.placeholder_tensors import PLACEHOLDER_USED, PlaceholderSpec, find_placeholders
from gemini.runtime.pool.fault_policy import worker_exception
from gemini.runtime.pool.signals import DeferredSignals
from gemini.runtime.pool.worker_failure import describe_out_of_memory
from gemini.runtime.pool.worker_handle import InternalFault, raise_internal_fault
from gemini.runtime.protocol import Backward, Forward, Gradients, Outputs, Refused
from gemini.runtime.rerun import GradientRequest, compute_gradients
from gemini.runtime.retained_inputs import retain
from gemini.runtime.transport.serialization import ONLY_TENSORS, pack, receives_code_with_parts, unpack

if TYPE_CHECKING:
    from gemini.runtime.eager.remote_module import RemoteModule


class RefusedError(Exception):
    """The worker could not run the call; nothing has changed."""


class ModuleCall:
    """One call of a remote module."""

    def __init__(self, remote: RemoteModule, args: Any, kwargs: Any) -> None:
        self.remote_module = remote
        self.arguments: tuple[Any, Any] | None = (args, kwargs)
        self.number = remote.worker.next_number()
        self.outputs: Outputs | None = None
        self.made: list[torch.Tensor] = []  # the tensors of the result that are not inputs, until they are returned
        self.inputs: list[torch.Tensor] = []
        self.trained: list[torch.Tensor] = []  # parameters that were not frozen
        self.region = Region.current()
        self.device, self.away, self.seeded = remote.worker.device, remote.away, remote.seeded
        self.generator = get_state(self.device, self.seeded)
        self.absent: list[PlaceholderSpec] = []  # tensors inside objects, which are not sent
        self.has_changed = False  # objects among its arguments
        self.buffers: list[torch.Tensor] = []  # their contents before the call, where it writes them

    def run(self) -> Any:
        """Return the result of the module; raises RefusedError where it must run locally."""
        classes = self.remote_module.worker.link.classes
        try:
            if receives_code_with_parts(*self.arguments):  # type: ignore[misc]
                raise RefusedError("an argument is a function that holds modules or tensors")
            args, kwargs = self.arguments  # type: ignore[misc]
            if reason := find_impure_argument((*args, *kwargs.values()), self.remote_module.module):
                raise RefusedError(reason)
            self.body, given = pack(self.arguments, classes)
            if self.body != ONLY_TENSORS and not self.remote_module.needs_all:
                self.absent = find_placeholders(args, kwargs, given)
        except RefusedError:
            raise
        except Exception as error:
            raise_internal_fault(error, "its arguments cannot be sent")
        self.inputs = self._move_inputs(given)
        outputs = self.forward()
        if True in outputs.differentiable:
            self.trained = self.remote_module.trained_parameters()
            retain(self.inputs)
            made = iter(
                rename_grad_fn(RemoteCallFunction, outputs.node).apply(
                    self, len(self.inputs), *self.inputs, *self.trained
                )
            )
        else:
            made, self.made = iter(self.made), []
        tensors = [next(made) if at is None else given[at] for at in outputs.same]
        if self.away:
            there, here = self.device.where, self.remote_module.shared_parameters.model_device
            tensors = [t.to(here) if t.device == there else t for t in tensors]
        try:
            return self._read(tensors) if outputs.objects else unpack(outputs.body, tensors, classes)
        except Exception as error:
            raise_internal_fault(error, "its result cannot be read")

    def _move_inputs(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move the inputs to the worker's device by ordinary ops, so that gradients return the same way."""
        if not self.away:
            return given
        there, here = self.device.where, self.remote_module.shared_parameters.model_device
        stays = {at for at, *_ in self.absent}
        return [t.to(there) if t.device == here and at not in stays else t for at, t in enumerate(given)]

    def _read(self, tensors: list[torch.Tensor]) -> Any:
        """Read the result of a module that received objects; apply its changes to them."""
        assert self.outputs is not None
        assert self.arguments is not None
        classes, objects = self.remote_module.worker.link.classes, find_objects(*self.arguments)
        result, self.has_changed = apply_result(unpack(self.outputs.body, tensors, classes, objects), objects)
        return result

    def forward(self) -> Outputs:
        """Run it in the worker."""
        remote, dropped = self.remote_module, self.remote_module.take_dropped()
        self.versions = _versions(self.inputs)
        try:
            reply = remote.worker.ask(lambda: self._request(dropped), remote.forward_text, timeout=remote.timeout)
        except BaseException:
            remote.resend_state(dropped)
            raise
        if isinstance(reply, Refused):
            if reply.reason == PLACEHOLDER_USED and self.absent:
                return self._retry_with_all_tensors()
            raise (InternalFault if reply.is_fault else RefusedError)(reply.reason)
        if not isinstance(reply, Outputs):
            if generator := getattr(reply, "generator", b""):
                set_state(generator, self.device, self.seeded)
            try:
                self._raise(reply, "forward")
            finally:
                del reply  # see _raise
        if reply.generator:
            set_state(reply.generator, self.device, self.seeded)
        remote.writes = reply.written
        if not reply.written:
            self.buffers = []
        self.made = [tensor for tensor in reply.tensors if tensor is not None]
        reply.tensors.clear()  # they refer to the node of this call: a reference back would never be freed
        self.outputs = reply
        return reply

    def _retry_with_all_tensors(self) -> Outputs:
        """Send the tensors inside objects: the module uses them."""
        self.remote_module.needs_all, self.absent = True, []
        self.number = self.remote_module.worker.next_number()
        self.inputs = self._move_inputs(self.inputs)
        return self.forward()

    def _raise(self, reply: Any, action: str, gradients: Sequence[Any] = ()) -> NoReturn:
        """Raise the exception of the module's code."""
        error = worker_exception(reply, self.remote_module, action)
        if self.remote_module.record.survives and (missing := describe_out_of_memory(error)):
            raise InternalFault(missing) from error
        self.remote_module.record.save(self, action, error, gradients, getattr(reply, "traceback", ""))
        try:
            raise error
        finally:
            del error, reply  # its traceback refers to this frame, whose tensors would be freed late

    def _request(self, dropped: list[int]) -> Forward:
        remote = self.remote_module
        news, (region, generator) = remote.news(), remote.worker.encode_modes(self.region, self.generator)
        self.modes = remote.modes
        if remote.writes is not False:
            self.buffers = [buffer.detach().clone() for buffer in remote.buffers]
        sent: list[Any] = self.inputs
        if self.absent:
            sent = list(sent)
            for at, *_ in self.absent:
                sent[at] = None
        return Forward(self.number, remote.number, self.body, region, generator, news, dropped, self.absent, sent)

    def undo(self) -> None:
        """Restore the state before the call."""
        set_state(self.generator, self.device, self.seeded)
        _restore_buffers(self.remote_module.buffers, self.buffers)

    def backward(self, gradients: list[Any], inputs: list[int], parameters: list[int]) -> list[Any]:
        """Run backward in the worker; locally, from the retained inputs, after an internal failure."""
        remote = self.remote_module
        if remote.worker.loss:  # the call in which it was lost has raised
            remote.record.demote(remote.backward_text, WorkerError(remote.worker.loss))
            return self.backward_local(gradients, inputs, parameters)
        dropped = remote.take_dropped()
        request = Backward(remote.worker.next_number(), self.number, inputs, parameters, dropped, gradients)
        try:
            reply = remote.worker.ask(request, remote.backward_text, timeout=2 * remote.timeout)
            if isinstance(reply, Refused):
                return self._handle_refusal(reply, gradients, inputs, parameters)
        except WorkerError as error:
            remote.record.save(self, "backward", error, gradients)
            if not remote.record.survives:
                raise
            remote.record.demote(remote.backward_text, error)
            return self.backward_local(gradients, inputs, parameters)
        except InternalFault as fault:
            remote.resend_state(dropped)
            remote.record.demote(remote.backward_text, fault)
            return self.backward_local(gradients, inputs, parameters)
        if not isinstance(reply, Gradients):
            try:
                self._raise(reply, "backward", gradients)
            except InternalFault as fault:
                remote.record.demote(remote.backward_text, fault)
                return self.backward_local(gradients, inputs, parameters)
            finally:
                del reply  # see _raise
        return list(reply.tensors)

    def _handle_refusal(
        self, reply: Refused, gradients: list[Any], inputs: list[int], parameters: list[int]
    ) -> list[Any]:
        """Return gradients of a call whose backward cannot run remotely; its module is local from now on."""
        if reply.is_fault:
            raise InternalFault(reply.reason)
        self.remote_module.refused = reply.reason
        return self.backward_local(gradients, inputs, parameters)

    def backward_local(
        self, gradients: list[Any], inputs: list[int], parameters: list[int], create_graph: bool = False
    ) -> list[Any]:
        """Return gradients from a local run of the module; with `create_graph` they are differentiable."""
        if self.arguments is None:
            raise RuntimeError(
                f"{self.remote_module.name}: a checkpointed call cannot be differentiated twice in a worker"
            )
        if _versions(self.inputs) != self.versions:
            raise WorkerError(
                f"{self.remote_module.backward_text} cannot run in this process: its inputs have been written since"
                "\n    → write to copies of them"
            )
        given = [at for at, gradient in enumerate(gradients) if gradient is not None]
        wanted = GradientRequest(inputs, [self.trained[at] for at in parameters], given)
        run = partial(self.run_local, self.buffers)  # also when the call is forgotten: these gradients may live longer
        return compute_gradients(run, self.inputs, wanted, [gradients[at] for at in given], create_graph)

    def release_actions(self) -> tuple[Callable[[], Any], ...]:
        """Return actions for when the graph is freed, in any thread; the next message releases the worker's graph."""
        nothing: dict[str, Any] = {"inputs": [], "arguments": None, "buffers": []}
        return partial(self.remote_module.dropped.append, self.number), partial(vars(self).update, nothing)

    def run_local(self, buffers: list[torch.Tensor], inputs: list[torch.Tensor], __: bool) -> list[torch.Tensor]:
        """Return the tensors of the result with a local graph, from tensors with the contents of the inputs."""
        remote = self.remote_module
        args, kwargs = unpack(self.body, inputs, remote.worker.link.classes)  # objects as before the call
        given = ArgumentObjects(args, kwargs, remote.worker.link.classes)
        before = get_state(self.device, self.seeded)
        now, modes = [buffer.detach().clone() for buffer in remote.buffers], [one.training for one in remote.modules]
        try:
            with ExitStack() as stack:
                set_state(self.generator, self.device, self.seeded)
                self.region.enter(stack, Region.current())
                _restore_buffers(remote.buffers, buffers)
                remote.set_modes(self.modes)
                result = remote.run_local(args, kwargs)
        finally:
            set_state(before, self.device, self.seeded)
            remote.set_modes(modes)
            _restore_buffers(remote.buffers, now)
        changes = given.changes()
        _, tensors = given.pack_result(result, {} if isinstance(changes, str) else changes)
        return tensors


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _restore_buffers(buffers: list[torch.Tensor], contents: list[torch.Tensor]) -> None:
    """Write buffers without autograd noticing: the tensors that it has saved hold the later contents."""
    for buffer, before in zip(buffers, contents, strict=False):
        buffer.data.copy_(before)


class RemoteCallFunction(torch.autograd.Function):  # type: ignore[misc]
    """The node of a call in the script's autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: ModuleCall, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        """Return the tensors that the call has made."""
        outputs = call.outputs
        assert outputs is not None
        made, call.made = tuple(call.made), []
        flags = [flag for flag, at in zip(outputs.differentiable, outputs.same, strict=True) if at is None]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, flag in zip(made, flags, strict=True) if not flag))
        ctx.call, ctx.count = call, count
        ctx.token = make_token(call.number, *call.release_actions())
        # Under saved-tensor hooks the token lives with the node; the saved tensor shows whether the graph was freed.
        if has_saved_tensor_hooks():
            ctx.save_for_backward(torch.empty(0, dtype=torch.int64))
        else:
            ctx.save_for_backward(ctx.token)
            ctx.token = None
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of inputs and parameters."""
        (saved,) = ctx.saved_tensors  # raises where the graph has been freed
        call: ModuleCall = ctx.call
        if saved.numel():
            call.number = int(saved)  # another one after a checkpoint has run the call again
        needed = ctx.needs_input_grad[2:]
        absent = {at for at, *_ in call.absent}  # took no part
        inputs = [at for at in range(ctx.count) if needed[at] and at not in absent]
        parameters = [at - ctx.count for at in range(ctx.count, len(needed)) if needed[at]]
        if torch.is_grad_enabled():  # the gradients will be differentiated: only this process can
            found = call.backward_local(_all_outputs(call, gradients), inputs, parameters, create_graph=True)
        else:
            with DeferredSignals():
                found = call.backward(_all_outputs(call, gradients), inputs, parameters)
        result: list[Any] = [None] * len(needed)
        for at, gradient in zip([*inputs, *(ctx.count + at for at in parameters)], found, strict=True):
            result[at] = gradient
        return (None, None, *result)


def _all_outputs(call: ModuleCall, gradients: tuple[Any, ...]) -> list[Any]:
    """Return gradients by output; outputs that are inputs have none."""
    assert call.outputs is not None
    given = iter(gradients)
    return [next(given) if at is None else None for at in call.outputs.same]
