"""Step messages: what controller and workers, and workers among themselves, exchange about pipelined steps.

    controller                                    worker
    Connect(peer)              + descriptor ──►   has a link to another worker of this host
    ConnectHosts(peer, …)                   ──►   meets a worker of another host
    JoinGroup(members, rank)   + descriptor ──►   is a shard of a group
                                            ◄──   Joined, with the path of its memory on another host
    Sources(texts) Stages(…)                ──►   executes generated code, installs the stages
    Tasks(key, …)                           ──►   has its tasks for one kind of step
    Step(key, inputs, …)                    ──►   runs it; PeerMessages go from worker to worker
                                            ◄──   Stepped · Raised · Refused
    AbortStep(step)                         ──►   a peer has failed: the state is as before the step
    Fetch(step, name)                       ──►   an output that the worker retains
                                            ◄──   Fetched
    SumGradients(key)                       ──►   replicas sum their gradients
                                            ◄──   Summed
    UpdateWeights(program, optimizer, …)    ──►   a replica runs the optimizer; no reply
    CompareWeights(program, hashes)         ──►
                                            ◄──   ComparedWeights
    RetirePrograms(programs)                ──►   drops stages

Each but PeerMessage has a reply, `Done` where nothing else is named.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import gemini.runtime.protocol  # noqa: F401 - registers its messages first
from gemini.runtime.transport.link import Link

ABORTED = "aborted"  # the reason of a refusal where another worker has failed


class Connect(NamedTuple):
    """A connection to another worker, whose descriptor comes along."""

    number: int
    peer: int
    side: int


class ConnectHosts(NamedTuple):
    """A connection to a worker on another host: where the two meet, and the key of their frames."""

    number: int
    peer: int
    side: int
    host: str  # the address on which this end listens
    meeting: tuple[str, int, str]
    key: bytes
    seconds: float


class JoinGroup(NamedTuple):
    """Become a shard of a group of workers, whose shared memory comes along, or is at a path.

    Without either, shard 0 allocates it, and replies with its path. With `meeting`, the shards are on several hosts.
    """

    number: int
    members: tuple[int, ...]
    rank: int
    path: str = ""
    host: str = ""  # the address on which this shard listens
    meeting: tuple[str, int, str] | None = None
    seconds: float = 0.0
    device: str = "cpu"  # where the values are that a group with a meeting exchanges


class Joined(NamedTuple):
    """Shard 0 has allocated the memory of a group."""

    number: int
    path: str


class Sources(NamedTuple):
    """Generated files, by path, and the objects that they import from the script."""

    number: int
    texts: dict[str, str]
    user_objects: dict[str, dict[str, Any]]


class Stages(NamedTuple):
    """Live stages of a program, by number; tensors of the model in them are sent as numbers."""

    number: int
    program: int
    stages: dict[int, Any]
    interfaces: tuple[Any, ...]
    recompute: frozenset[int]
    once: tuple[tuple[int, ...], ...] = ()
    place: int = 0  # of this worker
    shards: Any = None  # `ShardedStages`, where stages run on several workers


class Tasks(NamedTuple):
    """The tasks of a worker in one kind of step."""

    number: int
    key: int
    program: int
    place: int
    tasks: tuple[Any, ...]
    readers: dict[str, Any]
    loss: Any
    loss_stage: int
    frozen: frozenset[int]
    tail: Any = None
    draws: tuple[Any, ...] = ()  # of each stage: patterns of its random numbers
    members: tuple[int, ...] = ()  # the workers of the same stages, whose gradients are summed by `SumGradients`


class SumGradients(NamedTuple):
    """Sum the gradients of a step over the replicas of the stages, in their own memory."""

    number: int
    key: int


class UpdateWeights(NamedTuple):
    """Carry out a step of the script's optimizer on the replicas of its parameters. No reply: weights are compared.

    `groups` are (numbers of parameters, options); `steps` what is done to gradients before. `state` is None if the
    worker has it: it has taken part in all steps of this optimizer since it was sent.
    """

    number: int
    program: int
    optimizer: int
    name: str  # in torch.optim
    groups: list[tuple[list[int], dict[str, Any]]]
    live: list[int]  # parameters with gradients
    clips: list[tuple[list[int], float, torch.Tensor, Any]]
    state: list[tuple[int, dict[str, Any]]] | None


class CompareWeights(NamedTuple):
    """Compare the tensors of a program's stages, by their hashes, with those of the controller."""

    number: int
    program: int
    hashes: list[int]


class ComparedWeights(NamedTuple):
    """The places of tensors that differ."""

    number: int
    places: list[int]


class RetirePrograms(NamedTuple):
    """Programs that will not run any more."""

    number: int
    programs: list[int]


class AbortStep(NamedTuple):
    """A step has failed in another worker."""

    number: int
    step: int


class Fetch(NamedTuple):
    """Request an output that a worker retains: joined by its batch kind, summed, or of the first micro-batch.

    All parts, if other workers have some too.
    """

    number: int
    step: int
    name: str
    how: tuple[Any, ...]


# ── the frequent ones: plain data, with the tensors as the last field ──────────────────────────────────────────────
class Step(NamedTuple):
    """Run a step.

    `inputs` are (port, dimension, place among the tensors) of whole tensors, `numbers` (port, value per micro-batch) of
    other values; `operands` are (value, dimension, place). Shares are as `weigh` takes them: those of stages by
    micro-batch, those of ops by op, then micro-batch.
    """

    number: int
    step: int
    key: int
    region: Any
    state: Any
    sizes: tuple[int, ...]
    inputs: list[Any]
    numbers: list[Any]
    operands: list[Any]
    shares: list[list[Any]]
    op_shares: dict[int, list[Any]]
    keep: list[str]
    generator: bytes
    dropped: list[int]
    layout: int  # the last layout of gradients that the controller has
    tensors: list[Any]


class Stepped(NamedTuple):
    """The results of a step in one worker.

    `gradients` are (number of the parameter, latest stage, header): the memory in which they were summed; None if they
    have a layout that the controller knows, as is usual. `given` are (port, stage) of gradients of inputs, `operands`
    numbers of values; their tensors follow the root's.
    """

    number: int
    layout: int
    gradients: list[Any] | None
    loose: list[tuple[int, int]]  # (number, latest stage) of parameters whose gradients are among the tensors, first
    has_root: bool
    given: list[Any]
    operands: list[int]
    generator: bytes
    trace: bytes  # timed events, marshalled
    tensors: list[Any]


class Summed(NamedTuple):
    """Gradients that other replicas have, and this one has not: (number, latest stage) of their parameters."""

    number: int
    keys: list[tuple[int, int]]
    tensors: list[Any]


class Fetched(NamedTuple):
    """An output; its parts and their micro-batches, if other workers have some too."""

    number: int
    mids: list[int]
    tensors: list[Any]


class PeerMessage(NamedTuple):
    """From one worker to another: values or gradients of one micro-batch, by port.

    `names` are (port, number or None) of values, (port, reader) of gradients, whose tensors come in the same order; a
    gradient that is None took no part. A state is that of the generator, for a stage. Buffers are the memory for the
    gradients of a group: segment, offset, size, size of the segment; its descriptor comes along the first time.
    """

    step: int
    kind: str  # "value", "gradient", "state", "buffers", or "" for released slabs only
    mid: int
    names: list[Any]
    state: bytes
    tensors: list[Any]


def stages_module(program: int) -> int:
    """Return the number under which a worker on another host has the tensors of a program's stages."""
    return -program


Link.plain = Link.plain | {one.__name__: one for one in (Step, Stepped, Summed, Fetched, PeerMessage)}
