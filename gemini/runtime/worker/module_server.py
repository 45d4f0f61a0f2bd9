"""Module server: a worker runs modules forward, retains their graphs, and runs them backward on request.

The inputs of a call are leaves in the worker: the controller's autograd continues on its side. A graph is retained
until the controller drops the call, so that a second backward (`retain_graph=True`) finds it.
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
    """An input as the module sees it: not a leaf, which autograd would not allow it to write to."""

    @staticmethod
    def forward(_: Any, leaf: torch.Tensor) -> torch.Tensor:
        """Return the same memory."""
        return leaf.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the same gradient."""
        return gradient


def enter_input(leaf: torch.Tensor) -> torch.Tensor:
    """Return an input that requires a gradient as the module sees it; copying a small one is cheaper than a call."""
    if leaf.layout is not torch.strided:
        return InputBoundary.apply(leaf)
    found: torch.Tensor = leaf.clone() if leaf.nbytes <= INLINE and leaf.is_contiguous() else InputBoundary.apply(leaf)
    return found


class ModuleRaised(Exception):
    """User code of a module raised, in forward or backward; every other exception is an internal fault."""

    def __init__(self, error: BaseException, scope: str = "") -> None:
        super().__init__(error)
        self.error, self.scope = error, scope


@dataclass
class CallGraph:
    """The graph of one call."""

    inputs: list[torch.Tensor]
    parameters: list[nn.Parameter]
    outputs: list[Any]  # graph edges of differentiable outputs, without their contents
    check: SideEffectCheck


class ServedModule:
    """A module of the model in a worker."""

    def __init__(self, module: nn.Module, classes: ClassTable) -> None:
        self.module = module
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        self.trained = [parameter.requires_grad for parameter in self.parameters]
        self.check = SideEffectCheck(module, classes)
        self.has_run = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            raise ModuleRaised(error, find_scope(self.module, error)) from error

    def apply_state(self, state: tuple[tuple[bool, ...], tuple[bool, ...]] | None) -> None:
        """Apply training flags and frozen parameters of the controller; None: as in the last call of this module.

        A parameter exists once per process: another module or stage that shares it may have changed it since.
        """
        if state is not None:
            training, trained = state
            self.trained = list(trained)
            self.check.buffers.written = None  # in another mode it may write other buffers
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
    """All modules of a worker, and the graphs of calls whose backward may follow."""

    def __init__(self, classes: ClassTable) -> None:
        self.classes = classes
        self.device: Device = Cpu()
        self.modules: dict[int, ServedModule] = {}
        self.graphs: dict[int, CallGraph] = {}
        self._no_objects = ArgumentObjects((), {}, classes)
        # The last values from the controller, which are sent only when they change:
        self._region, self._flags, self._generator = Region.current(), torch_flags.current_flags(), b""
        self.are_flags_set = False  # whether the flags of this process are known to be those

    def install(self, modules: dict[int, nn.Module]) -> None:
        """Install modules."""
        self.modules.update({number: ServedModule(module, self.classes) for number, module in modules.items()})

    def drop(self, calls: list[int]) -> None:
        """Drop the graphs of calls."""
        for call in calls:
            self.graphs.pop(call, None)

    def forward(self, request: Forward) -> Outputs:
        """Run a module; raise Refusal if its side effects cannot be transferred."""
        if request.region is not None:
            *region, self._flags = request.region
            self._region, self.are_flags_set = Region(*region), False
        self._generator = request.generator or self._generator
        served = self.modules[request.module]
        served.apply_state(request.state)
        leaves = request.tensors
        if request.placeholders:
            insert_placeholders(leaves, request.placeholders)
        inputs = [
            enter_input(leaf) if leaf.requires_grad and type(leaf) is not PlaceholderTensor else leaf for leaf in leaves
        ]
        try:
            result = self._run(served, request, inputs)
        except HostRngUsed:
            if served.has_run:
                raise
            served.has_run = True  # its first call may import code that draws; the module itself would draw again
            result = self._run(served, request, inputs)
        served.has_run = True
        drawn = get_state(self.device)
        body, tensors = served.check.arguments.pack_result(result, served.check.changes)
        position = {id(tensor): at for at, tensor in enumerate(inputs)}
        same = [position.get(id(tensor)) for tensor in tensors]
        graded = [at is None and tensor.requires_grad for tensor, at in zip(tensors, same, strict=True)]
        node = ""
        if True in graded:
            node = grad_fn_name(tensors[graded.index(True)])
            trained = [parameter for parameter in served.parameters if parameter.requires_grad]
            edges = [edge_of(tensor) if flag else None for tensor, flag in zip(tensors, graded, strict=True)]
            self.graphs[request.number] = CallGraph(leaves, trained, edges, served.check)
            tensors = [tensor.detach() if flag else tensor for tensor, flag in zip(tensors, graded, strict=True)]
        sent = [tensor if at is None else None for tensor, at in zip(tensors, same, strict=True)]
        new_state = b"" if drawn == self._generator else drawn
        has_objects = bool(served.check.arguments.objects)
        served.check.arguments = self._no_objects  # it holds inputs, and thereby slabs
        has_written = bool(served.check.buffers.written)
        return Outputs(request.number, body, same, graded, new_state, has_written, has_objects, node, sent)

    def _run(self, served: ServedModule, request: Forward, inputs: list[torch.Tensor]) -> Any:
        args, kwargs = unpack(request.body, inputs, self.classes)
        given = self._no_objects if request.body == ONLY_TENSORS else ArgumentObjects(args, kwargs, self.classes)
        if not self.are_flags_set:
            torch_flags.apply_flags(self._flags)
        self.are_flags_set = False
        set_state(self._generator, self.device)
        ambient = Region.current()
        if self._region == ambient:
            result = served.check.run(served.run, args, kwargs, inputs, given)
        else:
            with ExitStack() as stack:
                self._region.enter(stack, ambient)
                result = served.check.run(served.run, args, kwargs, inputs, given)
        if torch_flags.current_flags() != self._flags:
            served.check.undo()
            raise Refusal("it changes process-wide flags of torch")
        self.are_flags_set = True
        return result

    def backward(self, request: Backward) -> Gradients:
        """Return the requested gradients; None for an input or parameter that took no part."""
        graph = self.graphs[request.call]
        parameters = [graph.parameters[at] for at in request.parameters]
        for parameter in parameters:
            parameter.requires_grad_()  # it may be frozen by now; the next call sets it again
        wanted = [graph.inputs[at] for at in request.inputs] + parameters
        pairs = [
            (output, gradient)
            for output, gradient in zip(graph.outputs, request.tensors, strict=True)
            if gradient is not None and output is not None
        ]
        if not pairs or not wanted:
            return Gradients(request.number, [None] * len(wanted))
        outputs, gradients = zip(*pairs, strict=True)
        before = get_state(self.device)
        for _ in range(2):  # the first run may import code that draws; the module itself would draw again
            try:
                found = differentiate(outputs, gradients, wanted, retain_graph=True)
            except BaseException as error:
                raise ModuleRaised(error) from error
            if changed := graph.check.find_change():  # by hooks on saved tensors, or functions with their own backward
                raise Refusal(f"in its backward {changed}")
            if not HOST_RNG.was_used() and get_state(self.device) == before:
                return Gradients(request.number, list(found))
            set_state(before, self.device)
        raise Refusal("its backward draws random numbers")

    def forget(self, modules: list[int]) -> None:
        """Drop modules."""
        for number in modules:
            self.modules.pop(number, None)

    def undo(self, module: int, call: int) -> None:
        """Drop the last call of a module and restore its buffers."""
        self.graphs.pop(call, None)
        if module in self.modules:
            self.modules[module].check.undo()
