"""The protocol: what controller and workers say to each other.

    controller                                worker
    Hello(secret, paths, …)            ──►
                                       ◄──    Ready
    Place(homes)  Install(units)       ──►
                                       ◄──    Done
    Forward(call, unit, arguments, …)  ──►    runs the unit, keeps its graph if a backward may follow
                                       ◄──    Said(text), Warned, Logged: at any time
                                       ◄──    Outputs · Refused(reason) · Raised(exception)
    Backward(call, gradients, …)       ──►
                                       ◄──    Gradients
    … each request may carry `dropped`: calls whose graph nobody needs any more; else Drop does
    Forget(units, homes)               ──►    of a model that the program has deleted
    Describe(classes)                  ──►    what classes of libraries have there
                                       ◄──    Described(attributes)
    Probe                              ──►    how fast it is now, while others are asked the same
                                       ◄──    Probed(speed)
    Peak                               ──►    the most memory that it had
                                       ◄──    Peaked(MB)
    Stop                               ──►    leaves

Requests carry a number and the reply repeats it, so a reply that nobody waits for any more (Ctrl-C) is recognised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gemini.runtime.exception_transfer import ExceptionData
from gemini.runtime.tracebacks import ChainedException
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.tensor_layout import TensorLayout


class Hello(NamedTuple):
    """The first message: how to be like the controller's process."""

    secret: bytes
    place: int
    threads: int
    path: list[str]
    dtype: torch.dtype
    recursion: int
    device: str
    back_end: str  # where its class is found


class Ready(NamedTuple):
    """The worker is up."""

    secret: bytes
    pid: int


class Preload(NamedTuple):
    """Modules of Python that the model will need: imported while the first call runs elsewhere. Nothing is answered."""

    names: list[str]


class MapTensors(NamedTuple):
    """Tensors of the model in a shared segment, whose descriptors come along."""

    number: int
    size: int
    shared: bytes  # what is needed to open it
    first: int  # number of the first tensor
    homes: list[TensorLayout]


class InstallModules(NamedTuple):
    """Modules to run, by number."""

    number: int
    units: dict[int, Any]


class Forget(NamedTuple):
    """Modules and tensors that nobody will ask for any more."""

    number: int
    units: list[int]
    homes: list[int]


class DescribeClasses(NamedTuple):
    """What do classes of libraries have there, by module and name?"""

    number: int
    classes: list[tuple[str, str]]


class ClassAttributes(NamedTuple):
    """Their attributes, in the same order."""

    number: int
    attributes: list[Any]


class MeasureSpeed(NamedTuple):
    """How fast is the worker now? All are asked at the same time."""

    number: int


class MeasuredSpeed(NamedTuple):
    """What it computes and what it moves: see `gemini.profiling.host_speed`."""

    number: int
    products: float
    moved_mb: float


class MeasurePeak(NamedTuple):
    """What is the most memory that the worker had since it was told to begin?"""

    number: int
    begins: bool = False  # to count anew; then it answers with Done


class MeasuredPeak(NamedTuple):
    """Without what it had before any model; not a number where it cannot tell."""

    number: int
    mb: float


class DropCalls(NamedTuple):
    """Calls whose graph nobody needs any more, where no other request takes that along. Nothing is answered."""

    number: int
    calls: list[int]


class Stop(NamedTuple):
    """Leave."""

    number: int


class Done(NamedTuple):
    """A request is carried out."""

    number: int


class Refused(NamedTuple):
    """A unit did something that cannot be done from afar, or we failed; everything is as before the call."""

    number: int
    reason: str
    is_fault: bool = False  # a fault of ours, with the traceback after the reason


class Raised(NamedTuple):
    """A unit raised: the exception in a form that travels, where, its traceback as text, the generator's state then.

    `chain`: the places in code that it went through, and the exceptions that led to it, with theirs.
    """

    number: int
    exception: BaseException | ExceptionData
    scope: str
    traceback: str
    generator: bytes
    chain: list[ChainedException]


class Printed(NamedTuple):
    """Text that a unit has written to `stdout` or `stderr`."""

    stream: str
    text: str


class Warned(NamedTuple):
    """A warning of a unit."""

    category: type[Warning]
    text: str
    file: str
    line: int


class Logged(NamedTuple):
    """A record that a unit has logged, by the attributes of a `logging.LogRecord`."""

    record: dict[str, Any]


class InstallReplica(NamedTuple):
    """Tensors of a unit for a worker that shares no memory: their forms, and the contents of each storage.

    The worker compares the source files of the classes it is to run with ours, by their hashes.
    """

    number: int
    unit: int
    first: int  # number of the first tensor
    homes: list[TensorLayout]
    sources: dict[str, str]
    contents: list[torch.Tensor]


class WriteTensors(NamedTuple):
    """New contents of storages of a unit, on a worker that shares no memory; either way. Nothing is answered."""

    number: int
    unit: int
    places: list[int]
    tensors: list[Any]


UNSOLICITED = (Printed, Warned, Logged, WriteTensors)  # not replies: they come in between


# ── the frequent ones: plain data, with the tensors as the last field ──────────────────────────────────────────────
class Forward(NamedTuple):
    """Run a unit. What has not changed since the last time is left out, so that most of it is seldom sent."""

    number: int
    unit: int
    body: bytes
    region: Any  # and the switches of torch; None: those of the last call that named them
    generator: bytes  # b"": the state that the last call named, whatever has been drawn since
    state: Any  # of the unit: training flags, frozen parameters; None: as before
    dropped: list[int]
    absent: list[Any]  # facts of tensors that stay at home, None among the tensors
    tensors: list[Any]


class Outputs(NamedTuple):
    """What a unit returned. An output that is one of the inputs is named by its place, in `same`, instead."""

    number: int
    body: bytes
    same: list[int | None]
    differentiable: list[bool]
    generator: bytes  # where the unit drew random numbers
    written: bool  # whether it writes to buffers
    objects: bool  # whether it was given objects: the body is a parcel, with what it has changed of them
    node: str  # what the first differentiable one comes from, as torch calls it
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


Link.plain = {one.__name__: one for one in (Forward, Outputs, Backward, Gradients, WriteTensors)}
