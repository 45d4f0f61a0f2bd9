"""A placed model: its first call is traced, then modules of it run in workers by eager dispatch.

    first call         runs locally and is traced        which modules, in what order, how long
    before the second  modules are placed and installed
    afterwards         remote modules run in their workers; others run locally, with one line that gives the reason

A module that a worker refuses (it changes an object among its arguments, for example) is replaced by the modules inside
it, down to those that can run remotely. The loss of a worker raises once; afterwards the model runs locally.

Nothing refers to the model itself: it is freed when the script drops it, then its remote modules, and with the last
model its workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gemini.capture import torch_flags
from gemini.errors import WorkerError
from gemini.guards.guard_set import GuardSet
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import bind, signature_of
from gemini.progress_line import ProgressLine
from gemini.runtime.devices.host_memory import format_bytes
from gemini.runtime.devices.worker_devices import model_device
from gemini.runtime.eager.first_call_trace import FirstCallTrace, ModuleTrace
from gemini.runtime.eager.module_placement import place_modules
from gemini.runtime.eager.remote_module import RemoteModule
from gemini.runtime.eager.split_proof import SplitProof, prove_split
from gemini.runtime.memory.shared_parameters import SharedParameters
from gemini.runtime.pool.fault_policy import FaultPolicy
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import ClassAttributes, DescribeClasses
from gemini.runtime.run_journal import ModelJournal
from gemini.user_code import is_user_module

_NAMED = 3  # modules of a worker in a message
_SLOW = 10  # times the traced duration of a module: a hang


def _continue_locally(reason: str) -> None:
    """Accept the loss of a worker for whatever reason: the model continues in this process."""


class PlacedModel:
    """The state that the controller keeps of one model."""

    def __init__(
        self, model: nn.Module, pool: WorkerPool, quiet: bool = False, micro_batches: int = 1, strict: bool = False
    ) -> None:
        self.pool, self.micro_batches = pool, micro_batches
        self.name = type(model).__name__
        self.journal = ModelJournal(self.name, len(pool.workers))  # written where a session has replaced it by its own
        self.record = FaultPolicy(self.name, quiet, strict)
        self.shared_parameters = SharedParameters(pool, model_device(model))
        pool.preload(sorted({kind for m in model.modules() if not is_user_module(kind := type(m).__module__)}))
        self.guards = GuardSet(model)
        self.first_call: FirstCallTrace | None = None
        self.remote_modules: dict[int, RemoteModule] = {}
        self.traces: dict[int, ModuleTrace] = {}  # by number of the remote module
        self.refused: dict[str, str] = {}  # modules that stay local, with the reason
        self.given_up = ""  # why it runs locally from now on
        self.on_loss: Callable[[str], None] = _continue_locally  # raises where it cannot
        self.planned = False  # modules are placed, when the second call begins
        self.calls = 0
        self.dispatches = True  # calls without a plan may run by eager dispatch
        self.replicates = False  # hosts optimize their own copies of the weights
        self.announces = True  # False: only problems are logged
        self._names: dict[int, str] = {}
        self._proofs: dict[Any, SplitProof] = {}

    def refresh_guards(self, model: nn.Module) -> None:
        """Inspect the model's code again after the script has changed the model."""
        if self.guards.refresh(model):
            self._query_class_attributes()

    def note_weights_sent(self, reason: str) -> None:
        """Log why hosts do not optimize their own copies of the weights."""
        self.record.say(f"{self.name}: weights are sent to other hosts after every step: {reason}", once="weights sent")

    def plan(self, model: nn.Module, first_call: FirstCallTrace) -> dict[nn.Module, RemoteModule]:
        """Place modules and install them; by module. On failure, nothing has changed."""
        self.planned = True
        try:
            return self._plan(model, first_call)
        except BaseException as error:
            self.remote_modules.clear()
            self.shared_parameters.release()
            self.planned = not isinstance(error, WorkerError)  # the next call raises as well
            raise

    def _describe_start(self, seconds: float) -> str:
        return f"gemini: {self.name}: {len(self.pool.workers)} workers are starting, {seconds:.0f} s so far"

    def _plan(self, model: nn.Module, first_call: FirstCallTrace) -> dict[nn.Module, RemoteModule]:
        with ProgressLine(self._describe_start, quiet=self.record.quiet or self.pool.is_ready):
            self.pool.await_ready()
        self._names = {id(module): name for name, module in model.named_modules()}
        named = (*model.named_parameters(), *model.named_buffers())
        self.shared_parameters.names = {id(tensor): name for name, tensor in named}
        self.shared_parameters.share([*model.parameters(), *model.buffers()])
        self._query_class_attributes()
        if not self.dispatches:
            return {}
        chosen = place_modules(first_call.root, len(self.pool.workers))
        found: dict[nn.Module, RemoteModule] = {}
        for trace, place in chosen:
            found.update(self._install(trace, place))
        used = {remote.worker.index for remote in found.values()}
        if not found:
            reasons = [f"{name}: {why}" for name, why in self.refused.items()]
            self.record.say(
                f"{self.name} runs in this process: {[*reasons, 'it calls no module that can run remotely'][0]}"
            )
        else:
            self.say(f"{self.name} runs in {len(used)} workers, {len(found)} modules of it")
        return found

    def _query_class_attributes(self) -> None:
        """Query the attributes of library classes in a worker: the script may have patched its own before."""
        worker = self.pool.workers[0]
        reply = worker.ask(
            DescribeClasses(worker.next_number(), self.guards.patches.library_classes()),
            "describe its imported classes",
        )
        if isinstance(reply, ClassAttributes):
            self.guards.patches.learn(reply.attributes)

    def prove_call(self, model: nn.Module, args: Any, kwargs: Any) -> SplitProof:
        """Prove that a call may be split into micro-batches; cached by the kind of call."""
        modes = tuple(m.training for m in model.modules())
        facts = (signature_of(bind(model, args, kwargs)), Region.current(), torch_flags.current_flags(), modes)
        if facts not in self._proofs:
            away = any(worker.device.where != self.shared_parameters.model_device for worker in self.pool.workers)
            reads = self.guards.reads.save(model)
            proof = SplitProof("its workers are on another device") if away else prove_split(model, args, kwargs)
            if changed := reads.restore():
                proof = SplitProof(f"it modifies values outside the model: {changed}")
            self._proofs[facts], reason = proof, proof.reason
            if reason:
                self.say(f"{self.name} runs a batch as a single micro-batch, not in {self.micro_batches}: {reason}")
        return self._proofs[facts]

    def _install(self, trace: ModuleTrace, place: int) -> dict[nn.Module, RemoteModule]:
        """Install a module remotely, or the modules inside it where it cannot be sent itself."""
        number = self.pool.next_module_number()
        name = self._names.get(id(trace.module), type(trace.module).__name__)
        remote = RemoteModule(
            number, name, trace.module, self.pool.workers[place], self.shared_parameters, record=self.record
        )
        remote.timeout = _SLOW * trace.ms / 1e3
        self.traces[number] = trace
        reason = remote.install()
        if not reason:
            self.remote_modules[number] = remote
            self.shared_parameters.module_numbers.append(number)
            self.record.plan.append([name, place])
            self._record_holdings(place)
            return {trace.module: remote}
        remote.leave()
        return self._split_further(remote, reason)

    def _record_holdings(self, place: int) -> None:
        """Record what a worker holds of this model, for the message about its loss."""
        remotes = [remote for remote in self.remote_modules.values() if remote.worker.index == place]
        size = sum(one.nbytes for remote in remotes for one in remote.module.parameters())
        named = ", ".join(remote.name for remote in remotes[:_NAMED]) + (" …" if len(remotes) > _NAMED else "")
        held = self.pool.workers[place].contents
        if not held.get(self.name, "").startswith("stage"):  # of a plan
            held[self.name] = f"{named} of {self.name} ({format_bytes(size)} of parameters)"

    def split(self, remote: RemoteModule, reason: str) -> dict[nn.Module, RemoteModule]:
        """Return remote modules in place of one that a worker has refused."""
        self.remote_modules.pop(remote.number, None)
        remote.leave()
        found = self._split_further(remote, reason)
        if not self.remote_modules:
            first = reason.partition("\n")[0]
            self.record.say(f"{self.name} runs in this process: {remote.name}: {first:.200}", once="nothing remote")
        return found

    def _split_further(self, remote: RemoteModule, reason: str) -> dict[nn.Module, RemoteModule]:
        self.refused[remote.name] = reason
        self.journal.record_module(remote.name, reason)
        if remote.is_our_fault and self.record.strict:
            raise WorkerError(
                f"{remote.name} cannot run in worker {remote.worker.index}: {reason}\n"
                "    → without strict=True the modules inside it run there, or it runs in this process"
            )
        trace = self.traces[remote.number]
        found: dict[nn.Module, RemoteModule] = {}
        for inner in sorted(trace.inside.values(), key=lambda one: one.order):
            if any(True for _ in inner.module.parameters()):
                found.update(self._install(inner, remote.worker.index))
        return found

    def release_dropped(self) -> None:
        """Release graphs of completed calls in the workers: pipelined steps send no requests to remote modules."""
        for remote in self.remote_modules.values():
            if remote.dropped:
                remote.worker.drop(remote.take_dropped())

    @property
    def local_reason(self) -> str:
        """Why the model has to run locally from now on; '' where it may use its workers."""
        return self.given_up or self.pool.loss

    def give_up(self, reason: str) -> None:
        """Run the model locally from now on; its tensors are in this process anyway. Raises with `strict`."""
        self.planned = True
        if not self.given_up:
            self.given_up = reason
            self.shared_parameters.release()
        if self.record.strict:
            remedy = "" if "\n    → " in reason else "\n    → without strict=True it continues in this process"
            raise WorkerError(f"{self.name} cannot run in its workers any more: {reason}{remedy}")
        if self.pool.loss:
            self.on_loss(reason)
        self.record.report_loss(reason)

    @property
    def demotions(self) -> int:
        """The number of calls that ran locally because of an internal failure."""
        return self.record.demotions

    def say(self, text: str) -> None:
        """Log one line about normal operation."""
        if self.announces:
            self.record.say(text)
