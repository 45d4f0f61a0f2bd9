"""Protocol: the messages between controller and workers.

    controller                                        worker
    Hello(secret, paths, …)                    ──►
                                               ◄──    Ready
    MapTensors(layouts) InstallModules(…)      ──►
                                               ◄──    Done
    Forward(call, module, arguments, …)        ──►    runs the module, retains its graph if a backward may follow
                                               ◄──    Printed(text), Warned, Logged: at any time
                                               ◄──    Outputs · Refused(reason) · Raised(exception)
    Backward(call, gradients, …)               ──►
                                               ◄──    Gradients
    … a request may carry `dropped`: calls whose graph is no longer needed; else DropCalls does
    Forget(modules, tensors)                   ──►    of a model that the script has deleted
    DescribeClasses(classes)                   ──►    attributes of library classes in the worker
                                               ◄──    ClassAttributes(attributes)
    MeasureSpeed                               ──►    its speed while all workers are measured
                                               ◄──    MeasuredSpeed(speed)
    MeasureLink(bytes)                         ──►    sends them back
                                               ◄──    MeasuredLink(bytes)
    MeasurePeak                                ──►    its peak memory
                                               ◄──    MeasuredPeak(MB)
    Stop                                       ──►    exits

Requests carry a number that the reply repeats, so a reply that no thread waits for any more (Ctrl-C) is recognized.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gemini.runtime.exception_transfer import ExceptionData
from gemini.runtime.tracebacks import ChainedException
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.tensor_layout import TensorLayout


class Hello(NamedTuple):
    """The first message: the settings of the controller's process."""

    secret: bytes
    worker: int
    threads: int
    path: list[str]
    dtype: torch.dtype
    recursion: int
    device: str
    back_end: str  # the path of its class


class Ready(NamedTuple):
    """The worker is up."""

    secret: bytes
    pid: int
    clock: float  # seconds, as in the times that it reports


class Preload(NamedTuple):
    """Python modules that the model will need: imported while the first call runs in the controller. No reply."""

    names: list[str]


class MapTensors(NamedTuple):
    """Tensors of the model in a shared segment, whose descriptors come along."""

    number: int
    size: int
    shared: bytes  # needed to open it
    first: int  # number of the first tensor
    layouts: list[TensorLayout]


class InstallModules(NamedTuple):
    """Modules to run, by number."""

    number: int
    modules: dict[int, Any]


class Forget(NamedTuple):
    """Modules and tensors that will not be used any more."""

    number: int
    modules: list[int]
    tensors: list[int]


class DescribeClasses(NamedTuple):
    """Request the attributes of library classes in the worker, by module and name."""

    number: int
    classes: list[tuple[str, str]]


class ClassAttributes(NamedTuple):
    """Their attributes, in the same order."""

    number: int
    attributes: list[Any]


class MeasureSpeed(NamedTuple):
    """Request the worker's speed; all workers measure at the same time."""

    number: int


class MeasuredSpeed(NamedTuple):
    """The worker's speed, as in `gemini.profiling.host_speed`."""

    number: int
    products: float
    moved_mb: float


class MeasureLink(NamedTuple):
    """Bytes that come back at once: half of the time is that of one way."""

    number: int
    contents: torch.Tensor


class MeasuredLink(NamedTuple):
    """Those bytes."""

    number: int
    contents: torch.Tensor


class MeasurePeak(NamedTuple):
    """Request the worker's peak memory since the last reset."""

    number: int
    begins: bool = False  # reset; the reply is Done


class MeasuredPeak(NamedTuple):
    """Peak memory without the base memory of the process; NaN if it cannot be measured."""

    number: int
    mb: float


class DropCalls(NamedTuple):
    """Calls whose graph is no longer needed, where no other request can carry them. No reply."""

    number: int
    calls: list[int]


class Stop(NamedTuple):
    """Exit."""

    number: int


class Done(NamedTuple):
    """A request has been carried out."""

    number: int


class Refused(NamedTuple):
    """A module did what cannot be done remotely, or the worker failed; the state is as before the call."""

    number: int
    reason: str
    is_fault: bool = False  # an internal fault, with the traceback after the reason


class Raised(NamedTuple):
    """User code raised: the exception in a portable form, where, its traceback as text, and the generator state.

    `chain`: the code positions that it passed, and the exceptions that led to it with theirs.
    """

    number: int
    exception: BaseException | ExceptionData
    scope: str
    traceback: str
    generator: bytes
    chain: list[ChainedException]


class Printed(NamedTuple):
    """Text that a module has written to `stdout` or `stderr`."""

    stream: str
    text: str


class Warned(NamedTuple):
    """A warning from a module."""

    category: type[Warning]
    text: str
    file: str
    line: int


class Logged(NamedTuple):
    """A record that a module has logged, by the attributes of a `logging.LogRecord`."""

    record: dict[str, Any]


class InstallReplica(NamedTuple):
    """Tensors of a module for a worker without shared memory: their layouts, and the contents of each storage.

    The worker compares the hashes of the source files of the classes with its own.
    """

    number: int
    module: int
    first: int  # number of the first tensor
    layouts: list[TensorLayout]
    sources: dict[str, str]
    contents: list[torch.Tensor]


class WriteTensors(NamedTuple):
    """New contents of storages of a module, for a worker without shared memory; in both directions. No reply."""

    number: int
    module: int
    places: list[int]
    tensors: list[Any]


class GradientBucket(NamedTuple):
    """Gradients of a step that are complete while its backward goes on: (number, latest stage) of their parameters."""

    number: int
    step: int
    keys: list[tuple[int, int]]
    tensors: list[Any]


UNSOLICITED = (Printed, Warned, Logged, WriteTensors, GradientBucket)  # no replies: they arrive at any time


# ── the frequent ones: plain data, with the tensors as the last field ──────────────────────────────────────────────
class Forward(NamedTuple):
    """Run a module. Fields that have not changed since the last call are left out."""

    number: int
    module: int
    body: bytes
    region: Any  # with torch's flags; None: as in the last call that sent them
    generator: bytes  # b"": the state that the last call sent
    state: Any  # of the module: training flags, frozen parameters; None: as before
    dropped: list[int]
    placeholders: list[Any]  # placeholders of tensors that are not sent, None among the tensors
    tensors: list[Any]


class Outputs(NamedTuple):
    """The outputs of a module. An output that is one of the inputs is named by its place, in `same`."""

    number: int
    body: bytes
    same: list[int | None]
    differentiable: list[bool]
    generator: bytes  # set if the module drew random numbers
    written: bool  # whether the module writes to buffers
    objects: bool  # whether arguments include mutable objects: the body also holds their changes
    node: str  # the grad_fn name of the first differentiable output
    tensors: list[Any]


class Backward(NamedTuple):
    """Gradients of the outputs of a call; `inputs` and `parameters` are those whose gradients are requested."""

    number: int
    call: int
    inputs: list[int]
    parameters: list[int]
    dropped: list[int]
    tensors: list[Any]


class Gradients(NamedTuple):
    """The requested gradients, inputs first; None for one that took no part."""

    number: int
    tensors: list[Any]


Link.plain = {one.__name__: one for one in (Forward, Outputs, Backward, Gradients, WriteTensors, GradientBucket)}
