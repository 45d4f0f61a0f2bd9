"""Binding: a call of the model in one canonical form, however its arguments were spelled.

`model(x, None, labels=y)`, `model(x, labels=y)` and `model(input=x, labels=y)` are one call. Arguments are named by
the parameters of `forward`; an argument that equals its default `None` is left out. A `Call` also takes the
nest of arguments apart, so that the same call can be made again with other tensors.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Sequence as SequenceType
from operator import is_
from typing import Any

import torch
from torch import nn

from gemini.capture.forms import Form, Literal, Ref
from gemini.capture.values import Encoder, UnsupportedValueError, decode, tensors, walk


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name; as given, where the signature does not fit (the model will say so itself)."""
    try:
        signature = _signature(model.forward)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            named[name] = tuple(value)
        elif not (value is None and parameter.default is None):
            named[name] = value
    return dict(sorted(named.items()))


_signatures: weakref.WeakKeyDictionary[Any, tuple[list[Any], inspect.Signature]] = weakref.WeakKeyDictionary()


def _signature(forward: Any) -> inspect.Signature:
    """Of a forward method. To find one takes long: those of classes are remembered, with what they follow from."""
    function = forward.__func__ if type(forward) is types.MethodType else None
    facts = _facts(function)
    if not facts:
        return inspect.signature(forward)
    known = _signatures.get(function)
    if known is None or len(known[0]) != len(facts) or not all(map(is_, known[0], facts)):
        known = _signatures[function] = facts, inspect.signature(forward)
    return known[1]


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


class Call:
    """One call of the model, repeatable with other tensors."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.form = _LenientEncoder(self._collect, lambda _: None)((tuple(args), dict(kwargs)))

    def _collect(self, tensor: torch.Tensor) -> Ref:
        self.tensors.append(tensor)
        return Ref(len(self.tensors) - 1)

    def arguments(self, given: SequenceType[torch.Tensor] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with fresh copies of the tensors: writes of the model do not reach the originals."""
        fresh = [fresh_copy(tensor) for tensor in (self.tensors if given is None else given)]
        args, kwargs = decode(self.form, lambda ref: fresh[ref.node])
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
            facts.append((where, type(leaf).__name__, repr(leaf)))
    return tuple(facts)


__all__ = ["Call", "bind", "fresh_copy", "signature_of", "tensors"]
