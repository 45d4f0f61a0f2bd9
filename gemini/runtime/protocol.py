"""The protocol: what controller and workers say to each other.

    controller                                worker
    Hello(secret, paths, …)            ──►
                                       ◄──    Ready
    Place(homes)  Install(units)       ──►
                                       ◄──    Done
    Forward(call, unit, arguments, …)  ──►    runs the unit, keeps its graph if a backward may follow
                                       ◄──    Done(outputs) · Refused(reason) · Raised(exception)
    Backward(call, gradients, …)       ──►
                                       ◄──    Done(gradients)
    … each message may carry `dropped`: calls whose graph nobody needs any more
    Stop                               ──►    leaves

Requests carry a number and the reply repeats it, so a reply that nobody waits for any more (Ctrl-C) is recognised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gemini.capture.regions import Region
from gemini.runtime.memory.homes import Home


class Hello(NamedTuple):
    """The first message: how to be like the controller's process."""

    secret: bytes
    place: int
    threads: int
    path: list[str]
    dtype: torch.dtype


class Place(NamedTuple):
    """Tensors of the model in a shared segment, whose descriptor comes along."""

    number: int
    size: int
    homes: list[Home]


class Install(NamedTuple):
    """Modules to run, by number."""

    number: int
    units: dict[int, Any]


class Forward(NamedTuple):
    """Run a unit."""

    number: int
    unit: int
    body: bytes
    tensors: list[torch.Tensor]
    region: Region
    generator: torch.Tensor
    state: Any  # training flags and frozen parameters, where they have changed since the last call
    dropped: list[int]


class Backward(NamedTuple):
    """Gradients of a call: `gradients` of its outputs, `inputs` and `parameters` that want one."""

    number: int
    call: int
    gradients: list[torch.Tensor | None]
    inputs: list[int]
    parameters: list[int]
    dropped: list[int]


class Stop(NamedTuple):
    """Leave."""

    number: int


class Ready(NamedTuple):
    """The worker is up."""

    secret: bytes
    pid: int


class Outputs(NamedTuple):
    """What a unit returned. An output that is one of the inputs is named by its place instead."""

    body: bytes
    tensors: list[torch.Tensor | int]
    differentiable: list[bool]
    generator: torch.Tensor | None  # where the unit drew random numbers


class Done(NamedTuple):
    """A request is carried out."""

    number: int
    result: Any


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
