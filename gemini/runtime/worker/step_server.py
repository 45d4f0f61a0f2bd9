"""Step server: carries out the requests of pipelined steps in a worker."""

from __future__ import annotations

import linecache
import os
import socket
import sys
from typing import Any

import torch

from gemini.batch_analysis.microbatch_join import PARTS, combine_parts
from gemini.capture import torch_flags
from gemini.collectives.native_group import join_process_group
from gemini.collectives.shard_group import ShardGroup
from gemini.collectives.shared_memory_group import SharedMemoryGroup, allocate_group
from gemini.malloc import keep_freed_memory, trim
from gemini.pipe.live_stages import load_module
from gemini.runtime.devices.base import Device
from gemini.runtime.protocol import Done, Refused
from gemini.runtime.step_messages import (
    ABORTED,
    AbortStep,
    Connect,
    ConnectHosts,
    Fetch,
    Fetched,
    Joined,
    JoinGroup,
    RetirePrograms,
    Sources,
    Stages,
    Step,
    Stepped,
    SumGradients,
    Summed,
    Tasks,
)
from gemini.runtime.tracebacks import find_scope
from gemini.runtime.transport.channel import Channel
from gemini.runtime.transport.code_dependencies import stub_modules
from gemini.runtime.transport.dist_p2p import P2PChannel
from gemini.runtime.transport.gloo_channel import GlooChannel
from gemini.runtime.transport.gloo_pair import GlooPair, MeetingPoint
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.remote_link import ThreadedRemoteLink
from gemini.runtime.worker.module_server import build_raised
from gemini.runtime.worker.p2p import PeerLinks, StepAborted
from gemini.runtime.worker.program_state import InstalledProgram, WorkerPlan
from gemini.runtime.worker.side_effect_check import HOST_RNG, HostRngUsed
from gemini.runtime.worker.step_runner import StageRaised, StepBackup, StepRunner
from gemini.schedule.block import FORWARD
from gemini.step import split_backward_ops
from gemini.step.delayed_weight_grads import STORE
from gemini.step.lower_program import TAIL


class StepServer:
    """The pipelined side of a worker."""

    def __init__(self, control: Link) -> None:
        self.control = control
        self.peers = PeerLinks(control)
        self.programs: dict[int, InstalledProgram] = {}
        self.plans: dict[int, WorkerPlan] = {}
        self.outputs: dict[int, dict[str, dict[int, Any]]] = {}  # by step
        self.groups: dict[tuple[int, ...], ShardGroup] = {}  # by the workers that are their shards
        self._group_memory: dict[tuple[int, ...], int] = {}
        self.last: tuple[int, StepBackup] | None = None  # the last step, which may still be undone
        split_backward_ops.install()
        trim()  # calls of whole batches leave more idle memory than micro-batches need
        control.transport.trim()
        control.transport.device.rest()
        keep_freed_memory()

    def next(self) -> tuple[Any, list[int]] | None:
        """Return a request that arrived during a step."""
        return self.peers.postponed.popleft() if self.peers.postponed else None

    def execute(self, request: Any, descriptors: list[int]) -> Any:
        """Return the reply to a request."""
        if isinstance(request, Step):
            return self._step(request)
        if isinstance(request, AbortStep):
            return self._abort(request)
        if isinstance(request, Fetch):
            return self._fetch(request)
        if isinstance(request, Connect):
            link = Link(Channel(socket.socket(fileno=descriptors[0])), side=request.side)
            link.set_device(self.control.transport.device)
            self.peers.add(request.peer, link)
        elif isinstance(request, ConnectHosts):
            self.peers.add(request.peer, connect_hosts(request, self.control.transport.device))
        elif isinstance(request, JoinGroup):
            return self._join(request, descriptors)
        elif isinstance(request, SumGradients):
            return self._sum_gradients(request)
        elif isinstance(request, Sources):
            with stub_modules(request.user_objects):
                for path, text in request.texts.items():
                    load_module(text, path)
        elif isinstance(request, Stages):
            self.programs[request.program] = InstalledProgram(request, self.control.shared_tensors)
            self._register_parameters()
        elif isinstance(request, Tasks):
            self.plans[request.key] = WorkerPlan(request, self.programs[request.program])
        elif isinstance(request, RetirePrograms):
            self._retire(request.programs)
        return Done(request.number)

    def _join(self, request: JoinGroup, descriptors: list[int]) -> Any:
        """Become a shard of a new group; while it waits for others it takes in messages, which may abort the step."""
        size = len(request.members)
        reply: Done | Joined = Done(request.number)
        if request.meeting is not None:
            store = MeetingPoint(*request.meeting).join(request.seconds)
            self.groups[request.members] = join_process_group(
                store, request.rank, size, request.host, request.seconds, torch.device(request.device)
            )
            return reply
        if descriptors:
            (descriptor,) = descriptors
        elif request.path:
            descriptor = os.open(request.path, os.O_RDWR)
        else:
            descriptor = allocate_group(size)
            if (old := self._group_memory.pop(request.members, -1)) >= 0:
                os.close(old)
            self._group_memory[request.members] = kept = os.dup(descriptor)  # the others open it
            reply = Joined(request.number, f"/proc/{os.getpid()}/fd/{kept}")
        self.groups[request.members] = SharedMemoryGroup(descriptor, request.rank, size, lambda: self.peers.receive(0))
        os.close(descriptor)
        return reply

    def _sum_gradients(self, request: SumGradients) -> Summed:
        """Sum the gradients of the last step with other replicas; all of them call it at once."""
        plan = self.plans[request.key]
        gradients, plan.replica_gradients = plan.replica_gradients, None
        if gradients is None:
            raise RuntimeError("there are no gradients to sum")
        missing = gradients.sum(self.groups[plan.members])
        if plan.place != plan.members[0]:
            plan.program.replica_gradients = gradients
            return Summed(request.number, [], [])
        numbers, latest = plan.program.numbers, plan.program.latest
        ids = [id(gradients.parameters[at]) for at in missing]
        keys = [(numbers[one], latest.get(one, 0)) for one in ids]
        return Summed(request.number, keys, [gradients.grads[at] for at in missing])

    def _register_parameters(self) -> None:
        STORE.set_parameters([parameter for one in self.programs.values() for parameter in one.parameters])

    def _retire(self, programs: list[int]) -> None:
        gone = [self.programs.pop(number) for number in programs if number in self.programs]
        self.plans = {key: plan for key, plan in self.plans.items() if plan.program not in gone}
        self._register_parameters()

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _step(self, request: Step) -> Any:
        for step in request.dropped:
            self.outputs.pop(step, None)
        self.last = None
        plan = self.plans[request.key]
        plan.program.apply_state(request.state)
        torch_flags.apply_flags(request.region[-1])
        HOST_RNG.was_used()
        run = StepRunner(plan, request, self.peers, self.control, self.groups)
        try:
            reply = self._run(run)
        except StepAborted:
            run.undo()
            self._acknowledge_abort()
            return Refused(request.number, ABORTED)
        except StageRaised as raised:
            run.undo()
            self._acknowledge_abort()  # which may have arrived at the same time
            device, classes = self.control.transport.device, self.control.classes
            return build_raised(request.number, raised, _describe_place(raised), device, classes)
        except BaseException:
            run.undo()
            self._acknowledge_abort()
            raise
        self.last = request.step, run.before()
        if run.outputs:
            self.outputs[request.step] = run.outputs
        return reply

    def _run(self, run: StepRunner) -> Stepped:
        reply = run.run()
        if HOST_RNG.was_used():
            raise HostRngUsed("it uses Python's or NumPy's random numbers")
        return reply

    def _acknowledge_abort(self) -> None:
        abort, self.peers.abort = self.peers.abort, None
        if abort is not None:
            self.control.send(Done(abort.number))

    def _abort(self, request: AbortStep) -> Done:
        """Undo a step that has failed in another worker after this one was done."""
        if self.last is not None and self.last[0] == request.step:
            self.last[1].restore()
            self.outputs.pop(request.step, None)
        self.last = None
        return Done(request.number)

    # ── outputs ────────────────────────────────────────────────────────────────────────────────────────────────
    def _fetch(self, request: Fetch) -> Fetched:
        parts = self.outputs[request.step][request.name]
        mids = sorted(parts)
        found = [parts[mid] for mid in mids]
        return Fetched(request.number, mids, found if request.how == PARTS else [combine_parts(found, request.how)])


def connect_hosts(request: ConnectHosts, device: Device) -> Link:
    """Return a link to a worker on another host, once it is there, too."""
    store = MeetingPoint(*request.meeting).join(request.seconds)
    pair = GlooPair(store, request.side, request.host, request.seconds)
    channel = GlooChannel(pair, request.key)
    return ThreadedRemoteLink(channel, P2PChannel(channel, pair), request.side, device)


def _describe_place(raised: StageRaised) -> str:
    """Describe where code raised: stage, micro-batch, module, and the generated line."""
    task = raised.task
    what = "forward" if task.kind == FORWARD else "the end" if task.kind == TAIL else "backward"
    where = "all samples" if task.kind == TAIL else f"micro-batch {task.mid}"
    text = f"{raised.what or what} of stage {task.stage}, {where}"
    scope = find_scope(raised.stage.module, raised.error) if not raised.what else ""
    if scope:
        text += f", in {scope}"
    file = getattr(sys.modules.get(type(raised.stage.module).__module__), "__file__", "")
    trace = raised.error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = linecache.getline(file, trace.tb_lineno).strip()
            text += f"; {file.rpartition('/')[2]}:{trace.tb_lineno}: {line}"
            break
        trace = trace.tb_next
    return text
