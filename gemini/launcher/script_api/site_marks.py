"""Where the script has its models, optimizers, backward passes and steps.

Each mark returns its argument and adds no frame around the script's own call:

    optimizer = __gemini__.optimizer(torch.optim.Adam(__gemini__.model(net).parameters()))
    __gemini__.loss(loss).backward()
    __gemini__.step(optimizer).step()

A mark looks at what it is given, since the source cannot tell an optimizer's `step()` from a game's; only
what is torch's is noted: a `Site` once a place, and the object by a weak reference. A run time that wants to
know at once registers a handler with `watch`. One that knows enough lets the marks of every step `rest`: they note
nothing then, and cost what a call of an empty function costs.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, TypeVar

from gemini.launcher.script_api.script_devices import torch_module

T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    """A place in the script that the run time cares about."""

    kind: str  # "model", "optimizer", "loss", "step"
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind} in {self.function}"


Handler = Callable[[Any, Site], None]

_sites: dict[tuple[str, str, int], Site] = {}
_places: dict[tuple[str, int, int], tuple[CodeType, Site]] = {}  # by the instruction; codes are kept, or ids would lie
_objects: dict[str, dict[int, weakref.ref[Any]]] = {}
_handlers: list[Handler] = []


def model(value: T) -> T:
    """Mark a model: an `nn.Module` made, or handed to an optimizer."""
    torch = torch_module()
    if torch is not None and isinstance(value, torch.nn.Module):
        _note("model", value)
    return value


def optimizer(value: T) -> T:
    """Mark an optimizer where it is made."""
    if _is_optimizer(value, torch_module()):
        _note("optimizer", value)
    return value


def loss(value: T) -> T:
    """Mark the tensor whose `backward()` ends a step's forward work."""
    torch = torch_module()
    if torch is not None and isinstance(value, torch.Tensor):
        _note("loss", value, keep=False)  # a new tensor every step: its place matters, not the object
    return value


def step(value: T) -> T:
    """Mark an optimizer (or gradient scaler) where it steps."""
    torch = torch_module()
    if _is_optimizer(value, torch) or _is_scaler(value, torch):
        _note("step", value)
    return value


def sites() -> tuple[Site, ...]:
    """Every site met so far, in the order of meeting."""
    return tuple(_sites.values())


def marked(kind: str) -> tuple[Any, ...]:
    """The living objects marked as `kind`, in the order of marking."""
    found = [reference() for reference in tuple(_objects.get(kind, {}).values())]
    return tuple(value for value in found if value is not None)


def watch(handler: Handler) -> Callable[[], None]:
    """Call `handler(object, site)` at every mark from now on; returns the function that ends it."""
    _handlers.append(handler)
    _mark_steps_by(loss, step)
    return lambda: _handlers.remove(handler)


def rest() -> None:
    """Note no more losses and steps, unless someone watches; until someone does."""
    if not _handlers:
        _mark_steps_by(_as_it_is, _as_it_is)


def forget() -> None:
    """Drop all sites and objects (a new script in the same process)."""
    _mark_steps_by(loss, step)
    _sites.clear()
    _places.clear()
    _objects.clear()


def _mark_steps_by(of_losses: Callable[[Any], Any], of_steps: Callable[[Any], Any]) -> None:
    """What instrumented source finds as `__gemini__.loss` and `__gemini__.step`, at every call anew."""
    namespace: Any = sys.modules["gemini.launcher.script_api"]
    namespace.loss, namespace.step = of_losses, of_steps


def _as_it_is(value: T) -> T:
    return value


def _note(kind: str, value: Any, keep: bool = True) -> None:
    frame = sys._getframe(2)
    code, place = frame.f_code, (kind, id(frame.f_code), frame.f_lasti)
    known = _places.get(place)
    if known is None or known[0] is not code:
        key = (kind, code.co_filename, frame.f_lineno)  # to find the line, Python reads all those before it
        if key not in _sites:
            _sites[key] = Site(*key, function=code.co_name)
        known = _places[place] = code, _sites[key]
    site = known[1]
    if keep:
        living = _objects.setdefault(kind, {})
        if id(value) not in living:
            with contextlib.suppress(TypeError):  # a class with slots may allow no weak references
                living[id(value)] = weakref.ref(value, _dropper(living, id(value)))
    for handler in tuple(_handlers):
        handler(value, site)


def _dropper(living: dict[int, weakref.ref[Any]], key: int) -> Callable[[weakref.ref[Any]], None]:
    """Ids are reused: an entry leaves with its object."""

    def drop(_: weakref.ref[Any]) -> None:
        living.pop(key, None)

    return drop


def _is_optimizer(value: Any, torch: ModuleType | None) -> bool:
    if torch is None:
        return False
    if isinstance(value, torch.optim.Optimizer):
        return True
    # accelerate and others wrap an optimizer without being one. Asked of the class: the script's own
    # objects may answer attribute lookups with code.
    kind = type(value)
    return hasattr(kind, "zero_grad") and hasattr(kind, "step") and not isinstance(value, torch.nn.Module)


def _is_scaler(value: Any, torch: ModuleType | None) -> bool:
    return torch is not None and isinstance(value, torch.amp.GradScaler)
