"""Stage runtime: the functions that generated stages need beyond plain torch.

`expect` and `check_output` check the assumptions of captured Python; `sequence`, `mapping`, `record` and `closure`
build values that have no literal; `inner_results` collects results of inner modules; `Extra` saves the extra state of a
module that is spread over several stages.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gemini.ir.callables import ClosureForm, rebuild_closure
from gemini.ir.encode import decode
from gemini.ir.import_paths import Symbol
from gemini.ir.interpreter import GuardBroken
from gemini.ir.out_spec import structure_of
from gemini.ir.pytree import Literal, MappingForm, SequenceForm


def expect(value: Any, expected: Any, what: str) -> None:
    """Raise GuardBroken unless the model's Python would take the captured branch."""
    if value != expected:
        raise GuardBroken(f"{what} is {expected!r} in the generated stage, now {value!r}")


def check_output(function: Callable[..., Any], structure: str) -> Callable[..., Any]:
    """Wrap a function to check that its result, and containers among its arguments, have the captured structure."""

    def call(*args: Any, **kwargs: Any) -> Any:
        held = structure_of((args, kwargs))
        result = function(*args, **kwargs)
        found, after = structure_of(result), structure_of((args, kwargs))
        if after != held:
            found += f" | {after}"
        if found != structure:
            name = getattr(function, "__qualname__", type(function).__name__)
            raise GuardBroken(f"{name} returned {found}, not {structure} as when it was captured")
        return result

    return call


def sequence(cls: type, *parts: Any) -> Any:
    """Return a list or tuple of a subclass."""
    return decode(SequenceForm(cls, tuple(Literal(part) for part in parts)), lambda form: form)


def mapping(cls: type, items: dict[Any, Any], **state: Any) -> Any:
    """Return a dictionary of a subclass, with its attributes."""
    pairs = tuple((key, Literal(part)) for key, part in items.items())
    return decode(
        MappingForm(cls, pairs, tuple((key, Literal(part)) for key, part in state.items())), lambda form: form
    )


def record(cls: type, **state: Any) -> Any:
    """Return an object of a Python class with these attributes."""
    return fill(object.__new__(cls), **state)


def fill(made: Any, **state: Any) -> Any:
    """Set attributes directly, without the class's `__setattr__`."""
    for key, value in state.items():
        object.__setattr__(made, key, value)
    return made


def closure(
    outer: tuple[str, str], indices: tuple[int, ...], name: str, cells: list[Any], defaults: tuple[Any, ...] = ()
) -> types.FunctionType:
    """Return a function defined inside an importable one, with the values it closes over."""
    return rebuild_closure(ClosureForm(Symbol(*outer), indices, name, (), ()), cells, defaults)


@contextmanager
def inner_results(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Any]]]:
    """Collect the results of these modules, call by call, while a block that contains them runs."""
    collected: dict[str, list[Any]] = {name: [] for name in modules}
    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: collected[name].append(output))
        for name, module in modules.items()
    ]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()


class Extra(nn.Module):  # type: ignore[misc]
    """Represents a module of which this stage holds parts, and saves its extra state."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not a child: its parameters are registered by name

    def get_extra_state(self) -> Any:
        """Return the extra state of the original."""
        return self.original.get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Load the extra state into the original."""
        self.original.set_extra_state(state)
