"""Replicated update: data parallelism in which every host optimizes its own copy of the weights.

    backward           gradients stay in the workers, which sum them by an all-reduce, each a part
    optimizer.step()   runs here, as always; workers on other hosts carry out the same step on their copies
    next step          hashes of all weights are compared; what differs is sent

So weights do not travel. Whatever the workers cannot repeat (gradients that the script changes or accumulates, other
optimizers, a state that was loaded) shows in the hashes or before, and costs a transfer, never a difference.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from gemini.runtime.pipelined.broadcast import Broadcast
from gemini.runtime.pool.remote_worker import RemoteWorker
from gemini.runtime.pool.worker_handle import InternalFault, WorkerHandle
from gemini.runtime.step_messages import AbortStep, ComparedWeights, SumGradients, Summed, UpdateWeights
from gemini.runtime.transport.channel import ChannelClosed
from gemini.step.worker_program import StepProgram

_STOCK = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
_MISSES = 3  # comparisons with differences, one after the other, after which workers repeat no more steps

Members = tuple[int, ...]


class _Delivered(NamedTuple):
    """A gradient as a step has left it."""

    parameter: weakref.ref[torch.Tensor]
    update: weakref.ref[ReplicatedUpdate]
    place: int  # its memory
    version: int

    def is_unchanged(self) -> bool:
        parameter = self.parameter()
        grad = None if parameter is None else parameter.grad
        return grad is not None and grad.data_ptr() == self.place and grad._version == self.version


_delivered: dict[int, _Delivered] = {}  # by identity of the parameter


def join_replicas(
    number: int, program: StepProgram, workers: Sequence[WorkerHandle], say: Callable[[str], None]
) -> ReplicatedUpdate | None:
    """Return the replicas of a program, by its number; None, with a line, where there are none."""
    members = find_members(program, workers)
    if members:
        return ReplicatedUpdate(number, members, workers, say)
    say("the plan has no copies of this host's stages on other hosts")
    return None


def find_members(program: StepProgram, workers: Sequence[WorkerHandle]) -> dict[int, Members]:
    """Return the workers of the same stages, by worker; {} where they are not copies that begin on this host."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for worker in workers:
        groups.setdefault(tuple(program.stages_of(worker.index)), []).append(worker.index)
    stages = [stage for found in groups for stage in found]
    is_even = len({len(members) for members in groups.values()}) == 1
    if len(stages) > len(set(stages)) or not is_even or len(groups) == len(workers):
        return {}
    if any(workers[members[0]].is_remote for members in groups.values()):
        return {}
    return {place: tuple(members) for members in groups.values() for place in members}


class ReplicatedUpdate:
    """The replicas of one program."""

    def __init__(
        self, number: int, members: dict[int, Members], workers: Sequence[WorkerHandle], say: Callable[[str], None]
    ) -> None:
        self.number, self.members, self.workers, self._say = number, members, workers, say
        self.remote = [worker for worker in workers if isinstance(worker, RemoteWorker)]
        self._broadcast = Broadcast(workers)
        self._in_sync: dict[tuple[int, int], tuple[weakref.ref[Optimizer], Any]] = {}  # by optimizer and worker
        self.clips: list[tuple[list[torch.Tensor], float, torch.Tensor, Any]] = []
        self._misses = 0
        _install()

    # ── the gradients of a step ────────────────────────────────────────────────────────────────────────────────
    def sum_gradients(self, key: int, step: int, seconds: float) -> dict[WorkerHandle, dict[Any, torch.Tensor]]:
        """Let all replicas sum their gradients; return those that the first of a group had no part of."""
        requests = {worker: SumGradients(worker.next_number(), key) for worker in self.workers}
        replies = self._broadcast.ask(
            requests, "sum gradients", lambda reply: not isinstance(reply, Summed),
            lambda number: AbortStep(number, step), seconds,
        )  # fmt: skip
        for worker, reply in replies.items():
            if not isinstance(reply, Summed):
                raise InternalFault(
                    f"sum of gradients in worker {worker.index}: {getattr(reply, 'reason', reply)!s:.500}"
                )
        return {worker: dict(zip(reply.keys, reply.tensors, strict=True)) for worker, reply in replies.items()}

    def deliver(self, owners: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
        """Note the gradients that the script gets."""
        self.clips, me = [], weakref.ref(self)
        for parameter, grad in zip(owners, gradients, strict=True):
            _delivered[id(parameter)] = _Delivered(weakref.ref(parameter), me, grad.data_ptr(), grad._version)

    # ── the optimizer ──────────────────────────────────────────────────────────────────────────────────────────
    def follow(self, optimizer: Optimizer, live: list[torch.Tensor], reason: str) -> None:
        """Let the workers repeat a step of an optimizer, which this process takes next; not where there is a reason."""
        if not reason and not all(_delivered[id(one)].is_unchanged() for one in live):
            reason = "the script changes or accumulates gradients"
        if reason or self._misses >= _MISSES:
            self._in_sync = {key: one for key, one in self._in_sync.items() if key[0] != id(optimizer)}
            if reason:
                self._say(reason)
            return
        for worker in self.remote:
            numbers = worker.stage_numbers(self.number)
            request = self._request(optimizer, [one for one in live if id(one) in numbers], numbers, worker)
            try:
                worker.update_weights(request)
            except ChannelClosed:
                return  # the next request reports it

    def _request(
        self, optimizer: Optimizer, live: list[torch.Tensor], numbers: dict[int, int], worker: RemoteWorker
    ) -> UpdateWeights:
        held = [[one for one in group["params"] if id(one) in numbers] for group in optimizer.param_groups]
        groups = [
            ([numbers[id(one)] for one in params], {name: group[name] for name in optimizer.defaults if name in group})
            for params, group in zip(held, optimizer.param_groups, strict=True)
        ]
        form = tuple(tuple(each) for each, _ in groups)
        known, state = self._in_sync.get((id(optimizer), worker.index)), None
        if known is None or known[0]() is not optimizer or known[1] != form:
            state = [(numbers[id(p)], dict(optimizer.state[p])) for each in held for p in each if p in optimizer.state]
            self._in_sync[id(optimizer), worker.index] = weakref.ref(optimizer), form
        clips = [([numbers[id(one)] for one in clipped if id(one) in numbers], *rest) for clipped, *rest in self.clips]
        return UpdateWeights(
            0, self.number, id(optimizer), type(optimizer).__name__, groups, [numbers[id(one)] for one in live],
            clips, state,
        )  # fmt: skip

    # ── before the next step ───────────────────────────────────────────────────────────────────────────────────
    def compare_weights(self) -> None:
        """Send the workers the weights in which they differ from this process."""
        requests: dict[WorkerHandle, Any] = {
            worker: worker.compare_weights(self.number) for worker in self.remote if worker.is_updated(self.number)
        }
        if not requests:
            return
        replies = self._broadcast.ask(
            requests, "compare weights", lambda reply: not isinstance(reply, ComparedWeights),
            lambda number: AbortStep(number, 0),
        )  # fmt: skip
        differ = False
        for worker in self.remote:
            reply = replies.get(worker)
            places = reply.places if isinstance(reply, ComparedWeights) else None
            if worker in requests and places != []:
                worker.correct_weights(self.number, places)
                differ = True
            if worker in requests:
                worker.note_compared(self.number)
        self._misses = self._misses + 1 if differ else 0
        if differ:
            self._in_sync = {}
        if self._misses == _MISSES:
            self._say("workers on other hosts compute other weights")


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    live: dict[ReplicatedUpdate, list[torch.Tensor]] = {}
    for group in optimizer.param_groups if _delivered else ():
        for parameter in group["params"]:
            found = _delivered.get(id(parameter))
            update = None if found is None or found.parameter() is not parameter else found.update()
            if update is not None and parameter.grad is not None:
                live.setdefault(update, []).append(parameter)
    name = type(optimizer).__name__
    reason = ""
    if name not in _STOCK or type(optimizer) is not getattr(torch.optim, name):
        reason = f"{name} is no elementwise optimizer of torch.optim"
    elif len(args) > 1 or kwargs.get("closure") is not None:
        reason = "its step computes gradients"
    for update, parameters in live.items():
        update.follow(optimizer, parameters, reason)


def _record_clips(
    clip: Callable[..., None], parameters: Any, max_norm: Any, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """Clip gradients, and record that for the workers."""
    clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    found = [_delivered[id(one)] for one in clipped if id(one) in _delivered]
    found = [one for one in found if one.is_unchanged()]
    clip(clipped, max_norm, total_norm, foreach)
    by_update: dict[ReplicatedUpdate, list[torch.Tensor]] = {}
    for one in found:
        parameter, update = one.parameter(), one.update()
        if parameter is not None and update is not None and parameter.grad is not None:
            _delivered[id(parameter)] = one._replace(version=parameter.grad._version)
            by_update.setdefault(update, []).append(parameter)
    for update, own in by_update.items():
        update.clips.append((own, float(max_norm), total_norm.detach().clone(), foreach))


@functools.cache
def _install() -> None:
    """Watch optimizers and the clipping of gradients, once per process."""
    register_optimizer_step_pre_hook(_before_step)
    clip = getattr(clip_grad, "_clip_grads_with_norm_", None)
    if clip is not None:
        clip_grad._clip_grads_with_norm_ = functools.wraps(clip)(functools.partial(_record_clips, clip))
