"""A remote module: a module of the model that a worker runs, as the controller sees it."""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gemini.guards.functional_call import SwappedParametersError, has_swapped_parameters
from gemini.guards.module_state import ModuleState
from gemini.guards.reached_values import ReachedValues
from gemini.ir.hook_tables import hook_tables
from gemini.runtime.memory.shared_layout import MisplacedTensor, can_share
from gemini.runtime.memory.shared_parameters import SharedParameters
from gemini.runtime.pool.fault_policy import FaultPolicy
from gemini.runtime.pool.worker_handle import InternalFault, WorkerHandle
from gemini.runtime.protocol import Done, InstallModules
from gemini.runtime.transport.module_pickling import strip_hooks
from gemini.runtime.transport.tensor_header import UnsendableTensor

_UNSENDABLE = (pickle.PicklingError, TypeError, AttributeError, UnsendableTensor)  # properties of the module itself


class RemoteModule:
    """A module with a worker. The module itself stays in the script, with the tensors that both sides share."""

    def __init__(
        self,
        number: int,
        name: str,
        module: nn.Module,
        worker: WorkerHandle,
        shared_parameters: SharedParameters,
        *,
        record: FaultPolicy,
    ) -> None:
        self.number, self.name, self.module, self.worker, self.shared_parameters = (
            number,
            name,
            module,
            worker,
            shared_parameters,
        )
        self.record = record
        self.refused = ""  # why it is no longer remote
        self.needs_all = False  # it uses tensors inside objects among its arguments
        self.is_our_fault = False  # the refusal is no property of the module itself
        self.timeout = 0.0  # seconds that a call of it may take, where that is more than the watchdog's own
        self.writes: bool | None = None  # whether its forward writes to buffers; None: not known yet
        self.modes: tuple[bool, ...] = ()  # the training flags of its last call
        self.forward_text, self.backward_text = f"forward of {name}", f"backward of {name}"
        device, outside = worker.device.where, shared_parameters.model_device
        self.away = device != outside  # the script's tensors are on another device than the worker's
        self.seeded = outside if outside.type == device.type else device  # whose generator the module uses
        self.reads = ReachedValues()  # what its code reads that is not its own
        self.dropped: deque[int] = deque()  # calls whose graph is not needed any more; any thread may add

    def install(self) -> str:
        """Send the module as it is to the worker; return why that is impossible, '' if it is done."""
        self.modules = list(self.module.modules())
        self.parameters = list(self.module.parameters())
        self.buffers = list(self.module.buffers())
        self.tensors = [*self.parameters, *self.buffers]
        self._hooks = [table for module in self.modules[1:] for table in hook_tables(module)]
        self._told: Any = None
        self.reads.refresh()
        if reason := self.reads.check(self.module):
            return reason
        if not all(can_share(tensor) for tensor in self.tensors):
            return "it holds tensors that cannot live in shared memory"
        try:
            self.worker.ensure_shared(self)
        except MisplacedTensor as astray:
            return self._refuse(astray)
        loose = ModuleState(self.module).loose
        if any(learns for _, _, learns in loose):
            return "it holds a tensor in an attribute that is computed, or trained"
        if any(tensor.requires_grad for tensor in self.buffers):
            return "it holds a buffer that requires a gradient"
        try:
            request = InstallModules(self.worker.next_number(), {self.number: strip_hooks(self.module)})
            reply = self.worker.ask(request, f"install {self.name}")
        except InternalFault as fault:
            self.is_our_fault = not isinstance(fault.__cause__, _UNSENDABLE)
            return f"it cannot be sent: {fault!s:.200}"
        if not isinstance(reply, Done):
            self.is_our_fault = True
            return f"the worker cannot install it: {getattr(reply, 'reason', reply)!s:.120}".partition("\n")[0]
        self.snapshot, self._moves = ModuleState(self.module), self.shared_parameters.relocations
        return ""

    def find_obstacle(self) -> str:
        """Return why this call cannot run in the worker, '' if it can. A module that has changed is sent again.

        Raises SwappedParametersError where that concerns this call alone.
        """
        if self.refused:
            return self.refused
        try:
            # micro-batches come in threads: the first that sees a change deals with it
            with self.shared_parameters.lock:
                if (
                    self.snapshot.find_change()
                    or self.worker.ensure_shared(self)
                    or self._moves != self.shared_parameters.relocations
                ):
                    if has_swapped_parameters([*self.module.parameters()]):
                        raise SwappedParametersError
                    reason = self.install()
                    if reason:
                        return reason
        except MisplacedTensor as astray:
            return self._refuse(astray)
        if found := self.reads.check(self.module):
            return found
        if any(self._hooks):
            return "modules inside it have hooks"
        return "hooks run before it" if self.module._forward_pre_hooks else ""  # they may change the module

    def _refuse(self, astray: MisplacedTensor) -> str:
        """Return the reason why the module runs locally, and log it."""
        self.record.say(f"{self.name} runs in this process: {astray}", once=str(astray))
        return str(astray)

    def leave(self) -> None:
        """Run the module locally from now on."""
        self.worker.release_module(self)

    def trained_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that get gradients."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def news(self) -> Any:
        """Return training flags and frozen parameters that the worker does not have yet."""
        self.modes = tuple([module.training for module in self.modules])  # a generator takes twice as long
        state = (self.modes, tuple([parameter.requires_grad for parameter in self.parameters]))
        if state == self._told:
            return None
        self._told, self.writes = state, None
        return state

    def resend_state(self, dropped: list[int]) -> None:
        """Send flags and dropped calls again: the worker may not have received them."""
        self._told = None
        self.dropped.extend(dropped)

    def set_modes(self, modes: Sequence[bool]) -> None:
        """Set the training flags of the modules."""
        for module, training in zip(self.modules, modes, strict=False):
            module.training = training

    def take_dropped(self) -> list[int]:
        """Return the calls to be released, each once."""
        found: list[int] = []
        if not self.dropped:
            return found
        with contextlib.suppress(IndexError):  # also where another thread has taken the last
            while True:
                found.append(self.dropped.popleft())
        return found

    def run_local(self, args: Any, kwargs: Any) -> Any:
        """Run the module's forward in this process."""
        return self.module.forward(*args, **kwargs)
