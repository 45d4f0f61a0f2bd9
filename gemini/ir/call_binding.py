"""Binding: a call of the model in one canonical form, however its arguments were spelled.

`model(x, None, labels=y)`, `model(x, labels=y)` and `model(input=x, labels=y)` are one call. Arguments are named by
the parameters of `forward`; an argument that equals its default `None` is left out. A `Call` also takes the
nest of arguments apart, so that the same call can be made again with other tensors.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as SequenceType
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import nn

from gemini.ir.encode import Encoder, UnsupportedValueError, decode, tensors, walk
from gemini.ir.pytree import Form, Literal, Ref, leaves, spelled


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name; as given, where the signature does not fit (the model will say so itself)."""
    try:
        known = _signature(model.forward)
        shape = (len(args), *kwargs)
        order = known.orders.get(shape)
        if order is not None:
            values = (*args, *kwargs.values())
            return {name: values[at] for name, at, is_left in order if not (is_left and values[at] is None)}
        bound = known.signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    known.learn(shape, kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = known.signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            named[name] = tuple(value)
        elif not (value is None and parameter.default is None):
            named[name] = value
    return dict(sorted(named.items()))


class _Signature:
    """Of a function, what it follows from, and where the arguments of calls go that were seen before."""

    def __init__(self, forward: Any, facts: list[Any]) -> None:
        self.signature, self.facts = inspect.signature(forward), facts
        # By number of arguments and names of the others, of each in the order of names: its name, its place among all
        # arguments, and whether it is left out where it is None.
        self.orders: dict[tuple[Any, ...], list[tuple[str, int, bool]]] = {}

    def learn(self, shape: tuple[Any, ...], named: Iterable[str]) -> None:
        """Remember calls of a shape that was found to fit."""
        parameters = self.signature.parameters
        if len(self.orders) >= _MOST or any(one.kind in _VARIABLE for one in parameters.values()):
            return
        names = [*[*parameters][: shape[0]], *named]
        self.orders[shape] = [(name, names.index(name), parameters[name].default is None) for name in sorted(names)]


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MOST = 1024  # shapes of calls that are remembered
_signatures: weakref.WeakKeyDictionary[Any, _Signature] = weakref.WeakKeyDictionary()


def _signature(forward: Any) -> _Signature:
    """Of a forward method. To find one takes long: those of classes are remembered, with what they follow from."""
    function = forward.__func__ if type(forward) is types.MethodType else None
    facts = _facts(function)
    if not facts:
        return _Signature(forward, facts)
    known = _signatures.get(function)
    if known is None or len(known.facts) != len(facts) or not all(map(is_, known.facts, facts)):
        known = _signatures[function] = _Signature(forward, facts)
    return known


def _facts(function: Any) -> list[Any]:
    """The objects that the signature of a function follows from; none where they are not known."""
    found: list[Any] = []
    while type(function) is types.FunctionType and "__signature__" not in vars(function):
        found += (function.__code__, function.__defaults__, function.__kwdefaults__)
        if "__wrapped__" not in vars(function):
            return found
        function = vars(function)["__wrapped__"]
    return []


class _LenientEncoder(Encoder):
    """Keeps what cannot be written down as it is: the call is repeated in this process only."""

    def _container(self, value: Any, depth: int) -> Form:
        try:
            return super()._container(value, depth)
        except UnsupportedValueError:
            return Literal(value)

    def _callable(self, value: Any, depth: int) -> Form:  # noqa: ARG002
        return Literal(value)


_plain_forms: dict[tuple[Any, ...], Form] = {}  # of calls with nothing but tensors


class Call:
    """One call of the model, repeatable with other tensors."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        # Where all arguments are tensors: how many have no name, and the names of the others. It tells the form.
        self.plain: tuple[Any, ...] | None = None
        if all(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            self.plain = (len(args), *kwargs)
            form = _plain_forms.get(self.plain)
            if form is not None:
                self.tensors += (*args, *kwargs.values())
                self.form = form
                return
        self.form = _LenientEncoder(self._collect, lambda _: None)((tuple(args), dict(kwargs)))
        if self.plain is not None and len(_plain_forms) < _MOST:
            _plain_forms[self.plain] = self.form

    @cached_property
    def like(self) -> tuple[Any, ...] | None:
        """What tells this call from others but for contents; None where there is more than tensors to it."""
        if self.plain is None:
            return None
        facts = tuple((one.dtype, one.device, one.requires_grad, one.shape) for one in self.tensors)
        return self.plain, facts

    def _collect(self, tensor: torch.Tensor) -> Ref:
        self.tensors.append(tensor)
        return Ref(len(self.tensors) - 1)

    @property
    def kept(self) -> list[Any]:
        """The objects in it that repeated calls are given themselves, and no copies."""
        return [leaf.value for leaf in leaves(self.form) if isinstance(leaf, Literal)]

    def arguments(self, given: SequenceType[torch.Tensor] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with fresh copies of the tensors: writes of the model do not reach the originals."""
        return self.with_tensors([fresh_copy(tensor) for tensor in (self.tensors if given is None else given)])

    def with_tensors(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these in the place of its own."""
        if self.plain is not None:
            count, *names = self.plain
            return tuple(tensors[:count]), dict(zip(names, tensors[count:], strict=True))
        args, kwargs = decode(self.form, lambda ref: tensors[ref.node])
        return args, kwargs


def fresh_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the same contents, strides and gradient flag."""
    copy = tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad)


def signature_of(bound: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """What of a call a graph depends on: structure, plain values, and all of each tensor but its contents."""
    facts: list[tuple[Any, ...]] = []
    for path, leaf in walk(bound):
        where = ".".join(str(step[1]) for step in path)
        if isinstance(leaf, torch.Tensor):
            facts.append((where, str(leaf.dtype), str(leaf.device), leaf.requires_grad, tuple(leaf.shape)))
        else:
            facts.append((where, type(leaf).__name__, spelled(leaf)))
    return tuple(facts)


__all__ = ["Call", "bind", "fresh_copy", "signature_of", "tensors"]
