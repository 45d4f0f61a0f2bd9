"""Messages of the executor: what controller and workers, and workers among themselves, say about steps.

    controller                                    worker
    Connect(peer)              + descriptor ──►   has a link to another worker
    Sources(texts) Stages(…)                ──►   generated text is executed there, stages arrive as units do
    Tasks(key, …)                           ──►   knows what to do in such a step
    Step(key, inputs, …)                    ──►   runs it; Parcels go from worker to worker
                                            ◄──   Stepped · Raised · Refused
    Abandon(step)                           ──►   a peer has failed: everything is as before the step
    Fetch(step, name)                       ──►   an output that has stayed there
                                            ◄──   Fetched
    Retire(programs)                        ──►   forgets stages

Each but Parcel is answered, with `Done` where nothing else is named.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gemini.runtime.protocol  # noqa: F401 - its messages first
from gemini.runtime.transport.link import Link

ABORTED = "abandoned"  # why a step is refused that was given up elsewhere


class Connect(NamedTuple):
    """A connection to another worker, whose descriptor comes along."""

    number: int
    peer: int
    side: int


class Sources(NamedTuple):
    """Generated files, by path, and what they import of the user's program."""

    number: int
    texts: dict[str, str]
    lent: dict[str, dict[str, Any]]


class Stages(NamedTuple):
    """Live stages of a program, by number; tensors of the model in them are named."""

    number: int
    program: int
    stages: dict[int, Any]
    interfaces: tuple[Any, ...]
    recompute: frozenset[int]
    draws: tuple[Any, ...]
    once: tuple[tuple[int, ...], ...] = ()


class Tasks(NamedTuple):
    """What a worker does in a step of one kind."""

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


class RetirePrograms(NamedTuple):
    """Programs that will not run any more."""

    number: int
    programs: list[int]


class AbortStep(NamedTuple):
    """A step has failed elsewhere."""

    number: int
    step: int


class Fetch(NamedTuple):
    """An output that has stayed in the worker: joined as its kind says, summed, or of the first micro-batch; all
    parts, where other workers have more of them."""

    number: int
    step: int
    name: str
    how: tuple[Any, ...]


# ── the frequent ones: plain data, with the tensors as the last field ──────────────────────────────────────────────
class Step(NamedTuple):
    """Run a step.

    `inputs` are (port, dimension, place among the tensors) of whole tensors, `numbers` (port, value a micro-batch) of
    the rest; `operands` are (value, dimension, place). Shares are as `weigh` takes them: of stages, by
    micro-batch; of ops, by op, then micro-batch.
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
    layout: int  # the last one of gradients that is known
    tensors: list[Any]


class Stepped(NamedTuple):
    """What a worker has to say after a step.

    `gradients` are (number of the parameter's home, latest stage, header): the memory in which they were summed up;
    None where they are those of a layout that the controller knows, as from one step to the next they usually are.
    `given` are (port, stage) of gradients of inputs, `operands` numbers of values; their tensors follow the root's.
    """

    number: int
    layout: int
    gradients: list[Any] | None
    loose: list[int]  # homes of parameters whose gradients are among the tensors, first
    has_root: bool
    given: list[Any]
    operands: list[int]
    generator: bytes
    trace: bytes  # events, to be read by whoever wants to know
    tensors: list[Any]


class Fetched(NamedTuple):
    """An output; its parts and their micro-batches, where others have more of them."""

    number: int
    mids: list[int]
    tensors: list[Any]


class PeerMessage(NamedTuple):
    """From one worker to another: values or gradients of one micro-batch, by port.

    `names` are (port, number or None) of values, (port, reader) of gradients, whose tensors come in the same order; a
    gradient that is None took no part. A state is that of the generator, for a stage.
    """

    step: int
    kind: str  # "value", "gradient", "state", or "" for nothing but slabs given back
    mid: int
    names: list[Any]
    state: bytes
    tensors: list[Any]


Link.plain = Link.plain | {one.__name__: one for one in (Step, Stepped, Fetched, PeerMessage)}
