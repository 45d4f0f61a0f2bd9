"""The protocol: what controller and workers say to each other.

    controller                                worker
    Hello(secret, paths, …)            ──►
                                       ◄──    Ready
    Place(homes)  Install(units)       ──►
                                       ◄──    Done
    Forward(call, unit, arguments, …)  ──►    runs the unit, keeps its graph if a backward may follow
                                       ◄──    Outputs · Refused(reason) · Raised(exception)
    Backward(call, gradients, …)       ──►
                                       ◄──    Gradients
    … each request may carry `dropped`: calls whose graph nobody needs any more
    Stop                               ──►    leaves

Requests carry a number and the reply repeats it, so a reply that nobody waits for any more (Ctrl-C) is recognised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gemini.runtime.memory.homes import Home
from gemini.runtime.transport.link import Link


class Hello(NamedTuple):
    """The first message: how to be like the controller's process."""

    secret: bytes
    place: int
    threads: int
    path: list[str]
    dtype: torch.dtype


class Ready(NamedTuple):
    """The worker is up."""

    secret: bytes
    pid: int


class Place(NamedTuple):
    """Tensors of the model in a shared segment, whose descriptor comes along."""

    number: int
    size: int
    homes: list[Home]


class Install(NamedTuple):
    """Modules to run, by number."""

    number: int
    units: dict[int, Any]


class Stop(NamedTuple):
    """Leave."""

    number: int


class Done(NamedTuple):
    """A request is carried out."""

    number: int


class Refused(NamedTuple):
    """A unit did something that cannot be done from afar; everything is as before the call."""

    number: int
    reason: str


class Raised(NamedTuple):
    """A unit raised; the exception itself where it can travel, and its traceback as text."""

    number: int
    exception: BaseException | None
    name: str
    text: str
    traceback: str


# ── the frequent ones: plain data, with the tensors as the last field ──────────────────────────────────────────────
class Forward(NamedTuple):
    """Run a unit. Its state (training flags, frozen parameters) and the region come where they have changed."""

    number: int
    unit: int
    body: bytes
    region: Any
    generator: bytes
    state: Any
    dropped: list[int]
    tensors: list[Any]


class Outputs(NamedTuple):
    """What a unit returned. An output that is one of the inputs is named by its place, in `same`, instead."""

    number: int
    body: bytes
    same: list[int | None]
    differentiable: list[bool]
    generator: bytes  # where the unit drew random numbers
    tensors: list[Any]


class Backward(NamedTuple):
    """Gradients of the outputs of a call; `inputs` and `parameters` that want one."""

    number: int
    call: int
    inputs: list[int]
    parameters: list[int]
    dropped: list[int]
    tensors: list[Any]


class Gradients(NamedTuple):
    """The gradients that were asked for, inputs first; None where one took no part."""

    number: int
    tensors: list[Any]


Link.plain = {one.__name__: one for one in (Forward, Outputs, Backward, Gradients)}
