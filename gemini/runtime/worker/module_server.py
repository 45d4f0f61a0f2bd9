"""Calls: a worker runs units forward, keeps their graphs, and runs them backward when asked.

The inputs of a call are leaves here: the controller's autograd continues on its side. A graph is kept until the
controller drops the call, so that a second backward (`retain_graph=True`) finds it.
"""

from __future__ import annotations

import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.autograd_engine import differentiate, edge_of, grad_fn_name
from gemini.capture import torch_flags
from gemini.ir.autograd_modes import Region
from gemini.random_numbers.rng_state import get_state, set_state
from gemini.runtime.argument_mutations import ArgumentObjects
from gemini.runtime.devices.base import Device
from gemini.runtime.devices.cpu import Cpu
from gemini.runtime.exception_transfer import to_portable
from gemini.runtime.placeholder_tensors import PlaceholderTensor, insert_placeholders
from gemini.runtime.protocol import Backward, Forward, Gradients, Outputs, Raised
from gemini.runtime.tracebacks import exception_chain, find_scope
from gemini.runtime.transport.serialization import ONLY_TENSORS, ClassTable, unpack
from gemini.runtime.transport.tensor_header import INLINE
from gemini.runtime.worker.side_effect_check import HOST_RNG, HostRngUsed, Refusal, SideEffectCheck


class InputBoundary(torch.autograd.Function):  # type: ignore[misc]
    """An input as the unit sees it: not a leaf, which autograd would not let it write to."""

    @staticmethod
    def forward(_: Any, leaf: torch.Tensor) -> torch.Tensor:
        """The same memory."""
        return leaf.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The same gradient."""
        return gradient


def enter_input(leaf: torch.Tensor) -> torch.Tensor:
    """An input that wants a gradient as the unit sees it; copying a small one costs less than a function in Python."""
    if leaf.layout is not torch.strided:
        return InputBoundary.apply(leaf)
    found: torch.Tensor = leaf.clone() if leaf.nbytes <= INLINE and leaf.is_contiguous() else InputBoundary.apply(leaf)
    return found


class ModuleRaised(Exception):
    """The code of a unit raised, in forward or backward; every other exception here is a fault of ours."""

    def __init__(self, error: BaseException, scope: str = "") -> None:
        super().__init__(error)
        self.error, self.scope = error, scope


@dataclass
class CallGraph:
    """The graph of one call."""

    inputs: list[torch.Tensor]
    parameters: list[nn.Parameter]
    outputs: list[Any]  # the places of differentiable outputs in the graph, not their contents


class ServedModule:
    """A module of the model as a worker has it."""

    def __init__(self, module: nn.Module, classes: ClassTable) -> None:
        self.module = module
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        self.trained = [parameter.requires_grad for parameter in self.parameters]
        self.audit = SideEffectCheck(module, classes)
        self.has_run = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            raise ModuleRaised(error, find_scope(self.module, error)) from error

    def follow(self, state: tuple[tuple[bool, ...], tuple[bool, ...]] | None) -> None:
        """Take over training flags and frozen parameters from the controller; None: as in the last call of this unit.

        A parameter is one for the whole process: another unit or stage that shares it may have followed since.
        """
        if state is not None:
            training, trained = state
            self.trained = list(trained)
            self.audit.buffers.written = None  # in another mode it may write to other buffers
            for module, flag in zip(self.modules, training, strict=True):
                module.training = flag
        if [parameter.requires_grad for parameter in self.parameters] != self.trained:
            for parameter, flag in zip(self.parameters, self.trained, strict=True):
                parameter.requires_grad_(flag)


def build_raised(number: int, raised: Any, scope: str, device: Device, classes: ClassTable) -> Raised:
    """Build the reply to a request whose user code raised; `raised.error` is the exception.

    The exceptions lose their frames, which hold tensors and thereby slabs.
    """
    error = raised.error
    frames = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    chain = exception_chain(error, lambda one: to_portable(one, classes))
    reply = Raised(number, to_portable(error, classes), scope, frames, get_state(device), chain)
    for one in (raised, error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = one.__cause__ = one.__context__ = None
    return reply


class ModuleServer:
    """All units of a worker and the graphs that may still be asked for."""

    def __init__(self, classes: ClassTable) -> None:
        self.classes = classes
        self.device: Device = Cpu()
        self.units: dict[int, ServedModule] = {}
        self.kept: dict[int, CallGraph] = {}
        self._nothing = ArgumentObjects((), {}, classes)
        # What the controller has told, which it does not repeat while it stays the same:
        self._region, self._switches, self._generator = Region.current(), torch_flags.current_flags(), b""
        self.is_settled = False  # the switches of this process are those, for certain

    def install(self, units: dict[int, nn.Module]) -> None:
        """Take over modules."""
        self.units.update({number: ServedModule(module, self.classes) for number, module in units.items()})

    def drop(self, calls: list[int]) -> None:
        """Forget the graphs of calls."""
        for call in calls:
            self.kept.pop(call, None)

    def forward(self, request: Forward) -> Outputs:
        """Run a unit; raises Refusal where that cannot be done from afar."""
        if request.region is not None:
            *region, self._switches = request.region
            self._region, self.is_settled = Region(*region), False
        self._generator = request.generator or self._generator
        unit = self.units[request.unit]
        unit.follow(request.state)
        leaves = request.tensors
        if request.absent:
            insert_placeholders(leaves, request.absent)
        inputs = [
            enter_input(leaf) if leaf.requires_grad and type(leaf) is not PlaceholderTensor else leaf for leaf in leaves
        ]
        try:
            result = self._run(unit, request, inputs)
        except HostRngUsed:
            if unit.has_run:
                raise
            unit.has_run = True  # what it imports in its first call may draw; the unit itself draws again
            result = self._run(unit, request, inputs)
        unit.has_run = True
        drawn = get_state(self.device)
        body, tensors = unit.audit.given.parcel(result, unit.audit.changes)
        place = {id(tensor): at for at, tensor in enumerate(inputs)}
        same = [place.get(id(tensor)) for tensor in tensors]
        graded = [at is None and tensor.requires_grad for tensor, at in zip(tensors, same, strict=True)]
        node = ""
        if True in graded:
            node = grad_fn_name(tensors[graded.index(True)])
            trained = [parameter for parameter in unit.parameters if parameter.requires_grad]
            edges = [edge_of(tensor) if flag else None for tensor, flag in zip(tensors, graded, strict=True)]
            self.kept[request.number] = CallGraph(leaves, trained, edges)
            tensors = [tensor.detach() if flag else tensor for tensor, flag in zip(tensors, graded, strict=True)]
        sent = [tensor if at is None else None for tensor, at in zip(tensors, same, strict=True)]
        news = b"" if drawn == self._generator else drawn
        has_objects = bool(unit.audit.given.objects)
        unit.audit.given = self._nothing  # it holds inputs, and so slabs
        has_written = bool(unit.audit.buffers.written)
        return Outputs(request.number, body, same, graded, news, has_written, has_objects, node, sent)

    def _run(self, unit: ServedModule, request: Forward, inputs: list[torch.Tensor]) -> Any:
        args, kwargs = unpack(request.body, inputs, self.classes)
        given = self._nothing if request.body == ONLY_TENSORS else ArgumentObjects(args, kwargs, self.classes)
        if not self.is_settled:
            torch_flags.apply_flags(self._switches)
        self.is_settled = False
        set_state(self._generator, self.device)
        ambient = Region.current()
        if self._region == ambient:
            result = unit.audit.watch(unit.run, args, kwargs, inputs, given)
        else:
            with ExitStack() as stack:
                self._region.enter(stack, ambient)
                result = unit.audit.watch(unit.run, args, kwargs, inputs, given)
        if torch_flags.current_flags() != self._switches:
            unit.audit.undo()
            raise Refusal("it turns switches of torch that hold for the whole process")
        self.is_settled = True
        return result

    def backward(self, request: Backward) -> Gradients:
        """The gradients that were asked for; None where an input or parameter took no part."""
        kept = self.kept[request.call]
        parameters = [kept.parameters[at] for at in request.parameters]
        for parameter in parameters:
            parameter.requires_grad_()  # it may be frozen by now; whoever uses it next says what it is
        wanted = [kept.inputs[at] for at in request.inputs] + parameters
        pairs = [
            (output, gradient)
            for output, gradient in zip(kept.outputs, request.tensors, strict=True)
            if gradient is not None and output is not None
        ]
        if not pairs or not wanted:
            return Gradients(request.number, [None] * len(wanted))
        outputs, gradients = zip(*pairs, strict=True)
        before = get_state(self.device)
        for _ in range(2):  # what it imports the first time may draw; the unit itself draws again
            try:
                found = differentiate(outputs, gradients, wanted, retain_graph=True)
            except BaseException as error:
                raise ModuleRaised(error) from error
            if not HOST_RNG.have_been_made() and get_state(self.device) == before:
                return Gradients(request.number, list(found))
            set_state(before, self.device)
        raise Refusal("its backward draws random numbers")

    def forget(self, units: list[int]) -> None:
        """Give modules up."""
        for unit in units:
            self.units.pop(unit, None)

    def undo(self, unit: int, call: int) -> None:
        """Forget the last call of a unit, as if it had not been made."""
        self.kept.pop(call, None)
        if unit in self.units:
            self.units[unit].audit.undo()
